"""A corpus of nine passages and four questions: every test can see the whole world it plays in."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from envs.retrieval import Passage
from envs.retrieval.bm25 import Bm25Retriever
from envs.tasks import Task

PASSAGES = (
    Passage("0", "Poland", "The capital of Poland is Warsaw. Its currency is the zloty."),
    Passage("1", "Germany", "The capital of Germany is Berlin, on the Spree."),
    Passage("2", "Vistula", "The Vistula is the longest river of Poland."),
    Passage("3", "C++", "C++ is a language by Bjarne Stroustrup."),
    Passage("4", "C (language)", "C is a language by Dennis Ritchie."),
    Passage("5", "United States", "The U.S. has fifty states."),
    Passage("6", "Asunción", "Asunción is the seat of the government of Paraguay."),
    Passage("7", "Abraham Lincoln", "Lincoln's hat was tall."),
    Passage("8", "東京", "東京は日本の首都です。"),
)
TASKS = (
    Task("pl", ("What is the capital of Poland?",), (("Warsaw", "Warszawa"),), "toy"),
    Task("de", ("What is the capital of Germany?",), (("Berlin",),), "toy"),
    Task("vi", ("What is the longest river of Poland?",), (("Vistula", "the Vistula"),), "toy"),
    Task("cpp", ("Who made C++?",), (("Bjarne Stroustrup",),), "toy"),
)


class FixedRetriever:
    """Gives the same passages for every query and remembers the queries."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self.passages = list(passages)
        self.queries: list[str] = []

    def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        self.queries.extend(queries)
        return [self.passages[:topk] for _ in queries]


@pytest.fixture(scope="session")
def retriever() -> Bm25Retriever:
    return Bm25Retriever.from_passages(PASSAGES)


@pytest.fixture
def tasks() -> tuple[Task, ...]:
    return TASKS
