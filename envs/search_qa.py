"""One question, a search tool, one answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from envs.base import InvalidAction, MemoryEnv, Tool, _at_least
from envs.errors import UserError, did_you_mean
from envs.grammar import ToolCall
from envs.retrieval import Retriever, load_retriever, render_passages
from envs.rewards import RewardSetting, read_reward
from envs.scoring import score_objectives
from envs.tasks import Task, load_tasks

Reward = Literal["em", "f1", "cover_em"]

SEARCH = Tool("search", "finds the passages that match a query best", {"query": "what to look for"})


class SearchQA(MemoryEnv):
    """Questions over a corpus. Reward 1 for an answer that equals a gold (SQuAD normalisation), else 0.

    Args:
        tasks: a source for `load_tasks`, tasks with one question each, or a `TaskPool` of them: many
            environments over the same tasks share one.
        retriever: a source for `load_retriever`, or a retriever; it is shared, not copied.
        topk: passages a search shows.
        reward: the score that is the reward: ``em``, ``f1`` or ``cover_em``; or as in `envs.rewards`.
        settings: of `MemoryEnv`.

    Reset options: ``task_id``, or ``index`` into the tasks.

    Raises:
        UserError: no tasks, an unknown source, a value out of range.
    """

    tools = (SEARCH,)
    rewards: tuple[str, ...] = ("em", "f1", "cover_em")

    def __init__(
        self,
        tasks: str | Sequence[Task] | TaskPool = "factbook-tiny:train",
        retriever: str | Retriever = "factbook-tiny",
        *,
        topk: int = 3,
        reward: RewardSetting = "em",
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.pool = task_pool(tasks)
        self.retriever = load_retriever(retriever) if isinstance(retriever, str) else retriever
        if not callable(getattr(self.retriever, "search", None)):
            raise UserError(
                f"retriever {retriever!r} has no search; the name of one, or an object, is needed"
            )
        self.topk = _at_least("topk", topk, 1)
        self.payment = read_reward(reward, self.rewards)

    @property
    def num_tasks(self) -> int:
        """Indices from 0 that `reset` takes as ``options["index"]``."""
        return len(self.pool.tasks)

    def draw_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        if "task_id" in options:
            return self.pool.by_id(options["task_id"])
        if "index" in options:
            return self.pool.tasks[checked_index(options["index"], self.num_tasks)]
        return self.pool.tasks[int(rng.integers(len(self.pool.tasks)))]

    def execute(self, call: ToolCall) -> str:
        if call.query is None:
            raise InvalidAction("search needs the text argument 'query'")
        return render_passages(self.retriever.search([call.query], self.topk)[0])

    def score(self, answer: str, task: Task) -> Mapping[str, float]:
        scores = score_objectives(answer, task.golds)
        return {"reward": self.payment.of_answer(scores), **scores}


class TaskPool:
    """Tasks with a look-up by id."""

    def __init__(self, tasks: tuple[Task, ...]) -> None:
        if not tasks:
            raise UserError("no tasks: at least one question is needed")
        self.tasks = tasks
        self._by_id = {task.id: task for task in tasks}
        if len(self._by_id) != len(tasks):
            raise UserError(
                f"{len(tasks) - len(self._by_id)} tasks share the id of another; ids must be unique"
            )

    def by_id(self, task_id: Any) -> Task:
        """Raises UserError with the closest id when there is none."""
        task = self._by_id.get(task_id) if isinstance(task_id, str) else None
        if task is None:
            raise UserError(f"no task {task_id!r}{did_you_mean(str(task_id), self._by_id)}")
        return task

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._by_id


@lru_cache(maxsize=16)
def _shared_pool(source: str) -> TaskPool:
    return TaskPool(tuple(load_tasks(source)))


def task_pool(tasks: str | Sequence[Task] | TaskPool) -> TaskPool:
    """A pool of tasks; one object for all environments that name the same source or hand in the same pool."""
    if isinstance(tasks, TaskPool):
        return tasks
    if isinstance(tasks, str):
        return _shared_pool(tasks)
    given: object = tasks  # whatever a setting of a command line may be
    if not isinstance(given, Sequence) or not all(isinstance(task, Task) for task in given):
        raise UserError(f"tasks {str(tasks)[:60]!r}: the name of a source, or a list of tasks, is needed")
    return TaskPool(tuple(tasks))


def checked_index(index: Any, count: int) -> int:
    """Raises UserError when ``index`` is no whole number in ``0..count - 1``."""
    if isinstance(index, bool) or not isinstance(index, int | np.integer) or not 0 <= index < count:
        raise UserError(f"index {index!r} is no whole number from 0 to {count - 1}")
    return int(index)
