"""The HTTP client against servers of both forms, and against what servers do wrong."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import stamina

from envs.errors import UserError
from envs.retrieval import Passage, RetrievalError, Retriever, load_retriever
from envs.retrieval.http import HttpRetriever
from tests.envs.servers import Reply, serving

DOCUMENT = {"id": "7", "contents": '"Poland"\nThe capital is Warsaw.'}
POLAND = Passage("7", "Poland", "The capital is Warsaw.", 0.83)

Handler = Callable[[dict[str, Any]], httpx.Response]


@pytest.fixture(autouse=True)
def no_waiting() -> Any:
    stamina.set_testing(True, attempts=3)
    yield
    stamina.set_testing(False)


def client(handler: Handler, **settings: Any) -> tuple[HttpRetriever, list[dict[str, Any]]]:
    seen: list[dict[str, Any]] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(json.loads(request.content))
        return handler(seen[-1])

    return HttpRetriever("http://host:8000", transport=httpx.MockTransport(handle), **settings), seen


def result(value: Any) -> httpx.Response:
    return httpx.Response(200, json={"result": value})


def search_r1(payload: dict[str, Any]) -> httpx.Response:
    return result(
        [
            [{"document": DOCUMENT, "score": 0.83}] * 5 if query != "none" else []
            for query in payload["queries"]
        ]
    )


def test_search_r1_in_batches_without_blank_queries() -> None:
    retriever, seen = client(search_r1, batch=2)
    assert isinstance(retriever, Retriever) and retriever.url == "http://host:8000/retrieve"
    found = retriever.search(["a", " ", "none", "b", "c"], 2)
    assert found == [[POLAND, POLAND], [], [], [POLAND, POLAND], [POLAND, POLAND]]
    assert seen == [
        {"queries": ["a", "none"], "topk": 2, "return_scores": True},
        {"queries": ["b", "c"], "topk": 2, "return_scores": True},
    ]
    assert retriever.search(["", "\n"], 3) == [[], []] and len(seen) == 2
    with pytest.raises(UserError, match="topk is 0"):
        retriever.search(["a"], 0)


def test_bare_documents_are_read_too() -> None:
    retriever, _ = client(lambda payload: result([[DOCUMENT, {"id": 3, "title": "T", "text": "x"}]]))
    assert retriever.search(["a"], 3) == [
        [Passage("7", "Poland", "The capital is Warsaw."), Passage("3", "T", "x")]
    ]


def test_the_flat_form_is_found_out_once() -> None:
    def flat(payload: dict[str, Any]) -> httpx.Response:
        if "query" not in payload:
            return httpx.Response(422, json={"detail": "query is missing"})
        return result([{"document": {"title": "T", "text": payload["query"]}, "docid": "d1", "score": 2}])

    retriever, seen = client(flat)
    assert retriever.search(["a", "b"], 1) == [[Passage("d1", "T", "a", 2.0)], [Passage("d1", "T", "b", 2.0)]]
    retriever.search(["c"], 1)
    assert ["queries" in payload for payload in seen] == [True, False, False, False]
    strict, _ = client(flat, dialect="search-r1")
    with pytest.raises(RetrievalError, match="the server answers 422"):
        strict.search(["a"], 1)


def test_busy_and_unreachable_servers_are_tried_again() -> None:
    replies = iter([httpx.Response(503), httpx.Response(429), result([[DOCUMENT]])])
    retriever, seen = client(lambda payload: next(replies))
    assert len(retriever.search(["a"], 1)[0]) == 1 and len(seen) == 3
    broken, seen = client(lambda payload: httpx.Response(500), attempts=3)
    with pytest.raises(RetrievalError, match=r"the server answers 500 \(3 attempts\)"):
        broken.search(["a"], 1)
    assert len(seen) == 3

    def refuse(payload: dict[str, Any]) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    with pytest.raises(RetrievalError, match="not reached, ConnectError: connection refused"):
        client(refuse)[0].search(["a"], 1)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (httpx.Response(404, text="no such page"), "the server answers 404"),
        (httpx.Response(200, text="<html>"), "the reply is not JSON"),
        (httpx.Response(200, json=[1]), "no list named result"),
        (httpx.Response(200, json={"result": {}}), "no list named result"),
        (result([]), "1 queries, but the reply is no list for each"),
        (result([{"document": DOCUMENT}]), "the reply is no list for each"),
        (result([[{"document": {"id": "x"}}]]), "a hit has no document with contents or text"),
        (result([[3]]), "a hit has no document"),
        (httpx.Response(200, content=b" " * 2000), "longer than 1000 bytes"),
    ],
)
def test_nonsense_is_an_error_of_the_retriever(reply: httpx.Response, message: str) -> None:
    with pytest.raises(RetrievalError, match=message):
        client(lambda payload: reply, max_bytes=1000)[0].search(["a"], 1)


def test_a_reply_in_drops_runs_out_of_time() -> None:
    """A piece every 0.1 seconds never runs into a limit of 0.4 between pieces."""
    drops: list[bytes | float] = [piece for _ in range(40) for piece in (b" ", 0.1)]
    with serving(lambda asked: Reply(200, drops)) as server:
        start = time.monotonic()
        with pytest.raises(RetrievalError, match=r"no whole reply in 0\.4 seconds \(1 attempts\)"):
            HttpRetriever(server.url, timeout=0.4, attempts=1).search(["a"], 1)
        assert time.monotonic() - start < 3.5, "40 drops take 4 seconds"


def test_a_broken_compression_is_an_error_of_the_retriever() -> None:
    reply = Reply(200, b"no gzip", {"Content-Encoding": "gzip"})
    with serving(lambda asked: reply) as server, pytest.raises(RetrievalError, match="the reply is broken"):
        HttpRetriever(server.url).search(["a"], 1)


def test_settings_and_sharing() -> None:
    assert load_retriever("http://host:1/retrieve") is load_retriever("http://host:1/retrieve")
    copy = pickle.loads(pickle.dumps(HttpRetriever("https://host/other", timeout=3.0)))
    assert copy.url == "https://host/other" and copy._client.timeout.read == 3.0
    for bad in ("ftp://x", "http://", "host:8000", "http://x:port/", "http://x:99999/"):
        with pytest.raises(UserError, match="is no address of a retrieval server"):
            HttpRetriever(bad)
    with pytest.raises(UserError, match="dialect 'x'"):
        HttpRetriever("http://h", dialect="x")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="at least 1"):
        HttpRetriever("http://h", batch=0)
