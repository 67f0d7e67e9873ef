"""Drawing more where groups carry no signal: what is dropped, counted, drawn again and kept."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from agent.rollout import Limits, RolloutReport
from agent.trajectory import Group, Trajectory, Turn
from envs.tasks.task import Task
from trainer import loop
from trainer.config import load_config
from trainer.questions import Draw


def group(name: str, *rewards: float) -> Group:
    turn = Turn((1,), (2, 3), (-1.0, -1.0), (True, True), None, None, "text", "observation")
    trajectories = (Trajectory(i, (turn,), reward, "answer", True, False) for i, reward in enumerate(rewards))
    return Group(Task(name, ("q",), (("a",),)), tuple(trajectories))


def gathered(
    monkeypatch: pytest.MonkeyPatch, batches: list[list[Group]], *overrides: str
) -> tuple[loop.Experience, list[tuple[int, int, int]]]:
    """Groups come from ``batches`` in place of rollouts; the draws that were asked for are noted."""
    asked: list[tuple[int, int, int]] = []

    def draw(step: int, count: int, attempt: int) -> list[str]:
        asked.append((step, count, attempt))
        return ["draw"] * count

    def roll_out(
        run: Any, draws: list[str], step: int, dropped: Any, attempt: int
    ) -> list[tuple[int, Group]]:
        assert attempt == asked[-1][2]
        played = batches[len(asked) - 1]
        dropped["engine"] += len(draws) - len(played)
        return [(0, group) for group in played]

    monkeypatch.setattr(loop, "roll_out", roll_out)
    config = load_config("dapo", ["rollout.questions_per_step=3", *overrides])
    monitor = SimpleNamespace(phase=lambda name: nullcontext())
    run: Any = SimpleNamespace(config=config, questions=SimpleNamespace(draw=draw), monitor=monitor)
    return loop.gather(run, 7), asked


def test_groups_without_signal_are_replaced_until_the_step_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    experience, asked = gathered(
        monkeypatch,
        [
            [group("right", 1, 1), group("mixed", 0, 1), group("wrong", 0, 0)],
            [group("wrong too", 0, 0)],  # and one whose machinery failed
            [group("mixed too", 1, 0), group("mixed as well", 1, 0)],
        ],
    )
    assert asked == [(7, 3, 0), (7, 2, 1), (7, 2, 2)]
    assert [g.task.id for g in experience.groups] == ["mixed", "mixed too", "mixed as well"]
    assert +experience.dropped == {"all_equal": 1, "all_zero": 2, "engine": 1}
    assert len(experience.advantages) == 3 and {row.question for row in experience.rows} == {0, 1, 2}
    assert len({row.trajectory for row in experience.rows}) == 6


def test_draws_end_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = [[group("wrong", 0, 0)]] * 9
    experience, asked = gathered(monkeypatch, nothing, "rollout.max_redraws=2")
    assert len(asked) == 3 and experience.rows == [] and experience.dropped["all_zero"] == 3


def test_without_the_setting_nothing_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = [[group("right", 1, 1), group("mixed", 0, 1)]]
    experience, asked = gathered(monkeypatch, batch, "algorithm.drop_groups_without_signal=false")
    assert asked == [(7, 3, 0)] and len(experience.groups) == 2


def test_rollouts_get_their_limits_and_come_back_with_their_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two environments, each under its own rules; a group that failed is counted."""
    asked: dict[str, Any] = {}
    failing = {"engine": 1}

    async def collect_groups(tasks: Any, make_env: Any, engine: Any, prompts: str, **settings: Any) -> Any:
        asked[prompts] = (tasks, settings["limits"], settings["samples"], settings["step"], settings["draw"])
        return [group(task.id, 0, 1) for task in tasks if task.id != "c"], RolloutReport(
            dropped=Counter(failing), errors=["the engine went away"]
        )

    monkeypatch.setattr(loop, "collect_groups", collect_groups)
    config = load_config("tiny", ["rollout.step_seconds=5", "rollout.episode_seconds=60.5"])
    questions = SimpleNamespace(environment=lambda index, task: None)
    run: Any = SimpleNamespace(config=config, questions=questions, sampler=None, prompts=["one", "two"])
    tasks = {name: Task(name, ("q",), (("a",),)) for name in "abc"}
    draws = [Draw(1, tasks["a"]), Draw(0, tasks["b"]), Draw(1, tasks["c"])]
    dropped: Counter[str] = Counter()
    played = loop.roll_out(run, draws, 3, dropped, 2)
    assert [(index, group.task.id) for index, group in played] == [(0, "b"), (1, "a")]
    assert dropped == {"engine": 2}
    assert asked["one"] == ([tasks["b"]], Limits(5.0, None, 60.5), 16, 3, 2)
    assert asked["two"][0] == [tasks["a"], tasks["c"]]

    for causes in ({"engine": 2}, {"timeout": 2}, {"engine": 1, "environment": 1}, {"environment": 2}):
        failing.clear()
        failing.update(causes)
        with pytest.raises(loop.NothingPlayed, match=r"step 3: not one group could.*the engine went away"):
            loop.roll_out(run, draws[:2] + draws[:2], 3, Counter())
    assert len(loop.roll_out(run, draws, 3, Counter(), attempt=1)) == 2  # the step has others
