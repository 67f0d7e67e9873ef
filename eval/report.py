"""Reports of a run: ``report.md`` for a terminal or a pull request, ``report.html`` in one self-contained file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from envs.grammar import parse_turn
from eval.charts import Point, line_chart
from eval.episode import Sample, TurnRecord
from eval.scorers import Scores
from eval.store import Run
from eval.summary import score_samples

VIEWER_EPISODES = 5000
"""Episodes that the viewer holds at most; the page says how many were left out."""


def write_reports(run: Run, scorer: str | None = None) -> None:
    """Write ``report.md`` and ``report.html`` into the run's folder."""
    suffix = f".{scorer}" if scorer else ""
    summaries = run.summaries(scorer)
    (run.path / f"report{suffix}.md").write_text(markdown_report(run, summaries), encoding="utf-8")
    (run.path / f"report{suffix}.html").write_text(html_report(run, summaries, scorer), encoding="utf-8")


def markdown_report(run: Run, summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """Score and cost tables as Markdown."""
    lines = [f"# {_cell(run.name)}", "", _facts(run), ""]
    lines += markdown_table(SCORE_HEAD, [score_row(name, each) for name, each in summaries.items()])
    lines += ["", *markdown_table(COST_HEAD, [cost_row(name, each) for name, each in summaries.items()])]
    lines += ["", EXPLANATION, ""]
    return "\n".join(lines)


EXPLANATION = (
    "Scores are means over all attempted samples with 95 % intervals; a failure of the infrastructure counts 0 there "
    "and is left out of the column of completed ones. EM and F1 of several objectives are means over them; 'all' "
    "is the share of episodes with every objective right. TT: prompt and completion tokens over all turns; PT: the "
    "largest prompt and completion of one turn; PT (MEM1) leaves the first prompt out and counts right answers only."
)
SCORE_HEAD = (
    "benchmark",
    "rule",
    "n",
    "EM",
    "F1",
    "all",
    "F1 completed",
    "errors",
    "invalid turns",
    "unanswered",
)
COST_HEAD = (
    "benchmark",
    "turns",
    "TT",
    "PT",
    "PT (MEM1)",
    "prompt",
    "completion",
    "memory",
    "observation",
    "dependency",
)


def score_row(name: str, summary: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        name,
        str(summary["scorer"]),
        str(summary["attempted"]),
        with_interval(summary, "em"),
        with_interval(summary, "f1"),
        with_interval(summary, "all"),
        number(summary["completed_only"].get("f1")),
        str(summary["errors"]),
        number(summary["invalid_turns"]),
        number(summary["unanswered"]),
    )


def cost_row(name: str, summary: Mapping[str, Any]) -> tuple[str, ...]:
    keys = ("prompt_tokens", "completion_tokens", "memory_tokens", "observation_tokens", "dependency")
    return (
        name,
        number(summary["turns"], 2),
        with_interval(summary, "total_tokens", 0),
        with_interval(summary, "peak_tokens", 0),
        number(summary["mem1_peak_tokens"], 0),
        *(number(summary[key], 0) for key in keys),
    )


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def with_interval(summary: Mapping[str, Any], key: str, digits: int = 3) -> str:
    low, high = summary["intervals"][key]
    if summary[key] is None:
        return "–"
    return f"{summary[key]:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; cell text cannot break it."""
    lines = ["| " + " | ".join(map(_cell, head)) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]


def _cell(text: str) -> str:
    return " ".join(str(text).replace("|", "\\|").replace("<", "&lt;").split())


def _facts(run: Run) -> str:
    player = run.config.get("player", {})
    weights = f", weights {player['weights']}" if "weights" in player else ""
    code = str(run.environment.get("code") or "none")[:12]
    return f"seed {run.config.get('seed')}, memory {run.config.get('memory')}{weights}, code {code}"


def html_report(run: Run, summaries: Mapping[str, Mapping[str, Any]], scorer: str | None = None) -> str:
    """The whole page; every text from models, documents and tasks is data, never markup."""
    episodes: list[dict[str, Any]] = []
    total = 0
    for name, samples in run.samples.items():
        total += len(samples)
        scores = score_samples(samples, scorer or run.scorer(name))
        room = VIEWER_EPISODES - len(episodes)
        episodes += [
            episode_data(name, sample, score)
            for sample, score in zip(samples[:room], scores[:room], strict=True)
        ]
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            title=run.name,
            facts=_facts(run),
            explanation=EXPLANATION,
            score_head=SCORE_HEAD,
            score_rows=[score_row(name, each) for name, each in summaries.items()],
            cost_head=COST_HEAD,
            cost_rows=[cost_row(name, each) for name, each in summaries.items()],
            charts=objective_charts({run.name: summaries}, run_objectives(run)),
            benchmarks=list(run.samples),
            left_out=total - len(episodes),
            data=script_json(episodes),
            style=style(),
            script=(Path(__file__).parent / "templates" / "viewer.js").read_text(encoding="utf-8"),
        )
    )


def run_objectives(run: Run) -> dict[str, int]:
    """By benchmark the number of objectives of its episodes, where all have the same."""
    found = {}
    for name, samples in run.samples.items():
        counts = {len(sample.golds) for sample in samples}
        if len(counts) == 1:
            found[name] = counts.pop()
    return found


def objective_charts(
    runs: Mapping[str, Mapping[str, Mapping[str, Any]]], objectives: Mapping[str, int]
) -> list[dict[str, Any]]:
    """F1 and total tokens against the number of objectives, a series a run and family of benchmarks."""
    charts = []
    for key, label in (
        ("f1", "F1"),
        ("total_tokens", "total tokens (TT)"),
        ("peak_tokens", "peak tokens (PT)"),
    ):
        series: dict[str, list[Point]] = {}
        for run_name, summaries in runs.items():
            for benchmark, summary in summaries.items():
                if benchmark not in objectives or summary[key] is None:
                    continue
                family = benchmark.removesuffix(f"-{objectives[benchmark]}")
                low, high = summary["intervals"][key]
                point = Point(objectives[benchmark], summary[key], low, high)
                series.setdefault(f"{run_name} · {family}" if len(runs) > 1 else family, []).append(point)
        lines = {name: points for name, points in series.items() if len(points) > 1}
        if lines:
            svg = line_chart(f"{label} by number of objectives", lines, "objectives", label)
            charts.append({"svg": Markup(svg), "names": list(lines)})
    return charts


def episode_data(benchmark: str, sample: Sample, scores: Scores) -> dict[str, Any]:
    """What the viewer shows of an episode."""
    status = "error" if sample.error is not None else "right" if scores["all"] == 1.0 else "wrong"
    return {
        "b": benchmark,
        "id": sample.id,
        "s": status,
        "q": sample.questions,
        "g": sample.golds,
        "a": sample.answer,
        "e": sample.error,
        "r": sample.stop_reason,
        "em": scores["em"],
        "f1": round(scores["f1"], 3),
        "t": [_turn_data(turn) for turn in sample.turns],
    }


def _turn_data(turn: TurnRecord) -> dict[str, Any]:
    parsed = parse_turn(turn.text)
    action = None
    if parsed.answer is not None:
        action = ["answer", parsed.answer]
    elif parsed.call is not None:
        arguments = dict(parsed.call.arguments)
        shown = (
            arguments["query"] if set(arguments) == {"query"} else json.dumps(arguments, ensure_ascii=False)
        )
        action = [parsed.call.name, str(shown)]
    return {
        "m": parsed.memory,
        "k": parsed.think,
        "a": action,
        "raw": turn.text if action is None or turn.invalid else None,
        "i": turn.information,
        "x": turn.invalid,
        "f": turn.finish,
        "n": [turn.prompt_tokens, turn.completion_tokens],
        "p": None if turn.p_mem is None else [turn.p_mem, turn.p_full],
    }


def script_json(value: Any) -> Markup:
    """JSON that may stand inside a ``<script>`` element whatever texts are in it."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def style() -> str:
    return (Path(__file__).parent / "templates" / "style.css").read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """Templates with escaping on."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
