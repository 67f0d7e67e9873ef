"""Scripted players through the interface that a model has: how much of each embedded set they solve.

Errands has its own file; Factbook's single questions have theirs, the full one with three hops.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest

import envs
from agent.engines.scripted import Expert, play
from envs.document_stream import DocumentStream
from envs.errands_player import ErrandsPlayer
from envs.multi_objective import MultiObjectiveQA
from envs.search_qa import SearchQA
from envs.stream_readers import ChainReader, PlayReader
from envs.tasks import Task
from envs.tasks.factbook import build_world
from envs.tasks.haystack import hide


def heldout(hops: int, count: int, seed: int = 0) -> list[Task]:
    """A fixed sample of the full world's held-out questions."""
    found = [task for task in build_world("full").heldout if task.metadata["hops"] == hops]
    return random.Random(f"{hops}/{seed}").sample(found, count)


def expert_score(env: Any, indices: range, score: str) -> float:
    """The mean of a score; the expert sees the task's chain of queries and, of its answers, what search shows."""
    scores = []
    for index in indices:
        env.reset(options={"index": index})
        player = partial(Expert, rng=np.random.default_rng(index))
        scores.append(play(env, player, task=env.task).scores[score])
    return float(np.mean(scores))


def test_errands_by_its_id() -> None:
    env = envs.make("mempo/Errands-v0")
    player = ErrandsPlayer()
    for seed in range(100, 200):
        observation, info = env.reset(seed=seed)
        reward: Any = 0.0
        while info["stop_reason"] is None:
            observation, reward, _, _, info = env.step(player.act(observation, info))
        assert reward == 1.0 and info["stop_reason"] == "answer"


def test_one_question_of_the_tiny_factbook() -> None:
    env = SearchQA("factbook-tiny:heldout", "factbook-tiny")
    assert env.num_tasks > 600
    assert expert_score(env, range(0, env.num_tasks, 2), "reward") >= 0.97


@pytest.mark.parametrize("objectives", [2, 3, 4, 6, 8, 10, 12, 16])
def test_two_to_sixteen_objectives(objectives: int) -> None:
    """Of the objectives at least 95 % are right, wherever in the episode they stand, with a memory of one step."""
    env = MultiObjectiveQA(
        "factbook-tiny:heldout", "factbook-tiny", objectives=objectives, max_turns=2 * objectives + 1
    )
    assert expert_score(env, range(160 // objectives), "em") >= 0.97


@pytest.mark.parametrize("hops", [2, 3])
def test_many_objectives_over_the_full_factbook(hops: int) -> None:
    env = MultiObjectiveQA(heldout(hops, 240), "factbook", objectives=6, max_turns=6 * hops + 1)
    assert env.num_tasks == 40
    assert expert_score(env, range(40), "em") >= (0.95 if hops == 2 else 0.90)


def read(env: DocumentStream, index: int, reader: Any) -> float:
    observation, info = env.reset(options={"index": index})
    player = reader(env.task)
    reward = 0.0
    while info["stop_reason"] is None:
        observation, reward, _, _, info = env.step(player.act(observation, info))
    return reward


def test_plays_of_the_training_side() -> None:
    env = DocumentStream("shakespeare:train")
    rewards = [read(env, index, lambda task: PlayReader()) for index in range(3, env.num_tasks, 12)]
    assert len(rewards) >= 100 and np.mean(rewards) >= 0.97


@pytest.mark.parametrize("hops", [2, 3])
@pytest.mark.parametrize("ask", ["first", "last"])
def test_multi_hop_passages_hidden_among_others(hops: int, ask: str) -> None:
    """Of the full world, 60 distractors each; `tests/envs/test_document_stream.py` has the tiny one."""
    hidden = hide(heldout(hops, 60), build_world("full").passages, distractors=60)
    env = DocumentStream(hidden, chunk_size=1500, ask=ask)
    rewards = [read(env, index, ChainReader) for index in range(60)]
    assert np.mean(rewards) >= (0.95 if hops == 2 else 0.90)
