"""The run folder: complete rows survive any kill, other settings are refused, the same samples give the same bytes."""

from __future__ import annotations

import errno
import gc
import json
import multiprocessing
import multiprocessing.context
import os
import random
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from envs.errors import UserError
from eval import store
from eval.benchmarks import Benchmark
from eval.episode import Sample
from eval.players import TextPlayer
from eval.session import Settings, run_session
from eval.store import RunWriter, finished_run, first_difference, only_writer, read_run
from eval.subjects import ScriptedSubject
from tests.eval.conftest import LOOKUP, Remembering


def sample(task: str, index: int = 0, answer: str | None = "yes", error: str | None = None) -> Sample:
    return Sample(task, index, ("q",), (("yes",),), answer, "answer", (), error=error)


CONFIG = {"player": {"name": "p"}, "seed": 0, "benchmarks": {"b": {"scorer": "squad", "expected": 3}}}


def write(path: Path, samples: list[Sample], config: dict[str, Any] = CONFIG) -> None:
    with RunWriter(path, config, {"code": "1"}) as writer:
        for each in samples:
            writer.add("b", each, 0.5)


def test_order_of_arrival_changes_no_byte(tmp_path: Path) -> None:
    rows = [sample("q2"), sample("q1", answer="no"), sample("q3")]
    written = []
    for name, order in (("one", rows), ("other", rows[::-1])):
        write(tmp_path / name, order)
        RunWriter(tmp_path / name, CONFIG, {"code": "1"}).finish()
        written.append((tmp_path / name / "summary.json").read_bytes())
    assert written[0] == written[1]
    assert json.loads(written[0])["b"]["em"] == pytest.approx(2 / 3)
    assert b"seconds" not in written[0]


def test_half_a_line_is_cut_and_whole_rows_are_kept(tmp_path: Path) -> None:
    write(tmp_path, [sample("q1"), sample("q2")])
    rows = tmp_path / "samples.jsonl"
    whole = rows.read_bytes()
    half = json.dumps({"benchmark": "b", **sample("q3").to_json()}).encode()[:40]
    rows.write_bytes(whole + half)
    assert len(read_run(tmp_path).samples["b"]) == 2
    writer = RunWriter(tmp_path, CONFIG, {"code": "1"})
    assert writer.finished("b") == {"q1#0", "q2#0"}
    assert rows.read_bytes() == whole
    with pytest.raises(UserError, match="1 samples are missing"):
        writer.finish()


def test_failed_samples_run_again_and_the_later_row_counts(tmp_path: Path) -> None:
    write(tmp_path, [sample("q1"), sample("q2", answer=None, error="EpisodeError: away"), sample("q3")])
    writer = RunWriter(tmp_path, CONFIG, {"code": "1"})
    assert writer.finished("b") == {"q1#0", "q3#0"}
    assert writer.finish().summaries()["b"]["errors"] == 1
    write(tmp_path, [sample("q2")])
    summary = read_run(tmp_path).summaries()["b"]
    assert (summary["attempted"], summary["errors"], summary["em"]) == (3, 0, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed was 0 there and is 1 now"),
        ({"player": {"name": "p", "weights": "x"}}, 'player.weights is "x" now and was not set'),
        ({"benchmarks": {"b": {"scorer": "robust", "expected": 3}}}, 'benchmarks.b.scorer was "squad"'),
    ],
)
def test_another_configuration_is_refused_and_named(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    write(tmp_path, [sample("q1")])
    with pytest.raises(UserError, match=message):
        RunWriter(tmp_path, {**CONFIG, **change}, {"code": "1"})


def test_other_versions_are_refused_only_while_a_run_is_incomplete(tmp_path: Path) -> None:
    write(tmp_path, [sample("q1")])
    with pytest.raises(UserError, match="code was"):
        RunWriter(tmp_path, CONFIG, {"code": "2"})
    write(tmp_path, [sample("q2"), sample("q3")])
    RunWriter(tmp_path, CONFIG, {"code": "2"})


def test_first_difference() -> None:
    assert first_difference({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2}]}) is None
    assert first_difference({"a": 1}, {"a": True}) == "a was 1 there and is true now"
    assert first_difference({"a": 1, "b": 2}, {"a": 1}) == "b was 2 there and is not set now"


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no evaluation run"):
        read_run(tmp_path)
    (tmp_path / "samples.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"samples but no run\.json"):
        RunWriter(tmp_path, CONFIG, {})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", b"", r"run\.json cannot be read"),
        ("run.json", b"[]", r"run\.json: an object is needed"),
        ("run.json", b"\xff\xfe", r"run\.json cannot be read"),
        ("run.json", b'{"config": 3}', "config must be an object with benchmarks"),
        ("run.json", b'{"config": {"benchmarks": []}}', "config must be an object with benchmarks"),
        ("run.json", b'{"config": {"benchmarks": {"b": 3}}}', "'b' does not say how many samples"),
        ("run.json", b'{"config": {"benchmarks": {"b": {"expected": "x"}}}}', "'b' does not say how many"),
        ("run.json", b'{"config": {"seed": "x", "benchmarks": {}}}', 'seed is "x"'),
        ("run.json", b'{"config": {"player": 3, "benchmarks": {}}}', "player is 3"),
        (
            "run.json",
            b'{"config": {"benchmarks": {"b": {"expected": 1, "scorer": "nope"}}}}',
            'unknown scorer "nope"',
        ),
        ("samples.jsonl", b"3\n", "line 1: an object is needed"),
        ("samples.jsonl", b"\xff\n", "line 1: not valid JSON"),
        ("samples.jsonl", b"[" * 100_000 + b"\n", "line 1: not valid JSON"),
        ("samples.jsonl", b'{"a": 1}{"b": 2}\n', "line 1: not valid JSON"),
        ("samples.jsonl", b'{"benchmark": "b"}\n', "line 1: a row is no sample"),
    ],
)
def test_a_damaged_folder_is_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    write(tmp_path, [sample("q1")])
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_run(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("task_id", ["x"]), ("task_id", 3), ("sample", "0"), ("sample", True), ("answer", 3), ("turns", 3),
        ("turns", [{}]), ("golds", [[1]]), ("golds", None), ("questions", [1]), ("tags", 3), ("reward", "1"),
        ("error", False), ("stop_reason", None),
    ],
)  # fmt: skip
def test_a_row_with_a_wrong_kind_is_named(tmp_path: Path, column: str, value: Any) -> None:
    write(tmp_path, [sample("q1"), sample("q2")])
    rows = [json.loads(row) for row in rows_of(tmp_path)]
    rows[1][column] = value
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"samples\.jsonl, line 2: a row is no sample"):
        read_run(tmp_path)


def test_rows_of_a_benchmark_that_the_run_does_not_name(tmp_path: Path) -> None:
    write(tmp_path, [sample("q1")])
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"benchmark": "other", **sample("q2").to_json()}) + "\n")
    with pytest.raises(UserError, match=r"a row of benchmark 'other', which run\.json does not name"):
        read_run(tmp_path)


def test_only_finished_runs_are_compared(tmp_path: Path) -> None:
    write(tmp_path, [sample("q1"), sample("q2")])
    with pytest.raises(UserError, match="not finished: 1 samples are missing"):
        finished_run(tmp_path)
    write(tmp_path, [sample("q3")])
    assert finished_run(tmp_path).missing == 0


def test_text_that_is_no_utf8_survives(tmp_path: Path) -> None:
    write(tmp_path, [sample("q1", answer="lone \ud800 surrogate\u2028line")])
    assert read_run(tmp_path).samples["b"][0].answer == "lone \ud800 surrogate\u2028line"


class Slow(Remembering):
    """Takes a moment for each turn."""

    def act(self, observation: str, info: Mapping[str, Any]) -> str:
        time.sleep(0.001)
        return super().act(observation, info)


class SlowSubject:
    name = "slow"
    interface: Mapping[str, Any] = {}

    def identity(self) -> dict[str, Any]:
        return {"name": "slow"}

    def player(self, env_id: str, env_kwargs: Mapping[str, Any], temperature: float) -> TextPlayer:
        return TextPlayer(lambda task, key: Slow(task), "slow")


def evaluate_slowly(folder: Path) -> None:
    run_session(SlowSubject(), [Benchmark("lookup", (), LOOKUP, samples=100)], folder)


def start(folder: Path) -> multiprocessing.context.ForkProcess:
    """A process of its own that can be killed; forked, so that no kill falls on its imports."""
    child = multiprocessing.get_context("fork").Process(target=evaluate_slowly, args=(folder,))
    child.start()
    return child


def finish(folder: Path) -> None:
    child = start(folder)
    child.join()
    assert child.exitcode == 0


def rows_of(folder: Path) -> list[bytes]:
    file = folder / "samples.jsonl"
    return file.read_bytes().splitlines(keepends=True) if file.is_file() else []


def test_killed_at_20_random_moments_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills in the middle of the samples, not in start-up: the same summary byte for byte, no sample twice."""
    monkeypatch.setattr("eval.session.environment", lambda: {"code": "fixed"})
    finish(tmp_path / "whole")
    rng = random.Random(0)
    folder, kills, before = tmp_path / "killed", 0, 0
    for _ in range(20):
        child = start(folder)
        wanted = before + rng.randint(1, 12)
        while child.is_alive() and len(rows_of(folder)) < wanted:
            time.sleep(0.0005)
        kills += child.is_alive()
        child.kill()
        child.join()
        assert len(rows_of(folder)) >= wanted
        if rng.random() < 0.5:  # a kill in the middle of a write leaves half a row
            with (folder / "samples.jsonl").open("rb+") as file:
                file.truncate(file.seek(0, 2) - rng.randint(1, 60))
        before = sum(row.endswith(b"\n") for row in rows_of(folder))
    assert kills == 20 and before < 300
    finish(folder)
    ids = [json.loads(row)["id"] for row in rows_of(folder)]
    assert len(ids) == len(set(ids)) == 300
    assert (folder / "summary.json").read_bytes() == (tmp_path / "whole" / "summary.json").read_bytes()


def test_one_process_at_a_time_writes_into_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    child = start(folder)
    while not rows_of(folder):
        time.sleep(0.0005)
    with pytest.raises(
        UserError, match="run: another process is writing there; wait for its end, or take another"
    ):
        evaluate_slowly(folder)
    child.kill()  # and its lock with it
    child.join()
    evaluate_slowly(folder)
    assert len(read_run(folder).samples["lookup"]) == 300


def test_a_folder_that_cannot_be_written_or_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="cannot be written: "), only_writer(folder):
            pass

    def no_locks(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(store.FileLock, "acquire", no_locks)
    with pytest.warns(UserWarning, match="no locks on its file system"), only_writer(tmp_path / "run"):
        pass


def test_same_session_again_reads_the_run_back(tmp_path: Path) -> None:
    benchmark = Benchmark(
        "two", ("factbook-tiny:heldout",), "mempo/MultiObjectiveQA-v0",
        {"retriever": "factbook-tiny", "objectives": 2}, questions=5,
    )  # fmt: skip
    expert = ScriptedSubject("expert")
    first = run_session(expert, [benchmark], None, root=tmp_path)
    size = (first.path / "samples.jsonl").stat().st_size
    again = run_session(expert, [benchmark], None, root=tmp_path)
    assert again.path == first.path
    assert (first.path / "samples.jsonl").stat().st_size == size
    blank = run_session(expert, [benchmark], None, Settings(memory="blank"), root=tmp_path)
    assert blank.path != first.path
    assert blank.summaries()["two"]["f1"] < first.summaries()["two"]["f1"]
    swapped = run_session(expert, [benchmark], None, Settings(memory="swap"), root=tmp_path)
    assert swapped.summaries()["two"]["f1"] < first.summaries()["two"]["f1"]
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(UserError, match="questions was 5 there and is 4 now"):
        run_session(expert, [Benchmark(**{**vars(benchmark), "questions": 4})], first.path)


def test_the_garbage_collector_is_left_as_it_was(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    class Watching(SlowSubject):
        def player(self, *arguments: Any) -> Any:
            seen.append((gc.get_threshold()[0], gc.get_freeze_count()))
            return super().player(*arguments)

    before = gc.get_threshold()
    benchmark = Benchmark("lookup", (), LOOKUP)
    run_session(Watching(), [benchmark], tmp_path / "run")
    assert all(threshold > before[0] and frozen > 10_000 for threshold, frozen in seen) and seen
    with pytest.raises(UserError, match="other settings"):
        run_session(Watching(), [benchmark], tmp_path / "run", Settings(seed=1))
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


def evaluate_until(folder: Path, at: int, found: Any) -> None:
    """Play; at event number ``at`` of those that touch the disk the process kills itself. Counts them in ``found``."""

    def counted(name: str, call: Any) -> Any:
        def happens(*args: Any, **kwargs: Any) -> Any:
            found[name] = found.get(name, 0) + 1
            if sum(found.values()) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return happens

    store.SYNC_SECONDS = 0.0
    for place, name in ((os, "fsync"), (store, "_line"), (Path, "replace"), (Path, "write_text")):
        setattr(place, name, counted(name, getattr(place, name)))
    run_session(SlowSubject(), [Benchmark("lookup", (), LOOKUP, samples=2)], folder, Settings(concurrency=3))


def test_killed_at_every_step_that_touches_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the run is named, between rows, while the summary is written, while the reports are."""
    monkeypatch.setattr("eval.session.environment", lambda: {"code": "fixed"})
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager:

        def play(folder: Path, at: int = 0) -> tuple[int | None, dict[str, int]]:
            found = manager.dict()
            child = context.Process(target=evaluate_until, args=(folder, at, found))
            child.start()
            child.join()
            return child.exitcode, dict(found)

        code, events = play(tmp_path / "whole")
        assert code == 0 and events.keys() == {"fsync", "_line", "replace", "write_text"}
        assert events["_line"] == 12 and events["replace"] == 3
        kept = {name: (tmp_path / "whole" / name).read_bytes() for name in ("summary.json", "report.html")}
        for at in range(1, sum(events.values()) + 1):
            folder = tmp_path / f"at-{at}"
            assert play(folder, at)[0] == -signal.SIGKILL
            before = [row for row in rows_of(folder) if row.endswith(b"\n")]
            assert play(folder)[0] == 0
            assert rows_of(folder)[: len(before)] == before
            ids = [json.loads(row)["id"] for row in rows_of(folder)]
            assert len(ids) == len(set(ids)) == 6
            assert {name: (folder / name).read_bytes() for name in kept} == kept
