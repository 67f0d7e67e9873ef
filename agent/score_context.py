"""The contexts in which memories are scored, as text and as tokens.

Contexts are encoded by segments (frame and question, memory, each step, end of the frame, answer), so that
every text is encoded once however many contexts share it, and the transcript of turn t is a prefix of the one
of t + 1. Segments end where common tokenizers split anyway: at a tag, after a newline, at a control token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agent.prompts import PromptBuilder
from agent.score_tree import Ids
from agent.trajectory import Trajectory
from envs.base import render_observation
from envs.errors import UserError
from envs.neutral import neutralise
from envs.tasks.task import Task

ANSWER_PREFIX = "<answer>"

MAX_ANSWERS = 8
"""Forms of the gold answer that are scored in one context."""

Segment = tuple[str, str]
"""What a segment follows, and its text."""

_PLACEHOLDER = "MEMPO-CONTEXT-GOES-HERE"

_FIRST_OBSERVATION = re.compile(
    r"Question: (?P<question>.*?)(?:\n(?P<information><information>.*</information>))?"
    r"(?:\nTurns left: \d+|\n)?",
    re.DOTALL,
)


def memory_context(question: str, memory: str) -> str:
    """What P_mem reads: the question and the text of one memory, no history."""
    return render_observation({"question": question, "carried": [memory_block(memory)], "hint": ""})


def transcript_context(question: str, steps: Sequence[str]) -> str:
    """What P_full reads: the question and the whole transcript; each step is a `step_text`, oldest first."""
    return render_observation({"question": question, "carried": list(steps), "hint": ""})


def question_line(question: str) -> str:
    """How both begin."""
    return transcript_context(question, [])


def memory_block(memory: str) -> str:
    return f"<mem>{memory}</mem>"


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


def opening(task: Task, trajectory: Trajectory) -> tuple[str, list[str]]:
    """The question as the policy read it (an environment may number objectives), and what came along with it.

    The first observation has no step in it; an environment that hands out documents may begin with the first.
    Without a first observation in `envs.base`'s form the question is the task's.
    """
    observation = trajectory.turns[0].observation if trajectory.turns else ""
    match = _FIRST_OBSERVATION.fullmatch(observation)
    if match is None:
        return neutralise(task.question), []
    return match["question"], [match["information"]] if match["information"] else []


@dataclass(frozen=True)
class Frame:
    """What a prompt has before and after the user's text; ``leading`` ids stand before everything."""

    leading: tuple[int, ...]
    before: str
    after: str


def frame(prompts: PromptBuilder) -> Frame:
    """Take a prompt apart.

    Raises:
        UserError: the chat template does not show the user's text exactly once.
    """
    whole = prompts.render(_PLACEHOLDER)
    parts = whole.split(_PLACEHOLDER)
    if len(parts) != 2:
        raise UserError(
            f"the chat template shows the user's message {len(parts) - 1} times; it must show it once"
        )
    text = prompts.tokenizer.encode(whole, add_special_tokens=False)
    ids = prompts.build(_PLACEHOLDER)
    return Frame(ids[: len(ids) - len(text)], *parts)


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
