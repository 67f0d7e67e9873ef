"""Advantages: numbers worked out by hand, and the properties that make them right."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.advantages import (
    generalised_advantages,
    memory_advantages,
    memory_rewards,
    outcome_advantages,
    token_advantages,
)

ROOT_HALF = 1 / math.sqrt(2)
REWARDS = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)) | st.just(math.nan), min_size=0, max_size=12)


def test_two_rewards_under_each_scale():
    assert outcome_advantages([0, 1]) == pytest.approx([-ROOT_HALF, ROOT_HALF], abs=2e-6)
    assert outcome_advantages([0, 1], std="population") == pytest.approx([-1, 1], abs=3e-6)
    assert outcome_advantages([0, 1], scale="none") == [-0.5, 0.5]


def test_without_a_baseline_the_advantage_is_the_reward():
    assert outcome_advantages([1, 0, math.nan, 1], scale="none", baseline="none") == [1.0, 0.0, 0.0, 1.0]
    assert outcome_advantages([1.0], scale="none", baseline="none") == [1.0]


def test_eps_is_added_to_the_standard_deviation():
    # Sample std of [0, 1] is 0.70711; 0.5 / (0.70711 + 0.29289) = 0.5.
    assert outcome_advantages([0, 1], eps=1 - ROOT_HALF) == pytest.approx([-0.5, 0.5])
    assert memory_advantages([[0.0], [1.0]], eps=1 - ROOT_HALF) == [
        pytest.approx([-0.5]),
        pytest.approx([0.5]),
    ]


def test_leave_one_out_subtracts_the_mean_of_the_others():
    # Others' means: 1/3, 1/3, 1/3, 0.
    advantages = outcome_advantages([0, 0, 0, 1], baseline="leave_one_out", scale="none")
    assert advantages == pytest.approx([-1 / 3, -1 / 3, -1 / 3, 1.0])


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("eps", [1e-6, 1e-8, 0.0])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_equal_rewards_give_exactly_zero(scale, eps, baseline):
    third = float(np.float32(2) / np.float32(3))
    noisy = [float(np.float32(np.mean([third] * k, dtype=np.float32))) for k in range(1, 9)]
    for rewards in ([2 / 3] * 8, [third] * 8, noisy, [0.1 + 0.2, 0.3], [-5.0] * 3, [0.0] * 4):
        assert outcome_advantages(rewards, scale=scale, eps=eps, baseline=baseline) == [0.0] * len(rewards)


def test_a_small_but_real_spread_is_no_noise():
    assert outcome_advantages([0.5, 0.5001], eps=0.0) == pytest.approx([-ROOT_HALF, ROOT_HALF])


def test_a_lone_trajectory_and_an_empty_group_give_nothing():
    assert outcome_advantages([1.0]) == [0.0]
    assert outcome_advantages([]) == []
    assert outcome_advantages([math.nan, 1.0]) == [0.0, 0.0]


def test_nan_reward_is_left_out_and_gets_zero():
    assert outcome_advantages([math.nan, 1, 0]) == [0.0, *outcome_advantages([1, 0])]


def test_without_a_baseline_the_reward_is_the_advantage():
    """Imitation of what was right: no centring, so a lone right trajectory counts too."""
    assert outcome_advantages([1, 0, math.nan, 1], baseline="none", scale="none") == [1, 0, 0, 1]
    assert outcome_advantages([1.0], baseline="none", scale="none") == [1.0]


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "none"])
def test_infinite_rewards_are_refused(baseline):
    with pytest.raises(ValueError, match="inf is no reward"):
        outcome_advantages([math.inf, 0.0], baseline=baseline)


def test_unknown_settings_are_refused():
    for call in (
        lambda: outcome_advantages([0, 1], scale="max"),  # type: ignore[arg-type]
        lambda: outcome_advantages([0, 1], std="pop"),  # type: ignore[arg-type]
        lambda: outcome_advantages([0, 1], baseline="median"),  # type: ignore[arg-type]
        lambda: memory_advantages([[0.0, 1.0]], pool="batch"),  # type: ignore[arg-type]
        lambda: memory_rewards([0.5], [0.5], baseline="first"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match="is needed"):
            call()


@given(REWARDS, st.sampled_from(["std", "none"]), st.sampled_from(["sample", "population"]))
@settings(max_examples=200, deadline=None)
def test_outcome_advantages_equal_the_formula(rewards, scale, std):
    known = [r for r in rewards if not math.isnan(r)]
    result = outcome_advantages(rewards, scale=scale, std=std)
    assert len(result) == len(rewards)
    if len(known) < 2 or len(set(known)) == 1:
        assert result == [0.0] * len(rewards)
        return
    mean = statistics.mean(known)
    deviation = statistics.stdev(known) if std == "sample" else statistics.pstdev(known)
    for reward, advantage in zip(rewards, result, strict=True):
        if math.isnan(reward):
            assert advantage == 0.0
        else:
            divisor = deviation + 1e-6 if scale == "std" else 1.0
            assert advantage == pytest.approx((reward - mean) / divisor, rel=1e-9, abs=1e-9)


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=9), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_permuting_rollouts_permutes_advantages(rewards, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    plain = outcome_advantages(rewards)
    assert outcome_advantages([rewards[i] for i in order]) == pytest.approx([plain[i] for i in order])


def test_memory_rewards_under_each_baseline():
    p_mem, p_full = [0.2, None, 0.5, 0.9], [0.1, 0.3, 0.4, 0.6]
    full = memory_rewards(p_mem, p_full)
    assert full[1] is None
    assert [full[0], full[2], full[3]] == pytest.approx([0.1, 0.1, 0.3])
    assert memory_rewards(p_mem, p_full, baseline="none") == p_mem
    # Turn 1 and the turn after a missing memory are compared with the question alone (0.1).
    previous = memory_rewards(p_mem, p_full, baseline="previous")
    assert previous[1] is None
    assert [previous[0], previous[2], previous[3]] == pytest.approx([0.1, 0.4, 0.4])


def test_memory_rewards_need_equal_lengths_and_known_baselines():
    with pytest.raises(ValueError, match="2 turns and p_full 1"):
        memory_rewards([0.1, 0.2], [0.1])
    assert memory_rewards([0.1, 0.2], [None, 0.5]) == [None, pytest.approx(-0.3)]
    assert memory_rewards([], [], baseline="previous") == []


def test_memory_pool_is_the_whole_group():
    # Values 0, 1, 2, 3: mean 1.5, sample std 1.29099.
    advantages = memory_advantages([[0.0, None, 1.0], [2.0, 3.0]])
    std = math.sqrt(5 / 3) + 1e-6
    assert advantages[0] == pytest.approx([-1.5 / std, 0.0, -0.5 / std])
    assert advantages[1] == pytest.approx([0.5 / std, 1.5 / std])


def test_memory_pool_by_turn():
    advantages = memory_advantages([[0.0, 5.0], [1.0, 5.0], [2.0]], pool="turn", scale="none")
    assert advantages == [[-1.0, 0.0], [0.0, 0.0], [1.0]]
    # A lone value is its own mean: exactly 0.
    assert memory_advantages([[0.0, 7.0], [1.0]], pool="turn", scale="none") == [[-0.5, 0.0], [0.5]]


def test_small_turn_pools_join_the_one_before():
    # Turn 2 has one memory: with min_pool 2 its pool is {0, 1, 8}, mean 3.
    scores = [[0.0, 8.0], [1.0]]
    assert memory_advantages(scores, pool="turn", scale="none", min_pool=2) == [[-3.0, 5.0], [-2.0]]
    # A small first turn joins the second.
    scores = [[4.0, 0.0], [None, 2.0]]
    assert memory_advantages(scores, pool="turn", scale="none", min_pool=2) == [[2.0, -2.0], [0.0, 0.0]]


def test_pools_without_spread_or_partner_give_exactly_zero():
    assert memory_advantages([[0.3], [None]]) == [[0.0], [0.0]]
    assert memory_advantages([[0.3, 0.3], [0.3, math.nan]]) == [[0.0, 0.0], [0.0, 0.0]]
    assert memory_advantages([[], []]) == [[], []]
    assert memory_advantages([]) == []


def test_missing_memories_stay_out_of_the_pool():
    with_gaps = memory_advantages([[None, 0.2, math.nan], [0.6, None, None]])
    assert with_gaps == [
        [0.0, memory_advantages([[0.2, 0.6]])[0][0], 0.0],
        [memory_advantages([[0.2, 0.6]])[0][1], 0, 0],
    ]


def test_memory_tokens_get_the_sum_and_the_rest_the_outcome():
    assert token_advantages(0.5, -2.0, 0.25, 5, (1, 3)) == [0.5, 0.0, 0.0, 0.5, 0.5]
    assert token_advantages(0.5, -2.0, 1.0, 3, None) == [0.5, 0.5, 0.5]
    assert token_advantages(0.5, 1.0, 0.0, 2, (0, 2)) == [0.5, 0.5]
    assert token_advantages(0.5, 1.0, 1.0, 0, None) == []


@pytest.mark.parametrize("span", [(-1, 2), (2, 2), (3, 2), (0, 6)])
def test_a_memory_span_outside_the_completion_is_refused(span):
    with pytest.raises(ValueError, match="outside a completion of 5"):
        token_advantages(0.0, 1.0, 1.0, 5, span)


def test_gae_by_its_definition():
    # delta = r + gamma v' - v: [0.5 * 0.4 - 0.2, 0.5 * 0.6 - 0.4, 1 - 0.6] = [0, -0.1, 0.4]; gamma lam =
    # 0.25.
    advantages, returns = generalised_advantages([0, 0, 1], [0.2, 0.4, 0.6], gamma=0.5, lam=0.5)
    assert advantages == pytest.approx([0 + 0.25 * -0.1 + 0.0625 * 0.4, -0.1 + 0.25 * 0.4, 0.4])
    assert returns == pytest.approx([0.2, 0.4, 1.0])
    assert generalised_advantages([], []) == ([], [])
    # lam = 1, gamma = 1: reward to go less value.
    advantages, _ = generalised_advantages([0, 0.5, 1], [0.3, 0.2, 0.1], lam=1.0)
    assert advantages == pytest.approx([1.2, 1.3, 0.9])
    with pytest.raises(ValueError, match="2 rewards but 1 values"):
        generalised_advantages([0, 1], [0])
