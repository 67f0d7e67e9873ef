"""Playing: records, seeds, failures, and what happens when the memory is taken away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from agent.engines.scripted import ScriptedPlayer
from agent.rollout import EpisodeError
from envs.base import MemoryEnv, Tool
from envs.errands_player import ErrandsPlayer
from envs.errors import UserError
from envs.grammar import ToolCall
from envs.registry import register
from envs.stream_readers import ChainReader
from envs.tasks import Task
from eval import benchmarks as registry
from eval.environments import draw_tasks, pin
from eval.episode import Sample, TurnRecord
from eval.interventions import MemoryIntervention, donors_by_task, replace_memory, swapped_memories
from eval.players import TextPlayer
from eval.runner import Evaluation, evaluate
from tests.eval.conftest import LOOKUP, TASKS, Lookup, Remembering

PLAYER = TextPlayer(lambda task, key: Remembering(task), "remembering")


def run(player: Any = PLAYER, **arguments: Any) -> Evaluation:
    return evaluate(player, **{"tasks": TASKS, "env_id": LOOKUP, **arguments})


def test_records_of_an_episode() -> None:
    sample = run().samples[0]
    assert (sample.id, sample.answer, sample.stop_reason, sample.reward) == ("q0#0", "Warsaw", "answer", 1.0)
    assert [turn.memory for turn in sample.turns] == ["start", "Warsaw", "done"]
    assert [turn.query for turn in sample.turns] == [TASKS[0].question, "something else", None]
    assert [turn.information for turn in sample.turns] == ["It is Warsaw.", "Nothing.", ""]
    assert sample.tags == {"objectives": 1, "source": "lookup", "hops": 1}
    first, second, _ = sample.turns
    # Words: "Question: What is the capital of Poland?"; then also the carried step and its information.
    assert first.prompt_tokens == 7
    assert first.completion_tokens == len(
        ["<mem>start</mem><search>What", "is", "the", "capital", "of", "Poland?</search>"]
    )
    assert second.prompt_tokens == 7 + first.completion_tokens + len(
        ["<information>It", "is", "Warsaw.</information>"]
    )
    assert (first.memory_tokens, first.observation_tokens) == (1, 3)


def test_json_there_and_back() -> None:
    import json

    for sample in run().samples:
        assert Sample.from_json(json.loads(json.dumps(sample.to_json()))) == sample


def test_what_is_done_to_a_row_is_not_done_to_its_sample() -> None:
    sample = run().samples[0]
    row = sample.to_json()
    row["tags"]["hops"] = row["turns"][0]["text"] = "changed"
    assert "changed" not in str(sample)


def test_an_evaluation_prints_short() -> None:
    """Whatever ran it may print its result: asyncio does, when it puts the handler of an interrupt back."""
    assert "Warsaw" not in repr(run()) and len(repr(run())) < 100


def test_summary_for_the_trainer() -> None:
    summary = run().summary()
    assert summary["em"] == summary["f1"] == 1.0
    assert {"total_tokens", "peak_tokens"} <= set(summary["intervals"])
    assert summary["intervals"]["em"] == [pytest.approx(0.438, abs=1e-3), 1.0]  # Wilson, 3 of 3
    assert summary["by"]["hops"]["1"]["n"] == 2


def test_memory_taken_away_hurts() -> None:
    kept = run(samples=2)
    assert kept.summary()["em"] == 1.0
    blank = run(samples=2, memory="blank")
    assert [sample.answer for sample in blank.samples] == ["unknown"] * 6
    # What the policy wrote is recorded as it wrote it; only what the environment carries was edited.
    assert blank.samples[0].turns[1].memory == "Warsaw"
    swapped = run(samples=2, memory="swap", donors=kept.samples)
    assert swapped.summary()["em"] == 0.0
    assert {sample.answer for sample in swapped.samples} <= {"Warsaw", "Lima", "Bamako"}
    assert run(samples=2, memory="swap", donors=kept.samples).samples == swapped.samples


def test_swap_takes_the_same_turn_of_another_task() -> None:
    def sample(task_id: str, memories: list[str | None]) -> Sample:
        turns = tuple(TurnRecord("", memory, None, "", None, "stop", 1, 1, 0, 0) for memory in memories)
        return Sample(task_id, 0, ("q",), (("a",),), None, "answer", turns)

    donors = donors_by_task([sample("a", ["a0", None, "a2"]), sample("b", ["b0"]), sample("c", [None])])
    assert set(donors) == {"a", "b"}
    assert swapped_memories(donors, "b", 0, seed=1) == ("a0", "a0", "a2")
    assert swapped_memories(donors, "a", 0, seed=1) == ("b0",)
    assert {swapped_memories(donors, "x", i, seed=1)[0] for i in range(20)} == {"a0", "b0"}
    assert swapped_memories({"a": donors["a"]}, "a", 0, seed=1) == ()


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("<mem>old</mem><answer>x</answer>", "<mem>new</mem><answer>x</answer>"),
        ("so <mem>old\nlines</mem>\n<search>q</search>", "so <mem>new</mem>\n<search>q</search>"),
        ("<search>q</search>", "<search>q</search>"),
        ("<mem>unclosed <search>q</search>", "<mem>unclosed <search>q</search>"),
        ("<search>q</search><mem>late</mem>", "<search>q</search><mem>late</mem>"),
    ],
)
def test_replace_memory(action: str, expected: str) -> None:
    assert replace_memory(action, "new") == expected


def test_intervention_keeps_the_turn_count_over_episodes() -> None:
    env = MemoryIntervention(gym.make(LOOKUP), ("first", "second"))
    for _ in range(2):
        env.reset(options={"index": 0})
        memories = [env.step("<mem>mine</mem><search>q</search>")[4]["memory"] for _ in range(3)]
        assert memories == ["first", "second", "second"]


class Slow:
    """Finishes its episodes in an order of its own and counts how many run at once."""

    def __init__(self, fail: int = 0) -> None:
        self.running = self.most = 0
        self.keys: list[tuple[int | str, ...]] = []
        self.fail = fail

    def identity(self) -> dict[str, Any]:
        return {"name": "slow"}

    async def play(self, env: gym.Env[str, str], task: Task, sample: int, seed_key: Any) -> Sample:
        self.running += 1
        self.most = max(self.most, self.running)
        self.keys.append(seed_key)
        await asyncio.sleep(0.01 if (len(self.keys) % 3) else 0.03)
        self.running -= 1
        if self.fail:
            self.fail -= 1
            raise EpisodeError("engine", "the server went away\nwith a long story")
        return Sample(task.id, sample, task.questions, task.golds, task.golds[0][0], "answer", ())


def test_concurrency_is_bounded_and_changes_nothing() -> None:
    narrow, wide = Slow(), Slow()
    one = run(narrow, samples=4, concurrency=2)
    other = run(wide, samples=4, concurrency=12)
    assert (narrow.most, wide.most) == (2, 12)
    assert one.samples == other.samples
    assert [sample.id for sample in one.samples] == [f"q{i}#{k}" for i in range(3) for k in range(4)]
    assert set(narrow.keys) == set(wide.keys) == {("eval", 0, f"q{i}", k) for i in range(3) for k in range(4)}


def test_failures_are_tried_again_and_then_counted_apart() -> None:
    again = Slow(fail=2)
    assert run(again, concurrency=1).summary()["errors"] == 0
    assert len(again.keys) == 5
    given_up = run(Slow(fail=3), concurrency=1)
    summary = given_up.summary()
    assert (summary["attempted"], summary["completed"], summary["errors"]) == (3, 2, 1)
    assert summary["em"] == pytest.approx(2 / 3)
    assert summary["completed_only"]["em"] == 1.0
    assert given_up.samples[0].error == "EpisodeError: the server went away"
    with pytest.raises(UserError, match="every sample failed; the first one: EpisodeError: the server went"):
        run(Slow(fail=100))


def test_a_failing_environment_is_not_a_wrong_answer() -> None:
    Lookup.failures = ["the tool broke"]
    assert run(concurrency=1).summary()["em"] == 1.0
    Lookup.failures = ["the tool broke"] * 3
    failed = run(concurrency=1).samples[0]
    assert (failed.error, failed.answer) == ("EpisodeError: RuntimeError: the tool broke", None)


def test_progress_and_skipping() -> None:
    seen = []
    found = run(skip={"q1#0"}, on_sample=lambda sample, seconds, progress: seen.append((sample.id, progress)))
    assert [sample.id for sample in found.samples] == ["q0#0", "q2#0"]
    assert [name for name, _ in seen] == ["q0#0", "q2#0"]
    last = seen[-1][1]
    assert (last.done, last.total, last.errors, last.em) == (2, 2, 0, 1.0)
    assert last.seconds_left == 0.0


def test_tasks_by_index() -> None:
    assert [(task.id, task.golds) for task in draw_tasks(LOOKUP, {})] == [(t.id, t.golds) for t in TASKS]
    assert [task.id for task in draw_tasks(LOOKUP, {}, 2)] == ["q0", "q1"]
    with pytest.raises(UserError, match="index 3"):
        draw_tasks(LOOKUP, {}, 4)
    kwargs = {"tasks": "factbook-tiny:heldout", "objectives": 4}
    tasks = draw_tasks("mempo/MultiObjectiveQA-v0", kwargs, 20)
    assert len({question for task in tasks for question in task.questions}) == 80


class Drawers(MemoryEnv):
    """Keeps an episode's state where it draws the task, as the skeleton of a new environment does."""

    tools = (Tool("open", "opens the drawer", {"which": "any"}),)
    by_index = True

    def draw_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        index = int(options["index"]) if self.by_index and "index" in options else int(rng.integers(10**6))
        self.inside = f"thing {index}"
        return Task(f"drawer/{index}", ("What is in it?",), ((self.inside,),))

    def execute(self, call: ToolCall) -> str:
        return self.inside

    def score(self, answer: str, task: Task) -> Mapping[str, float]:
        return {"reward": float(answer == task.golds[0][0])}


register("mempotest/Drawers-v0", "tests.eval.test_runner:Drawers")


class Forgetting(Drawers):
    """Draws from what it has drawn before, which no seed repeats."""

    drawn = 0

    def draw_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        type(self).drawn += 1
        return super().draw_task(rng, {"index": self.drawn})


register("mempotest/Forgetting-v0", "tests.eval.test_runner:Forgetting")


def test_a_task_that_is_not_drawn_again_is_refused_and_not_played_in_another_state() -> None:
    [task] = draw_tasks("mempotest/Forgetting-v0", {}, 1)
    env = pin(gym.make("mempotest/Forgetting-v0", disable_env_checker=True), task)
    with pytest.raises(
        UserError, match=r"Forgetting: task 'drawer/1' was drawn with .* is not drawn by it again"
    ):
        env.reset(seed=0)


class Opening:
    """Opens the drawer and says what it saw."""

    def act(self, observation: str, info: Mapping[str, Any]) -> str:
        if info["turn"] == 0:
            return '<mem>m</mem><tool_call>{"name": "open", "arguments": {"which": "it"}}</tool_call>'
        return f"<mem>m</mem><answer>{info['information']}</answer>"


@pytest.mark.parametrize("by_index", [True, False])
def test_the_world_of_an_episode_is_that_of_its_task(by_index: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `draw_task` sets up belongs to the task that is played, also in an environment that is used again."""
    monkeypatch.setattr(Drawers, "by_index", by_index)
    tasks = draw_tasks("mempotest/Drawers-v0", {}, 5)
    assert len({task.id for task in tasks}) == 5
    found = run(
        TextPlayer(lambda task, key: Opening(), "opening"),
        tasks=tasks[::-1],
        env_id="mempotest/Drawers-v0",
        samples=2,
    )
    assert [sample.answer for sample in found.samples] == [
        t.golds[0][0] for t in tasks[::-1] for _ in range(2)
    ]


def test_errands_are_those_of_the_task() -> None:
    env: Any = pin(gym.make("mempo/Errands-v0"), draw_tasks("mempo/Errands-v0", {}, 3)[2])
    env.reset(seed=5)
    assert env.unwrapped.task.id == "errands/7x3/2"
    assert env.unwrapped.task.golds == tuple((errand.word,) for errand in env.unwrapped.house.errands)


BEST: dict[str, Callable[[Task], ScriptedPlayer]] = {
    "errands": lambda task: ErrandsPlayer(),
    "haystack-tiny": ChainReader,
}


@pytest.mark.parametrize("benchmark", BEST)
def test_embedded_benchmarks_without_a_search_can_be_won(benchmark: str) -> None:
    found = registry.get(benchmark)
    tasks = replace(found, questions=4).load()
    player = BEST[benchmark]
    summary = evaluate(
        TextPlayer(lambda task, key: player(task), "good"),
        tasks=tasks,
        env_id=found.env,
        env_kwargs=found.kwargs(),
    ).summary()
    assert (summary["em"], summary["errors"]) == (1.0, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tasks": []}, "no task"),
        ({"tasks": [TASKS[0], TASKS[0]]}, "'q0' occurs twice"),
        ({"samples": 0}, "at least 1"),
        ({"memory": "blnak"}, "did you mean 'blank'"),
        ({"memory": "swap"}, "memory 'keep'"),
        ({"env_id": "mempotest/Lookpu-v0"}, "did you mean 'mempotest/Lookup-v0'"),
        ({"env_kwargs": {"colour": 1}}, "colour"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(**arguments)
