"""From samples to numbers: scores with intervals, rates and cost; a pure function of the samples.

Scores are means over all attempted samples (a failure of the infrastructure counts 0 there), with the same
over the completed ones and the count of errors beside them. Tokens are means over completed samples: a
failed one has none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from eval.cost import Cost, episode_cost, mem1_mean_peak
from eval.episode import Sample
from eval.scorers import Scores, default_scorer, score_answer
from eval.stats import bootstrap_mean, pass_at_k, wilson

COST_KEYS = tuple(Cost.__dataclass_fields__)
_GROUPED = ("hops", "category", "dataset", "type")


def score_samples(samples: Sequence[Sample], scorer: str | None = None) -> list[Scores]:
    """Scores of each sample, in order; without a named rule the one that fits the number of objectives.

    A failed sample scores 0 under every key.
    """
    rows: list[Scores] = []
    for sample in samples:
        name = scorer or default_scorer(len(sample.golds))
        rows.append(score_answer(name, sample.answer, sample.golds))
    return rows


def summarise(samples: Sequence[Sample], scorer: str | None = None, *, seed: int = 0) -> dict[str, Any]:
    """All numbers of an evaluation as JSON-ready values; None stands where a number does not exist.

    Keys: every score (``em``, ``f1``, ``all``, maybe ``cover_em``) and every cost (``total_tokens``,
    ``peak_tokens``, ``turns``, ...) as a mean, ``intervals`` (95 %, ``[low, high]`` by the same keys),
    ``methods`` (how each interval was made), ``completed_only`` (score means), ``attempted``,
    ``completed``, ``errors``, ``questions``, ``pass_at`` (by k), ``avg_at`` (by k), ``invalid_turns`` and
    ``unanswered`` (rates), ``stop_reasons``, ``mem1_peak_tokens``, ``memory_scores`` and ``by`` (score
    means by kind of task).

    Args:
        seed: of the bootstrap.
    """
    # A bootstrap depends on the order of its values: the same samples must give the same bytes.
    samples = sorted(samples, key=lambda sample: (sample.task_id, sample.sample))
    scores = score_samples(samples, scorer)
    clusters = [sample.task_id for sample in samples]
    completed = [i for i, sample in enumerate(samples) if sample.error is None]
    summary: dict[str, Any] = {
        "scorer": scorer or _common_scorer(samples),
        "questions": len(set(clusters)),
        "attempted": len(samples),
        "completed": len(completed),
        "errors": len(samples) - len(completed),
    }
    intervals: dict[str, list[float | None]] = {}
    methods: dict[str, str] = {}
    keys = sorted({key for row in scores for key in row}) or ["em", "f1", "all"]
    single = all(len(sample.golds) == 1 for sample in samples)
    for key in keys:
        values = [row.get(key, 0.0) for row in scores]
        binary = key == "all" or (single and key in ("em", "cover_em"))
        summary[key], intervals[key], methods[key] = _estimate(values, clusters, seed, binary)
    costs = [episode_cost(samples[i].turns) for i in completed]
    for key in COST_KEYS:
        values = [float(getattr(cost, key)) for cost in costs]
        summary[key], intervals[key], methods[key] = _estimate(
            values, [clusters[i] for i in completed], seed, False
        )
    summary["intervals"] = intervals
    summary["methods"] = methods
    summary["completed_only"] = {key: _mean([scores[i][key] for i in completed]) for key in keys}
    summary |= _repeated(samples, scores)
    summary |= _rates([samples[i] for i in completed])
    right = [scores[i]["all"] == 1.0 for i in completed]
    summary["mem1_peak_tokens"] = _number(mem1_mean_peak([samples[i].turns for i in completed], right))
    summary["by"] = {
        tag: _means_by(samples, scores, lambda sample, tag=tag: sample.tags.get(tag))  # type: ignore[misc]
        for tag in _GROUPED
        if len({sample.tags.get(tag) for sample in samples}) > 1
    }
    return summary


def sample_row(sample: Sample, scores: Scores) -> dict[str, Any]:
    """One flat row about a sample: id, scores, cost, how it ended."""
    return {
        "id": sample.id,
        **scores,
        **asdict(episode_cost(sample.turns)),
        "answer": sample.answer,
        "stop_reason": sample.stop_reason,
        "error": sample.error,
    }


def _common_scorer(samples: Sequence[Sample]) -> str:
    return " and ".join(sorted({default_scorer(len(sample.golds)) for sample in samples}))


def _estimate(
    values: Sequence[float], clusters: Sequence[str], seed: int, binary: bool
) -> tuple[float | None, list[float | None], str]:
    if not values:
        return None, [None, None], "none"
    mean = math.fsum(values) / len(values)
    if binary and len(set(clusters)) == len(values):
        low, high = wilson(round(math.fsum(values)), len(values))
        return mean, [low, high], "wilson"
    estimate = bootstrap_mean(values, clusters, seed=seed)
    method = "bootstrap" if len(set(clusters)) == len(values) else "bootstrap by question"
    return mean, [estimate.low, estimate.high], method


def _repeated(samples: Sequence[Sample], scores: Sequence[Scores]) -> dict[str, Any]:
    """pass@k and avg@k for every k that each question has samples for."""
    counts: dict[str, list[float]] = {}
    for sample, row in zip(samples, scores, strict=True):
        counts.setdefault(sample.task_id, []).append(row["all"])
    if not counts:
        return {"pass_at": {}, "avg_at": {}}
    least = min(len(each) for each in counts.values())
    passes: dict[str, float | None] = {}
    for k in _powers_of_two(least):
        each = [pass_at_k(len(flags), round(sum(flags)), k) for flags in counts.values()]
        passes[str(k)] = _mean([value for value in each if value is not None])
    average = _mean([math.fsum(flags) / len(flags) for flags in counts.values()])
    return {"pass_at": passes, "avg_at": {str(least): average}}


def _powers_of_two(limit: int) -> list[int]:
    found = [1]
    while found[-1] * 2 <= limit:
        found.append(found[-1] * 2)
    return found if found[-1] == limit else [*found, limit]


def _rates(samples: Sequence[Sample]) -> dict[str, Any]:
    turns = [turn for sample in samples for turn in sample.turns]
    scored = [turn for turn in turns if turn.p_mem is not None and turn.p_full is not None]
    return {
        "invalid_turns": _mean([float(turn.invalid is not None) for turn in turns]),
        "unanswered": _mean([float(sample.answer is None) for sample in samples]),
        "memory_turns": _mean([float(turn.memory is not None) for turn in turns]),
        "stop_reasons": dict(sorted(Counter(sample.stop_reason for sample in samples).items())),
        "memory_scores": {
            "turns": len(scored),
            "p_mem": _mean([turn.p_mem for turn in scored if turn.p_mem is not None]),
            "p_full": _mean([turn.p_full for turn in scored if turn.p_full is not None]),
        },
    }


def _means_by(
    samples: Sequence[Sample], scores: Sequence[Scores], key: Callable[[Sample], object]
) -> dict[str, Mapping[str, float | int | None]]:
    groups: dict[str, list[Scores]] = {}
    for sample, row in zip(samples, scores, strict=True):
        groups.setdefault(str(key(sample)), []).append(row)
    return {
        name: {"n": len(rows)} | {k: _mean([row[k] for row in rows]) for k in ("em", "f1", "all")}
        for name, rows in sorted(groups.items())
    }


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
