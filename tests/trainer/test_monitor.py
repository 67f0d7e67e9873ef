"""What a run writes: rows that survive kills, dumps that read back equal, pictures of the right numbers."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from types import MappingProxyType

import pytest
from rich.console import Console

from agent.memory_score import MemoryScore
from agent.trajectory import Group, Trajectory, Turn
from envs.errors import UserError
from envs.tasks.task import Task
from trainer.monitor import Monitor
from trainer.plots import plot_arms, plot_run, series, smooth, spread
from trainer.records import StepLog, read_steps
from trainer.trajectory_io import read_rollouts, write_rollouts


def turn(text: str, memory: str | None = None, **fields) -> Turn:
    return Turn(
        prompt_ids=(1, 2, 3),
        completion_ids=(4, 5),
        logprobs=(-0.1, -1 / 3),
        sampled=(True, False),
        memory_span=None if memory is None else (0, 1),
        memory=memory,
        text=text,
        observation="Question: Q?\n",
        **fields,
    )


@pytest.fixture
def groups() -> list[Group]:
    task = Task(
        "peru-1",
        ("Capital of Peru?", "River of Cairo?"),
        (("Lima", "Ciudad de los Reyes"), ("Nile",)),
        source="factbook/train",
        metadata=MappingProxyType(
            {"hops": 2, "chain": ({"q": "π", "n": (1, 2.5)}, [None, True]), "by": {1: "x"}}
        ),
    )
    played = (
        turn(
            "<mem>look up\nthe capital</mem><think>search it</think><search>capital of Peru</search>",
            memory="look up\nthe capital",
            information="Doc 1(Title: Lima) " + "Lima is the capital. " * 200,
            query="capital of Peru",
        ),
        turn("<think>oops", information="no action found", invalid="no action", finish="length"),
        turn("<mem>Lima</mem><answer>Lima; Nile</answer>", memory="Lima", weight_version=7),
    )
    won = Trajectory(
        0, played, 1.0, "answer", True, False, answer="Lima; Nile", scores={"reward": 1.0, "f1": 0.75}
    )
    lost = Trajectory(3, (), math.nan, "window", terminated=False, truncated=True)
    other = Task("cairo", ("River of Cairo?",), (("Nile",),))
    return [Group(task, (won, lost)), Group(other, (replace(won, sample=1, reward=-0.1),))]


@pytest.fixture
def scores() -> list[list[list[MemoryScore]]]:
    row = [MemoryScore(0.125, 0.5, True), MemoryScore(None, 1 / 3), MemoryScore(0.875, 0.25)]
    return [[row, []], [row]]


def steps(path) -> list[dict]:
    return list(read_steps(path))


# --- rows ---


def test_rows_are_whole_ordered_and_on_the_disk(tmp_path):
    log = StepLog(tmp_path / "runs" / "m.jsonl")
    log.append(1, {"a": 0.1 + 0.2, "b": math.nan, "c": {"d": [math.inf, 2]}})
    assert (tmp_path / "runs" / "m.jsonl").read_text() == (
        '{"step": 1, "a": 0.30000000000000004, "b": null, "c": {"d": [null, 2]}}\n'
    )
    log.append(3, {})
    for step in (3, 2):
        with pytest.raises(ValueError, match=f"step {step} comes after step 3"):
            log.append(step, {})
    assert [row["step"] for row in steps(log.path)] == [1, 3]


def test_a_resumed_log_is_cut_back_to_its_step(tmp_path):
    path = tmp_path / "m.jsonl"
    log = StepLog(path)
    for step in range(1, 6):
        log.append(step, {"value": step})
    with path.open("a") as file:
        file.write('{"step": 6, "val')
    assert [row["value"] for row in steps(path)] == [1, 2, 3, 4, 5]
    resumed = StepLog(path, start_step=3)
    assert [row["value"] for row in steps(path)] == [1, 2, 3]
    resumed.append(4, {"value": 40})
    assert [row["value"] for row in steps(path)] == [1, 2, 3, 40]
    assert [name.name for name in tmp_path.iterdir()] == ["m.jsonl"]


@pytest.mark.parametrize("line", ["not json", "[1]", '{"value": 1}', '{"step": "1"}'])
def test_a_row_that_is_none_is_named(line, tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(UserError, match=r"m\.jsonl, line 2: "):
        steps(path)
    with pytest.raises(UserError, match="does not exist"):
        steps(tmp_path / "none.jsonl")


# --- monitor ---


class Clock:
    """Seconds that go on only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain_console() -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    return Console(file=written, force_terminal=False, width=60), written


def run_steps(folder, clock: Clock, first: int, last: int, **settings) -> str:
    console, written = plain_console()
    with Monitor(folder, 5, start_step=first - 1, console=console, clock=clock, **settings) as monitor:
        for step in range(first, last + 1):
            with monitor.phase("rollout"):
                clock.now += 2.0
            with monitor.phase("update"):
                clock.now += 1.0
            with monitor.phase("rollout"):
                clock.now += 0.5
            clock.now += 0.5
            metrics = {"score/em": step / 10, "reward/mean": step / 4, "memory/r_mem": -0.5, "other": 1.0}
            monitor.step(step, metrics, tokens=8000)
    return written.getvalue()


def test_a_step_is_written_timed_and_shown(tmp_path):
    shown = run_steps(tmp_path, Clock(), 1, 2)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines()[0] == (
        '{"step": 1, "memory/r_mem": -0.5, "other": 1.0, "reward/mean": 0.25, "score/em": 0.1}'
    )
    timing = steps(tmp_path / "timings.jsonl")[1]
    assert timing["seconds"] == 4.0 and timing["tokens_per_second"] == 2000.0
    assert timing["phases"] == {"rollout": 2.5, "update": 1.0}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", timing["at"])
    assert shown.splitlines() == [
        "step 1/5  reward 0.250  EM 0.10  R_M -0.500  2,000 tokens/s  0m16s left",
        "step 2/5  reward 0.500  EM 0.20  R_M -0.500  2,000 tokens/s  0m12s left",
    ]


def test_metrics_hold_no_clock_time(tmp_path):
    slow = Clock()
    run_steps(tmp_path / "a", Clock(), 1, 3)
    slow.now = 5e6
    run_steps(tmp_path / "b", slow, 1, 3)
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == (tmp_path / "b/metrics.jsonl").read_bytes()


def test_a_resumed_run_leaves_the_same_files(tmp_path, groups):
    run_steps(tmp_path / "whole", Clock(), 1, 5)
    run_steps(tmp_path / "cut", Clock(), 1, 4)
    monitor = Monitor(tmp_path / "cut", 5, start_step=4, console=plain_console()[0])
    for step in (2, 4):
        monitor.episodes(step, groups)
        monitor.rollouts(step, groups)
    run_steps(tmp_path / "cut", Clock(), 3, 5)
    whole, cut = (tmp_path / name / "metrics.jsonl" for name in ("whole", "cut"))
    assert whole.read_bytes() == cut.read_bytes()
    assert [row["step"] for row in steps(tmp_path / "cut" / "timings.jsonl")] == [1, 2, 3, 4, 5]
    for kind in ("episodes/step-0002.md", "rollouts/step-0002.jsonl"):
        assert (tmp_path / "cut" / kind).is_file()
    for kind in ("episodes/step-0004.md", "rollouts/step-0004.jsonl"):
        assert not (tmp_path / "cut" / kind).exists()


def test_phases_do_not_nest(tmp_path):
    monitor = Monitor(tmp_path, 1, console=plain_console()[0])
    with (
        monitor.phase("a"),
        pytest.raises(RuntimeError, match="'b' begins within another"),
        monitor.phase("b"),
    ):
        pass
    with pytest.raises(KeyError), monitor.phase("fails"):
        raise KeyError
    with monitor.phase("c"):
        pass


def test_a_terminal_has_one_line_that_is_kept_up_to_date(tmp_path):
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=140)
    with Monitor(tmp_path, 3, console=console, clock=Clock()) as monitor:
        monitor.step(1, {"reward/mean": 0.5}, tokens=10)
        monitor.say("saved [checkpoint]")
    screen = written.getvalue()
    assert "reward 0.500" in screen and "1/3" in screen and "saved [checkpoint]" in screen


def test_tensorboard_gets_the_metrics(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_steps(tmp_path, Clock(), 1, 3, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [
        (1, 0.25),
        (2, 0.5),
        (3, 0.75),
    ]


# --- dumps ---


def test_rollouts_come_back_equal(tmp_path, groups, scores):
    path = tmp_path / "new" / "step.jsonl"
    write_rollouts(path, groups, scores)
    read, read_scores = read_rollouts(path)
    assert read == groups and read_scores == scores
    assert isinstance(read[0].task.metadata["chain"], tuple)
    assert all(json.loads(line)["format"] == 1 for line in path.read_text().splitlines())
    write_rollouts(path, groups)
    assert read_rollouts(path) == (groups, None)
    write_rollouts(path, [])
    assert read_rollouts(path) == ([], None)


def test_text_that_is_no_unicode_comes_back_too(tmp_path, groups):
    odd = Group(replace(groups[1].task, id="lone \ud800", questions=("‹π›\u2028",)), groups[1].trajectories)
    write_rollouts(tmp_path / "r.jsonl", [odd])
    assert read_rollouts(tmp_path / "r.jsonl")[0] == [odd]


def test_rollouts_of_another_shape_are_refused(tmp_path, groups, scores):
    path = tmp_path / "r.jsonl"
    with pytest.raises(ValueError, match="'peru-1' do not have the shape"):
        write_rollouts(path, groups, [scores[0][:1], scores[1]])
    with pytest.raises(ValueError, match="zip"):
        write_rollouts(path, groups, scores[:1])
    assert not path.exists()
    write_rollouts(path, groups)
    whole = path.read_text()
    for bad in (whole.replace('"format": 1', '"format": 2'), whole[:-30], '{"format": 1}\n', "[]\n"):
        path.write_text(bad)
        with pytest.raises(UserError, match=r"r\.jsonl, line \d: "):
            read_rollouts(path)
    with pytest.raises(UserError, match="does not exist"):
        read_rollouts(tmp_path / "none")


def test_the_episode_dump_reads_like_an_episode(tmp_path, groups, scores):
    monitor = Monitor(tmp_path, 1, console=plain_console()[0])
    path = monitor.episodes(
        12, groups, scores, [[0.7071, 0.0], [0.0]], [[[1.25, 0.0, -0.5], []], [[0.0, 0.0, 0.0]]], limit=1
    )
    text = path.read_text()
    assert path.name == "step-0012.md"
    for expected in (
        "# Episodes of step 12",
        "## Task peru-1 (factbook/train)",
        "2. **Question:** River of Cairo?",
        "**Gold:** Lima | Ciudad de los Reyes",
        "### Rollout 0: reward 1, ended by answer, f1 0.75, 15 tokens, peak 5, A_T +0.71",
        "**Turn 1** (3 + 2 tokens, P_mem 0.125, P_full 0.500 (transcript cut), R_M -0.375, A_M +1.25)",
        "- memory: look up\n  the capital",
        "- thought: search it",
        "- search: capital of Peru",
        "> Doc 1(Title: Lima) Lima is the capital.",
        "**Turn 2** (3 + 2 tokens)",
        "- memory: (none)",
        "- invalid: no action\n- as written: <think>oops",
        "- generation ended by: length",
        "**Turn 3** (3 + 2 tokens, P_mem 0.875, P_full 0.250, R_M +0.625, A_M -0.50)",
        "- answer: Lima; Nile",
        "**Answer:** Lima; Nile",
        "### Rollout 3: reward not scored, ended by window",
    ):
        assert expected in text, expected
    assert "cairo" not in text and "[…]" in text and len(text) < 4000
    bare = monitor.episodes(13, groups).read_text()
    assert "P_mem" not in bare and "A_T" not in bare and "## Task cairo" in bare


# --- pictures ---

ROWS = [
    {
        "step": step,
        "reward/mean": step / 10,
        "memory/p_mem": None if step == 2 else 0.5,
        "tokens/total": 300 - step,
    }
    for step in range(1, 8)
]


def test_series_leave_out_what_is_not_known():
    assert series(ROWS, "memory/p_mem") == ([1, 3, 4, 5, 6, 7], [0.5] * 6)
    assert series([{"step": 1, "x": math.inf}, {"step": 2, "x": 3}], "x") == ([2], [3.0])
    assert series(ROWS, "none") == ([], [])


def test_smoothing_worked_out_by_hand():
    # weights 0.3, 0.7 * 0.3 of the value before: (0.21 * 1 + 0.3 * 3) / 0.51
    assert smooth([1.0, 3.0]) == pytest.approx([1.0, 1.11 / 0.51])
    assert smooth([2.0] * 5) == pytest.approx([2.0] * 5)
    assert smooth([]) == []


def test_spread_of_seeds():
    runs = [([1, 2], [0.0, 0.0]), ([1, 2, 3], [1.0, 1.0, 1.0]), ([1, 2], [0.5, 0.5])]
    found = spread(runs)
    assert found[0] == [1, 2]
    for values, expected in zip(found[1:], ([0.0, 0.0], [0.5, 0.5], [1.0, 1.0]), strict=True):
        assert values == pytest.approx(expected)
    assert spread([]) == ([], [], [], [])


def test_pictures_are_made_and_repeat_to_the_byte(tmp_path):
    for name in ("a", "b"):
        plot_run(ROWS, tmp_path / name / "curve.png", "tiny")
        plot_arms(
            {"mempo": [ROWS, ROWS[:5]], "grpo": [ROWS]},
            {"reward/mean": "reward"},
            tmp_path / name / "arms.png",
        )
    for picture in ("curve.png", "arms.png"):
        first = (tmp_path / "a" / picture).read_bytes()
        assert first[:8] == b"\x89PNG\r\n\x1a\n" and first == (tmp_path / "b" / picture).read_bytes()
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_run([], tmp_path / "none.png")
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_arms({}, {"a": "b"}, tmp_path / "none.png")


def test_the_picture_shows_the_numbers(tmp_path, monkeypatch):
    """The lines that are drawn are the metrics: read back from the figure."""
    import trainer.plots

    drawn = []
    monkeypatch.setattr(trainer.plots, "_save", lambda figure, path: drawn.append(figure))
    plot_run(ROWS, tmp_path / "x.png")
    outcome, memory, tokens = drawn[0].axes
    assert [line.get_ydata().tolist() for line in outcome.lines[:1]] == [[row["reward/mean"] for row in ROWS]]
    assert outcome.lines[1].get_ydata().tolist() == pytest.approx(
        smooth([row["reward/mean"] for row in ROWS])
    )
    assert [text.get_text() for text in outcome.get_legend().get_texts()] == ["reward"]
    assert memory.lines[0].get_xdata().tolist() == [1, 3, 4, 5, 6, 7]
    assert tokens.lines[0].get_ydata().tolist() == [300 - step for step in range(1, 8)]
    plot_run([{"step": 1}], tmp_path / "y.png")
    assert [text.get_text() for axis in drawn[1].axes for text in axis.texts] == ["not measured"] * 3
