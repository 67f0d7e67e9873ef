"""What a run shows and writes while it trains.

    metrics.jsonl         a row a step; the same seed and settings give the same bytes
    timings.jsonl         wall clock of each step, by phase; never in metrics.jsonl
    episodes/step-*.md    some groups as a person reads them
    rollouts/step-*.jsonl whole groups with their scores, to replay an update (on request)
    tensorboard/          the metrics again (on request)

On a terminal one line is kept up to date; elsewhere every step prints a line.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from agent.trajectory import Group
from trainer.episodes import write_episodes
from trainer.records import StepLog
from trainer.trajectory_io import Scores, write_rollouts

SHOWN = {
    "reward": ("reward/mean", "{:.3f}"),
    "EM": ("score/em", "{:.2f}"),
    "F1": ("score/f1", "{:.2f}"),
    "P_mem": ("memory/p_mem", "{:.3f}"),
    "R_M": ("memory/r_mem", "{:+.3f}"),
}
"""What the progress display shows of a step's metrics, where they are there."""

RECENT = 10
"""Steps that the time left is estimated from."""


class Monitor:
    """The one place that a run reports to.

    Args:
        folder: of the run; made when missing.
        total_steps: steps of the whole run.
        start_step: steps that are done when a run is resumed; what later steps left behind is removed.
        tensorboard: write events too.
        console: where progress goes; None: standard error.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        folder: str | Path,
        total_steps: int,
        *,
        start_step: int = 0,
        tensorboard: bool = False,
        console: Console | None = None,
        clock: Any = time.perf_counter,
    ) -> None:
        self.folder, self.total_steps, self.done = Path(folder), total_steps, start_step
        self.folder.mkdir(parents=True, exist_ok=True)
        self.console = console or Console(stderr=True)
        self._clock = clock
        self._metrics = StepLog(self.folder / "metrics.jsonl", start_step)
        self._timings = StepLog(self.folder / "timings.jsonl", start_step)
        for kind in ("episodes", "rollouts"):
            _forget_after(self.folder / kind, start_step)
        self._events = _event_writer(self.folder / "tensorboard", start_step) if tensorboard else None
        self._phases: dict[str, float] = {}
        self._nested = False
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._step_began = clock()
        self._cpu_began = time.process_time()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            console=self.console,
            transient=False,
            disable=not self.console.is_terminal,
            auto_refresh=False,
        )
        self._task = self._progress.add_task("step", total=total_steps, completed=start_step, facts="")

    def __enter__(self) -> Self:
        self._progress.start()
        self._step_began = self._clock()
        self._cpu_began = time.process_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._progress.stop()
        if self._events is not None:
            self._events.close()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the step; the display names it while it lasts.

        Raises:
            RuntimeError: a phase within a phase (its time would count twice).
        """
        if self._nested:
            raise RuntimeError(f"phase {name!r} begins within another")
        self._nested = True
        self._progress.update(self._task, description=name, refresh=True)
        start = self._clock()
        try:
            yield
        finally:
            self._nested = False
            self._phases[name] = self._phases.get(name, 0.0) + self._clock() - start

    def step(self, step: int, metrics: Mapping[str, float], tokens: int) -> None:
        """End of a step: write its rows and show it.

        Args:
            step: counts from 1.
            metrics: finite numbers by name; keys are written in sorted order.
            tokens: sampled and read by the policy in this step, for tokens/s.

        Raises:
            ValueError: a step that is not after the last one.
        """
        ordered = {key: metrics[key] for key in sorted(metrics)}
        self._metrics.append(step, ordered)
        seconds = self._clock() - self._step_began
        rate = tokens / seconds if seconds > 0 else 0.0
        self._timings.append(
            step,
            {
                "seconds": round(seconds, 4),
                # what the step costs whatever else the machine does beside it
                "cpu_seconds": round(time.process_time() - self._cpu_began, 4),
                "tokens_per_second": round(rate, 1),
                "phases": {name: round(spent, 4) for name, spent in self._phases.items()},
                "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            },
        )
        if self._events is not None:
            for key, value in ordered.items():
                self._events.add_scalar(key, value, step)
        self._recent.append(seconds)
        self.done = step
        self._show(metrics, rate)
        self._phases = {}
        self._step_began = self._clock()
        self._cpu_began = time.process_time()

    def seconds_left(self) -> float:
        """Estimate from the last steps."""
        if not self._recent:
            return float("nan")
        return (self.total_steps - self.done) * sum(self._recent) / len(self._recent)

    def episodes(
        self,
        step: int,
        groups: Sequence[Group],
        scores: Scores | None = None,
        outcome_advantages: Sequence[Sequence[float]] | None = None,
        memory_advantages: Sequence[Sequence[Sequence[float]]] | None = None,
        limit: int | None = None,
    ) -> Path:
        """Write the first ``limit`` groups of a step for a person; see `write_episodes`."""
        path = self.folder / "episodes" / f"step-{step:04d}.md"
        write_episodes(path, step, groups[:limit], scores, outcome_advantages, memory_advantages)
        return path

    def rollouts(self, step: int, groups: Sequence[Group], scores: Scores | None = None) -> Path:
        """Write all groups of a step so that its update can be replayed; see `read_rollouts`."""
        path = self.folder / "rollouts" / f"step-{step:04d}.jsonl"
        write_rollouts(path, groups, scores)
        return path

    def say(self, message: str) -> None:
        """One line for the person at the screen."""
        self.console.print(message, highlight=False, markup=False, soft_wrap=True)

    def _show(self, metrics: Mapping[str, float], rate: float) -> None:
        facts = [
            f"{label} {form.format(metrics[key])}" for label, (key, form) in SHOWN.items() if key in metrics
        ]
        facts += [f"{rate:,.0f} tokens/s", f"{_duration(self.seconds_left())} left"]
        line = "  ".join(facts)
        self._progress.update(self._task, completed=self.done, facts=line, refresh=True)
        if not self.console.is_terminal:
            self.say(f"step {self.done}/{self.total_steps}  {line}")


def _forget_after(folder: Path, step: int) -> None:
    for path in folder.glob("step-*"):
        number = path.stem.removeprefix("step-")
        if number.isdigit() and int(number) > step:
            path.unlink()


def _event_writer(folder: Path, start_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # late: takes a second, and most runs do without

    return SummaryWriter(str(folder), purge_step=start_step + 1)


def _duration(seconds: float) -> str:
    if seconds != seconds:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
