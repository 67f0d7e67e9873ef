"""A table of runs, best first, with links to their reports and published figures as marked reference rows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.errors import UserError
from eval.report import environment, markdown_table, objective_charts, run_objectives, style
from eval.store import Run
from eval.suites import Suite

METRICS = ("em", "f1")


@dataclass(frozen=True)
class Row:
    """One line of the table. ``link`` is a path relative to the leaderboard, empty for a reference."""

    name: str
    cells: tuple[str, ...]
    link: str = ""
    reference: bool = False


@dataclass(frozen=True)
class Leaderboard:
    """Rows with the best mean F1 over the benchmarks first, references last."""

    head: tuple[str, ...]
    rows: tuple[Row, ...]
    charts: Sequence[Mapping[str, Any]]

    def markdown(self) -> str:
        rows = []
        for row in self.rows:
            name = f"[{row.name}]({row.link})" if row.link else f"{row.name} (published, not measured here)"
            rows.append((name, *row.cells))
        return "\n".join(["# Leaderboard", "", *markdown_table(self.head, rows), "", NOTE, ""])

    def html(self) -> str:
        template = environment().get_template("leaderboard.html.j2")
        return template.render(board=self, note=NOTE, style=style())


NOTE = (
    "EM / F1 with the 95 % interval of F1, means over all attempted samples; TT and PT in tokens. Rows marked as "
    "published quote a paper: other prompts, other searches, maybe other samples."
)


def leaderboard(runs: Sequence[Run], folder: Path, suite: Suite | None = None) -> Leaderboard:
    """The table of runs.

    Args:
        folder: where it will lie; links are relative to it.
        suite: adds its reference figures for the benchmarks in the table, or, without runs, for all of its.

    Raises:
        UserError: neither runs nor a suite.
    """
    if not runs and suite is None:
        raise UserError("no run to list")
    benchmarks = list(dict.fromkeys(name for run in runs for name in run.samples))
    if suite is not None:
        benchmarks = [name for name in suite.benchmarks if name in benchmarks or not runs] + [
            name for name in benchmarks if name not in suite.benchmarks
        ]
    summaries = [run.summaries() for run in runs]
    order = sorted(range(len(runs)), key=lambda i: -_mean_f1(summaries[i], benchmarks))
    rows = []
    for index in order:
        run, summary = runs[index], summaries[index]
        cells = tuple(_cell(summary.get(name)) for name in benchmarks)
        link = os.path.relpath(run.path / "report.html", folder)
        rows.append(Row(run.name, cells, link))
    if suite is not None:
        for system in suite.systems():
            found = [suite.reference(system, name) for name in benchmarks]
            if any(found):
                cells = tuple(f"{r.metric.upper()} {r.value:.3f}" if r else "–" for r in found)
                rows.append(Row(system, cells, reference=True))
    named = {runs[i].name: summaries[i] for i in order}
    objectives = {name: count for run in runs for name, count in run_objectives(run).items()}
    return Leaderboard(("run", *benchmarks), tuple(rows), objective_charts(named, objectives))


def write_leaderboard(board: Leaderboard, folder: Path) -> None:
    """``leaderboard.md`` and ``leaderboard.html`` in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "leaderboard.md").write_text(board.markdown(), encoding="utf-8")
    (folder / "leaderboard.html").write_text(board.html(), encoding="utf-8")


def _mean_f1(summaries: Mapping[str, Mapping[str, Any]], benchmarks: Sequence[str]) -> float:
    values = [summaries[name]["f1"] or 0.0 for name in benchmarks if name in summaries]
    return sum(values) / len(values) if values else 0.0


def _cell(summary: Mapping[str, Any] | None) -> str:
    if summary is None or summary["f1"] is None:
        return "–"
    low, high = summary["intervals"]["f1"]
    tokens = (
        ""
        if summary["total_tokens"] is None
        else (f", TT {summary['total_tokens']:.0f}, PT {summary['peak_tokens']:.0f}")
    )
    errors = f", {summary['errors']} errors" if summary["errors"] else ""
    return f"{summary['em']:.3f} / {summary['f1']:.3f} [{low:.3f}, {high:.3f}]{tokens}{errors}"
