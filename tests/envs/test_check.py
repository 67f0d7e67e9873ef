"""The checker passes what is right and names what is wrong: each rule is broken once by an environment."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check

import envs
from envs.base import MemoryEnv, Tool
from envs.check import CheckFailed, broken_blocks, check_env
from envs.errors import UserError
from envs.grammar import ToolCall
from envs.tasks import Task

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("id", envs.list_ids())
def test_every_registered_environment_passes_both_checks(id: str) -> None:
    gymnasium_check(envs.make(id).unwrapped)
    assert len(check_env(id)) == 11


@pytest.mark.parametrize("id", envs.list_ids())
def test_a_random_agent_can_step_them(id: str) -> None:
    env = envs.make(id, max_turns=8)
    env.action_space.seed(0)
    reasons = set()
    for seed in range(30):
        _, info = env.reset(seed=seed)
        while info["stop_reason"] is None:
            observation, _, terminated, truncated, info = env.step(env.action_space.sample())
            assert observation in env.observation_space and not (terminated and truncated)
        reasons.add(info["stop_reason"])
    assert reasons == {"answer", "max_turns"}


class Fine(MemoryEnv):
    """Passes; the others below break one thing each."""

    tools = (Tool("look", "looks", {"at": "what"}),)

    def draw_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        return Task(f"t{rng.integers(9)}", ("What?",), (("gold",),))

    def execute(self, call: ToolCall) -> str:
        return f"you see {call.arguments['at']}"

    def score(self, answer: str, task: Task) -> Mapping[str, float]:
        return {"reward": float(answer == task.golds[0][0])}


class NoTools(Fine):
    tools = ()


class LeaksInQuestion(Fine):
    def show_question(self, task: Task) -> str:
        return f"What? (not {task.golds[0][0]})"


class LeaksInTool(Fine):
    def execute(self, call: ToolCall) -> str:
        return f"the answer is {self.task.golds[0][0]}"


class GlobalRandom(Fine):
    def execute(self, call: ToolCall) -> str:
        return f"you see {random.random()}"


class UnseededState(Fine):
    count = 0

    def execute(self, call: ToolCall) -> str:
        self.count += 1
        return f"call {self.count}"


class Raises(Fine):
    def _check(self, call: ToolCall) -> None:
        if call.name == "no-such-tool":
            raise KeyError(call.name)
        super()._check(call)


class ForgetsMemory(Fine):
    def _keep(self, memory: str) -> str | None:
        return None


class KeepsMemory(Fine):
    def step(self, action: str) -> Any:
        kept = self._memory
        result = super().step(action)
        return (f"{result[0]}<mem>{kept}</mem>" if kept else result[0], *result[1:])


class BreaksBlocks(Fine):
    def _observe(self, *arguments: Any) -> Any:
        observation, info = super()._observe(*arguments)
        return observation.replace("‹", "<"), info


class NanInfo(Fine):
    def _observe(self, *arguments: Any) -> Any:
        observation, info = super()._observe(*arguments)
        return observation, {**info, "extra": {"loss": float("nan")}}


class SharedInfo(Fine):
    shared: list[int] = []

    def _observe(self, *arguments: Any) -> Any:
        observation, info = super()._observe(*arguments)
        return observation, {**info, "extra": self.shared}


class WrongReward(Fine):
    def step(self, action: str) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, reward + float(rest[0]), *rest


class NoReward(Fine):
    def score(self, answer: str, task: Task) -> Mapping[str, float]:
        return {"em": 1.0}


class NoOptions(Fine):
    def reset(self, *, seed: int | None = None) -> Any:  # type: ignore[override]
        return super().reset(seed=seed)


class NeverEnds(Fine):
    def _why_stop(self) -> str | None:
        return None


class AnswersAgain(Fine):
    def step(self, action: str) -> Any:
        self._playing = True
        return super().step(action)


def test_a_right_environment_passes() -> None:
    assert len(check_env(Fine())) == 10


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (NoTools, "has no tools"),
        (LeaksInQuestion, "a gold answer of the task is in an observation"),
        (LeaksInTool, "a gold answer of the task is in an observation"),
        (GlobalRandom, "global generator"),
        (UnseededState, "two different episodes"),
        (Raises, "raised KeyError"),
        (ForgetsMemory, "memory is not in the observation"),
        (KeepsMemory, "still there after a turn that wrote none"),
        (BreaksBlocks, "opens inside think"),
        (NanInfo, r"info\['extra'\]\['loss'\] is nan"),
        (SharedInfo, r"info\['extra'\] is the same object"),
        (WrongReward, r"the reward is 1.0, but the scores are \{'reward': 0.0\}"),
        (NoOptions, "Gymnasium's own check: .*options"),
        (NeverEnds, "goes on after max_turns"),
        (AnswersAgain, "a second answer was accepted"),
    ],
)
def test_what_is_wrong_is_named(broken: type[MemoryEnv], message: str) -> None:
    with pytest.raises(CheckFailed, match=message):
        check_env(broken())


def test_a_score_without_a_reward_is_named() -> None:
    with pytest.raises(KeyError, match=r"NoReward.score\(\) gives \['em'\], but no 'reward'"):
        check_env(NoReward())


def test_only_our_environments_are_checked() -> None:
    import gymnasium

    with pytest.raises(UserError, match="is no MemoryEnv"):
        check_env(gymnasium.make("CartPole-v1"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Question: q\n<mem>m</mem><information>i</information>\nTurns left: 3", None),
        ("a < b > c <br> <memory>", None),
        ("<mem>m", "mem is not closed"),
        ("</mem>", "'</mem>' closes nothing at 0"),
        ("<mem><think></think></mem>", "'<think>' opens inside mem at 5"),
        ("<information></information></ Information >", "'</ Information >' closes nothing at 27"),
        ("<information>a<Mem x='1'>", "\"<Mem x='1'>\" opens inside information at 14"),
    ],
)
def test_broken_blocks(text: str, problem: str | None) -> None:
    assert broken_blocks(text) == problem


EPISODES = """
import json
import envs
from envs.check import plausible_calls

for id in envs.list_ids():
    env = envs.make(id, max_turns=6)
    for seed in (0, 1, 2**40):
        steps = [env.reset(seed=seed)]
        env.action_space.seed(seed)
        for call in plausible_calls(env.unwrapped)[:3]:
            steps.append(env.step(f"<mem>{env.action_space.sample()[:20]}</mem>{call}"))
        steps += [env.step("<answer>test</answer>"), env.reset()]  # the last goes on from the seed
        for step in steps:
            print(json.dumps([id, seed, *step]))
"""


def test_two_processes_with_one_seed_see_the_same_episodes() -> None:
    """Every id, in two processes that run side by side and hash texts differently."""
    started = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", EPISODES]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
    first, second = (process.communicate(timeout=300)[0] for process in started)
    assert [process.returncode for process in started] == [0, 0]
    assert first == second
    rows = [json.loads(line) for line in first.splitlines()]
    ours = [id for id in envs.list_ids() if id.startswith("mempo/")]  # other tests register their own
    assert {row[0] for row in rows} == set(ours)
    for id in ours:
        assert len({row[1] for row in rows if row[0] == id}) == 3
        seen = {row[2] for row in rows if row[0] == id}
        assert len(seen) > 9, f"{id}: seeds, turns and later episodes differ"
