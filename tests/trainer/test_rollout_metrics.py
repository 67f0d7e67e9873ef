"""Metrics of a step, each against a number counted by hand on two small groups."""

from __future__ import annotations

import math

import pytest

from agent.memory_score import MemoryScore
from agent.trajectory import Group, Trajectory, Turn
from envs.tasks.task import Task
from trainer.rollout_metrics import memory_metrics, rollout_metrics


def turn(
    prompt: int, completion: int, memory: str | None = None, query: str | None = None, **rest: object
) -> Turn:
    span = (0, 2) if memory is not None else None
    return Turn(
        prompt_ids=(1,) * prompt,
        completion_ids=(2,) * completion,
        logprobs=(-1.0,) * completion,
        sampled=(True,) * completion,
        memory_span=span,
        memory=memory,
        text=f"{memory}|{query}",
        observation="",
        query=query,
        **rest,  # type: ignore[arg-type]
    )


def trajectory(sample: int, reward: float, *turns: Turn, answered: bool = True) -> Trajectory:
    return Trajectory(
        sample,
        turns,
        reward,
        "answer" if answered else "max_turns",
        terminated=answered,
        truncated=not answered,
        answer="a" if answered else None,
        scores={"em": reward, "reward": reward},
    )


GROUPS = [
    Group(
        Task("one", ("q",), (("a",),)),
        (
            trajectory(0, 1.0, turn(10, 5, "same", "x"), turn(20, 5, "own")),
            trajectory(1, 0.0, turn(10, 5, "same", "x", invalid="no action"), answered=False),
        ),
    ),
    Group(
        Task("two", ("q",), (("a",),)),
        (trajectory(0, 1.0, turn(10, 5, "same", "y")), trajectory(1, 1.0, turn(10, 5, None, "z"))),
    ),
]


def test_rewards_behaviour_and_tokens() -> None:
    metrics = rollout_metrics(GROUPS, 1)
    assert metrics["reward/mean"] == 0.75
    assert metrics["reward/std_within_groups"] == pytest.approx(0.25)  # 0.5 and 0
    assert metrics["reward/groups_without_spread"] == 0.5
    assert metrics["score/em"] == 0.75 and "score/reward" not in metrics
    assert metrics["episode/turns"] == 5 / 4
    assert metrics["episode/answered"] == 0.75
    assert metrics["episode/invalid_turns"] == metrics["episode/without_memory"] == 1 / 5
    assert metrics["episode/searches"] == 1.0
    assert (metrics["stop/answer"], metrics["stop/max_turns"]) == (0.75, 0.25)
    assert metrics["tokens/total"] == (40 + 15 + 15 + 15) / 4
    assert metrics["tokens/peak"] == (25 + 15 + 15 + 15) / 4
    assert metrics["tokens/completion"] == (10 + 5 + 5 + 5) / 4
    assert metrics["tokens/prompt"] == metrics["tokens/total"] - metrics["tokens/completion"]
    assert metrics["tokens/memory_block"] == 2.0
    assert metrics["tokens/memory"] == 8 / 4  # four blocks of two tokens in four episodes
    assert metrics["tokens/thought_and_action"] == (25 - 8) / 4


def test_repetition_counts_questions_not_rollouts() -> None:
    metrics = rollout_metrics(GROUPS, 1)
    # memories: "same" under both questions, "own" under one; queries: x, y and z under one each
    assert metrics["repeat/memories_across_questions"] == pytest.approx(2 / 3)
    assert metrics["repeat/queries_across_questions"] == 0.0
    assert metrics["repeat/distinct_rollouts_in_group"] == 1.0


def test_unscored_rewards_are_counted_and_left_out() -> None:
    group = Group(GROUPS[0].task, (trajectory(0, math.nan, turn(1, 2)), trajectory(1, 1.0, turn(1, 2))))
    metrics = rollout_metrics([group], 1)
    assert metrics["reward/mean"] == 1.0 and metrics["reward/unscored"] == 1.0


def test_memory_scores_by_turn() -> None:
    scores = [
        [[MemoryScore(0.2, 0.1), MemoryScore(0.9, 0.5)], [MemoryScore(0.4, 0.1)]],
        [[MemoryScore(None, 0.3, cut=True)], [MemoryScore(0.6, 0.6)]],
    ]
    advantages = [[[-1.0, 1.5], [0.5]], [[0.0], [0.0]]]
    # The baseline "previous": turn 1 less the question alone, turn 2 less the memory before.
    rewards = [[[0.1, 0.7], [0.3]], [[None], [0.0]]]
    metrics = memory_metrics(scores, advantages, rewards)
    assert metrics["memory/p_mem"] == pytest.approx((0.2 + 0.9 + 0.4 + 0.6) / 4)
    assert metrics["memory/p_full"] == pytest.approx((0.1 + 0.5 + 0.1 + 0.6) / 4)
    assert metrics["memory/r_mem_turn1"] == pytest.approx((0.1 + 0.3 + 0.0) / 3)
    assert metrics["memory/a_mem_turn2"] == 1.5
    assert metrics["memory/r_mem_turn2"] == 0.7 and metrics["memory/p_full_turn2"] == 0.5
    assert metrics["memory/r_mem"] == pytest.approx((0.1 + 0.7 + 0.3 + 0.0) / 4)
    assert metrics["memory/positive_share"] == 0.5 and metrics["memory/negative_share"] == 0.25
    assert metrics["memory/transcripts_cut"] == 1 / 5  # of five turns, that without a memory too
    assert metrics["memory/a_mem_turn_bias"] == 0.0  # too few memories of a turn to say


def test_a_bias_of_early_turns_is_seen() -> None:
    scores = [[[MemoryScore(0.1, 0.0), MemoryScore(0.9, 0.0)]] * 8]
    metrics = memory_metrics(scores, [[[-1.0, 1.0]] * 8], [[[0.1, 0.9]] * 8])
    assert metrics["memory/a_mem_turn_bias"] == 1.0


def test_the_gap_between_the_weights_that_sampled_and_those_that_learn() -> None:
    versions = (trajectory(0, 1.0, turn(1, 2, weight_version=3), turn(1, 2, weight_version=2)),)
    assert rollout_metrics([Group(Task("one", ("q",), (("a",),)), versions)], 4)["rollout/weight_gap"] == 0.5
    assert rollout_metrics([], 4)["rollout/weight_gap"] == 0.0
