"""The run folder: what was run, every sample as it finished, and numbers that repeat to the byte.

    run.json        everything that decides the result, written first
    samples.jsonl   one row a sample in the order they finished; append only, flushed to the disk
    summary.json    per benchmark the numbers of `eval.summary`; the same samples give the same bytes
    latency.json    wall-clock figures, apart because they never repeat; latency.jsonl has one row a sample
    report.md, report.html

A kill leaves whole rows and at most half a line, which is cut off when the run goes on.
"""

from __future__ import annotations

import errno
import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from filelock import FileLock, Timeout

from envs.errors import UserError
from eval.episode import Sample
from eval.scorers import scorer_names
from eval.stats import percentiles
from eval.summary import summarise

RUN, SAMPLES, SUMMARY, LATENCY = "run.json", "samples.jsonl", "summary.json", "latency.jsonl"
LOCK = ".lock"
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
SYNC_SECONDS = 2.0
"""Rows are handed to the system at once, and to the disk at least this often."""


@dataclass(frozen=True)
class Run:
    """A run folder read back.

    Attributes:
        path: of the folder.
        config: what decides the result (`run.json`, section ``config``).
        environment: code revision and package versions it ran with.
        samples: by benchmark, sorted by task id and sample index, whatever order they finished in.
    """

    path: Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    samples: Mapping[str, tuple[Sample, ...]]
    _summaries: dict[str | None, dict[str, Any]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def name(self) -> str:
        """How tables call it: the model, and what was changed about its memory, context or tools."""
        player = self.config.get("player", {})
        parts = [str(player.get("name", self.path.name))]
        entries = self.config.get("benchmarks", {}).values()
        contexts = {str(entry.get("env_kwargs", {}).get("context", "previous")) for entry in entries}
        if player.get("tools") is False:
            parts.append("no tools")
        elif len(contexts) == 1 and contexts != {"previous"}:
            parts.append(f"context {contexts.pop()}")
        memory = self.config.get("memory", "keep")
        return ", ".join(parts if memory == "keep" else [*parts, f"memory {memory}"])

    @property
    def missing(self) -> int:
        """Samples that `run.json` promises and that are not there."""
        benchmarks = self.config.get("benchmarks", {})
        return sum(int(entry["expected"]) - len(self.samples[name]) for name, entry in benchmarks.items())

    def scorer(self, benchmark: str) -> str | None:
        found = self.config.get("benchmarks", {}).get(benchmark, {}).get("scorer")
        return None if found is None else str(found)

    def summaries(self, scorer: str | None = None) -> dict[str, Any]:
        """By benchmark the numbers of `eval.summary.summarise`, under another rule where one is named."""
        if scorer not in self._summaries:
            seed = int(self.config.get("seed", 0))
            self._summaries[scorer] = {
                name: summarise(samples, scorer or self.scorer(name), seed=seed)
                for name, samples in self.samples.items()
            }
        return self._summaries[scorer]


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keep other processes from writing into a folder meanwhile; the lock ends with the process, however it ends.

    A file system that knows no locks keeps nobody away: then it warns.

    Raises:
        UserError: another process is writing there, or nothing can be written there.
    """
    lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        raise UserError(
            f"{folder}: another process is writing there; wait for its end, or take another folder"
        ) from None
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
            raise UserError(f"{folder} cannot be written: {error.strerror or error}") from None
        warnings.warn(
            f"{folder}: no locks on its file system; see that nobody else writes there", stacklevel=3
        )
    try:
        yield
    finally:
        lock.release()


class RunWriter:
    """Writes a run, or goes on with one.

    Args:
        path: the folder; made when missing.
        config: what decides the result; JSON values.
        environment: what may differ when a complete run is read back, but not while one is written.
        facts: what else is worth knowing of its start, such as the revision of the code; never compared.

    Raises:
        UserError: the folder holds another run; the first difference is named.
    """

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        environment: Mapping[str, Any],
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.config = json.loads(json.dumps(config))
        self._samples: IO[bytes] | None = None
        self._latency: IO[bytes] | None = None
        self._synced = 0.0
        path.mkdir(parents=True, exist_ok=True)
        file = path / RUN
        if file.is_file():
            stored = _read_object(file)
            difference = first_difference(stored.get("config", {}), self.config)
            if difference:
                raise UserError(f"{path} holds a run with other settings: {difference}; take another --out")
            changed = first_difference(stored.get("environment", {}), json.loads(json.dumps(environment)))
            if changed and read_run(path).missing:
                raise UserError(
                    f"{path} was begun under other versions: {changed}; finish it there or take another --out"
                )
        elif any((path / name).exists() for name in (SAMPLES, SUMMARY)):
            raise UserError(f"{path} holds samples but no {RUN}; take another --out")
        else:
            write_json(file, {"config": self.config, "environment": environment, "facts": facts or {}})
        for name in (SAMPLES, LATENCY):
            _cut_half_line(path / name)
        self.done = {key: sample for key, sample in _rows(path / SAMPLES) if sample.error is None}

    def __enter__(self) -> Self:
        self._samples = (self.path / SAMPLES).open("ab")
        self._latency = (self.path / LATENCY).open("ab")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in (self._samples, self._latency):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
                file.close()
        self._samples = self._latency = None

    def finished(self, benchmark: str) -> set[str]:
        """Ids of the samples of a benchmark that need not run again; failed ones do."""
        return {sample_id for name, sample_id in self.done if name == benchmark}

    def add(self, benchmark: str, sample: Sample, seconds: float) -> None:
        """Append one sample. A row is written in one piece; of two rows with one id the later counts."""
        assert self._samples is not None and self._latency is not None, "use it as a context manager"
        self._samples.write(_line({"benchmark": benchmark, **sample.to_json()}))
        self._samples.flush()
        self._latency.write(_line({"benchmark": benchmark, "id": sample.id, "seconds": round(seconds, 6)}))
        now = time.monotonic()
        if now - self._synced >= SYNC_SECONDS:
            os.fsync(self._samples.fileno())
            self._latency.flush()
            self._synced = now

    def finish(self) -> Run:
        """Write ``summary.json`` and ``latency.json`` from the rows on disk.

        Raises:
            UserError: samples are missing.
        """
        run = read_run(self.path)
        if run.missing:
            raise UserError(f"{self.path}: {run.missing} samples are missing; run the same command again")
        write_json(self.path / SUMMARY, run.summaries())
        seconds = [
            float(row["seconds"])
            for _, row in _objects(self.path / LATENCY)
            if isinstance(row.get("seconds"), int | float)
        ]
        write_json(self.path / "latency.json", {"episode_seconds": percentiles(seconds), "n": len(seconds)})
        return run


def finished_run(path: str | Path) -> Run:
    """A run from its folder, with all of its samples.

    Raises:
        UserError: no run there, or samples are missing.
    """
    run = read_run(path)
    if run.missing:
        raise UserError(
            f"{path} is not finished: {run.missing} samples are missing; run the command that began it again"
        )
    return run


def read_run(path: str | Path) -> Run:
    """A run from its folder, finished or not.

    Raises:
        UserError: no run there, or files of another form.
    """
    folder = Path(path)
    if not (folder / RUN).is_file():
        raise UserError(f"{folder} is no evaluation run: it has no {RUN}")
    stored = _read_object(folder / RUN)
    config = _checked(stored.get("config", {}), folder / RUN)
    rows: dict[str, dict[str, Sample]] = {name: {} for name in config["benchmarks"]}
    for (benchmark, sample_id), sample in _rows(folder / SAMPLES):
        if benchmark not in rows:
            raise UserError(
                f"{folder / SAMPLES}: a row of benchmark {benchmark!r}, which {RUN} does not name"
            )
        rows[benchmark][sample_id] = sample
    samples = {
        name: tuple(sorted(each.values(), key=lambda sample: (sample.task_id, sample.sample)))
        for name, each in rows.items()
    }
    return Run(folder, config, stored.get("environment", {}), samples)


def _checked(config: Any, place: Path) -> dict[str, Any]:
    """A run's configuration, as far as reading the run back depends on it."""
    if not isinstance(config, dict) or not isinstance(config.get("benchmarks"), dict):
        raise UserError(f"{place}: config must be an object with benchmarks")
    for key, kind in (("player", dict), ("seed", int), ("memory", str)):
        if not isinstance(config.get(key, kind()), kind):
            raise UserError(f"{place}: {key} is {_shown(config[key])}")
    for name, entry in config["benchmarks"].items():
        if not isinstance(entry, dict) or not isinstance(entry.get("expected"), int):
            raise UserError(f"{place}: benchmark {name!r} does not say how many samples are expected")
        rule = entry.get("scorer")
        if rule is not None and rule not in scorer_names():
            raise UserError(f"{place}: benchmark {name!r} has the unknown scorer {_shown(rule)}")
        if not isinstance(entry.get("env_kwargs", {}), dict):
            raise UserError(f"{place}: env_kwargs of {name!r} is {_shown(entry['env_kwargs'])}")
    return config


def first_difference(stored: Any, wanted: Any, where: str = "") -> str | None:
    """Where two JSON values differ first, in words; None when they do not."""
    if isinstance(stored, dict) and isinstance(wanted, dict):
        for key in [*stored, *(key for key in wanted if key not in stored)]:
            place = f"{where}.{key}" if where else str(key)
            if key not in stored:
                return f"{place} is {_shown(wanted[key])} now and was not set there"
            if key not in wanted:
                return f"{place} was {_shown(stored[key])} there and is not set now"
            found = first_difference(stored[key], wanted[key], place)
            if found:
                return found
        return None
    if stored != wanted or type(stored) is not type(wanted):
        return f"{where or 'config'} was {_shown(stored)} there and is {_shown(wanted)} now"
    return None


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all, keys in the order given, floats as they print."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def _line(row: Mapping[str, Any]) -> bytes:
    # Lone surrogates can come out of a model's bytes; escaped, every row is valid UTF-8.
    return json.dumps(row, ensure_ascii=True, allow_nan=False).encode() + b"\n"


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: an object is needed")
    return value


def _rows(path: Path) -> Iterator[tuple[tuple[str, str], Sample]]:
    for place, row in _objects(path):
        try:
            sample = Sample.from_json(row)
            yield (str(row["benchmark"]), sample.id), sample
        except (KeyError, TypeError) as error:
            raise UserError(f"{place}: a row is no sample ({type(error).__name__}: {error})") from None


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Whole rows, each with the place it stands in."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return  # half a line, from a kill in the middle of a write
            place = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{place}: not valid JSON ({error})") from None
            if not isinstance(row, dict):
                raise UserError(f"{place}: an object is needed")
            yield place, row


def _cut_half_line(path: Path) -> None:
    if not path.is_file():
        return
    with path.open("rb+") as file:
        data = file.read()
        file.truncate(data.rfind(b"\n") + 1)
