"""Rewards by name, by import, from a judge and as weighted sums: numbers worked out by hand, a server that fails."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agent.engines.base import Completion
from agent.prompts import PromptBuilder
from agent.rollout import Sampling, collect_groups
from agent.tiny import build_tokenizer
from envs import make
from envs.errors import UserError
from envs.judge import Judge
from envs.multi_objective import MultiObjectiveQA
from envs.rewards import Episode, RewardError, memory_length, read_reward
from envs.search_qa import SearchQA
from envs.tasks import Task
from tests.envs.conftest import FixedRetriever
from tests.envs.servers import Asked, Reply, Server, json_reply, serving

HERE = "tests.envs.test_rewards"
PERU = Task("pe", ("Capital of Peru?",), (("Lima", "City of Kings"),))


def short_answers(episode: Episode, most: int = 10) -> float:
    return float(len(episode.answer) <= most)


def broken(episode: Episode) -> float:
    raise ZeroDivisionError("nobody knows")


def endless(episode: Episode) -> float:
    return float("inf")


def env_of(reward: Any, **settings: Any) -> SearchQA:
    env = SearchQA([PERU], FixedRetriever([]), reward=reward, **settings)
    env.reset(seed=0)
    return env


def words(count: int) -> str:
    return " ".join(["word"] * count)


def test_a_weighted_sum_by_hand() -> None:
    """F1 of "Lima town" against Lima is 2/3; memories of 3, 12 and 6 words over 4 are 0, 2/3 and 1/3 too long."""
    env = env_of({"f1": 1.5, "format": 0.25, "memory_length": {"weight": -0.5, "limit": 4}})
    env.step(f"<mem>{words(3)}</mem><search>a</search>")
    env.step(f"<mem>{words(12)}</mem><search>b</search>")
    *_, reward, terminated, _, info = env.step(f"<mem>{words(6)}</mem><answer>Lima town</answer>")
    assert terminated and reward == pytest.approx(1.5 * 2 / 3 + 0.25 - 0.5 / 3)
    assert info["scores"]["reward"] == reward
    assert info["scores"]["memory_length"] == pytest.approx(1 / 3) and info["scores"]["format"] == 1.0
    assert info["scores"]["em"] == 0.0


@pytest.mark.parametrize(
    ("first", "last", "valid"),
    [
        ("<mem>a</mem><search>x</search>", "<mem>b</mem><answer>Lima</answer>", 1.0),
        ("<search>x</search>", "<mem>b</mem><answer>Lima</answer>", 0.0),  # no memory
        ("<mem>a</mem>nothing", "<mem>b</mem><answer>Lima</answer>", 0.0),  # no action
        ("<mem>a</mem><search>x</search>", "<answer>Lima</answer>", 0.0),
    ],
)
def test_format_asks_for_an_action_and_a_memory_in_every_turn(first: str, last: str, valid: float) -> None:
    env = env_of({"em": 1.0, "format": 0.5})
    env.step(first)
    assert env.step(last)[1] == 1.0 + 0.5 * valid


def test_memories_within_the_limit_or_none_at_all_cost_nothing() -> None:
    episode = Episode(PERU, "Lima", {}, ("a", None), (60,), 0)
    assert memory_length(episode) == 0.0 and memory_length(episode, limit=45) == 0.25
    assert memory_length(Episode(PERU, "Lima", {}, (None,), (), 0)) == 0.0


def test_an_invalid_turn_voids_a_strict_episode_only() -> None:
    for strict, paid in ((False, 1.0), (True, 0.0)):
        env = env_of("em", strict_format=strict)
        env.step("<mem>a</mem>nothing")
        _, reward, terminated, _, info = env.step("<mem>a</mem><answer>Lima</answer>")
        assert terminated and reward == info["scores"]["reward"] == paid
        assert info["scores"]["em"] == 1.0


def test_no_answer_never_pays_more_than_an_answer() -> None:
    reward = {"em": 1.0, "format": 0.1, "memory_length": {"weight": -0.2, "limit": 1}}
    silent = env_of(reward, max_turns=1)
    _, paid, _, truncated, info = silent.step("<mem>m</mem><search>x</search>")
    assert truncated and paid == info["scores"]["reward"] == -0.2
    assert {name: info["scores"][name] for name in ("em", "format", "memory_length")} == dict.fromkeys(
        ("em", "format", "memory_length"), 0.0
    )
    wrong = env_of(reward)
    assert wrong.step(f"<mem>{words(500)}</mem>junk")[1] == 0.0  # nothing is paid before the end
    assert wrong.step(f"<mem>{words(500)}</mem><answer>Rome</answer>")[1] > paid


def test_a_function_by_import_with_its_settings() -> None:
    assert env_of(f"{HERE}:short_answers").step("<answer>anything</answer>")[1] == 1.0
    env = env_of({"em": 1, f"{HERE}:short_answers": {"weight": 0.5, "most": 3}})
    *_, info = env.step("<answer>Lima</answer>")
    assert (info["scores"]["reward"], info["scores"]["short_answers"]) == (1.0, 0.0)


@pytest.mark.parametrize("name", ["broken", "endless"])
def test_a_function_that_fails_is_no_reward_of_zero(name: str) -> None:
    with pytest.raises(RewardError, match=name):
        env_of({"em": 1.0, f"{HERE}:{name}": 1.0}).step("<answer>Lima</answer>")


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("emm", "did you mean 'em'"),
        ({}, "a name, or a table"),
        ({"em": "much"}, "weight 'much' is no finite number"),
        ({"em": {"weight": 1.0, "limit": 3}}, "'em' has no setting 'limit'"),
        ({"memory_length": {"limits": 3}}, "memory_length.*limits"),
        ("no.such.module:f", "cannot be imported"),
        (f"{HERE}:nothing", "cannot be imported"),
        ({"format": 1, f"{HERE}:format": 1}, "'format' is taken"),
        ({"judge": {"url": "ftp://x", "model": "m"}}, "no http address"),
        ({"judge": {"url": "http://x"}}, "needs a model"),
        ({"judge": {"url": "http://x", "model": "m", "form": "xml"}}, "form 'xml'"),
        ({"judge": {"url": "http://x", "model": "m", "attempts": 0}}, "attempts"),
        ({"judge": {"url": "http://x", "model": "m", "attempts": 1.5}}, "attempts is 1.5"),
        ({"judge": {"url": "http://x", "model": "m", "timeout": "long"}}, "timeout is 'long'"),
        ({"judge": {"url": "http://x", "model": "m", "timeout": float("nan")}}, "timeout is nan"),
        ({"judge": {"url": "http://x", "model": "m", "key_env": 3}}, "must be texts"),
        ({"judge": {"url": 5, "model": "m"}}, "5 is no http address"),
        ({"judge": {"url": "http://x:port/v1", "model": "m"}}, "no http address"),
        (".relative:f", "cannot be imported"),
        ("builtins:max", "no signature"),
    ],
)
def test_what_does_not_fit_is_named_when_the_environment_is_made(reward: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        env_of(reward)


def test_every_environment_takes_a_sum() -> None:
    for env_id, own in (
        ("mempo/SearchQA-v0", "cover_em"),
        ("mempo/MultiObjectiveQA-v0", "mem1"),
        ("mempo/DocumentStream-v0", "f1"),
        ("mempo/Errands-v0", "partial"),
    ):
        env = make(env_id, reward={own: 2.0, "format": 0.5})
        env.reset(seed=0)
        gold = env.unwrapped.task.gold_answer  # type: ignore[attr-defined]
        best = 2.0 * (2 if own == "mem1" else 1)
        assert env.step(f"<mem>m</mem><answer>{gold}</answer>")[1] == best + 0.5, env_id


# A judge.


def chat(text: str) -> Reply:
    return json_reply({"choices": [{"message": {"role": "assistant", "content": text}}]})


@pytest.fixture
def judged() -> Iterator[tuple[Server, list[Reply]]]:
    """A server that gives the replies in turn, the last one for ever."""
    replies: list[Reply] = []

    def answer(asked: Asked) -> Reply:
        return replies.pop(0) if len(replies) > 1 else replies[0]

    with serving(answer) as server:
        yield server, replies


def two() -> Episode:
    task = Task("two", ("Capital of Peru?", "River of Cairo?"), (("Lima",), ("Nile", "The Nile")))
    return Episode(task, 'Lima; "the Nile"', {}, ("m",), (1,), 0)


@pytest.mark.parametrize(
    ("text", "score"),
    [("yes", 1.0), (" **No.**", 0.0), ("<think>no, or yes?</think>\nYes, both are right.", 1.0)],
)
def test_an_openai_judge(
    judged: tuple[Server, list[Reply]], monkeypatch: pytest.MonkeyPatch, text: str, score: float
) -> None:
    server, replies = judged
    replies.append(chat(text))
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    assert Judge(f"{server.url}/v1", "grader")(two()) == score
    [asked] = server.asked
    assert asked.path == "/v1/chat/completions" and asked.headers["authorization"] == "Bearer secret"
    assert (asked.json["model"], asked.json["temperature"]) == ("grader", 0)
    assert json.loads(asked.json["messages"][1]["content"]) == {
        "questions": ["Capital of Peru?", "River of Cairo?"],
        "accepted": [["Lima"], ["Nile", "The Nile"]],
        "answer": 'Lima; "the Nile"',
    }


def test_a_json_judge_in_a_sum(judged: tuple[Server, list[Reply]]) -> None:
    server, replies = judged
    replies.append(json_reply({"score": 0.75}))
    judge = {"weight": 0.4, "url": f"{server.url}/grade", "form": "json"}
    env = env_of({"em": 1.0, "judge": judge})
    *_, info = env.step("<mem>m</mem><answer>City of Kings</answer>")
    assert info["scores"]["reward"] == pytest.approx(1.3) and info["scores"]["judge"] == 0.75
    [asked] = server.asked
    assert asked.path == "/grade" and "authorization" not in asked.headers
    assert asked.json == {
        "question": "Capital of Peru?",
        "golds": [["Lima", "City of Kings"]],
        "answer": "City of Kings",
    }


@pytest.mark.parametrize(
    "bad",
    [
        Reply(503),
        Reply(429),
        Reply(200, b"not json"),
        json_reply({"score": 1.5}),
        json_reply({"score": True}),
        json_reply({"score": "0.5"}),
        json_reply({}),
        Reply(200, [b'{"score"', 1.0, b": 1.0}"]),  # drips past the time limit
    ],
    ids=["503", "429", "no json", "over 1", "bool", "text", "none", "slow"],
)
def test_a_judge_is_asked_again_and_then_it_is_an_error(
    judged: tuple[Server, list[Reply]], bad: Reply
) -> None:
    server, replies = judged
    judge = Judge(server.url, form="json", attempts=2, timeout=0.6)
    replies += [bad, json_reply({"score": 0.5})]
    assert judge(two()) == 0.5 and len(server.asked) == 2
    replies[:] = [bad]
    with pytest.raises(RewardError, match=r"2 attempts"):
        judge(two())
    assert len(server.asked) == 4


def test_a_refused_request_is_an_error_at_once(judged: tuple[Server, list[Reply]]) -> None:
    server, replies = judged
    replies.append(json_reply({"error": "no such model"}, status=404))
    with pytest.raises(RewardError, match=r"404.*no such model"):
        Judge(server.url, "grader")(two())
    assert len(server.asked) == 1
    with pytest.raises(RewardError, match="not reached"):
        Judge("http://127.0.0.1:9", "grader", attempts=1)(two())


def test_a_verdict_that_is_neither_is_no_verdict(judged: tuple[Server, list[Reply]]) -> None:
    server, replies = judged
    replies += [chat("Nobody can say."), json_reply({"choices": []}), chat("yes")]
    assert Judge(server.url, "grader")(two()) == 1.0 and len(server.asked) == 3


def test_a_judge_can_be_sent_to_another_process() -> None:
    judge = Judge("http://localhost/v1", "grader")
    assert pickle.loads(pickle.dumps(judge)) == judge


class Says:
    """An engine that writes one answer."""

    max_context, weight_version = 512, 0

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self.ids = tuple(encode("<mem>m</mem><answer>Lima</answer>"))

    async def generate(self, request: Any) -> Completion:
        return Completion(self.ids, (-1.0,) * len(self.ids), "stop", 0)


def test_a_judge_that_is_down_drops_the_group_and_is_counted(judged: tuple[Server, list[Reply]]) -> None:
    """An infrastructure error: the episode is played again, then its group is gone; nobody gets a 0."""
    server, replies = judged
    tokenizer = build_tokenizer(["What is the capital of Peru? Lima."], vocab_size=330)
    engine = Says(lambda text: tokenizer.encode(text, add_special_tokens=False))
    judge = {"url": server.url, "form": "json", "attempts": 1}

    def collect() -> Any:
        return asyncio.run(
            collect_groups(
                [PERU],
                lambda task: MultiObjectiveQA(
                    [task], FixedRetriever([]), objectives=1, reward={"em": 1.0, "judge": judge}
                ),
                engine,  # type: ignore[arg-type]
                PromptBuilder(tokenizer, ""),
                samples=2,
                sampling=Sampling(1.0, 64),
                run_seed=0,
                step=1,
                retries=1,
            )
        )

    replies.append(Reply(500))
    groups, report = collect()
    assert groups == [] and dict(report.dropped) == {"environment": 1}
    assert report.retried["environment"] == 2 and "judge" in report.errors[0]
    replies[:] = [Reply(500), json_reply({"score": 1.0})]  # once only: the second attempt is judged
    groups, report = collect()
    assert [t.reward for t in groups[0].trajectories] == [2.0, 2.0] and not report.dropped
    assert groups[0].trajectories[0].scores["judge"] == 1.0


def test_a_setting_that_is_read_says_what_it_pays() -> None:
    reward = read_reward({"em": 1.0, "f1": 0.5}, ("em", "f1"))
    assert reward.of_answer({"em": 1.0, "f1": 0.5, "other": 9.0}) == 1.25 and reward.terms == ()
