"""Two runs side by side, sample by sample: paired intervals and p-values, refused where the samples differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from envs.errors import UserError
from eval.episode import Sample
from eval.report import markdown_table
from eval.stats import Difference, paired_difference
from eval.store import Run
from eval.summary import score_samples

METRICS = ("em", "f1", "all")
COMPARISON_HEAD = ("benchmark", "score", "n", "A", "B", "B - A", "95 %", "p", "test")


@dataclass(frozen=True)
class Comparison:
    """One score of two runs on one benchmark; ``difference`` is B - A over questions."""

    benchmark: str
    metric: str
    a: float
    b: float
    difference: Difference

    def row(self) -> tuple[str, ...]:
        found = self.difference
        return (
            self.benchmark,
            self.metric,
            str(found.n),
            f"{self.a:.3f}",
            f"{self.b:.3f}",
            f"{found.mean:+.3f}",
            f"[{found.low:+.3f}, {found.high:+.3f}]",
            f"{found.p_value:.2g}",
            found.test,
        )


def compare_runs(a: Run, b: Run, scorer: str | None = None) -> list[Comparison]:
    """EM, F1 and "all" of every benchmark that both runs have.

    Args:
        scorer: a rule for both; None takes each benchmark's own, which must be the same in both.

    Raises:
        UserError: no benchmark in common; samples, questions or golds that differ; different rules.
    """
    shared = [name for name in a.samples if name in b.samples]
    if not shared:
        raise UserError(
            f"{a.path} and {b.path} have no benchmark in common ({_names(a.samples)} against {_names(b.samples)})"
        )
    found: list[Comparison] = []
    for name in shared:
        rule = scorer or a.scorer(name)
        if scorer is None and a.scorer(name) != b.scorer(name):
            raise UserError(
                f"{name}: scored as {a.scorer(name)} in {a.path} and as {b.scorer(name)} in {b.path}; "
                "name one rule with --scorer"
            )
        seed = int(a.config.get("seed", 0))
        found += compare_samples(name, a.samples[name], b.samples[name], rule, seed)
    return found


def compare_samples(
    benchmark: str, a: Sequence[Sample], b: Sequence[Sample], scorer: str | None = None, seed: int = 0
) -> list[Comparison]:
    """As `compare_runs`, of the samples of one benchmark; aligned by id, clustered by question."""
    first, second = {sample.id: sample for sample in a}, {sample.id: sample for sample in b}
    _check_same(benchmark, first, second)
    ids = sorted(first, key=lambda key: (first[key].task_id, first[key].sample))
    scores_a = score_samples([first[key] for key in ids], scorer)
    scores_b = score_samples([second[key] for key in ids], scorer)
    clusters = [first[key].task_id for key in ids]
    found = []
    for metric in METRICS:
        values_a, values_b = [row[metric] for row in scores_a], [row[metric] for row in scores_b]
        difference = paired_difference(values_a, values_b, clusters, seed=seed)
        mean_a, mean_b = (sum(values) / len(values) for values in (values_a, values_b))
        found.append(Comparison(benchmark, metric, mean_a, mean_b, difference))
    return found


def markdown_comparison(a: Run, b: Run, found: Sequence[Comparison]) -> str:
    """The comparison as Markdown."""
    head = [f"A: {a.name} ({a.path})", "", f"B: {b.name} ({b.path})", ""]
    return "\n".join([*head, *markdown_table(COMPARISON_HEAD, [each.row() for each in found])])


def _check_same(benchmark: str, a: Mapping[str, Sample], b: Mapping[str, Sample]) -> None:
    for here, there, label in ((a, b, "second"), (b, a, "first")):
        missing = [key for key in here if key not in there]
        if missing:
            raise UserError(
                f"{benchmark}: the runs have different samples, {len(missing)} are not in the {label} run "
                f"(such as {missing[0]!r}); a paired comparison needs the same ones"
            )
    if not a:
        raise UserError(f"{benchmark}: no samples to compare")
    for key, sample in a.items():
        if (sample.questions, sample.golds) != (b[key].questions, b[key].golds):
            raise UserError(f"{benchmark}: sample {key!r} asks or accepts something else in the second run")


def _names(samples: Mapping[str, object]) -> str:
    return ", ".join(samples) or "none"
