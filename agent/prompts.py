"""From an observation to prompt ids: system prompt, chat template, window budget.

Each prompt is rendered whole, through the model's own chat template where it has one (templates strip or
open ``<think>`` depending on what else is in the conversation), else through a plain one. A prompt over the
budget is shortened where it hurts least, with a visible mark; question, memory and rules are never touched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from agent.text_ids import text_ids
from envs.base import render_observation
from envs.errors import UserError, did_you_mean
from envs.grammar import render_call

SHORTENED = " […shortened]"

SystemStyle = Literal["paper", "compact", "few-shot"]
CallStyle = Literal["tool_call", "search"]

_SYSTEM_STYLES = ("paper", "compact", "few-shot")
# The last block: the environment's reply holds no tag of ours, but a memory before it may spell one.
_INFORMATION = re.compile(r"<information>((?:(?!<information>).)*)</information>\s*\Z", re.DOTALL)


class WindowExceeded(Exception):
    """The prompt does not fit even after shortening: the episode ends as truncated."""


@dataclass(frozen=True)
class Prompt:
    """What the policy reads.

    Attributes:
        ids: the whole prompt.
        observation: the text in it that came from the environment, as shown (shortened where it had to be).
        shortened: whether something was cut.
    """

    ids: tuple[int, ...]
    observation: str
    shortened: bool


class PromptBuilder:
    """Builds prompts of one model for one system prompt.

    Args:
        system: rules; no system turn when empty. Templates without a system role get it before the
            observation.
        style: ``chat`` (needs a chat template), ``plain`` (for base models), ``auto`` picks by the tokenizer.
        max_prompt_tokens: budget; None for none.
        template_options: handed to the chat template, e.g. ``{"enable_thinking": False}``.

    Raises:
        UserError: ``chat`` without a chat template, or a template that does not render.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        system: str = "",
        style: Literal["auto", "chat", "plain"] = "auto",
        max_prompt_tokens: int | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        if style not in ("auto", "chat", "plain"):
            raise UserError(f"prompt style {style!r} is none of auto, chat, plain")
        templated = bool(getattr(tokenizer, "chat_template", None))
        if style == "chat" and not templated:
            raise UserError("the tokenizer has no chat template; prompt style 'plain' works without one")
        self.tokenizer = tokenizer
        self.system = system.strip()
        self.max_prompt_tokens = max_prompt_tokens
        self._chat = style != "plain" and templated
        self._options = dict(template_options or {})
        self._merge_system = False
        self._leading: tuple[int, ...] = () if self._chat else _leading_ids(tokenizer)
        if self._chat and self.system:
            self._merge_system = not self._takes_system()
        self._frame = self._find_frame()

    def render(self, observation: str) -> str:
        """The whole prompt as text (without the ids that a plain prompt starts with)."""
        if self._frame is not None:
            return f"{self._frame[0]}{observation}{self._frame[1]}"
        return self._render(observation)

    def build(self, observation: str, parts: Mapping[str, Any] | None = None) -> tuple[int, ...]:
        """Prompt ids; see `prompt`."""
        return self.prompt(observation, parts).ids

    def prompt(
        self, observation: str, parts: Mapping[str, Any] | None = None, limit: int | None = None
    ) -> Prompt:
        """Build the prompt; shorten the observation where it does not fit.

        What is cut, in this order, each from its end: the newest information, then the information of the
        carried steps before it, oldest first.

        Args:
            parts: the environment's ``info["parts"]``; without it nothing can be shortened.
            limit: a further budget in tokens, beside the builder's own.

        Raises:
            WindowExceeded: it does not fit even with all information cut away.
        """
        ids = self._encode(observation)
        budgets = [budget for budget in (self.max_prompt_tokens, limit) if budget is not None]
        budget = min(budgets, default=len(ids))
        if len(ids) <= budget:
            return Prompt(ids, observation, False)
        carried = list((parts or {}).get("carried") or ())
        shown, last = observation, len(carried) - 1
        for index in [last, *range(last)] if carried else []:
            match = _INFORMATION.search(carried[index])
            if match is None:
                continue
            step = carried[index]

            def cut(kept: int, index: int = index, match: re.Match[str] = match, step: str = step) -> str:
                text = match.group(1)[:kept].rstrip() + SHORTENED
                carried[index] = f"{step[: match.start()]}<information>{text}</information>"
                return render_observation({**(parts or {}), "carried": list(carried)})

            low, high = 0, max(0, len(match.group(1)) - 1)
            while low < high:
                middle = (low + high + 1) // 2
                if len(self._encode(cut(middle))) <= budget:
                    low = middle
                else:
                    high = middle - 1
            shown = cut(low)
            ids = self._encode(shown)
            if len(ids) <= budget:
                return Prompt(ids, shown, True)
        raise WindowExceeded(
            f"prompt of {len(ids)} tokens does not fit into {budget}; "
            "question, memory and rules are never cut"
        )

    def _encode(self, observation: str) -> tuple[int, ...]:
        return (*self._leading, *text_ids(self.tokenizer, self.render(observation)))

    def _render(self, observation: str) -> str:
        if not self._chat:
            head = f"{self.system}\n\n" if self.system else ""
            return f"{head}{observation}\n"
        content = observation
        messages = []
        if self.system and self._merge_system:
            content = f"{self.system}\n\n{observation}"
        elif self.system:
            messages.append({"role": "system", "content": self.system})
        messages.append({"role": "user", "content": content})
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self._options
            )
        except Exception as error:  # Jinja templates raise whatever their author chose
            raise UserError(f"the chat template does not render: {error}") from error
        return str(text)

    def _takes_system(self) -> bool:
        try:
            return self.system in self._render("x")
        except UserError:
            return False

    def _find_frame(self) -> tuple[str, str] | None:
        """What stands before and after the observation, when the template shows it verbatim (most do)."""
        probes = [" first\n probe ", "<mem>second</mem>\n"]
        before, middle, after = self._render(probes[0]).partition(probes[0])
        if not middle or self._render(probes[1]) != f"{before}{probes[1]}{after}":
            return None
        return before, after


def _leading_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that the tokenizer itself puts before a text (Gemma's and Llama's ``<bos>``)."""
    bare = tokenizer.encode("a", add_special_tokens=False)
    full = tokenizer.encode("a", add_special_tokens=True)
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start])
    return ()


def system_prompt(
    tool_help: str, style: SystemStyle = "paper", max_turns: int = 16, call_style: CallStyle = "tool_call"
) -> str:
    """The rules of the game as text.

    Args:
        tool_help: the environment's description of its tools.
        style: ``paper`` explains memory, thought, tools and answer; ``compact`` is empty (a model trained
            on the grammar needs no rules); ``few-shot`` adds a worked episode, for base models.
        max_turns: turns an episode has at most.
        call_style: how the examples call the tool.

    Raises:
        UserError: an unknown style.
    """
    if style == "compact":
        return ""
    if style == "paper":
        return _rules(tool_help, max_turns, call_style)
    if style == "few-shot":
        return f"{_rules(tool_help, max_turns, call_style)}\n\n{_worked_episode(call_style)}"
    raise UserError(
        f"prompt style {style!r} is none of {', '.join(_SYSTEM_STYLES)}{did_you_mean(style, _SYSTEM_STYLES)}"
    )


def _rules(tool_help: str, max_turns: int, call_style: CallStyle) -> str:
    call = render_call("what to look for", call_style)
    return f"""\
You answer a question in at most {max_turns} turns, with the help of tools. You see the question and \
your last step with what it brought; everything older is gone, except what you wrote into your memory.

{tool_help.strip()}

Write each turn in this order:
<mem>everything worth keeping: facts found so far, what is still open. It replaces your old memory.</mem>
<think>what you know and what to do next</think>
then either one tool call:
{call}
or, once you know it, the final answer, as short as possible:
<answer>the answer</answer>
When there are several questions, answer all of them in their order, separated by "; ".
The reply to a tool call comes between <information> and </information>."""


# Invented names throughout: a model that copies the example cannot be right by accident.
_EXAMPLE_QUESTION = "In which town was the founder of the Quillmoor lantern guild born?"
_EXAMPLE_SEARCH = "Quillmoor lantern guild founder"
_EXAMPLE_FOUND = (
    "Doc 1(Title: Quillmoor lantern guild) The Quillmoor lantern guild was founded by Oda Tressick, "
    "a glazier born in the town of Vellenfirth."
)
_EXAMPLE_MEMORY = "Founder of the Quillmoor lantern guild: Oda Tressick, born in Vellenfirth."


def _worked_episode(call_style: CallStyle) -> str:
    """Two turns as observations and completions look, then the start of the real episode."""
    first = (
        "<mem>Nothing found yet.</mem><think>I need the founder of the guild first.</think>"
        f"{render_call(_EXAMPLE_SEARCH, call_style)}"
    )
    second = (
        f"<mem>{_EXAMPLE_MEMORY}</mem><think>The founder's place of birth is known.</think>"
        "<answer>Vellenfirth</answer>"
    )
    return f"""\
Example, turn 1:
Question: {_EXAMPLE_QUESTION}
{first}

Example, turn 2:
Question: {_EXAMPLE_QUESTION}
{first}
<information>{_EXAMPLE_FOUND}</information>
{second}

Now your turn:"""
