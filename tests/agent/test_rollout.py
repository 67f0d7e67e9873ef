"""Rollouts with an engine and an environment written out by hand: ids in, ids out, failures apart from zeros."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import pytest
from transformers import PreTrainedTokenizerFast

from agent.engines.base import Completion, EngineError, GenerationRequest
from agent.prompts import PromptBuilder, system_prompt
from agent.rollout import EpisodeError, Limits, RolloutReport, Sampling, collect_groups, play_episode
from agent.seeds import derive
from agent.tiny import build_tokenizer
from agent.trajectory import Group, Trajectory
from envs.errors import UserError
from envs.grammar import ACTION_STOPS, parse_turn
from envs.tasks.task import Task

TOKENIZER: PreTrainedTokenizerFast = build_tokenizer(["the answer is yes"] * 50, 300)
PROMPTS = PromptBuilder(TOKENIZER)
TASKS = [Task(f"t{number}", (f"Question {number}?",), (("yes",),)) for number in range(4)]
ANSWERS = (
    "<mem>m</mem><search>a</search>",
    "<mem>n</mem><search>b</search>",
    "<answer>yes</answer>",
    "<mem>o</mem><answer>no</answer>",
    "nothing",
)


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


END = ids_of("<|im_end|>")


class Game(gym.Env[str, str]):
    """Search as often as you like, four turns at most; the answer "yes" is worth 1."""

    def __init__(self, task: Task, fail: Callable[[int], bool] = lambda turn: False) -> None:
        self.task, self.fail, self.actions, self.closed = task, fail, list[str](), False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self.actions.clear()
        return f"Question: {self.task.question}\n", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        if self.fail(len(self.actions)):
            raise OSError("the tool broke")
        parsed = parse_turn(action)
        info: dict[str, Any] = {
            "parse": {"answer": parsed.answer},
            "invalid": parsed.invalid,
            "information": "none",
        }
        if parsed.answer is not None:
            return (
                "",
                self.score(parsed.answer, self.task)["reward"],
                True,
                False,
                {**info, "stop_reason": "answer"},
            )
        over = len(self.actions) == 4
        return (
            f"Turn {len(self.actions)}",
            0.0,
            False,
            over,
            {**info, "stop_reason": "max_turns" if over else None},
        )

    def score(self, answer: str, task: Task) -> dict[str, float]:
        return {"reward": float(answer == task.golds[0][0])}

    def close(self) -> None:
        self.closed = True


class Scripted:
    """Answers by a function of the request; records requests; yields to others a random number of times."""

    weight_version, max_context = 6, 2000

    def __init__(
        self, answer: Callable[[GenerationRequest], Completion], delay_seed: int | None = None
    ) -> None:
        self.answer, self.requests = answer, list[GenerationRequest]()
        self.random = random.Random(delay_seed) if delay_seed is not None else None
        self.under_way = self.most = 0

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            for _ in range(self.random.randrange(9) if self.random else 0):
                await asyncio.sleep(0)
            return self.answer(request)
        finally:
            self.under_way -= 1

    async def close(self) -> None: ...


def done(ids: Sequence[int], finish: Any = "stop") -> Completion:
    return Completion(tuple(ids), tuple(-0.25 * (place + 1) for place in range(len(ids))), finish, 6)


def by_seed(request: GenerationRequest) -> Completion:
    return done((*ids_of(ANSWERS[request.seed % len(ANSWERS)]), *END))


def play(game: Game, engine: Scripted, prompts: PromptBuilder = PROMPTS, **options: Any) -> Trajectory:
    options = {"seed_key": (1, 2, "t0", 0), "sampling": Sampling(), **options}
    return asyncio.run(play_episode(game, engine, prompts, **options))


def collect(
    engine: Scripted, make: Callable[[Task], Game] = Game, tasks: Sequence[Task] = TASKS, **options: Any
) -> tuple[list[Group], RolloutReport]:
    settings: dict[str, Any] = {"samples": 3, "sampling": Sampling(), "run_seed": 7, "step": 3, **options}
    return asyncio.run(collect_groups(tasks, make, engine, PROMPTS, **settings))


def test_ids_of_turns_are_the_engines() -> None:
    """The letters one by one, where encoding the text again gives whole words."""
    letters = [index for letter in "the answer" for index in ids_of(letter)]
    sampled = (
        *ids_of("<mem>"),
        *letters,
        *ids_of("</mem>"),
        *ids_of("<answer>"),
        *ids_of("yes"),
        *ids_of("</answer>"),
    )
    text = "<mem>the answer</mem><answer>yes</answer>"
    assert ids_of(text) != sampled
    engine = Scripted(lambda request: done((*sampled, *END)))
    result = play(Game(TASKS[0]), engine)
    [turn] = result.turns
    assert turn.completion_ids == (*sampled, *END)
    assert turn.logprobs == tuple(-0.25 * (place + 1) for place in range(len(sampled) + 1))
    assert turn.sampled == (True,) * (len(sampled) + 1)
    assert turn.text == text
    assert (turn.memory, turn.memory_span) == ("the answer", (0, 12))
    assert turn.weight_version == 6
    assert (
        turn.prompt_ids
        == engine.requests[0].prompt_ids
        == ids_of("<|im_start|>user\nQuestion: Question 0?\n<|im_end|>\n<|im_start|>assistant\n")
    )
    assert (result.reward, result.answer, result.stop_reason, result.terminated) == (
        1.0,
        "yes",
        "answer",
        True,
    )


def test_seeds_of_turns_and_samples() -> None:
    engine = Scripted(lambda request: done((*ids_of("<search>a</search>"), *END)))
    groups, _ = collect(engine, samples=2, tasks=TASKS[:2])
    expected = {
        derive(7, 3, f"t{task}", sample, turn) for task in (0, 1) for sample in (0, 1) for turn in range(4)
    }
    assert {request.seed for request in engine.requests} == expected
    assert len(engine.requests) == len(expected) == 16
    assert [[trajectory.sample for trajectory in group.trajectories] for group in groups] == [[0, 1], [0, 1]]
    assert {trajectory.stop_reason for group in groups for trajectory in group.trajectories} == {"max_turns"}


def test_the_same_task_twice_is_sampled_apart() -> None:
    engine = Scripted(lambda request: done((*ids_of("<answer>yes</answer>"), *END)))
    groups, _ = collect(engine, tasks=[TASKS[0], TASKS[0]], samples=2)
    assert len(groups) == 2 and len({request.seed for request in engine.requests}) == 4


def test_a_task_that_a_further_draw_of_the_step_asks_again_is_sampled_apart() -> None:
    engine = Scripted(lambda request: done((*ids_of("<answer>yes</answer>"), *END)))
    for draw in (0, 1, 2):
        collect(engine, tasks=[TASKS[0], TASKS[0]], samples=2, draw=draw)
    assert len(engine.requests) == 12 and len({request.seed for request in engine.requests}) == 12
    assert len({request.group for request in engine.requests}) == 6


def test_order_and_result_whatever_the_concurrency() -> None:
    expected, report = collect(Scripted(by_seed))
    assert [group.task.id for group in expected] == ["t0", "t1", "t2", "t3"]
    rewards = [trajectory.reward for group in expected for trajectory in group.trajectories]
    assert 0.0 in rewards and 1.0 in rewards
    turns = [turn for group in expected for trajectory in group.trajectories for turn in trajectory.turns]
    assert (report.groups, report.episodes, report.turns) == (4, 12, len(turns))
    assert report.prompt_tokens == sum(len(turn.prompt_ids) for turn in turns)
    assert report.completion_tokens == sum(len(turn.completion_ids) for turn in turns)
    for concurrency in (1, 2, 5, None):
        for delay in (1, 2):
            engine = Scripted(by_seed, delay_seed=delay)
            assert collect(engine, concurrency=concurrency)[0] == expected
            assert engine.most == concurrency if concurrency else engine.most > 5
    backwards, _ = collect(Scripted(by_seed), tasks=TASKS[::-1])
    assert backwards == expected[::-1]


def test_a_failing_environment_is_tried_again_with_a_fresh_one() -> None:
    expected, _ = collect(Scripted(by_seed))
    games: list[Game] = []

    def make(task: Task) -> Game:
        tries = sum(game.task.id == task.id for game in games)
        games.append(Game(task, lambda turn: task.id == "t1" and tries < 2))
        return games[-1]

    groups, report = collect(Scripted(by_seed), make, concurrency=1)
    assert groups == expected
    assert dict(report.retried) == {"environment": 2} and not report.dropped
    assert len(games) == 12 + 2 and all(game.closed for game in games)
    assert len({id(game) for game in games}) == 14


def test_an_environment_that_always_fails_drops_its_group() -> None:
    expected, _ = collect(Scripted(by_seed))
    games: list[Game] = []

    def make(task: Task) -> Game:
        sample = sum(game.task.id == "t2" for game in games) if task.id == "t2" else 9
        games.append(Game(task, lambda turn: task.id == "t2" and sample in (1, 2, 3)))
        return games[-1]

    groups, report = collect(Scripted(by_seed), make)
    assert groups == [expected[0], expected[1], expected[3]]
    assert dict(report.dropped) == {"environment": 1} and report.retried["environment"] == 2
    assert report.errors == ["group of task 't2' dropped after 3 attempts: OSError: the tool broke"]
    assert (report.groups, report.episodes) == (3, 9)


@pytest.mark.parametrize("abort", [False, True])
def test_an_engine_that_fails_is_no_wrong_answer(abort: bool) -> None:
    expected, _ = collect(Scripted(by_seed))
    bad = {derive(7, 3, "t0", 1, 0): 2, derive(7, 3, "t3", 0, 0): 99}

    def answer(request: GenerationRequest) -> Completion:
        if bad.get(request.seed, 0) > 0:
            bad[request.seed] -= 1
            if abort:
                return done((), "abort")
            raise EngineError("out of memory")
        return by_seed(request)

    groups, report = collect(Scripted(answer))
    assert groups == expected[:3]
    assert dict(report.dropped) == {"engine": 1} and dict(report.retried) == {"engine": 4}
    assert len(report.errors) == 1 and report.errors[0].startswith(
        "group of task 't3' dropped after 3 attempts: "
    )
    no_retries, report = collect(Scripted(by_seed), lambda task: Game(task, lambda turn: True), retries=0)
    assert no_retries == [] and dict(report.dropped) == {"environment": 4} and not report.retried


def test_a_stop_by_length_truncates() -> None:
    engine = Scripted(lambda request: done(ids_of("<mem>m</mem>the"), "length"))
    game = Game(TASKS[0])
    result = play(game, engine)
    assert (result.terminated, result.truncated, result.stop_reason) == (False, True, "length")
    assert result.reward == 0.0 and result.answer is None and dict(result.scores) == {"reward": 0.0}
    assert result.turns[0].finish == "length" and result.turns[0].memory == "m" and result.turns[0].invalid
    assert game.actions == []


def test_an_empty_completion_truncates() -> None:
    result = play(Game(TASKS[0]), Scripted(lambda request: done(())))
    assert (result.turns, result.truncated, result.stop_reason) == ((), True, "empty")


def test_a_prompt_over_the_window_truncates() -> None:
    engine = Scripted(by_seed)
    engine.max_context = 20
    result = play(Game(TASKS[0]), engine, sampling=Sampling(max_new_tokens=8))
    assert (result.turns, result.truncated, result.stop_reason) == ((), True, "window")
    assert engine.requests == []


def test_only_eos_is_an_invalid_action_and_the_prompts_example_no_answer() -> None:
    rules = system_prompt("TOOLS", "few-shot")
    assert "<answer>Vellenfirth</answer>" in rules
    prompts = PromptBuilder(TOKENIZER, rules)
    game = Game(TASKS[0])
    result = play(game, Scripted(lambda request: done(END)), prompts)
    assert game.actions == ["", "", "", ""]
    assert (result.answer, result.stop_reason, result.reward) == (None, "max_turns", 0.0)
    for turn in result.turns:
        assert "Vellenfirth" in str(TOKENIZER.decode(turn.prompt_ids))
        assert turn.invalid and turn.memory is None and turn.completion_ids == END


def test_a_stop_inside_a_memory_ends_no_turn() -> None:
    first, second = ids_of("<mem>write </answer>"), ids_of("</mem><answer>yes</answer>")
    engine = Scripted(lambda request: done(second if len(request.prompt_ids) > length else first))
    length = len(PROMPTS.build("Question: Question 0?\n"))
    result = play(Game(TASKS[0]), engine, sampling=Sampling(max_new_tokens=50))
    assert result.turns[0].completion_ids == (*first, *second)
    assert result.answer == "yes" and len(result.turns) == 1
    assert [request.max_new_tokens for request in engine.requests] == [50, 50 - len(first)]
    assert len({request.seed for request in engine.requests}) == 2


def test_a_stop_inside_a_memory_at_the_last_token_is_a_stop_by_length() -> None:
    said = ids_of("<mem>write </answer>")
    result = play(Game(TASKS[0]), Scripted(lambda _: done(said)), sampling=Sampling(max_new_tokens=len(said)))
    assert result.stop_reason == "length" and result.turns[0].completion_ids == said
    assert result.turns[0].memory is None and result.turns[0].text == "<mem>write </answer>"


@pytest.mark.parametrize("stop", ACTION_STOPS)
def test_the_end_of_a_turn_behind_a_stop_inside_a_memory_is_one(stop: str) -> None:
    first = ids_of(f"<mem>write {stop}")
    engine = Scripted(lambda request: done(END if request.prompt_ids[-len(first) :] == first else first))
    turn = play(Game(TASKS[0]), engine, sampling=Sampling(max_new_tokens=50)).turns[0]
    assert turn.completion_ids == (*first, *END) and turn.finish == "stop"
    assert turn.text == f"<mem>write {stop}"


def test_tags_that_are_special_tokens_belong_to_the_text() -> None:
    """Others than `TOKENIZER`'s, as people add them: only the token that ends a turn is no text."""
    tokenizer = build_tokenizer(["the answer is yes"] * 50, 300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<mem>", "</mem>", "<answer>", "</answer>"]})
    said = tuple(tokenizer.encode("<mem>m</mem><answer>yes</answer>", add_special_tokens=False))
    assert said[-1] in tokenizer.all_special_ids
    for ids in (said, (*said, *END)):
        result = play(Game(TASKS[0]), Scripted(lambda _, ids=ids: done(ids)), PromptBuilder(tokenizer))
        assert result.answer == "yes" and result.reward == 1.0
        assert result.turns[0].text == "<mem>m</mem><answer>yes</answer>"
        assert result.turns[0].memory_span == (0, said.index(tokenizer.convert_tokens_to_ids("</mem>")) + 1)


def test_time_limits() -> None:
    class Slow(Scripted):
        async def generate(self, request: GenerationRequest) -> Completion:
            await asyncio.sleep(30)
            raise AssertionError("unreachable")

    for limits in (Limits(request=0.02), Limits(episode=0.02)):
        with pytest.raises(EpisodeError) as caught:
            play(Game(TASKS[0]), Slow(by_seed), limits=limits)
        assert caught.value.cause == "timeout"


def test_another_task_than_asked_for_is_a_user_error() -> None:
    with pytest.raises(UserError, match="'t1' where 't0'"):
        collect(Scripted(by_seed), lambda task: Game(TASKS[1]), tasks=TASKS[:1])
