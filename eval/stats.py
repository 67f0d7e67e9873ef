"""Interval estimates and paired tests, pure functions on plain numbers.

Everything random takes a seed and uses its own generator, so the same results print the same numbers.
Sources: Wilson (1927) for a rate; the percentile bootstrap over clusters (Efron and Tibshirani 1993) for a
mean; the exact McNemar test (a two-sided binomial test on the discordant pairs); pass@k as in Chen et al.
2021 (arXiv 2107.03374).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
_CHUNK = 2_000_000  # indices drawn at once: bounds the memory of a bootstrap at about 16 MB


@dataclass(frozen=True)
class Estimate:
    """A mean with its confidence interval. ``n`` counts the independent units (clusters, not samples)."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Difference:
    """``b - a`` over paired clusters: mean, confidence interval and two-sided p-value (with the test's
    name).
    """

    mean: float
    low: float
    high: float
    n: int
    p_value: float
    test: str


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a rate. ``n`` = 0 says nothing: (0, 1).

    Raises:
        ValueError: successes outside 0..n, or a confidence outside (0, 1).
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n} attempts: a number from 0 to {n} is needed")
    z = _normal_quantile(confidence)
    if n == 0:
        return 0.0, 1.0
    rate = successes / n
    denominator = 1 + z * z / n
    centre = (rate + z * z / (2 * n)) / denominator
    half = z / denominator * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    # At 0 of n and n of n the exact bounds are 0 and 1; rounding must not leave them at 1e-17.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


def _normal_quantile(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; a number between 0 and 1 is needed")
    # `scipy.stats` has the same number, and takes longer to import than all intervals of a run to compute.
    from scipy.special import ndtri

    return float(ndtri(0.5 + confidence / 2))


def cluster_sums(
    values: Sequence[float], clusters: Sequence[Hashable] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum and count of the values of each cluster, clusters in order of first appearance; both of shape
    (G,).
    """
    array = np.asarray(values, dtype=np.float64)
    if clusters is None:
        return array, np.ones(len(array))
    if len(clusters) != len(array):
        raise ValueError(f"{len(array)} values but {len(clusters)} cluster labels")
    index: dict[Hashable, int] = {}
    labels = np.array([index.setdefault(cluster, len(index)) for cluster in clusters], dtype=np.int64)
    sums = np.bincount(labels, weights=array, minlength=len(index)).astype(np.float64)
    counts = np.bincount(labels, minlength=len(index)).astype(np.float64)
    return sums, counts


def bootstrap_mean(
    values: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    confidence: float = 0.95,
) -> Estimate:
    """Mean of ``values`` with a percentile bootstrap interval; whole clusters are drawn with replacement.

    The mean of a resample is its sum of values over its number of values, so unequal clusters weigh by size.
    No value at all gives nan; one cluster alone gives an interval of width 0 (nothing can be said about
    spread).

    Raises:
        ValueError: values and clusters of different lengths.
    """
    sums, counts = cluster_sums(values, clusters)
    groups = len(sums)
    if groups == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    means = _resampled_means(sums, counts, seed, resamples)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Estimate(math.fsum(values) / len(values), float(low), float(high), groups)


def _resampled_means(
    sums: NDArray[np.float64], counts: NDArray[np.float64], seed: int, resamples: int
) -> NDArray[np.float64]:
    equal = bool((counts == counts[0]).all())  # then every resample has as many values as the sample
    means = [
        sums[drawn].sum(axis=1) / (counts.sum() if equal else counts[drawn].sum(axis=1))
        for drawn in _resamples(len(sums), seed, resamples)
    ]
    return np.concatenate(means)


def _resamples(groups: int, seed: int, resamples: int) -> Iterator[NDArray[np.int64]]:
    """Indices of the groups in each resample, ``(resamples, groups)`` in pieces of at most `_CHUNK`."""
    rows = max(1, _CHUNK // groups)
    if resamples <= rows:
        yield _one_piece(groups, seed, resamples)
        return
    generator = np.random.default_rng(seed)
    for start in range(0, resamples, rows):
        yield generator.integers(groups, size=(min(rows, resamples - start), groups))


@lru_cache(maxsize=1)
def _one_piece(groups: int, seed: int, resamples: int) -> NDArray[np.int64]:
    """Kept, because every score and every cost of a benchmark is resampled in the same way."""
    return np.random.default_rng(seed).integers(groups, size=(resamples, groups))


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Two-sided exact McNemar p-value from the discordant counts (only A right, only B right)."""
    if only_a < 0 or only_b < 0:
        raise ValueError("discordant counts cannot be negative")
    n, k = only_a + only_b, min(only_a, only_b)
    tail = sum(math.comb(n, i) for i in range(k + 1))
    return float(min(1.0, 2 * tail / 2**n))


def paired_difference(
    a: Sequence[float],
    b: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    confidence: float = 0.95,
) -> Difference:
    """Mean of ``b - a`` over aligned samples: paired bootstrap interval over clusters, and a p-value.

    The p-value is the exact McNemar test when every sample is its own cluster and all values are 0 or 1;
    else a seeded sign-flip test over clusters, which is the same test where McNemar applies and also takes
    F1 or several samples of one question.

    Raises:
        ValueError: sequences of different lengths, or no pair at all.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} samples against {len(b)}: a paired comparison needs the same samples")
    if not a:
        raise ValueError("nothing to compare: no sample in common")
    deltas = [float(y) - float(x) for x, y in zip(a, b, strict=True)]
    sums, counts = cluster_sums(deltas, clusters)
    means = _resampled_means(sums, counts, seed, resamples)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    binary = all(value in (0, 1) for value in (*a, *b)) and len(sums) == len(deltas)
    if binary:
        p_value, test = mcnemar_exact(deltas.count(-1.0), deltas.count(1.0)), "exact McNemar"
    else:
        p_value, test = sign_flip_p(sums, seed=seed), "sign-flip"
    return Difference(math.fsum(deltas) / len(deltas), float(low), float(high), len(sums), p_value, test)


def sign_flip_p(
    differences: Sequence[float] | NDArray[np.float64], *, seed: int = 0, flips: int = 10_000
) -> float:
    """Two-sided p-value of the hypothesis that each difference is as likely negative as positive.

    Exact (all sign patterns) for up to 12 differences that are not 0, else ``flips`` seeded draws, counted
    with the observed pattern among them so that the p-value is never 0.
    """
    nonzero = np.asarray(differences, dtype=np.float64)
    nonzero = nonzero[nonzero != 0]
    count = len(nonzero)
    if count == 0:
        return 1.0
    observed = abs(float(nonzero.sum())) - 1e-9 * float(np.abs(nonzero).sum())
    if count <= 12:
        patterns = (np.arange(2**count)[:, None] >> np.arange(count)) & 1
        return float(np.mean(np.abs((1.0 - 2.0 * patterns) @ nonzero) >= observed))
    generator = np.random.default_rng(seed)
    extreme, done = 0, 0
    rows = max(1, _CHUNK // count)
    while done < flips:
        size = min(rows, flips - done)
        signs = generator.integers(0, 2, size=(size, count)) * 2.0 - 1.0
        extreme += int((np.abs(signs @ nonzero) >= observed).sum())
        done += size
    return (extreme + 1) / (flips + 1)


def pass_at_k(n: int, correct: int, k: int) -> float | None:
    """Probability that at least one of k draws without replacement from n samples is right; None when n <
    k.
    """
    if not 0 <= correct <= n or k < 1:
        raise ValueError(f"pass@{k} of {correct} right among {n}: needs 0 <= right <= n and k >= 1")
    if n < k:
        return None
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def percentiles(values: Sequence[float], points: Sequence[float] = (50, 90, 99)) -> dict[str, float]:
    """``{"p50": ..}`` with linear interpolation; empty without values."""
    if not values:
        return {}
    found = np.percentile(np.asarray(values, dtype=np.float64), list(points))
    return {f"p{point:g}": float(value) for point, value in zip(points, found, strict=True)}
