"""What each part of the algorithm buys: several recipes, the same cold start, the same data order, paired seeds.

    python -m benchmarks.ablation                          # 7 arms x 5 seeds, hours
    python -m benchmarks.ablation --seeds 0 --set steps=10 # a short form

Each run is a process of its own, so that its peak memory is its own. Prints Markdown and draws the curves. A run that
is complete already is read, not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from agent.engines.local import LocalEngine
from agent.memory_score import MemoryScorer
from agent.models import load_model
from agent.prompts import PromptBuilder
from agent.rollout import Sampling, collect_groups
from envs.errors import UserError
from envs.registry import make
from eval.environments import draw_tasks, pin
from trainer.config import load_config, write_config
from trainer.plots import plot_arms

ARMS = ("imitation", "ppo", "grpo", "two-loss", "tiny", "mempo-none", "mempo-previous")
NAMES = {"tiny": "mempo", "imitation": "rejection-sampling imitation", "ppo": "PPO with critic"}
CURVES = {"reward/mean": "reward", "score/f1": "F1 in training", "tokens/total": "tokens an episode"}
SETTINGS = ("steps=16", "evaluation.questions=200", "evaluation.interventions=false")
MORE_STEPS = {"imitation": 1.75}
"""Imitation gets the time of the others, not their number of steps: its rows are fewer and have no reference."""
_SCORED_QUESTIONS = 32


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ablation", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--arms", nargs="+", default=list(ARMS), help="recipes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--runs", type=Path, default=Path("runs/ablation"))
    parser.add_argument("--picture", type=Path, default=Path("docs/ablation.png"))
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = parser.parse_args(arguments)
    try:
        jobs = [(arm, seed) for seed in options.seeds for arm in options.arms]
        _run_all(jobs, options.runs, options.set, options.jobs)
        results = {
            arm: [_result(options.runs / f"{arm}-{seed}") for seed in options.seeds] for arm in options.arms
        }
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report(results))
    curves = {NAMES.get(arm, arm): [result["rows"] for result in results[arm]] for arm in options.arms}
    plot_arms(curves, CURVES, options.picture, "ablation on the embedded world")
    timed = {NAMES.get(arm, arm): [by_seconds(result) for result in results[arm]] for arm in options.arms}
    beside = options.picture.with_name(f"{options.picture.stem}-seconds{options.picture.suffix}")
    plot_arms(timed, CURVES, beside, "the same runs against time", "seconds of one core")
    return 0


def by_seconds(result: dict[str, Any], every: int = 10) -> list[dict[str, Any]]:
    """A run's curves at full multiples of ``every`` seconds of training, interpolated between its steps.

    The first point is the end of the first step, the last one before the run's end.
    """
    ends = list(accumulate(result["seconds"]))
    points = range(math.ceil(ends[0] / every) * every, int(ends[-1]) + 1, every)
    curves = {key: np.interp(points, ends, [row[key] for row in result["rows"]]) for key in CURVES}
    return [
        {"step": point, **{key: float(curve[number]) for key, curve in curves.items()}}
        for number, point in enumerate(points)
    ]


def report(results: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: held-out scores, gain over the paired MemPO run, behaviour and cost of each arm."""
    lines = [
        "| arm | F1, 2 objectives | less MemPO, paired | greedy F1 | F1, 4 objectives | tokens an episode "
        "| P_mem before -> after, frozen scorer | s a step | F1 gain a minute | peak memory MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, runs in results.items():
        scores = [run["summary"]["trained"]["2"]["f1"] for run in runs]
        pairs = zip(scores, results.get("tiny", []), strict=False)
        less = [score - base["summary"]["trained"]["2"]["f1"] for score, base in pairs]
        gains = [
            run["summary"]["trained"]["2"]["f1"] - run["summary"]["cold_start"]["2"]["f1"] for run in runs
        ]
        minutes = [sum(run["seconds"]) / 60 for run in runs]
        four = [run["summary"]["trained"].get("4", {}).get("f1", float("nan")) for run in runs]
        lines.append(
            f"| {NAMES.get(arm, arm)} | {_spread(scores)} | {'-' if arm == 'tiny' or not less else _spread(less)} "
            f"| {_spread([run['summary']['trained']['2']['greedy_f1'] for run in runs])} | {_spread(four)} "
            f"| {fmean(run['summary']['trained']['2']['total_tokens'] for run in runs):.0f} "
            f"| {fmean(run['frozen']['before'] for run in runs):.3f} -> "
            f"{fmean(run['frozen']['after'] for run in runs):.3f} "
            f"| {fmean(fmean(run['seconds']) for run in runs):.1f} "
            f"| {_spread([gain / spent for gain, spent in zip(gains, minutes, strict=True)])} "
            f"| {fmean(run['peak_mib'] for run in runs):.0f} |"
        )
    return "\n".join(lines)


def _run_all(jobs: Sequence[tuple[str, int]], runs: Path, overrides: Sequence[str], at_once: int) -> None:
    """Every run that is not complete, ``at_once`` at a time; one that was interrupted goes on."""
    waiting = [(arm, seed) for arm, seed in jobs if not (_folder(runs, arm, seed) / "summary.json").is_file()]
    running: dict[int, tuple[str, Path]] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            arm, seed = waiting.pop(0)
            folder = _folder(runs, arm, seed)
            _prepare(arm, seed, runs, overrides)
            print(f"{time.strftime('%H:%M:%S')} {arm}, seed {seed}", file=sys.stderr, flush=True)
            with open(folder / "log.txt", "a", encoding="utf-8") as log:
                command = [sys.executable, "-m", "trainer.run", "--resume", str(folder)]
                process = subprocess.Popen(command, stdout=log, stderr=log)
            running[process.pid] = (f"{arm}, seed {seed}", folder)
        pid, status, usage = os.wait3(0)
        name, folder = running.pop(pid)
        if status:
            raise UserError(f"{name} failed; see {folder / 'log.txt'}")
        (folder / "peak_mib.json").write_text(json.dumps(usage.ru_maxrss / 1024), encoding="utf-8")


def _folder(runs: Path, arm: str, seed: int) -> Path:
    return runs / f"{arm}-{seed}"


def _prepare(arm: str, seed: int, runs: Path, overrides: Sequence[str]) -> None:
    """The run's configuration, and its cold start's scores if a run of the same seed has them already."""
    folder = _folder(runs, arm, seed)
    if (folder / "config.toml").is_file():
        return
    config = load_config(arm, [*SETTINGS, *overrides, f"seed={seed}"])
    config = config.model_copy(update={"steps": round(config.steps * MORE_STEPS.get(arm, 1.0))})
    folder.mkdir(parents=True, exist_ok=True)
    for known in runs.glob(f"*-{seed}/cold_start.json"):
        shutil.copyfile(known, folder / "cold_start.json")
        break
    write_config(config, folder / "config.toml")


def _result(folder: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    timings = [
        json.loads(line) for line in (folder / "timings.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    frozen = folder / "frozen_scores.json"
    if not frozen.is_file():
        frozen.write_text(json.dumps(frozen_scores(folder)), encoding="utf-8")
    return {
        "summary": json.loads((folder / "summary.json").read_text(encoding="utf-8")),
        "rows": rows,
        "seconds": [row["cpu_seconds"] for row in timings],
        "peak_mib": json.loads((folder / "peak_mib.json").read_text(encoding="utf-8")),
        "frozen": json.loads(frozen.read_text(encoding="utf-8")),
    }


def frozen_scores(folder: Path) -> dict[str, float]:
    """Mean P_mem of memories on held-out questions before and after training, both scored by the cold-start model.

    P_mem under the trained policy itself may rise because the scorer got better; this rises only with the memories.
    """
    config = load_config(str(folder / "config.toml"))
    env_id = config.environment[0].id
    kwargs = {**config.environment[0].kwargs, "tasks": config.evaluation.tasks}
    scorer_model = load_model(folder / "cold_start")
    means: dict[str, float] = {}
    for name, source in (("before", "cold_start"), ("after", "model")):
        policy = load_model(folder / source)
        prompts = PromptBuilder(policy.tokenizer)
        groups, _ = asyncio.run(
            collect_groups(
                draw_tasks(env_id, kwargs, _SCORED_QUESTIONS),
                lambda task: pin(make(env_id, **kwargs), task),
                LocalEngine(policy.model, policy.tokenizer),
                prompts,
                samples=4,
                sampling=Sampling(config.rollout.temperature, config.rollout.max_new_tokens),
                run_seed=config.seed,
                step=0,
            )
        )
        scorer = MemoryScorer(scorer_model.tokenizer, prompts=prompts, answer_lead=config.model.answer_lead)
        scores = scorer.score(scorer_model.model, groups)
        last = [
            turns[-1].p_mem for group in scores for turns in group if turns and turns[-1].p_mem is not None
        ]
        means[name] = fmean(last) if last else float("nan")
    return means


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


if __name__ == "__main__":
    sys.exit(main())
