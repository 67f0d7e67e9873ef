"""Intervals and tests against brute force, tables and worked numbers."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
from scipy.stats import binom, binomtest

from eval.stats import (
    bootstrap_mean,
    mcnemar_exact,
    paired_difference,
    pass_at_k,
    percentiles,
    sign_flip_p,
    wilson,
)


@pytest.mark.parametrize(
    ("successes", "n"), [(0, 1), (1, 1), (0, 10), (3, 10), (10, 10), (81, 263), (999, 1000)]
)
def test_wilson_equals_scipy(successes: int, n: int) -> None:
    expected = binomtest(successes, n).proportion_ci(0.95, method="wilson")
    assert wilson(successes, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_wilson_brute_force() -> None:
    """The bounds are the rates at which the observed one is exactly z standard errors away."""
    low, high = wilson(7, 25)
    for bound in (low, high):
        z = abs(7 / 25 - bound) / math.sqrt(bound * (1 - bound) / 25)
        assert z == pytest.approx(1.959963984540054, abs=1e-9)


def test_wilson_edges() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 5)[0] == 0.0 and wilson(5, 5)[1] == 1.0
    with pytest.raises(ValueError, match="6 successes of 5"):
        wilson(6, 5)
    with pytest.raises(ValueError, match="confidence"):
        wilson(1, 5, confidence=95)


def test_bootstrap_equals_a_loop_to_the_last_digit() -> None:
    values = [0.0, 0.25, 1.0, 0.5, 0.75, 0.125, 1.0]
    clusters = ["a", "b", "a", "c", "c", "d", "e"]
    estimate = bootstrap_mean(values, clusters, seed=11, resamples=500)
    by_cluster = {"a": [0.0, 1.0], "b": [0.25], "c": [0.5, 0.75], "d": [0.125], "e": [1.0]}
    names = ["a", "b", "c", "d", "e"]
    means = []
    for row in np.random.default_rng(11).integers(5, size=(500, 5)):
        drawn = [value for index in row for value in by_cluster[names[index]]]
        means.append(math.fsum(drawn) / len(drawn))
    means.sort()

    def quantile(q: float) -> float:
        position = q * (len(means) - 1)
        below = math.floor(position)
        return means[below] + (position - below) * (means[below + 1] - means[below])

    assert (estimate.low, estimate.high) == pytest.approx((quantile(0.025), quantile(0.975)), abs=1e-15)
    assert estimate.mean == statistics.fmean(values)
    assert estimate.n == 5


def test_bootstrap_against_all_resamples() -> None:
    """With 5 values all 3125 resamples can be listed; the seeded one agrees with their quantiles."""
    values = [0.0, 1.0, 0.3, 0.6, 0.9]
    means = sorted(sum(drawn) / 5 for drawn in itertools.product(values, repeat=5))
    exact = np.quantile(means, [0.025, 0.975])
    estimate = bootstrap_mean(values, seed=0, resamples=20_000)
    assert (estimate.low, estimate.high) == pytest.approx(tuple(exact), abs=0.02)


def test_bootstrap_clusters_widen_the_interval() -> None:
    """Ten copies of each answer carry no more information than one: the interval must not shrink."""
    values = [float(i % 3 == 0) for i in range(60)]
    once = bootstrap_mean(values, seed=3)
    copied = [value for value in values for _ in range(10)]
    questions = [i for i in range(60) for _ in range(10)]
    clustered = bootstrap_mean(copied, questions, seed=3)
    naive = bootstrap_mean(copied, seed=3)
    assert (clustered.low, clustered.high) == pytest.approx((once.low, once.high), abs=1e-12)
    assert naive.high - naive.low < 0.5 * (clustered.high - clustered.low)


def test_bootstrap_repeats_and_depends_on_the_seed() -> None:
    values = [0.1, 0.9, 0.4, 0.7, 0.2, 0.35]
    assert bootstrap_mean(values, seed=5) == bootstrap_mean(values, seed=5)
    assert bootstrap_mean(values, seed=5, resamples=100) != bootstrap_mean(values, seed=6, resamples=100)
    np.random.seed(1)
    before = np.random.get_state()[1].copy()  # type: ignore[union-attr, index]
    bootstrap_mean(values)
    assert (before == np.random.get_state()[1]).all()  # type: ignore[index]


def test_bootstrap_chunks_do_not_change_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [0.1, 0.9, 0.4, 0.7]
    whole = bootstrap_mean(values, seed=2, resamples=101)
    monkeypatch.setattr("eval.stats._CHUNK", 40)
    assert bootstrap_mean(values, seed=2, resamples=101) == whole


def test_bootstrap_edges() -> None:
    assert math.isnan(bootstrap_mean([]).mean)
    alone = bootstrap_mean([0.25])
    assert (alone.mean, alone.low, alone.high) == (0.25, 0.25, 0.25)
    with pytest.raises(ValueError, match="2 values but 1 cluster"):
        bootstrap_mean([0.0, 1.0], ["a"])


@pytest.mark.parametrize(("b", "c"), [(0, 0), (0, 1), (5, 5), (2, 9), (9, 2), (0, 10), (13, 40), (300, 390)])
def test_mcnemar_equals_the_binomial_test(b: int, c: int) -> None:
    expected = 1.0 if b + c == 0 else min(1.0, 2 * binom.cdf(min(b, c), b + c, 0.5))
    assert mcnemar_exact(b, c) == pytest.approx(expected, rel=1e-9)


def test_mcnemar_by_hand() -> None:
    assert mcnemar_exact(1, 5) == 2 * (1 + 6) / 64


def test_sign_flip_is_mcnemar_on_binary_differences() -> None:
    assert sign_flip_p([1, 1, 1, 1, 1, -1, 0, 0]) == pytest.approx(mcnemar_exact(1, 5), abs=1e-12)
    many = [1.0] * 40 + [-1.0] * 20
    assert sign_flip_p(many, seed=1) == pytest.approx(mcnemar_exact(20, 40), abs=0.005)


def test_sign_flip_brute_force() -> None:
    deltas = [0.5, -0.25, 0.75, 0.1, 0.3]
    sums = [
        abs(sum(s * d for s, d in zip(signs, deltas, strict=True)))
        for signs in itertools.product((1, -1), repeat=5)
    ]
    assert sign_flip_p(deltas) == sum(value >= abs(sum(deltas)) - 1e-12 for value in sums) / 32
    assert sign_flip_p([0.0, 0.0]) == 1.0


def test_paired_difference_binary() -> None:
    a = [0, 0, 0, 0, 0, 1, 1, 1, 0, 1]
    b = [1, 1, 1, 1, 1, 0, 1, 1, 0, 1]
    found = paired_difference(a, b, seed=1)
    assert found.mean == pytest.approx(0.4)
    assert found.test == "exact McNemar"
    assert found.p_value == mcnemar_exact(1, 5)
    assert found.low <= 0.4 <= found.high
    backwards = paired_difference(b, a, seed=1)
    assert (backwards.mean, backwards.p_value) == (-found.mean, found.p_value)


def test_pairing_uses_the_pairs() -> None:
    """Two runs that differ by a constant have a certain difference, however noisy each is."""
    a = [0.0, 0.8, 0.1, 0.5, 0.3, 0.7]
    found = paired_difference(a, [value + 0.1 for value in a])
    assert found.high - found.low < 1e-12
    assert found.test == "sign-flip"
    assert found.p_value == 2 / 64


def test_paired_difference_by_question() -> None:
    a, b = [0, 1, 0, 0], [1, 1, 1, 0]
    found = paired_difference(a, b, ["q", "q", "r", "r"])
    assert (found.n, found.test) == (2, "sign-flip")
    with pytest.raises(ValueError, match="4 samples against 3"):
        paired_difference(a, b[:3])
    with pytest.raises(ValueError, match="no sample"):
        paired_difference([], [])


def test_pass_at_k() -> None:
    assert pass_at_k(5, 2, 2) == pytest.approx(0.7)
    assert pass_at_k(1, 1, 2) is None
    assert pass_at_k(4, 0, 3) == 0.0 and pass_at_k(4, 4, 1) == 1.0
    for n, right, k in [(6, 2, 3), (7, 5, 2), (5, 1, 5)]:
        draws = list(itertools.combinations([1] * right + [0] * (n - right), k))
        assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    with pytest.raises(ValueError, match="pass@0"):
        pass_at_k(3, 1, 0)


def test_percentiles() -> None:
    assert percentiles([1.0, 2.0, 3.0], (50, 90)) == {"p50": 2.0, "p90": pytest.approx(2.8)}
    assert percentiles([]) == {}
