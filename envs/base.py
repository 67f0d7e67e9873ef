"""The base class of every environment: one episode is one task, one step is one turn of the policy.

The environment carries the memory. What the policy reads each turn is the observation alone: the question,
the last step (or the last k, or all) as the policy wrote it, and what its tool call gave back. So anything
that maps text to text can play. A subclass says which tools there are and writes three things: `draw_task`,
`execute`, `score`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded

from envs.errors import UserError, did_you_mean
from envs.grammar import CallStyle, ParsedTurn, ToolCall, parse_turn, render_call
from envs.neutral import clip, clip_counted, count_words, neutralise
from envs.rewards import Episode, Reward
from envs.spaces import TextSpace
from envs.tasks.task import Task

Context = Literal["previous", "full"] | int

MAX_ACTION = 100_000
"""Characters of a turn that are read; the rest is as if it had not been written."""

MAX_QUESTION = 20_000
"""Characters of a question that are shown."""


class InvalidAction(Exception):
    """Raised by `MemoryEnv.execute`: the call cannot be carried out as it was written, and the reason why.

    The policy reads the reason as its next information; the episode goes on.
    """


@dataclass(frozen=True)
class Tool:
    """A tool that the policy may call: every argument is a required text, described for the policy."""

    name: str
    description: str
    arguments: Mapping[str, str] = field(default_factory=dict)

    def help(self, style: CallStyle) -> str:
        """One line for the system prompt, with the form of a call."""
        if style == "search" and self.name == "search" and tuple(self.arguments) == ("query",):
            form = render_call("…", "search")
        else:
            fields = ", ".join(f'"{argument}": "…"' for argument in self.arguments)
            form = f'<tool_call>{{"name": "{self.name}", "arguments": {{{fields}}}}}</tool_call>'
        arguments = "; ".join(f"{argument}: {meaning}" for argument, meaning in self.arguments.items())
        return f"{self.name}: {self.description}{f' ({arguments})' if arguments else ''}. Call: {form}"


def render_observation(parts: Mapping[str, Any]) -> str:
    """The text a policy reads, from ``info["parts"]``: stable text first, newest last.

    Args:
        parts: ``question`` (str), ``carried`` (steps as text, oldest first), ``hint`` (str, may be empty).
    """
    lines = [f"Question: {parts['question']}", *parts["carried"]]
    if parts["hint"]:
        lines.append(parts["hint"])
    return "\n".join(lines) if len(lines) > 1 else lines[0] + "\n"


class MemoryEnv(gymnasium.Env[str, str]):
    """Text in, text out; see the module's docstring.

    Args:
        max_turns: turns after which an unanswered episode is truncated.
        context: what is carried besides the question: the ``"previous"`` step, the last k steps, or the
            ``"full"`` history.
        memory_limit: size of a carried memory as ``counter`` counts it; a longer one is cut with a visible
            mark.
        turn_hint: end the observation with ``Turns left: n``.
        information_limit: characters of a tool's reply that are shown; a longer one is cut with a visible
            mark.
        call_style: the form of a call that `tool_help` shows. Both forms are always understood.
        counter: size of a memory; words unless a tokenizer's counter is handed in.
        invalid_limit: invalid actions after which the episode is truncated; None for no limit.
        strict_format: pay an episode with an invalid action as one without an answer.
        render_mode: ``"ansi"`` or None.

    An observation holds nothing of the golds. `task` does: it is privileged, for the trainer and the scorer.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 4}
    tools: Sequence[Tool] = ()
    payment: Reward = Reward({}, ())
    task: Task

    def __init__(
        self,
        *,
        max_turns: int = 16,
        context: Context = "previous",
        memory_limit: int | None = None,
        turn_hint: bool = False,
        information_limit: int = 6000,
        call_style: CallStyle = "tool_call",
        counter: Callable[[str], int] = count_words,
        invalid_limit: int | None = None,
        strict_format: bool = False,
        render_mode: str | None = None,
    ) -> None:
        self.max_turns = _at_least("max_turns", max_turns, 1)
        self.memory_limit = None if memory_limit is None else _at_least("memory_limit", memory_limit, 1)
        self.information_limit = _at_least("information_limit", information_limit, 1)
        self.invalid_limit = None if invalid_limit is None else _at_least("invalid_limit", invalid_limit, 1)
        if call_style not in ("tool_call", "search"):
            raise UserError(f"call_style {call_style!r} is none of 'tool_call', 'search'")
        if render_mode not in (None, "ansi"):
            raise UserError(f"render_mode {render_mode!r} is none of None, 'ansi'")
        if not callable(counter):
            raise UserError(f"counter {counter!r} is no function that gives the size of a text")
        self.context = context
        self.turn_hint = turn_hint
        self.call_style: CallStyle = call_style
        self.strict_format = strict_format
        self.counter = counter
        self.render_mode = render_mode
        steps = _carried_steps(context, self.max_turns)
        self.action_space = TextSpace(MAX_ACTION, style="turn")
        self.observation_space = TextSpace(
            MAX_QUESTION + steps * (MAX_ACTION + self.information_limit + 200) + 100
        )
        self._carried: deque[str] = deque(maxlen=steps)
        self._playing = False

    # What a subclass writes.

    def draw_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """The task of the next episode: decided by ``rng``, unless ``options`` names one (``task_id``,
        ``index``).

        Raises:
            UserError: ``options`` names a task that does not exist.
        """
        raise NotImplementedError

    def begin(self, task: Task) -> None:
        """Set up an episode of a task, which may be another than `draw_task` draws; nothing to do by default."""

    def execute(self, call: ToolCall) -> str:
        """Carry out a call of one of `tools` (its arguments are texts, not blank): the reply as plain text.

        The base class cuts it, makes it harmless and puts it into a block.

        Raises:
            InvalidAction: the call makes no sense here.
        """
        raise NotImplementedError

    def score(self, answer: str, task: Task) -> Mapping[str, float]:
        """Named scores of a final answer; ``reward`` is among them."""
        raise NotImplementedError

    @property
    def scores_without_answer(self) -> dict[str, float]:
        """What an episode ends with that has no answer: 0 under every name that the environment has.

        Terms that take from the reward take all of it (a value of 1), so that answering never pays less than not
        answering.
        """
        names = [*self.score("", self.task), *(term.name for term in self.payment.terms)]
        worst = sum(min(0.0, term.weight) for term in self.payment.terms)
        return {**dict.fromkeys(names, 0.0), "reward": worst}

    def show_question(self, task: Task) -> str:
        """The question as the policy reads it."""
        return task.question

    # What it gets for that.

    @property
    def tool_help(self) -> str:
        """The tools for a system prompt, one a line."""
        return "\n".join(tool.help(self.call_style) for tool in self.tools)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        options = options or {}
        self.task = self.draw_task(self.np_random, options)
        self.begin(self.task)
        self.ask_question(self.show_question(self.task))
        self._carried.clear()
        self._turn = self._invalid_count = 0
        self._memory: str | None = None
        self._memories: list[str | None] = []
        self._information = ""
        self._playing = True
        return self._observe(None, None, None, None)

    def ask_question(self, question: str) -> None:
        """What the policy reads as the question from now on."""
        self._question = neutralise(clip(question, MAX_QUESTION))

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if not self._playing:
            raise ResetNeeded("the episode is over (or was never started): call reset before step")
        turn = parse_turn(action[:MAX_ACTION] if isinstance(action, str) else "")
        self._turn += 1
        self._memory = None if turn.memory is None else self._keep(turn.memory)
        self._memories.append(self._memory)
        if turn.answer is not None:
            scores = self._pay(turn.answer)
            self._playing = False
            self._information = ""
            self._carry(turn, None)
            observation, info = self._observe(turn, None, "answer", scores)
            return observation, float(scores["reward"]), True, False, info
        invalid = turn.invalid
        if turn.call is not None:
            try:
                self._check(turn.call)
                reply = self.execute(turn.call)
            except InvalidAction as error:
                invalid = str(error)
        if invalid is not None:
            self._invalid_count += 1
            reply = f"Invalid action: {invalid}."
        self._information = neutralise(clip(reply, self.information_limit))
        self._carry(turn, self._information)
        stop = self._why_stop()
        self._playing = stop is None
        # A gold can normalise to nothing, so "no answer" is not scored as the empty answer.
        scores_of_none = self.scores_without_answer if stop else None
        observation, info = self._observe(turn, invalid, stop, scores_of_none)
        return observation, scores_of_none["reward"] if scores_of_none else 0.0, False, stop is not None, info

    def render(self) -> str | None:  # type: ignore[override]
        return self._text() if self.render_mode == "ansi" else None

    def _pay(self, answer: str) -> dict[str, float]:
        scores = dict(self.score(answer, self.task))
        if "reward" not in scores:
            raise KeyError(f"{type(self).__name__}.score() gives {sorted(scores)}, but no 'reward'")
        if self.strict_format and self._invalid_count:
            return {**self.scores_without_answer, **scores, "reward": self.scores_without_answer["reward"]}
        sizes = tuple(self.counter(memory) for memory in self._memories if memory is not None)
        memories = tuple(self._memories)
        episode = Episode(self.task, answer, dict(scores), memories, sizes, self._invalid_count)
        for term in self.payment.terms:
            scores[term.name] = term(episode)
            scores["reward"] += term.weight * scores[term.name]
        return scores

    def _keep(self, memory: str) -> str | None:
        if self.memory_limit is not None:
            memory = clip_counted(memory, self.memory_limit, self.counter)
        return neutralise(memory) or None

    def _check(self, call: ToolCall) -> None:
        tool = next((tool for tool in self.tools if tool.name == call.name), None)
        if tool is None:
            names = [tool.name for tool in self.tools]
            shown = clip(call.name, 80)
            raise InvalidAction(f"no tool {shown!r}{did_you_mean(shown, names)} (tools: {', '.join(names)})")
        for argument in tool.arguments:
            value = call.arguments.get(argument)
            if not isinstance(value, str):
                raise InvalidAction(f"{tool.name} needs the text argument {argument!r}")
            if not value.strip():
                raise InvalidAction(f"blank {argument}")

    def _carry(self, turn: ParsedTurn, information: str | None) -> None:
        written = f"<mem>{self._memory}</mem>" if self._memory else ""
        if turn.think is not None and turn.think.strip():
            written += f"<think>{neutralise(turn.think)}</think>"
        if turn.action is not None:
            inner = turn.action.index(">") + 1
            outer = turn.action.rindex("<")
            written += turn.action[:inner] + neutralise(turn.action[inner:outer]) + turn.action[outer:]
        if information is not None:
            written += ("\n" if written else "") + f"<information>{information}</information>"
        self._carried.append(written)

    def _why_stop(self) -> str | None:
        if self.invalid_limit is not None and self._invalid_count >= self.invalid_limit:
            return "invalid_actions"
        return "max_turns" if self._turn >= self.max_turns else None

    def _parts(self) -> dict[str, Any]:
        hint = f"Turns left: {self.max_turns - self._turn}" if self.turn_hint else ""
        return {"question": self._question, "carried": list(self._carried), "hint": hint}

    def _text(self) -> str:
        return render_observation(self._parts())

    def _observe(
        self, turn: ParsedTurn | None, invalid: str | None, stop: str | None, scores: dict[str, float] | None
    ) -> tuple[str, dict[str, Any]]:
        """The observation and its info: plain values made for this call, nothing of the golds."""
        parts = self._parts()
        call = turn.call if turn else None
        info: dict[str, Any] = {
            "task_id": self.task.id,
            "question": self._question,
            "memory": self._memory,
            "information": self._information,
            "turn": self._turn,
            "turns_left": self.max_turns - self._turn,
            "invalid": invalid,
            "stop_reason": stop,
            "parse": {
                "memory": turn.memory if turn else None,
                "think": turn.think if turn else None,
                "tool": call.name if call else None,
                # As text: a vector env makes arrays by key, which values of the policy's choosing break.
                "arguments": json.dumps(call.arguments, ensure_ascii=False) if call else None,
                "answer": turn.answer if turn else None,
                "invalid": turn.invalid if turn else None,
            },
            "query": call.query if call else None,
            "parts": parts,
        }
        if scores is not None:
            info["scores"] = scores
        return render_observation(parts), info


def _carried_steps(context: Context, max_turns: int) -> int:
    if context == "previous":
        return 1
    if context == "full":
        return max_turns
    if isinstance(context, bool) or not isinstance(context, int) or context < 1:
        raise UserError(f"context {context!r} is none of 'previous', 'full', a number of steps from 1")
    return context


def _at_least(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise UserError(f"{name} is {value!r}; a whole number of at least {least} is needed")
    return int(value)
