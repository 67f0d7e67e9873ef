"""Several questions in one episode, in MEM1's form: asked as ``q1; q2``, answered as ``a1; a2``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from envs.base import _at_least
from envs.errors import UserError
from envs.retrieval import Retriever
from envs.rewards import RewardSetting
from envs.scoring import mem1_train, score_objectives
from envs.search_qa import SearchQA, TaskPool, checked_index
from envs.tasks import Task
from envs.tasks.searches import search_chain

JOINER = " + "
"""Between the ids of the questions in a task's id."""


class MultiObjectiveQA(SearchQA):
    """k questions drawn without replacement from single-question tasks, answered in order.

    Args:
        objectives: k, from 1 (2 to 16 make sense); None takes tasks that have several questions (MEM1's rows)
            as they are.
        numbered: ask ``1) q1 2) q2`` instead of ``q1; q2``.
        reward: ``em`` (1 when every objective is right and there is no extra answer), ``partial`` (mean exact
            match), ``f1`` (mean F1) or ``mem1`` (MEM1's: the number of right positions); or as in `envs.rewards`.
        tasks, retriever, topk, settings: as in `SearchQA`. Golds with ``;`` are left out, and a question
            whose golds all have one.

    Reset options: ``task_id`` (as the task's own id: question ids joined by `` + ``), or ``index``: indices
        cover
    every question once, in an order of their own, before any comes again.
    """

    rewards = ("em", "partial", "f1", "mem1")

    def __init__(
        self,
        tasks: str | Sequence[Task] | TaskPool = "factbook-tiny:train",
        retriever: str | Retriever = "factbook-tiny",
        *,
        objectives: int | None = 2,
        numbered: bool = False,
        topk: int = 3,
        reward: RewardSetting = "em",
        **settings: Any,
    ) -> None:
        super().__init__(tasks, retriever, topk=topk, reward=reward, **settings)
        self.objectives = None if objectives is None else _at_least("objectives", objectives, 1)
        self.numbered = numbered
        self.pool = _without_separators(self.pool, single=objectives is not None)
        if len(self.pool.tasks) < (self.objectives or 1):
            raise UserError(
                f"{self.objectives} objectives cannot be drawn from {len(self.pool.tasks)} questions"
            )

    @property
    def num_tasks(self) -> int:
        """Indices from 0 that use every question at most once (larger ones are taken too)."""
        return len(self.pool.tasks) // (self.objectives or 1)

    def draw_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        if self.objectives is None:
            return super().draw_task(rng, options)
        if "task_id" in options:
            return join_tasks([self.pool.by_id(part) for part in str(options["task_id"]).split(JOINER)])
        count, k = len(self.pool.tasks), self.objectives
        if "index" in options:
            index = checked_index(options["index"], 2**31)
            pass_number, place = divmod(index, count // k)
            chosen = _order(count, pass_number)[place * k : (place + 1) * k].tolist()
        else:
            # A dictionary keeps the order of drawing; numpy's choice would shuffle the whole pool.
            drawn: dict[int, None] = {}
            while len(drawn) < k:
                drawn[int(rng.integers(count))] = None
            chosen = list(drawn)
        return join_tasks([self.pool.tasks[i] for i in chosen])

    def show_question(self, task: Task) -> str:
        if not self.numbered:
            return task.question
        return " ".join(f"{number}) {question}" for number, question in enumerate(task.questions, 1))

    def score(self, answer: str, task: Task) -> Mapping[str, float]:
        scores = score_objectives(answer, task.golds)
        own = {"em": scores["em_all"], "partial": scores["em"], "f1": scores["f1"]}
        own["mem1"] = float(mem1_train(answer, task.golds))
        return {"reward": self.payment.of_answer(own), **scores}


def join_tasks(tasks: Sequence[Task]) -> Task:
    """Single-question tasks as one; ``metadata["chains"]`` has each one's chain, if all have one."""
    chains = [search_chain(task) for task in tasks]
    metadata: dict[str, Any] = {"parts": [task.id for task in tasks]}
    if all(chains):
        metadata["chains"] = chains
        metadata["hops"] = sum(len(chain) for chain in chains if chain)
    return Task(
        id=JOINER.join(task.id for task in tasks),
        questions=tuple(question for task in tasks for question in task.questions),
        golds=tuple(golds for task in tasks for golds in task.golds),
        source=tasks[0].source,
        metadata=metadata,
    )


@lru_cache(maxsize=16)
def _without_separators(pool: TaskPool, single: bool) -> TaskPool:
    """Golds with ``;`` are left out, and tasks that then have none; ``single``: those of many questions."""
    kept = []
    for task in pool.tasks:
        if single and len(task.questions) > 1:
            continue
        golds = tuple(tuple(gold for gold in accepted if ";" not in gold) for accepted in task.golds)
        if all(golds):
            kept.append(task if golds == task.golds else replace(task, golds=golds))
    if not kept:
        raise UserError(
            "no single question has a gold answer without ';', which separates the objectives' answers"
            if single and any(len(task.questions) == 1 for task in pool.tasks)
            else "no task is left: with several questions in a task, objectives=None is needed"
        )
    return TaskPool(tuple(kept))


@lru_cache(maxsize=16)
def _order(count: int, pass_number: int) -> np.ndarray:
    """The order in which indices use the questions: fixed, so that an index means the same everywhere."""
    return np.random.default_rng([0x0B1EC7, pass_number]).permutation(count)
