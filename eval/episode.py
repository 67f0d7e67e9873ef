"""One evaluated episode as it lies in ``samples.jsonl``: plain values, no clock time, JSON there and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any

from agent.trajectory import Trajectory
from envs.tasks.task import Task


@dataclass(frozen=True)
class TurnRecord:
    """One turn of an episode.

    Attributes:
        text: what the policy wrote (the decoded completion).
        memory: the text inside its memory block, or None.
        query: the search query of its call, or None.
        information: the environment's reply; empty when the episode ended with this turn.
        invalid: what was wrong with the action, or None.
        finish: ``stop``, ``length`` or ``abort``.
        prompt_tokens, completion_tokens: as the engine counted them.
        memory_tokens: tokens of the memory block, tags included.
        observation_tokens: tokens of ``information``.
        p_mem, p_full: the memory scores of this turn where they were asked for.
    """

    text: str
    memory: str | None
    query: str | None
    information: str
    invalid: str | None
    finish: str
    prompt_tokens: int
    completion_tokens: int
    memory_tokens: int
    observation_tokens: int
    p_mem: float | None = None
    p_full: float | None = None


@dataclass(frozen=True)
class Sample:
    """One attempt at one task. ``error`` names an infrastructure failure: then nothing was scored.

    Attributes:
        task_id, sample: together the id of the sample; ``sample`` counts from 0.
        questions, golds: as in the task, so that a file of samples can be scored again on its own.
        tags: facts about the task to group by (``source``, ``hops``).
        answer: the final answer, or None when none was given.
        stop_reason: why the episode ended; ``error`` when it failed.
        reward: what the environment paid.
        turns: in order.
        error: None, or one line on the failure of the last attempt.
    """

    task_id: str
    sample: int
    questions: tuple[str, ...]
    golds: tuple[tuple[str, ...], ...]
    answer: str | None
    stop_reason: str
    turns: tuple[TurnRecord, ...]
    reward: float = 0.0
    tags: Mapping[str, str | int | float] = field(default_factory=dict)
    error: str | None = None

    @property
    def id(self) -> str:
        return sample_id(self.task_id, self.sample)

    def to_json(self) -> dict[str, Any]:
        # By hand: `dataclasses.asdict` copies every value deep, which took half of the time of a record.
        turns = [dict(vars(turn)) for turn in self.turns]
        return {"id": self.id, **vars(self), "turns": turns, "tags": dict(self.tags)}

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Sample:
        """Inverse of `to_json`.

        Raises:
            KeyError, TypeError: a row of another form.
        """
        known = {f.name for f in fields(Sample)}
        values = {key: value for key, value in row.items() if key in known}
        values["questions"] = tuple(row["questions"])
        values["golds"] = tuple(tuple(golds) for golds in row["golds"])
        values["turns"] = tuple(TurnRecord(**turn) for turn in row["turns"])
        sample = Sample(**values)
        _check_kinds(sample, _SAMPLE_KINDS)
        for turn in sample.turns:
            _check_kinds(turn, _TURN_KINDS)
        for text in (*sample.questions, *(gold for golds in sample.golds for gold in golds)):
            if not isinstance(text, str):
                raise TypeError(f"{text!r} stands for a text")
        return sample


_TEXT, _MAYBE, _COUNT, _NUMBER = (str,), (str, NoneType), (int,), (int, float)
_SAMPLE_KINDS: Mapping[str, tuple[type, ...]] = {
    "task_id": _TEXT, "sample": _COUNT, "answer": _MAYBE, "stop_reason": _TEXT, "reward": _NUMBER,
    "tags": (dict,), "error": _MAYBE,
}  # fmt: skip
_TURN_KINDS: Mapping[str, tuple[type, ...]] = {
    "text": _TEXT, "memory": _MAYBE, "query": _MAYBE, "information": _TEXT, "invalid": _MAYBE, "finish": _TEXT,
    "prompt_tokens": _COUNT, "completion_tokens": _COUNT, "memory_tokens": _COUNT, "observation_tokens": _COUNT,
    "p_mem": (*_NUMBER, NoneType), "p_full": (*_NUMBER, NoneType),
}  # fmt: skip


def _check_kinds(record: object, kinds: Mapping[str, tuple[type, ...]]) -> None:
    for key, allowed in kinds.items():
        if type(getattr(record, key)) not in allowed:
            raise TypeError(f"{key} is {getattr(record, key)!r}")


def sample_id(task_id: str, sample: int) -> str:
    return f"{task_id}#{sample}"


def task_tags(task: Task) -> dict[str, str | int | float]:
    """What of a task's metadata is worth grouping by: its source, its hops, and its number of objectives."""
    tags: dict[str, str | int | float] = {"objectives": len(task.questions)}
    if task.source:
        tags["source"] = task.source
    for key in ("hops", "category", "dataset", "type"):
        value = task.metadata.get(key)
        if isinstance(value, str | int | float):
            tags[key] = value
    return tags


def from_trajectory(
    task: Task, sample: int, trajectory: Trajectory, count_tokens: Callable[[str], int]
) -> Sample:
    """The record of a trajectory; ``count_tokens`` counts the environment's replies."""
    turns = tuple(
        TurnRecord(
            text=turn.text,
            memory=turn.memory,
            query=turn.query,
            information=turn.information,
            invalid=turn.invalid,
            finish=turn.finish,
            prompt_tokens=len(turn.prompt_ids),
            completion_tokens=len(turn.completion_ids),
            memory_tokens=0 if turn.memory_span is None else turn.memory_span[1] - turn.memory_span[0],
            observation_tokens=count_tokens(turn.information) if turn.information else 0,
        )
        for turn in trajectory.turns
    )
    return Sample(
        task_id=task.id,
        sample=sample,
        questions=task.questions,
        golds=task.golds,
        answer=trajectory.answer,
        stop_reason=trajectory.stop_reason,
        turns=turns,
        reward=trajectory.reward,
        tags=task_tags(task),
    )


def failed(task: Task, sample: int, error: str) -> Sample:
    """The record of an attempt that an infrastructure failure ended, after its retries."""
    return Sample(
        task_id=task.id,
        sample=sample,
        questions=task.questions,
        golds=task.golds,
        answer=None,
        stop_reason="error",
        turns=(),
        tags=task_tags(task),
        error=error,
    )
