"""Environments for evaluation: which tasks they have, and instances with an episode's task pinned to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils.seeding import np_random

from envs.base import MemoryEnv
from envs.errors import UserError
from envs.registry import make
from envs.tasks import Task

DRAWN = "drawn"
"""Key of a task's metadata under which `drawn_task` keeps the seed and the options that drew it."""


def drawn_task(env: gym.Env[str, str], seed: int, options: Mapping[str, Any] | None = None) -> Task:
    """Reset `env` and return the task it drew, with what it takes to draw it again.

    Raises:
        UserError: not an environment of ours.
    """
    named = dict(options or {})
    env.reset(seed=seed, options=named)
    task = _base(env).task
    return replace(task, metadata={**task.metadata, DRAWN: {"seed": seed, "options": named}})


def pin(env: gym.Env[str, str], task: Task) -> gym.Env[str, str]:
    """Make the next resets of `env` play `task`, whatever they would have drawn.

    The environment draws the task itself, as it did for `drawn_task` or by its id, because drawing may also set up the
    episode (a house, drawers, pieces of a text). A task from elsewhere that it cannot draw is played as it is. The
    generator that the environment uses later is left alone.

    Raises:
        UserError: not an environment of ours. At the reset: a task that this environment drew, and does not draw again.
    """
    base = _base(env)
    draw = type(base).draw_task

    def same_task(rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        for seed, named in _ways(task):
            with contextlib.suppress(UserError):
                found = draw(base, np_random(seed)[0], named)
                if (found.id, found.questions, found.golds) == (task.id, task.questions, task.golds):
                    return task
        if DRAWN in task.metadata:
            raise UserError(
                f"{type(base).__name__}: task {task.id!r} was drawn with {task.metadata[DRAWN]} and is not drawn by it "
                "again: draw_task must take everything from the generator and the options that it is given"
            )
        return task

    base.draw_task = same_task  # type: ignore[method-assign]
    return env


def _ways(task: Task) -> Iterator[tuple[int, Mapping[str, Any]]]:
    drawn = task.metadata.get(DRAWN)
    if drawn is not None:
        yield drawn["seed"], drawn["options"]
    yield 0, {"task_id": task.id}


def draw_tasks(env_id: str, kwargs: Mapping[str, Any], count: int | None = None) -> list[Task]:
    """The tasks of an environment by index, 0 to ``count`` - 1; without a count all that it says it has.

    Raises:
        UserError: fewer than ``count``; no count for an environment without ``num_tasks``.
    """
    env = make(env_id, **kwargs)
    known = getattr(env.unwrapped, "num_tasks", None)
    if count is None and not isinstance(known, int):
        raise UserError(f"{env_id} does not say how many tasks it has; a limit is needed")
    tasks: dict[str, Task] = {}
    total = count if count is not None else int(known or 0)
    for index in range(total):
        task = drawn_task(env, index, {"index": index})
        tasks.setdefault(task.id, task)
    close(env)
    if len(tasks) < total:
        raise UserError(f"{env_id} has {len(tasks)} different tasks; {total} are asked for")
    return list(tasks.values())


class EnvironmentPool:
    """Environments of one id, made when needed and used again."""

    def __init__(self, env_id: str, kwargs: Mapping[str, Any]) -> None:
        self._id, self._kwargs = env_id, dict(kwargs)
        self._free: list[gym.Env[str, str]] = []

    def acquire(self, task: Task) -> gym.Env[str, str]:
        """An environment that will play `task`."""
        env = self._free.pop() if self._free else make(self._id, **self._kwargs)
        return pin(env, task)

    def release(self, env: gym.Env[str, str]) -> None:
        """Take back an environment that works."""
        self._free.append(env)

    def discard(self, env: gym.Env[str, str]) -> None:
        """Close one that failed; being broken, it may fail at that, too."""
        with contextlib.suppress(Exception):
            close(env)

    def close(self) -> None:
        for env in self._free:
            close(env)
        self._free.clear()


def close(env: gym.Env[str, str]) -> None:
    closing: Callable[[], None] = env.close
    closing()


def _base(env: gym.Env[str, str]) -> MemoryEnv:
    base = env.unwrapped
    if not isinstance(base, MemoryEnv):
        raise UserError(f"{type(base).__name__} is no MemoryEnv; only those know tasks that can be evaluated")
    return base
