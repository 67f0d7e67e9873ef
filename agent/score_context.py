"""The contexts in which memories are scored, as text and as tokens.

Contexts are encoded by segments (frame and question, memory, each step, end of the frame, answer), so that
every text is encoded once however many contexts share it, and the transcript of turn t is a prefix of the one
of t + 1. Segments end where common tokenizers split anyway: at a tag, after a newline, at a control token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from agent.score_tree import Ids
from envs.errors import UserError

ANSWER_PREFIX = "<answer>"

MAX_ANSWERS = 8
"""Forms of the gold answer that are scored in one context."""

Segment = tuple[str, str]
"""What a segment follows, and its text."""

_PLACEHOLDER = "MEMPO-CONTEXT-GOES-HERE"


def question_line(question: str) -> str:
    return f"Question: {question}\n"


def memory_block(memory: str) -> str:
    return f"<mem>{memory}</mem>"


def memory_context(question: str, memory: str) -> str:
    """What P_mem reads: the question and the text of one memory, no history."""
    return question_line(question) + memory_block(memory)


def transcript_context(question: str, steps: Sequence[str]) -> str:
    """What P_full reads: the question and the whole transcript; each step is a `step_text`, oldest first."""
    return question_line(question) + "\n".join(steps)


def step_text(completion: str, information: str) -> str:
    """One step of a transcript: what the policy wrote, then what it got (its tags are added if missing)."""
    tagged = information.startswith("<information>")
    return f"{completion}\n{information if tagged else f'<information>{information}</information>'}"


def answer_forms(golds: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Texts that count as the gold answer inside ``<answer>``, the canonical one first.

    One objective at a time takes its aliases while the others keep their first: the product over objectives
    would grow exponentially. At most `MAX_ANSWERS`, drawn from the objectives in turn.
    """
    first = [aliases[0] for aliases in golds]
    forms = {"; ".join(first): None}
    for rank in range(1, max(len(aliases) for aliases in golds)):
        for objective, aliases in enumerate(golds):
            if rank < len(aliases):
                forms["; ".join([*first[:objective], aliases[rank], *first[objective + 1 :]])] = None
    return tuple(form for form in forms if form.strip())[:MAX_ANSWERS]


def chat_renderer(tokenizer: Any, system: str) -> Callable[[str], str]:
    """User text -> whole prompt text through the tokenizer's chat template."""
    messages = [{"role": "system", "content": system}] if system else []

    def render(text: str) -> str:
        conversation = [*messages, {"role": "user", "content": text}]
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))

    return render


def frame(render: Callable[[str], str]) -> tuple[str, str]:
    """What a prompt has before and after the user's text.

    Raises:
        UserError: the template does not show the user's text exactly once.
    """
    parts = render(_PLACEHOLDER).split(_PLACEHOLDER)
    if len(parts) != 2:
        raise UserError(
            f"the chat template shows the user's message {len(parts) - 1} times; it must show it once"
        )
    return parts[0], parts[1]


class Segments:
    """Encodes many texts in one call: ask with `add`, then `encode`, then read.

    A segment is split as it would be after the text it follows: behind a newline where the tokenizer puts a
    space before whatever it encodes (SentencePiece), an answer behind ``<answer>``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        special = sorted(filter(None, tokenizer.all_special_tokens), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, special))) if special else None
        self._known: dict[tuple[str, str], Ids] = {}
        self._wanted: dict[tuple[str, str], None] = {}
        newline, both, alone = self._ids(["\n", "\na", "a"])
        self.inside = "\n" if both[: len(newline)] == newline and both[len(newline) :] != alone else ""

    def clean(self, text: str) -> str:
        """Without the tokenizer's control tokens, which would end the user's message."""
        return self._control.sub("", text) if self._control else text

    def add(self, text: str, after: str) -> Segment:
        key = (after, text)
        if key not in self._known:
            self._wanted[key] = None
        return key

    def encode(self) -> None:
        wanted, self._wanted = list(self._wanted), {}
        befores = {after: ids for after, ids in zip(*self._each({after for after, _ in wanted}), strict=True)}
        alone: list[Segment] = []
        for key, ids in zip(wanted, self._ids([after + text for after, text in wanted]), strict=True):
            before = befores[key[0]]
            if ids[: len(before)] == before:
                self._known[key] = np.array(ids[len(before) :], dtype=np.int64)
            else:
                alone.append(key)
        for key, ids in zip(alone, self._ids([text for _, text in alone]), strict=True):
            self._known[key] = np.array(ids, dtype=np.int64)

    def __getitem__(self, segment: Segment) -> Ids:
        return self._known[segment]

    def _each(self, texts: set[str]) -> tuple[list[str], list[list[int]]]:
        ordered = sorted(texts)
        return ordered, self._ids(ordered)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return list(self._tokenizer(texts, add_special_tokens=False)["input_ids"]) if texts else []
