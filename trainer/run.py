"""`python -m trainer.run`: a run from a recipe to a table.

runs/<id>/
  config.toml           the resolved configuration; `python -m trainer.run runs/<id>/config.toml` repeats the run
  cold_start/  model/   plain Hugging Face folders: what the run started from, and what it made
  imitation/            demonstrations and curve, when the cold start is made by imitation
  metrics.jsonl         a row a step; the same seed and settings give the same bytes
  timings.jsonl         wall clock, apart
  episodes/             some groups of some steps, for a person to read
  checkpoints/          complete or absent; `--resume runs/<id>` goes on from the last one
  learning_curve.png    reward, memory scores and tokens by step
  summary.json          held-out scores of the cold start and of the trained policy
runs/latest             name of the newest complete run
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from agent.engines.base import EngineError
from agent.engines.choose import only_vllm, training_engines
from agent.engines.settings import ENGINES
from agent.memory_score import MemoryScorer
from agent.models import LoadedModel, load_model, save_model
from envs.errors import UserError
from eval.runner import Progress
from eval.store import only_writer
from trainer.checkpoint import CheckpointStore, restore_rng
from trainer.config import RunConfig, engine_of, flag_overrides, load_config, recipe_names, write_config
from trainer.imitate import start_by_imitation
from trainer.learner import Learner, NonFiniteError
from trainer.loop import NothingPlayed, Run, train
from trainer.monitor import Monitor
from trainer.plots import plot_run
from trainer.policy import first_policy
from trainer.questions import Questions, prompt_builders
from trainer.validation import Validation

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()  # a run has its own
    folder = options.resume or options.out or Path("RUN")
    try:
        folder, config, resumed = _choose(options)
        with only_writer(folder):
            run_folder(config, folder, resumed)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except NonFiniteError as error:
        print(f"error: {error}; the last good checkpoint is in {folder / 'checkpoints'}", file=sys.stderr)
        return FAILED
    except (EngineError, NothingPlayed) as error:
        print(f"error: {error}; --resume {folder} goes on when that is mended", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"interrupted; --resume {folder} goes on from the last checkpoint", file=sys.stderr)
        return INTERRUPTED
    return 0


def run_folder(
    config: RunConfig, folder: Path, resumed: bool = False, console: Console | None = None
) -> dict[str, Any]:
    """Train into a folder and write its summary.

    Args:
        resumed: go on from the folder's last checkpoint, if it has one.

    Returns:
        What ``summary.json`` holds.
    """
    console = console or Console(stderr=True)
    seconds: dict[str, float] = {}
    started = time.perf_counter()
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    torch.manual_seed(config.seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_config(config, folder / "config.toml")

    with _timed(seconds, "cold_start"):
        policy = _cold_start(config, folder, console)
    checkpoints = CheckpointStore(folder / "checkpoints", config.output.keep)
    done = checkpoints.load().step if resumed and checkpoints.latest() is not None else 0
    run = assemble(config, policy, folder, console, done)
    try:
        tables = _train_and_score(run, policy, folder, seconds, resumed, done, console)
    finally:
        for engine in {run.engine, run.sampler}:
            asyncio.run(engine.close())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    plot_run(rows, folder / "learning_curve.png", f"{config.recipe}, seed {config.seed}")
    seconds["total"] = time.perf_counter() - started
    summary = {
        "recipe": config.recipe,
        "seed": config.seed,
        "steps": config.steps,
        **tables,
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
    }
    _write_json(folder / "summary.json", summary)
    _point_latest(folder)
    show(summary, folder, console)
    return summary


def _train_and_score(
    run: Run,
    policy: LoadedModel,
    folder: Path,
    seconds: dict[str, float],
    resumed: bool,
    done: int,
    console: Console,
) -> dict[str, Any]:
    """Everything that needs the engine: held-out scores of the first policy, training, scores of the last one."""
    config = run.config
    engine = run.engine
    with _timed(seconds, "evaluate_cold_start"):
        cold_path = folder / "cold_start.json"
        if not (resumed and cold_path.is_file()):
            _write_json(cold_path, _table(run, "cold start"))
        cold = json.loads(cold_path.read_text(encoding="utf-8"))
    if done:
        go_on(run)
        engine.load_weights(run.learner.model, max(run.steps_done, engine.weight_version + 1))
        console.print(f"resumed after step {run.steps_done}", highlight=False)
    with _timed(seconds, "train"):
        train(run)
    save_model(_plain(run.learner.model), policy.tokenizer, folder / "model")
    with _timed(seconds, "evaluate_trained"):
        trained = _table(run, "trained")
        intervened = (
            run.validation.without_memory("trained", engine)
            if config.evaluation.interventions and config.evaluation.tasks
            else {}
        )
    return {"cold_start": cold, "trained": trained, "without_memory": intervened}


def assemble(
    config: RunConfig, policy: LoadedModel, folder: Path, console: Console, steps_done: int = 0
) -> Run:
    """Everything a run is made of, ready for the step after ``steps_done`` (what later ones wrote is forgotten)."""
    questions = Questions(config.environment, config.seed)
    prompts = prompt_builders(config, policy.tokenizer)
    lead = config.model.answer_lead
    scorers = {b: MemoryScorer(policy.tokenizer, prompts=b, answer_lead=lead) for b in dict.fromkeys(prompts)}
    learner = Learner(policy.model, config.learner, seed=config.seed)
    rollout = config.rollout
    engine, sampler = training_engines(
        rollout.engine,
        learner.model,
        policy.tokenizer,
        folder=folder,
        max_batch=rollout.max_batch,
        sglang=rollout.sglang,
        vllm=rollout.vllm,
    )
    monitor = Monitor(
        folder,
        config.steps,
        start_step=steps_done,
        tensorboard=config.output.tensorboard,
        console=console,
    )
    return Run(
        config=config,
        questions=questions,
        engine=engine,
        sampler=sampler,
        prompts=prompts,
        scorers=[scorers[builder] for builder in prompts],
        learner=learner,
        monitor=monitor,
        checkpoints=CheckpointStore(folder / "checkpoints", config.output.keep),
        validation=Validation(config, prompts[0], _progress_line(console)),
    )


def go_on(run: Run) -> None:
    """Take up the last checkpoint: weights, optimizer, generators; later rows and checkpoints are forgotten."""
    checkpoint = run.checkpoints.load(run.questions.fingerprint())
    run.learner.load_state_dict(checkpoint.state["learner"])
    restore_rng(checkpoint.state["rng"])
    run.checkpoints.discard_after(checkpoint.step)
    run.steps_done = checkpoint.step


def show(summary: dict[str, Any], folder: Path, console: Console) -> None:
    """The final table: cold start beside trained policy."""
    table = Table(title=f"held-out questions, {summary['recipe']}, seed {summary['seed']}")
    for heading in ("objectives", "policy", "EM", "F1 (95 %)", "greedy F1", "total tokens", "peak tokens"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for objectives in summary["trained"]:
        for name in ("cold_start", "trained"):
            row = summary[name][objectives]
            low, high = row["intervals"]["f1"]
            table.add_row(
                objectives,
                name.replace("_", " "),
                f"{row['em']:.3f}",
                f"{row['f1']:.3f} ({low:.3f}-{high:.3f})",
                f"{row['greedy_f1']:.3f}",
                f"{row['total_tokens']:.0f}",
                f"{row['peak_tokens']:.0f}",
            )
    if summary["trained"]:
        console.print(table)
    for memory, row in summary["without_memory"].items():
        console.print(f"memory {memory}: F1 {row['f1']:.3f}", highlight=False)
    console.print(
        f"{summary['seconds']['total']:.0f} s; run, learning curve and episodes: {folder}", highlight=False
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.run",
        description="Train an agent that manages its own memory, from a recipe to a table of held-out scores.",
        epilog=f"recipes: {', '.join(recipe_names())}",
    )
    parser.add_argument(
        "recipe", nargs="?", default="tiny", help="name of a recipe or path of a .toml file (default: tiny)"
    )
    parser.add_argument("--seed", type=int, help="decides everything that is drawn (default: the recipe's)")
    parser.add_argument("--out", type=Path, help="folder of the run (default: runs/<recipe>-<time>)")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in this folder")
    parser.add_argument("--model", help="model folder, GGUF file or hub id; short for --set model.path=...")
    parser.add_argument("--engine", choices=ENGINES, help="where tokens come from (default: the recipe's)")
    parser.add_argument(
        "--server",
        action="append",
        metavar="URL",
        help="a running server to sample on: SGLang's (may be repeated), or with --engine vllm a vLLM server, which "
        "keeps its weights: see docs/engines.md",
    )
    parser.add_argument(
        "--launch", action="store_true", help="start an SGLang server, and end it with the run"
    )
    parser.add_argument("--data", help="training questions (FlashRAG jsonl or parquet), or a built-in source")
    parser.add_argument("--corpus", help="passages to search (FlashRAG jsonl), or a built-in source")
    parser.add_argument("--eval-data", help="held-out questions in the same form")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override any value of the recipe",
    )
    return parser


def _choose(options: argparse.Namespace) -> tuple[Path, RunConfig, bool]:
    """Folder and configuration of the run, and whether it goes on with an earlier one."""
    overrides = list(options.set) + flag_overrides(
        {
            "seed": options.seed,
            "model.path": options.model,
            "environment.0.kwargs.tasks": options.data,
            "environment.0.kwargs.retriever": options.corpus,
            "evaluation.tasks": options.eval_data,
        }
    )
    if options.resume is not None:
        if overrides or options.out is not None:
            raise UserError(
                "--resume goes on with a run as it is: no option changes it but where tokens come from"
            )
        written = options.resume / "config.toml"
        if not written.is_file():
            raise UserError(f"{options.resume} is no run: it has no config.toml")
        where = _where(options, engine_of(str(written)))
        return options.resume, load_config(str(written), where), True
    where = _where(options, engine_of(options.recipe, overrides))
    config = load_config(options.recipe, [*overrides, *where])
    folder = options.out or Path("runs") / f"{config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    if (folder / "config.toml").exists():
        raise UserError(
            f"{folder} already holds a run: choose another --out, or go on with it by --resume {folder}"
        )
    return folder, config, False


def _where(options: argparse.Namespace, written: str) -> list[str]:
    """Overrides that say where tokens come from; servers that are named replace a launched one, and it them.

    Args:
        written: the engine without these options; it says what kind of server is meant where --engine does not.
    """
    found = []
    if options.engine == "local" and (options.server or options.launch):
        raise UserError("--engine local samples in this process: leave out --server and --launch")
    kind = "sglang" if written == "local" else written
    engine = options.engine or (kind if options.server or options.launch else None)
    if engine is not None:
        found.append(f"rollout.engine={engine}")
    if engine == "vllm":
        if options.launch:
            raise UserError(
                "--launch starts an SGLang server; --engine vllm needs a running one: --server URL"
            )
        if options.server:
            found.append(f"rollout.vllm.url={json.dumps(only_vllm(options.server))}")
    elif options.server or options.launch:
        found.append(f"rollout.sglang.urls={json.dumps(options.server or [])}")
        found.append(f"rollout.sglang.launch={json.dumps(options.launch)}")
    return found


def _cold_start(config: RunConfig, folder: Path, console: Console) -> LoadedModel:
    """The first policy; kept in the run's folder, where a resumed run finds it again."""
    kept = folder / "cold_start"
    if kept.is_dir():
        return load_model(kept, dtype=config.model.torch_dtype, device=config.model.device)

    def progress(step: int, steps: int, loss: float) -> None:
        if step % 100 == 0 or step == steps:
            console.print(f"cold start {step}/{steps}  loss {loss:.3f}", highlight=False)

    if config.cold_start.source == "imitate":
        policy = start_by_imitation(config, folder / "imitation", console)
    else:
        policy = first_policy(config, progress)
    save_model(policy.model, policy.tokenizer, kept)
    return policy


def _table(run: Run, name: str) -> dict[str, dict[str, Any]]:
    return run.validation.table(name, run.engine) if run.config.evaluation.tasks else {}


def _plain(model: Any) -> Any:
    """Under LoRA the adapters are merged, so that any tool loads the folder."""
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model


def _progress_line(console: Console) -> Any:
    def report(name: str, progress: Progress) -> None:
        due = progress.done == progress.total or (console.is_terminal and progress.done % 50 == 0)
        if due:
            console.print(
                f"{name}: {progress.done}/{progress.total}  F1 {progress.f1:.3f}  errors {progress.errors}  "
                f"{progress.seconds_left:.0f} s left",
                highlight=False,
            )

    return report


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start


def _write_json(path: Path, value: Any) -> None:
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(aside, path)


def _point_latest(folder: Path) -> None:
    """``latest`` beside the run names it; written last, so it never names an incomplete one."""
    pointer = folder.parent / "latest"
    aside = pointer.with_name("latest.new")
    aside.write_text(folder.name + "\n", encoding="utf-8")
    os.replace(aside, pointer)


if __name__ == "__main__":
    sys.exit(main())
