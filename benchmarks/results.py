"""The figures of docs/results.md: the default recipe with several seeds, beside a model with the good habit only.

    python -m benchmarks.results                     # 3 seeds, then the reference model (about an hour on 2 cores)
    python -m benchmarks.results --reference FOLDER  # with a reference model that is there already

Prints Markdown. A run folder that is complete already is read, not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console

from agent.models import load_model, save_model
from envs.errors import UserError
from trainer import cold_start
from trainer.config import load_config
from trainer.run import assemble, run_folder

GOOD_HABIT = ["cold_start.habits.careful=1.0"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/results"), help="folder of the runs")
    parser.add_argument(
        "--reference", type=Path, help="model that imitates the good habit only; else it is trained"
    )
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    try:
        summaries = [_run(seed, options.runs / f"seed-{seed}", console) for seed in options.seeds]
        reference = _reference(options.runs / "good-habit", options.reference, console)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report(summaries, reference))
    return 0


def report(summaries: Sequence[dict[str, Any]], reference: dict[str, Any]) -> str:
    """Markdown: scores of each seed and their means, the share of the gap that was closed, and the interventions."""
    lines = [
        "| seed | objectives | F1 cold start | F1 trained (95 %) | greedy F1 cold start | greedy F1 trained "
        "| EM cold start | EM trained | tokens cold start | tokens trained | peak trained |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for summary in summaries:
        for objectives, trained in summary["trained"].items():
            cold = summary["cold_start"][objectives]
            low, high = trained["intervals"]["f1"]
            lines.append(
                f"| {summary['seed']} | {objectives} | {cold['f1']:.3f} | {trained['f1']:.3f} ({low:.3f}-{high:.3f}) "
                f"| {cold['greedy_f1']:.3f} | {trained['greedy_f1']:.3f} | {cold['em']:.3f} | {trained['em']:.3f} "
                f"| {cold['total_tokens']:.0f} | {trained['total_tokens']:.0f} | {trained['peak_tokens']:.0f} |"
            )
    lines += [
        "",
        "| mean of seeds | cold start | trained | good habit only | share of the gap closed |",
        "|---|---|---|---|---|",
    ]
    for objectives in summaries[0]["trained"]:
        for key, name in (("f1", "F1"), ("greedy_f1", "greedy F1")):
            cold_mean = _mean(summaries, lambda s, o=objectives, k=key: s["cold_start"][o][k])
            trained_mean = _mean(summaries, lambda s, o=objectives, k=key: s["trained"][o][k])
            good = reference[objectives][key]
            gap = good - cold_mean
            share = f"{(trained_mean - cold_mean) / gap:.0%}" if gap > 0.02 else "no gap"
            values = [s["trained"][objectives][key] for s in summaries]
            spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
            lines.append(
                f"| {name}, {objectives} objectives | {cold_mean:.3f} | {trained_mean:.3f}{spread} "
                f"| {good:.3f} | {share} |"
            )
    lines += [
        "",
        "| seed | F1, memory kept | memory blanked | memory swapped | seconds in all | training |",
        "|---|---|---|---|---|---|",
    ]
    for summary in summaries:
        first = next(iter(summary["trained"].values()))
        blank, swap = (summary["without_memory"][memory]["f1"] for memory in ("blank", "swap"))
        seconds = summary["seconds"]
        lines.append(
            f"| {summary['seed']} | {first['f1']:.3f} | {blank:.3f} | {swap:.3f} "
            f"| {seconds['total']:.0f} | {seconds['train']:.0f} |"
        )
    return "\n".join(lines)


def _run(seed: int, folder: Path, console: Console) -> dict[str, Any]:
    if (folder / "summary.json").is_file():
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        return summary
    return run_folder(
        load_config("tiny", [f"seed={seed}"]), folder, (folder / "config.toml").is_file(), console
    )


def _reference(folder: Path, given: Path | None, console: Console) -> dict[str, Any]:
    """Held-out table of the model that imitates only the good habit, made by the recipe's own cold start."""
    table = folder / "table.json"
    if not table.is_file():
        config = load_config("tiny", GOOD_HABIT)
        if given is None:
            model, tokenizer, _ = cold_start.build(config)
            save_model(model, tokenizer, folder / "model")
            given = folder / "model"
        run = assemble(config, load_model(given), folder, console)
        folder.mkdir(parents=True, exist_ok=True)
        table.write_text(json.dumps(run.validation.table("good habit", run.engine)), encoding="utf-8")
    result: dict[str, Any] = json.loads(table.read_text(encoding="utf-8"))
    return result


def _mean(summaries: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> float:
    return fmean(value(summary) for summary in summaries)


if __name__ == "__main__":
    sys.exit(main())
