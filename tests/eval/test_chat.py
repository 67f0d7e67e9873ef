"""Endpoints: what providers answer, in their forms, and what becomes of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agent.engines.replies import error_message
from envs.errors import UserError
from eval.chat import ChatPlayer, Endpoint, close_action, read_reply, retry_after
from eval.runner import evaluate
from tests.eval.conftest import FACTS, LOOKUP, TASKS

Handler = Callable[[dict[str, Any]], httpx.Response]


def completion(text: str, usage: dict[str, Any] | None = None, finish: str = "stop") -> httpx.Response:
    data: dict[str, Any] = {"choices": [{"message": {"content": text}, "finish_reason": finish}]}
    return httpx.Response(200, json=data if usage is None else {**data, "usage": usage})


def know_it_all(body: dict[str, Any]) -> httpx.Response:
    """Searches, then answers what it read; the closing tag is cut off with the stop string, as providers do."""
    seen = body["messages"][-1]["content"]
    found = next((answer for answer in FACTS.values() if f"It is {answer}" in seen), None)
    if found is None:
        fact = seen.split("What is the ")[1].split("?")[0]
        return completion(f"<mem>looking</mem><search>{fact}", {"prompt_tokens": 50, "completion_tokens": 9})
    return completion(f"<mem>{found}</mem><answer>{found}", {"prompt_tokens": 70, "completion_tokens": 8})


class Server:
    """Answers from a queue first, then as the handler says; remembers what it was asked."""

    def __init__(self, handler: Handler = know_it_all, queue: list[httpx.Response] | None = None) -> None:
        self.handler, self.queue = handler, queue or []
        self.requests: list[tuple[httpx.Request, dict[str, Any]]] = []
        self.running = self.most = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.requests.append((request, body))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.002)
        self.running -= 1
        return self.queue.pop(0) if self.queue else self.handler(body)


def player(server: Server, **settings: Any) -> ChatPlayer:
    endpoint = Endpoint("http://127.0.0.1:9/v1", "some-model", **settings)
    return ChatPlayer(endpoint, "the rules", 0.5, 64, transport=httpx.MockTransport(server))


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """No test waits; what would have been waited is written down."""
    waited: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float, *rest: Any) -> None:
        if seconds >= 0.1:
            waited.append(seconds)
            seconds = 0
        await real(seconds)

    monkeypatch.setattr("eval.chat.asyncio.sleep", sleep)
    return waited


def test_an_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    server = Server()
    found = evaluate(player(server), tasks=TASKS, env_id=LOOKUP)
    assert found.summary()["em"] == 1.0
    first, second = found.samples[0].turns
    assert first.text == "<mem>looking</mem><search>capital of Poland</search>"
    assert (first.prompt_tokens, first.completion_tokens, second.prompt_tokens) == (50, 9, 70)
    assert (first.memory, first.query, first.information) == ("looking", "capital of Poland", "It is Warsaw.")
    request, body = server.requests[0]
    assert request.url.path == "/v1/chat/completions"
    assert request.headers["authorization"] == "Bearer secret"
    assert body["messages"][0] == {"role": "system", "content": "the rules"}
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("some-model", 0.5, 64)
    assert "secret" not in json.dumps(player(server).identity())


def test_seeds_differ_by_turn_and_repeat() -> None:
    def seeds() -> list[int]:
        server = Server()
        evaluate(player(server), tasks=TASKS, env_id=LOOKUP, samples=2)
        return sorted(body["seed"] for _, body in server.requests)

    assert seeds() == seeds()
    assert len(set(seeds())) == 12


def test_missing_usage_is_estimated_and_said() -> None:
    server = Server(lambda body: completion("<answer>Warsaw</answer>"))
    turn = evaluate(player(server), tasks=TASKS[:1], env_id=LOOKUP).samples[0].turns[0]
    assert turn.finish == "estimated"
    assert turn.completion_tokens == 6  # 23 bytes
    # The prompt that was sent, not the observation after it: "the rules" and the question.
    assert (
        turn.prompt_tokens == (len("the rules" + server.requests[0][1]["messages"][-1]["content"]) + 3) // 4
    )
    half = Server(lambda body: completion("<answer>Warsaw</answer>", {"prompt_tokens": 11}))
    turn = evaluate(player(half), tasks=TASKS[:1], env_id=LOOKUP).samples[0].turns[0]
    assert (turn.finish, turn.prompt_tokens, turn.completion_tokens) == ("estimated", 11, 6)
    assert evaluate(player(Server()), tasks=TASKS[:1], env_id=LOOKUP).samples[0].turns[0].finish == "stop"


def test_busy_servers_are_waited_for(pauses: list[float]) -> None:
    busy = [
        httpx.Response(429, json={"error": {"message": "slow down"}}, headers={"Retry-After": "7"}),
        httpx.Response(503, text="<html>gateway</html>"),
        httpx.Response(500, json={"detail": "oops"}),
    ]
    server = Server(queue=busy)
    found = evaluate(player(server), tasks=TASKS[:1], env_id=LOOKUP)
    assert found.summary()["errors"] == 0 and found.summary()["em"] == 1.0
    assert pauses[0] == 7
    assert len(pauses) == 3 and 0 < pauses[1] < pauses[2] < 4


def test_a_server_that_stays_broken_is_an_error_not_a_wrong_answer(pauses: list[float]) -> None:
    def broken(body: dict[str, Any]) -> httpx.Response:
        if "Peru" in body["messages"][-1]["content"]:
            return httpx.Response(500, json={"error": "kaputt"})
        return know_it_all(body)

    summary_of = evaluate(player(Server(broken), attempts=2), tasks=TASKS, env_id=LOOKUP)
    summary = summary_of.summary()
    assert (summary["errors"], summary["completed_only"]["em"]) == (1, 1.0)
    assert "no reply after 2 attempts; the last: status 500: kaputt" in str(summary_of.samples[1].error)


def test_too_much_patience_asked_for(pauses: list[float]) -> None:
    late = httpx.Response(429, headers={"Retry-After": "9999"})
    with pytest.raises(UserError, match="asks for 9999 s of patience"):
        evaluate(player(Server(lambda body: late)), tasks=TASKS[:1], env_id=LOOKUP, retries=0)
    assert pauses == []


@pytest.mark.parametrize("status", [401, 403, 404, 400])
def test_what_a_person_must_mend_stops_the_run(status: int) -> None:
    server = Server(lambda body: httpx.Response(status, json={"error": {"message": "no such model"}}))
    with pytest.raises(UserError, match="no such model"):
        evaluate(player(server), tasks=TASKS, env_id=LOOKUP)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (
            400,
            {"error": {"message": "This model's maximum context length is 10 tokens", "code": "x"}},
        ),  # OpenAI
        (400, {"error": {"message": "Please cut it", "code": "context_length_exceeded"}}),  # Groq, Azure
        (400, {"object": "error", "message": "This model's maximum context length is 9 tokens"}),  # vLLM
        (
            400,
            {"type": "error", "error": {"message": "prompt is too long: 9 tokens > 8 maximum"}},
        ),  # Anthropic
        (400, [{"error": {"message": "The input token count (9) exceeds the maximum number of tokens (8)"}}]),
        (400, {"error": {"message": "the request exceeds the available context size"}}),  # llama.cpp
        (422, {"message": "Prompt contains 9 tokens, too large for model with 8 maximum context length"}),
        (413, {"error": {"message": "Please reduce the length of the messages"}}),
    ],
)
def test_a_full_window_ends_the_episode(status: int, body: Any) -> None:
    full = httpx.Response(status, json=body)
    found = evaluate(player(Server(lambda body: full)), tasks=TASKS[:1], env_id=LOOKUP)
    assert (found.samples[0].stop_reason, found.samples[0].error) == ("window", None)
    assert found.summary()["em"] == 0.0


def test_a_filtered_prompt_ends_its_episode_and_not_the_run() -> None:
    def filtering(body: dict[str, Any]) -> httpx.Response:
        if "Peru" in body["messages"][-1]["content"]:
            return httpx.Response(400, json={"error": {"message": "no", "code": "content_filter"}})
        return know_it_all(body)

    found = evaluate(player(Server(filtering)), tasks=TASKS, env_id=LOOKUP)
    assert [sample.stop_reason for sample in found.samples] == ["answer", "filtered", "answer"]
    assert (found.summary()["errors"], found.summary()["em"]) == (0, pytest.approx(2 / 3))


def test_a_used_up_quota_is_not_waited_for(pauses: list[float]) -> None:
    spent = httpx.Response(429, json={"error": {"message": "Pay.", "code": "insufficient_quota"}})
    server = Server(lambda body: spent)
    with pytest.raises(UserError, match="refuses: status 429: Pay"):
        evaluate(player(server), tasks=TASKS[:1], env_id=LOOKUP)
    assert (len(server.requests), pauses) == (1, [])


def test_length_ends_the_episode() -> None:
    server = Server(lambda body: completion("<mem>on and on", finish="length"))
    sample = evaluate(player(server), tasks=TASKS[:1], env_id=LOOKUP).samples[0]
    assert (sample.stop_reason, sample.answer, len(sample.turns)) == ("length", None, 1)


def test_connections_are_bounded() -> None:
    server = Server()
    evaluate(player(server), tasks=TASKS, env_id=LOOKUP, samples=8, concurrency=5)
    assert server.most == 5


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "one", "code": 3}}, "one"),
        ({"object": "error", "message": "two"}, "two"),
        ({"error": "three"}, "three"),
        ({"detail": [{"msg": "four"}]}, "four"),
        ([{"error": {"message": "five"}}], "five"),
        ("six\nlines", "six lines"),
        ("", "empty reply"),
        ({"odd": 1}, "{'odd': 1}"),
    ],
)
def test_forms_of_errors(body: Any, message: str) -> None:
    answer = httpx.Response(500, text=body) if isinstance(body, str) else httpx.Response(500, json=body)
    assert error_message(answer) == message


def test_a_200_that_is_no_completion() -> None:
    with pytest.raises(Exception, match="a reply of another form: overloaded"):
        read_reply(httpx.Response(200, json={"error": {"message": "overloaded"}}))
    empty = httpx.Response(200, json={"choices": [{"message": {"content": None}}], "usage": None})
    assert read_reply(empty).text == ""


def test_retry_after_forms() -> None:
    now = 1_700_000_000.0
    assert retry_after({"retry-after": "2.5"}, now) == 2.5
    assert retry_after({"retry-after": "Tue, 14 Nov 2023 22:13:50 GMT"}, now) == 30.0
    assert retry_after({"retry-after-ms": "1500"}, now) == 1.5
    assert retry_after({"retry-after": "soon"}, now) is None
    assert retry_after({"retry-after": "-3"}, now) == 0.0
    google = json.dumps([{"error": {"details": [{"@type": "RetryInfo", "retryDelay": "22.5s"}]}}])
    assert retry_after({}, now, google) == 22.5
    assert retry_after({"retry-after": "4"}, now, google) == 4
    assert retry_after({}, now) is None


@pytest.mark.parametrize(
    ("text", "closed"),
    [
        ("<mem>m</mem><answer>x", "<mem>m</mem><answer>x</answer>"),
        ("<search>q", "<search>q</search>"),
        ('<tool_call>{"name": "search", "arguments": {"query": "q"}}', None),
        ("<answer>x</answer>", "<answer>x</answer>"),
        ("no action", "no action"),
        ("<mem>unclosed", "<mem>unclosed"),
    ],
)
def test_close_action(text: str, closed: str | None) -> None:
    assert close_action(text) == (closed or text + "</tool_call>")
