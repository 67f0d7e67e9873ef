"""Evaluate a player on tasks in an environment: collect one record a sample, then score, apart from playing.

    evaluation = evaluate(EnginePlayer(engine, prompts, sampling), env_id="mempo/MultiObjectiveQA-v0",
    tasks=tasks) evaluation.summary()["f1"]

Episodes run concurrently, bounded; each has a seed of its own, so concurrency and order change no result. A
failing episode is tried again in a fresh environment; what still fails is a record with an ``error``, never
a wrong answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import gymnasium as gym

from agent.engines.base import EngineError
from agent.rollout import EpisodeError, SeedKey
from envs.errors import UserError
from envs.tasks.task import Task
from eval.environments import EnvironmentPool
from eval.episode import Sample, failed, sample_id
from eval.interventions import (
    Memory,
    MemoryIntervention,
    check_mode,
    donors_by_task,
    swapped_memories,
)
from eval.summary import score_samples, summarise


class Player(Protocol):
    """Plays whole episodes. Whatever decides what it does is in `identity`."""

    def identity(self) -> dict[str, Any]:
        """JSON-ready description of everything that decides the result: model, weights, prompt, sampling."""
        ...

    async def play(self, env: gym.Env[str, str], task: Task, sample: int, seed_key: SeedKey) -> Sample:
        """Reset ``env`` and play it to its end.

        Raises:
            EpisodeError, EngineError: a failure of the infrastructure; the runner tries again.
        """
        ...


@dataclass(frozen=True)
class Progress:
    """How far an evaluation is; handed to the callback after each sample."""

    done: int
    total: int
    errors: int
    em: float
    f1: float
    seconds: float

    @property
    def seconds_left(self) -> float:
        return self.seconds / self.done * (self.total - self.done) if self.done else 0.0


@dataclass(frozen=True)
class Evaluation:
    """Records of all samples, in the order of tasks and sample indices."""

    # Not printed: asyncio prints the result of what it ran when it tidies up.
    samples: tuple[Sample, ...] = field(repr=False)
    scorer: str | None = None
    seed: int = 0
    seconds: tuple[float, ...] = field(default=(), compare=False, repr=False)

    def summary(self, scorer: str | None = None) -> dict[str, Any]:
        """Means, 95 % intervals, rates and cost, see `eval.summary.summarise`."""
        return summarise(self.samples, scorer or self.scorer, seed=self.seed)

    @cached_property
    def scores(self) -> list[dict[str, float]]:
        return score_samples(self.samples, self.scorer)


async def evaluate_async(
    player: Player,
    *,
    tasks: Sequence[Task],
    env_id: str = "mempo/SearchQA-v0",
    env_kwargs: Mapping[str, Any] | None = None,
    scorer: str | None = None,
    samples: int = 1,
    seed: int = 0,
    memory: Memory = "keep",
    donors: Sequence[Sample] | None = None,
    concurrency: int = 64,
    retries: int = 2,
    skip: Collection[str] = (),
    on_sample: Callable[[Sample, float, Progress], None] | None = None,
) -> Evaluation:
    """Play every task ``samples`` times and return the records.

    Args:
        player: who plays.
        tasks: with distinct ids.
        env_id, env_kwargs: the environment; it plays ``tasks``, whatever tasks it has of its own.
        scorer: a rule of `eval.scorers`; None takes the one that fits the number of objectives.
        samples: attempts at each task.
        seed: with task id and sample index decides what an episode samples.
        memory: ``blank`` or ``swap`` takes the carried memory away; ``swap`` needs ``donors``, the samples
            of a run that kept it.
        concurrency: episodes at once, at least 1.
        retries: further attempts at an episode that failed.
        skip: ids of samples (``task_id#sample``) not to play.
        on_sample: called after each sample with the record, its seconds and the progress.

    Raises:
        UserError: no task, an id twice, unknown environment or mode; every single sample failed.
    """
    _check(tasks, samples, concurrency)
    check_mode(memory, donors)
    pool = EnvironmentPool(env_id, env_kwargs or {})
    swap = _Swap(memory, donors_by_task(donors or ()), seed)
    plan = [
        (task, index) for task in tasks for index in range(samples) if sample_id(task.id, index) not in skip
    ]
    gate = asyncio.Semaphore(concurrency)
    tally = _Tally(len(plan), scorer)
    results: dict[str, tuple[Sample, float]] = {}

    async def one(task: Task, index: int) -> None:
        async with gate:
            start = time.perf_counter()
            sample = await _attempt(player, pool, swap, task, index, seed, retries)
            seconds = time.perf_counter() - start
            results[sample.id] = (sample, seconds)
            progress = tally.add(sample)
            if on_sample is not None:
                on_sample(sample, seconds, progress)

    try:
        async with asyncio.TaskGroup() as group:
            for task, index in plan:
                group.create_task(one(task, index))
    except ExceptionGroup as failures:
        raise _first(failures) from None
    finally:
        pool.close()
    ordered = [results[sample_id(task.id, index)] for task, index in plan]
    if ordered and all(sample.error is not None for sample, _ in ordered):
        raise UserError(f"every sample failed; the first one: {ordered[0][0].error}")
    return Evaluation(
        tuple(sample for sample, _ in ordered), scorer, seed, tuple(seconds for _, seconds in ordered)
    )


def evaluate(player: Player, **arguments: Any) -> Evaluation:
    """`evaluate_async` for code without an event loop; the same arguments and errors."""
    return asyncio.run(evaluate_async(player, **arguments))


@dataclass(frozen=True)
class _Swap:
    """What happens to the memory in every episode."""

    memory: Memory
    donors: Mapping[str, Sequence[Sample]]
    seed: int

    def wrap(self, env: gym.Env[str, str], task: Task, index: int) -> gym.Env[str, str]:
        if self.memory == "keep":
            return env
        if self.memory == "blank":
            return MemoryIntervention(env)
        return MemoryIntervention(env, swapped_memories(self.donors, task.id, index, self.seed))


async def _attempt(
    player: Player, pool: EnvironmentPool, swap: _Swap, task: Task, index: int, seed: int, retries: int
) -> Sample:
    failure = ""
    for _ in range(retries + 1):
        env = pool.acquire(task)
        try:
            sample = await player.play(
                swap.wrap(env, task, index), task, index, ("eval", seed, task.id, index)
            )
        except (EpisodeError, EngineError) as error:
            # Not the model's fault: counted and named, and it ends only this episode.
            failure = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            pool.discard(env)
        else:
            pool.release(env)
            return sample
    return failed(task, index, failure)


class _Tally:
    """Running means for the progress display."""

    def __init__(self, total: int, scorer: str | None) -> None:
        self._total, self._scorer = total, scorer
        self._done = self._errors = 0
        self._em = self._f1 = 0.0
        self._start = time.perf_counter()

    def add(self, sample: Sample) -> Progress:
        scores = score_samples([sample], self._scorer)[0]
        self._done += 1
        self._errors += sample.error is not None
        self._em += scores["em"]
        self._f1 += scores["f1"]
        seconds = time.perf_counter() - self._start
        mean_em, mean_f1 = self._em / self._done, self._f1 / self._done
        return Progress(self._done, self._total, self._errors, mean_em, mean_f1, seconds)


def _check(tasks: Sequence[Task], samples: int, concurrency: int) -> None:
    if not tasks:
        raise UserError("no task to evaluate on")
    if samples < 1 or concurrency < 1:
        raise UserError(f"samples ({samples}) and concurrency ({concurrency}) must be at least 1")
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise UserError(f"task id {task.id!r} occurs twice; ids name samples and must be distinct")
        seen.add(task.id)


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
