"""Rollouts on the disk and back: groups that are read are equal to those that were written.

One line a group, so that a file can be read with any JSON tool. A training step can be replayed from it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent.memory_score import MemoryScore
from agent.trajectory import Group, Trajectory, Turn
from envs.errors import UserError
from envs.tasks.task import Task
from trainer.records import write_lines
from trainer.state_tree import flatten, restore

FORMAT = 1

Scores = Sequence[Sequence[Sequence[MemoryScore]]]


def write_rollouts(path: str | Path, groups: Sequence[Group], scores: Scores | None = None) -> None:
    """Write the groups of a step, and their memory scores where they are known.

    Raises:
        TypeError: a task's metadata holds something that is no plain value, list, tuple or dict.
        ValueError: scores of another shape.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    by_group = [None] * len(groups) if scores is None else list(scores)
    write_lines(path, (_line(group, score) for group, score in zip(groups, by_group, strict=True)))


def read_rollouts(path: str | Path) -> tuple[list[Group], list[list[list[MemoryScore]]] | None]:
    """What `write_rollouts` wrote; scores are None when none were.

    Raises:
        UserError: no such file, or a line that is no group (named with its number).
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"rollout file {path} does not exist")
    groups: list[Group] = []
    scores: list[list[list[MemoryScore]]] = []
    with path.open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                if row["format"] != FORMAT:
                    raise UserError(f"{path}, line {number}: format {row['format']}; {FORMAT} is needed")
                groups.append(_group(row))
                if row["scores"] is not None:
                    scores.append([[MemoryScore(*turn) for turn in turns] for turns in row["scores"]])
            except UserError:
                raise
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                raise UserError(f"{path}, line {number}: no group ({error})") from None
    return groups, scores if scores and len(scores) == len(groups) else None


def _line(group: Group, scores: Sequence[Sequence[MemoryScore]] | None) -> str:
    if scores is not None and [len(turns) for turns in scores] != [len(t.turns) for t in group.trajectories]:
        raise ValueError(f"scores of task {group.task.id!r} do not have the shape of its trajectories")
    row = {
        "format": FORMAT,
        "task": _plain(vars(group.task)),
        "trajectories": [
            _plain({**vars(trajectory), "turns": tuple(vars(turn) for turn in trajectory.turns)})
            for trajectory in group.trajectories
        ],
        "scores": None if scores is None else [list(map(_triple, turns)) for turns in scores],
    }
    return json.dumps(row, allow_nan=False) + "\n"


def _triple(score: MemoryScore) -> tuple[float | None, float, bool]:
    return score.p_mem, score.p_full, score.cut


def _plain(fields: dict[str, Any]) -> Any:
    values, tensors = flatten(fields)
    if tensors:
        raise TypeError(f"rollouts hold no tensors, but one is at {next(iter(tensors))}")
    return values


def _group(row: dict[str, Any]) -> Group:
    return Group(Task(**restore(row["task"], {})), tuple(map(_trajectory, row["trajectories"])))


def _trajectory(values: Any) -> Trajectory:
    fields = restore(values, {})
    return Trajectory(**{**fields, "turns": tuple(Turn(**turn) for turn in fields["turns"])})
