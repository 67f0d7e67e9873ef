"""Hostile text through whole environments: as question, as text to read, as corpus, and out of the policy's own pen."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from envs.base import MemoryEnv
from envs.document_stream import DocumentStream
from envs.grammar import parse_turn, render_call
from envs.multi_objective import MultiObjectiveQA
from envs.retrieval import Passage
from envs.retrieval.bm25 import Bm25Retriever
from envs.search_qa import SearchQA
from envs.tasks import Task
from tests.envs.conftest import FixedRetriever
from tests.envs.test_neutral import TAGS, hostile_documents, squeezed

NEXT = '<tool_call>{"name": "next", "arguments": {}}</tool_call>'
BLOCK = re.compile(rf"<(/?)({'|'.join(TAGS)})>")


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return hostile_documents(1000, seed=2)


def blocks(observation: str) -> list[str]:
    """The names of the blocks, which must follow one another, each closed, however their tags are spelled."""
    found = [match.groups() for match in BLOCK.finditer(squeezed(observation))]
    for (opening, name), (closing, other) in zip(found[::2], found[1::2], strict=True):
        assert (opening, closing) == ("", "/") and name == other, (found, observation)
    return [name for _, name in found[::2]]


def test_the_independent_reader_sees_what_is_broken() -> None:
    assert blocks("<mem>a</mem> <information>b</information>") == ["mem", "information"]
    for broken in ("<mem>a</mem></ M\u200bEM>", "<mem><answer>x</answer></mem>", "<mem>a</answer>"):
        with pytest.raises((AssertionError, ValueError)):
            blocks(broken)


def test_as_questions(documents: list[str]) -> None:
    tasks = [Task(str(i), (text,), (("gold-zq",),)) for i, text in enumerate(documents)]
    env = MultiObjectiveQA(tasks, FixedRetriever([]), objectives=2)
    for index in range(500):
        observation, info = env.reset(options={"index": index})
        assert observation in env.observation_space and info["question"] in observation
        assert len(observation) <= 20_100
        start = squeezed(observation[:3000])
        assert BLOCK.search(start) is None and "<|im_" not in start and "[inst]" not in start
        assert parse_turn(observation).answer is None and parse_turn(observation).call is None
        observation, reward, terminated, *_ = env.step(f"<mem>m</mem>{render_call('who', 'search')}")
        tail = observation[-200:]
        assert tail.endswith(
            "<mem>m</mem><search>who</search>\n<information>No passage matches the query.</information>"
        )
        assert reward == 0 and not terminated


@pytest.mark.parametrize("kind", ["text", "chunks", "passages"])
def test_as_text_to_read(documents: list[str], kind: str) -> None:
    tasks = []
    for number, text in enumerate(documents):
        carried = {
            "text": text,
            "chunks": (text[:400], text[400:]),
            "passages": (Passage("a", text[:200], text), Passage("b", "B", text[::-1])),
        }[kind]
        tasks.append(Task(str(number), ("Who?",), (("gold-zq",),), "", {kind: carried}))
    env = DocumentStream(tasks, chunk_size=700)
    pieces = 0
    for index in range({"text": 0, "chunks": 1, "passages": 2}[kind], 1000, 3):
        _, info = env.reset(options={"index": index})
        for _ in range(3):
            if info["information"].startswith("Part ") and ", the last:" in info["information"][:40]:
                break
            observation, reward, terminated, truncated, info = env.step(f"<mem>note</mem>{NEXT}")
            assert info["invalid"] is None and not (reward or terminated or truncated)
            assert observation in env.observation_space
            assert blocks(observation) == ["mem", "tool_call", "information"]
            newest = parse_turn(observation[observation.index("<information>") :])
            assert newest.answer is None and newest.call is None
            pieces += 1
    assert pieces > 330


def test_as_a_corpus_on_disk(documents: list[str], tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    rows = [{"id": i, "title": text[:80], "text": text[:5000]} for i, text in enumerate(documents)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    retriever = Bm25Retriever.from_file(path)
    env = SearchQA([Task("q", ("Who?",), (("gold-zq",),))], retriever, information_limit=900, max_turns=2000)
    env.reset(seed=0)
    shown = 0
    for number, text in enumerate(documents):
        query = text[:60] if number % 2 else "Warsaw answer"
        observation, *_, info = env.step(f"<mem>m</mem>{render_call(query, 'tool_call')}")
        assert info["stop_reason"] is None
        shown += info["information"].startswith("Doc 1(Title: ")
        if number % 3 == 0:
            assert blocks(info["information"]) == [] and blocks(observation)[-1] == "information"
    assert shown > 800


@pytest.mark.parametrize("context", ["previous", "full"])
def test_out_of_the_policys_own_pen(documents: list[str], context: str) -> None:
    """Memories, thoughts and queries are replayed; none of them may act in the next turn."""
    env: MemoryEnv = SearchQA(
        [Task("q", ("Who?",), (("gold-zq",),))], FixedRetriever([]), context=context, max_turns=3
    )  # type: ignore[arg-type]
    rng = random.Random(0)
    carried = 0
    for text in documents:
        env.reset(seed=0)
        text = text[: rng.choice([50, 300, 800])]
        query = json.dumps({"name": "search", "arguments": {"query": text}})
        observation, reward, _, _, info = env.step(
            f"<mem>{text}</mem><think>{text[::-1]}{text}</think><tool_call>{query}</tool_call>"
        )
        assert observation in env.observation_space and reward == 0
        names = blocks(observation)
        assert names.count("information") == 1 and names.count("mem") == (info["memory"] is not None)
        carried += info["memory"] is not None
        again = env.step(f"<mem>{info['memory']}</mem>{render_call('who', 'search')}")[0]
        assert blocks(again)[-3:] == ["mem", "search", "information"]
    assert carried > 800
