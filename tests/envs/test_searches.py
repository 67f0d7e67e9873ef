"""From what data sets know about a question to the searches that answer it, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from envs.multi_objective import join_tasks
from envs.retrieval.base import Passage
from envs.tasks.searches import search_chain, search_chains
from envs.tasks.task import Task

STEPS = [
    {"id": 1, "question": "Where was Hans Edler from?", "answer": "Sweden"},
    {"id": 2, "question": "#1 at the 1920 Summer Olympics >> country", "answer": " Belgium "},
    {"id": 3, "question": "Did #2 or #1 (not #9) win?", "answer": "The Draw."},
]


def task(golds: tuple[str, ...] = ("draw",), **metadata: Any) -> Task:
    return Task("t", ("Who?",), (golds,), "", metadata)


def test_a_decomposition_with_its_references_filled_in() -> None:
    chain = search_chain(task(decomposition=STEPS))
    assert chain is not None
    assert [(hop["query"], hop["answer"]) for hop in chain] == [
        ("Where was Hans Edler from?", "Sweden"),
        ("Sweden at the 1920 Summer Olympics country", "Belgium"),
        ("Did Belgium or Sweden (not #9) win?", "The Draw."),
    ]


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"decomposition": "no list"},
        {"decomposition": [{"question": "a"}]},
        {"decomposition": [{"question": "a", "answer": "  "}]},
        {"decomposition": STEPS[:2]},  # ends at Belgium, which is no gold
        {"supporting": ("1", "2"), "passages": (Passage("1", "A", "x"), Passage("2", "B", "y"))},
        {"supporting": ("1",), "passages": (Passage("1", "A", "draw"),)},
    ],
)
def test_nothing_known_is_no_chain(metadata: dict[str, Any]) -> None:
    assert search_chain(task(**metadata)) is None
    assert search_chains(task(**metadata)) is None


@pytest.mark.parametrize("turned", [False, True])
def test_a_bridge_between_two_supporting_paragraphs(turned: bool) -> None:
    book = Passage("1", "Emma", "A novel by Jane Austen.")
    author = Passage("2", "Jane Austen", "Born in Steventon.")
    other = Passage("3", "Steventon", "A village.")
    passages = (author, other, book) if turned else (book, other, author)
    chain = search_chain(task(("Steventon",), passages=passages, supporting=("1", "2")))
    assert chain is not None
    assert [(hop["query"], hop["answer"]) for hop in chain] == [
        ("Emma", "Jane Austen"),
        ("Jane Austen", "Steventon"),
    ]


def test_several_questions_need_a_chain_each() -> None:
    known, unknown = task(decomposition=STEPS), task()
    both = search_chains(join_tasks([known, known]))
    assert both is not None and [len(chain) for chain in both] == [3, 3]
    assert search_chains(join_tasks([known, unknown])) is None
    embedded = [{"query": "q", "answer": "anything"}]  # a source's own chain is taken as it is
    assert search_chain(task(chain=embedded)) == embedded
