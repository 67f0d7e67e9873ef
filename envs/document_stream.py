"""A long text read piece by piece, once: the memory is all that stays of it (MemAgent's and RULER-HQA's
form).

The text may also be the sessions of a conversation (LongMemEval, LoCoMo) or passages among which the few that
matter are hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envs.base import InvalidAction, MemoryEnv, Tool, _at_least
from envs.errors import UserError
from envs.grammar import ToolCall
from envs.rewards import RewardSetting, read_reward
from envs.scoring import score_objectives
from envs.search_qa import TaskPool, checked_index, task_pool
from envs.tasks import Task
from envs.tasks.chunks import chunks_of

LATER = "It is asked at the end of the text. Keep what may matter, and call next."
"""Stands for the question until the text was read, with ``ask="last"``."""

_LONGEST = 100_000
_SPARE_TURNS = 4


class DocumentStream(MemoryEnv):
    """A long text read piece by piece with one tool, ``next``; reward 1 for the right answer at its end.

    Args:
        tasks: a source for `load_tasks`, or tasks with something to read (see `envs.tasks.chunks.chunks_of`).
        chunk_size: characters of a piece at most.
        ask: ``first`` shows the question from the start, ``last`` only with the last piece.
        reward: ``em``, ``f1`` or ``cover_em`` (means over objectives where a task has several); or as
            in `envs.rewards`.
        max_turns: None gives each episode a turn for each piece, one for the answer and 4 to spare.
        information_limit: None fits ``chunk_size``.
        settings: of `MemoryEnv`.

    Reset options: ``task_id``, or ``index`` into the tasks.

    Raises:
        UserError: no tasks, an unknown source, a value out of range; at reset, a task with nothing to read.
    """

    tools = (Tool("next", "gives the next piece of the text; there is no way back"),)
    rewards = ("em", "f1", "cover_em")

    def __init__(
        self,
        tasks: str | Sequence[Task] | TaskPool = "shakespeare:train",
        *,
        chunk_size: int = 2000,
        ask: str = "first",
        reward: RewardSetting = "em",
        max_turns: int | None = None,
        information_limit: int | None = None,
        **settings: Any,
    ) -> None:
        self.chunk_size = _at_least("chunk_size", chunk_size, 1)
        if ask not in ("first", "last"):
            raise UserError(f"ask {ask!r} is none of 'first', 'last'")
        self.ask = ask
        self.payment = read_reward(reward, self.rewards)
        self._fixed_turns = max_turns is not None
        super().__init__(
            max_turns=_LONGEST if max_turns is None else max_turns,
            information_limit=self.chunk_size + 100 if information_limit is None else information_limit,
            **settings,
        )
        self.pool: TaskPool = task_pool(tasks)

    @property
    def num_tasks(self) -> int:
        """Indices from 0 that `reset` takes as ``options["index"]``."""
        return len(self.pool.tasks)

    def draw_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        if "task_id" in options:
            return self.pool.by_id(options["task_id"])
        if "index" in options:
            return self.pool.tasks[checked_index(options["index"], self.num_tasks)]
        return self.pool.tasks[int(rng.integers(self.num_tasks))]

    def begin(self, task: Task) -> None:
        self._pieces = chunks_of(task, self.chunk_size)
        self._read = 0
        if not self._fixed_turns:
            self.max_turns = min(len(self._pieces) + 1 + _SPARE_TURNS, _LONGEST)

    def show_question(self, task: Task) -> str:
        return task.question if self.ask == "first" else LATER

    def execute(self, call: ToolCall) -> str:
        count = len(self._pieces)
        if self._read == count:
            raise InvalidAction("the text has ended: answer the question")
        piece = self._pieces[self._read]
        self._read += 1
        if self._read == count:
            self.ask_question(self.task.question)
            return f"Part {count} of {count}, the last:\n{piece}"
        return f"Part {self._read} of {count}:\n{piece}"

    def score(self, answer: str, task: Task) -> Mapping[str, float]:
        scores = score_objectives(answer, task.golds)
        return {"reward": self.payment.of_answer(scores), **scores}
