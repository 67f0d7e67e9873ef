"""A small world for the harness tests: three questions, a search that looks things up, a known player."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from envs.base import MemoryEnv, Tool
from envs.errors import UserError
from envs.grammar import ToolCall
from envs.registry import register
from envs.tasks import Task

FACTS = {"capital of Poland": "Warsaw", "capital of Peru": "Lima", "capital of Mali": "Bamako"}
TASKS = [
    Task(f"q{i}", (f"What is the {fact}?",), ((answer,),), "lookup", {"hops": 1 + i % 2})
    for i, (fact, answer) in enumerate(FACTS.items())
]


class Lookup(MemoryEnv):
    """Answers a query that names a fact; fails as often as the test says."""

    tools = (Tool("search", "looks a fact up", {"query": "the fact"}),)
    failures: list[str] = []

    @property
    def num_tasks(self) -> int:
        return len(TASKS)

    def draw_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        index = int(options.get("index", rng.integers(len(TASKS))))
        if index >= len(TASKS):
            raise UserError(f"index {index} is no whole number from 0 to {len(TASKS) - 1}")
        return TASKS[index]

    def execute(self, call: ToolCall) -> str:
        if self.failures:
            raise RuntimeError(self.failures.pop())
        return next((f"It is {FACTS[fact]}." for fact in FACTS if fact in str(call.query)), "Nothing.")

    def score(self, answer: str, task: Task) -> Mapping[str, float]:
        return {"reward": float(answer in task.golds[0])}


LOOKUP = "mempotest/Lookup-v0"
register(LOOKUP, "tests.eval.conftest:Lookup")


class Remembering:
    """Searches, waits a turn with nothing but its memory, then answers what the memory says."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def act(self, observation: str, info: Mapping[str, Any]) -> str:
        question = str(info["question"])
        if info["turn"] == 0:
            return f"<mem>start</mem><search>{question}</search>"
        if info["turn"] == 1:
            found = str(info["information"]).removeprefix("It is ").removesuffix(".")
            return f"<mem>{found}</mem><search>something else</search>"
        return f"<mem>done</mem><answer>{info['memory'] or 'unknown'}</answer>"


@pytest.fixture(autouse=True)
def _no_failures() -> None:
    Lookup.failures = []
