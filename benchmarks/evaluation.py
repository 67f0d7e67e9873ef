"""Where the time of a complete evaluation goes: how much of it is not the model.

1,000 embedded questions are evaluated as `python -m eval.bench` does it, from loading the tasks to the HTML report,
with the small cold start that comes with the package. Counted are seconds by the clock on one thread: of the model's
forward passes, of everything else that the engine does (requests, sampling, cache), and of the whole. Other work on the
machine takes from all of them alike; processor time is not used, because its 11,000 readings at 6 microseconds would be
5 % of what is to be measured. Loading the model, Python and the libraries is not an evaluation's and is left out.

Run: ``python -m benchmarks.evaluation``
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from agent.engines import local
from agent.engines.local import LocalEngine
from agent.models import load_model
from eval import benchmarks as registry
from eval.session import Settings, run_session
from eval.subjects import Manner, ModelSubject

COLD_START = Path(__file__).parents[1] / "trainer" / "assets" / "tiny-cold-start"
MANNER = Manner(
    style="compact", call_style="search", max_new_tokens=64, interface={"topk": 1, "numbered": True}
)
"""How the recipe `tiny` asks this model."""


class Clock:
    """Seconds spent inside the functions it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self.calls += 1

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(COLD_START), help="a folder (the cold start of the package)")
    parser.add_argument("--benchmark", nargs="+", default=["factbook-tiny-2", "factbook-tiny-4"])
    parser.add_argument("--questions", type=int, help="episodes of a benchmark at most (its own number)")
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--profile", type=int, metavar="N", help="print the N dearest functions")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    subject = ModelSubject.local(load_model(options.model), MANNER)
    forward, engine = Clock(), Clock()
    model: Any = subject._engine.model  # type: ignore[attr-defined]
    model.forward = forward.wrap(model.forward)
    LocalEngine._step = engine.wrap(LocalEngine._step)  # type: ignore[method-assign]
    # What a request costs the engine before it waits for a step.
    local._Job = engine.wrap(local._Job)  # type: ignore[misc]
    local.check_request = engine.wrap(local.check_request)  # type: ignore[attr-defined]
    chosen = [registry.get(name) for name in options.benchmark]
    if options.questions:
        chosen = [replace(benchmark, questions=options.questions) for benchmark in chosen]

    profile = cProfile.Profile()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        if options.profile:
            profile.enable()
        run = run_session(
            subject,
            chosen,
            Path(folder) / "run",
            Settings(concurrency=options.concurrency),
            console=Console(quiet=True),
        )
        profile.disable()
        whole = time.perf_counter() - start
    samples = [sample for each in run.samples.values() for sample in each]
    questions = sum(len(sample.questions) for sample in samples)
    turns = sum(len(sample.turns) for sample in samples)
    print(f"{questions} questions in {len(samples)} episodes, {turns} turns, {forward.calls} forward passes")
    for name, seconds in (
        ("model", forward.seconds),
        ("engine around it", engine.seconds - forward.seconds),
        ("everything else", whole - engine.seconds),
        ("whole", whole),
    ):
        print(f"{name:18} {seconds:8.2f} s  {seconds / whole:6.1%}")
    if options.profile:
        pstats.Stats(profile).sort_stats("cumulative").print_stats(options.profile)


if __name__ == "__main__":
    main()
