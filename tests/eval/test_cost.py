"""Token cost against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from eval.cost import episode_cost, mem1_mean_peak, mem1_peak


@dataclass(frozen=True)
class Counts:
    prompt_tokens: int
    completion_tokens: int
    memory_tokens: int = 0
    observation_tokens: int = 0


EPISODE = [Counts(100, 20, 5, 60), Counts(180, 30, 12, 40), Counts(150, 10, 0, 0)]


def test_totals_and_peak() -> None:
    cost = episode_cost(EPISODE)
    assert cost.turns == 3
    assert cost.total_tokens == 100 + 20 + 180 + 30 + 150 + 10
    assert cost.peak_tokens == 210
    assert (cost.prompt_tokens, cost.completion_tokens) == (430, 60)
    assert (cost.memory_tokens, cost.observation_tokens) == (17, 100)


def test_dependency_counts_pairs() -> None:
    cost = episode_cost([Counts(3, 2), Counts(4, 3)])
    pairs = 0
    for prompt, completion in ((3, 2), (4, 3)):
        for position in range(completion):
            pairs += prompt + position
    assert cost.dependency == pairs == (3 + 4) + (4 + 5 + 6)


def test_no_turn_costs_nothing() -> None:
    assert vars(episode_cost([])) == dict.fromkeys(vars(episode_cost([])), 0)


def test_mem1_peak_leaves_the_prompt_out() -> None:
    assert mem1_peak(EPISODE) == max(20, 80 + 30, 50 + 10)
    assert mem1_peak([Counts(100, 7), Counts(90, 3)]) == 7
    assert mem1_peak([]) == 0


def test_mem1_mean_counts_right_answers_only() -> None:
    short, long = [Counts(10, 4)], EPISODE
    assert mem1_mean_peak([short, long], [True, False]) == 4
    assert mem1_mean_peak([short, long], [True, True]) == 57
    assert math.isnan(mem1_mean_peak([short], [False]))
    with pytest.raises(ValueError, match="2 episodes but 1 flags"):
        mem1_mean_peak([short, long], [True])
