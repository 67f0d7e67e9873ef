"""The full embedded world: size, filters by brute force, joins, an expert that reaches answers by search."""

from __future__ import annotations

import random
import re
import subprocess
import sys

import numpy as np
import pytest

from agent.engines.scripted import Expert, play
from envs.retrieval import Retriever, load_retriever
from envs.search_qa import SearchQA
from envs.tasks.factbook import World, build_world
from envs.tasks.factbook.joins import Atlas, airports, elements
from envs.tasks.factbook.source import load_countries
from envs.tasks.task import Task


@pytest.fixture(scope="module")
def world() -> World:
    return build_world("full", 0)


@pytest.fixture(scope="module")
def retriever() -> Retriever:
    return load_retriever("factbook")


def sample(world: World, hops: int, count: int) -> list[Task]:
    found = [task for task in world.train + world.heldout if task.metadata["hops"] == hops]
    return random.Random(hops).sample(found, count)


def holds(text: str, part: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(part)}(?!\w)", text, re.IGNORECASE) is not None


def test_size(world: World) -> None:
    hops = [task.metadata["hops"] for task in world.train + world.heldout]
    assert hops.count(2) >= 10_000
    assert hops.count(3) >= 3_000
    assert hops.count(1) >= 3_000
    assert len(world.passages) >= 32_000
    assert len({task.id for task in world.train + world.heldout}) == len(hops)
    assert len({task.question for task in world.train + world.heldout}) == len(hops)
    assert [task.metadata["hops"] for task in world.heldout].count(3) >= 1_000


def test_dropped_shares_are_reported(world: World) -> None:
    assert 0.01 < world.report["dropped share"]["questions"] < 0.2
    reasons = (
        "answer stands in the question",
        "one passage holds both clue and answer",
        "one search for the question shows the answer",
    )
    counts = [world.report["dropped"][reason] for reason in reasons]
    asked = len(world.train) + len(world.heldout)
    assert min(counts) > 100
    assert world.report["dropped share"]["questions"] == pytest.approx(
        sum(counts) / (asked + sum(counts)), abs=1e-4
    )
    assert set(world.report["joined"]) == {"airportsdata", "mendeleev", "countryinfo"}


def test_each_hop_s_answer_stands_in_its_passage(world: World) -> None:
    by_id = {passage.id: passage for passage in world.passages}
    assert len(by_id) == len(world.passages)
    for task in world.train + world.heldout:
        chain = task.metadata["chain"]
        assert len(chain) == task.metadata["hops"]
        for hop in chain:
            passage = by_id[hop["passage"]]
            assert hop["answer"] in f"{passage.title} {passage.text}"
        assert chain[-1]["answer"] == task.golds[0][0]
        assert len({hop["passage"] for hop in chain}) == len(chain)


def test_no_answer_in_its_question(world: World) -> None:
    for task in world.train + world.heldout:
        assert not any(holds(task.question, gold) for gold in task.golds[0][:1])
        assert not any(";" in gold for gold in task.golds[0])


def test_bridges_are_not_named(world: World) -> None:
    for task in world.train + world.heldout:
        if task.metadata["hops"] == 3:
            assert not any(holds(task.question, hop["answer"]) for hop in task.metadata["chain"])


def test_whole_chains_on_one_side(world: World) -> None:
    titles = [
        {hop["title"] for task in side for hop in task.metadata["chain"]}
        for side in (world.train, world.heldout)
    ]
    assert not titles[0] & titles[1]
    bridges = [
        {
            hop["passage"]
            for task in side
            for hop in task.metadata["chain"]
            if hop["passage"].startswith(("air", "ele"))
        }
        for side in (world.train, world.heldout)
    ]
    assert len(bridges[0]) > 200 and len(bridges[1]) > 60


def test_no_passage_holds_both_clue_and_answer(world: World) -> None:
    texts = [(passage.id, f"{passage.title} {passage.text}") for passage in world.passages]
    checked = 0
    for task in sample(world, 2, 100):
        clue = re.search(r"country whose [a-z ]+? is (.+)\?$", task.question)
        if clue is None:
            continue
        answer = task.metadata["chain"][-1]["answer"]
        both = [
            name for name, text in texts if clue[1] in text and holds(text, clue[1]) and holds(text, answer)
        ]
        assert both == [], task.question
        checked += 1
    assert checked > 30


def test_one_search_does_not_answer_two_or_three_hops(world: World, retriever: Retriever) -> None:
    """No accepted answer stands in what a search for the question shows; that of a longer list rarely does."""
    for hops in (2, 3):
        tasks = sample(world, hops, 1500)
        for topk, most in ((3, 0), (10, 120)):
            results = retriever.search([task.question for task in tasks], topk)
            shown = ["\n".join(f"{p.title} {p.text}" for p in found) for found in results]
            assert all(len(found) == topk for found in results)
            answered = [
                any(holds(text, gold) for gold in task.golds[0])
                for task, text in zip(tasks, shown, strict=True)
            ]
            assert sum(answered) <= most, (hops, topk)


@pytest.mark.parametrize(("hops", "least"), [(1, 0.95), (2, 0.95), (3, 0.90)])
def test_the_expert_reaches_the_answers_by_search_alone(
    world: World, retriever: Retriever, hops: int, least: float
) -> None:
    env = SearchQA(sample(world, hops, 400), retriever)
    rewards = []
    for index in range(400):
        task = env.pool.tasks[index]
        record = play(env, Expert(task, np.random.default_rng(index)), task=task)
        rewards.append(record.scores["reward"])
    assert np.mean(rewards) >= least


def test_names_and_codes_of_countries() -> None:
    atlas = Atlas(load_countries())
    found = {
        name: atlas.by_name(name) for name in ("UK", "USA", "S. Korea", "Myanmar", "Cote d'Ivoire", "Narnia")
    }
    assert {name: country and country.name for name, country in found.items()} == {
        "UK": "United Kingdom",
        "USA": "United States",
        "S. Korea": "South Korea",
        "Myanmar": "Burma",
        "Cote d'Ivoire": "Côte d'Ivoire",
        "Narnia": None,
    }
    poland, niger = atlas.by_code("PL"), atlas.by_code("NE")
    assert poland is not None and poland.name == "Poland" and "Republic of Poland" in atlas.aliases(poland)
    assert niger is not None and niger.name == "Niger"


def test_bridges_of_other_packages() -> None:
    atlas = Atlas(load_countries())
    discovered = {bridge.passage.title: bridge.country.name for bridge in elements(atlas)}
    assert discovered["Germanium"] == "Germany" and discovered["Polonium"] == "France"
    assert "Krypton" not in discovered  # mendeleev says Great Britain
    assert "Oxygen" not in discovered  # England/Sweden
    found = {bridge.passage.id: bridge for bridge in airports(atlas)}
    kariba = found["airport/kab"]
    assert (kariba.country.name, kariba.passage.title) == ("Zimbabwe", "Kariba International Airport")
    assert (
        max(sum(b.country.name == name for b in found.values()) for name in ("China", "Russia", "Brazil"))
        <= 6
    )


def test_the_same_world_in_another_process(world: World) -> None:
    script = "from envs.tasks.factbook import build_world; print(build_world('full', 0).fingerprint)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == world.fingerprint


def test_the_world_that_the_figures_were_measured_in(world: World) -> None:
    """Whoever changes it on purpose changes this line, and measures again."""
    assert world.fingerprint.startswith("da89fb22a5d5f2ec")
