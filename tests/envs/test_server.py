"""The retrieval server as a real process or thread on this machine, and our client against it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import stamina
import uvicorn

import envs
from envs.errors import UserError
from envs.retrieval import Passage, RetrievalError, Retriever, load_retriever
from envs.retrieval.bm25 import Bm25Retriever
from envs.retrieval.http import HttpRetriever
from envs.retrieval.server import main
from envs.retrieval.service import Limits, create_app
from tests.envs.conftest import PASSAGES, TASKS, FixedRetriever

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def serving(retriever: Retriever, **limits: Any) -> Iterator[str]:
    """The server in a thread; gives its address without a slash at the end."""
    config = uvicorn.Config(create_app(retriever, "test", Limits(**limits)), log_level="critical")
    server = uvicorn.Server(config)
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        listening.close()
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(
        Bm25Retriever.from_passages(PASSAGES), max_queries=5, max_topk=20, max_body=2000, max_query=300
    ) as url:
        yield url


def post(url: str, payload: Any) -> tuple[int, Any]:
    body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    reply = httpx.post(url + "/retrieve", content=body, trust_env=False, timeout=20)
    assert reply.headers["Content-Type"] == "application/json"
    return reply.status_code, reply.json()


QUERIES = ["capital of Poland", "C++", "", "xylophone", "東京", "\ud800 Poland", "river of Poland Germany"]


def test_our_client_gets_what_the_retriever_gives(retriever: Bm25Retriever) -> None:
    with serving(retriever) as url:
        for topk in (1, 3, 100):
            assert HttpRetriever(url).search(QUERIES, topk) == retriever.search(QUERIES, topk)
        assert sum(map(len, retriever.search(QUERIES, 100))) >= 10
        assert HttpRetriever(url, batch=2).search(QUERIES, 3) == retriever.search(QUERIES, 3)


def test_the_embedded_world_is_the_same_near_and_far() -> None:
    local = load_retriever("factbook-tiny")
    queries = [task.questions[0] for task in envs.load_tasks("factbook-tiny:train")[:100]]
    with serving(local) as url:
        assert HttpRetriever(url).search(queries, 3) == local.search(queries, 3)


def test_search_r1s_form_with_scores_and_without(address: str, retriever: Bm25Retriever) -> None:
    (hit,) = retriever.search(["C++"], 1)[0]
    document = {"id": "3", "contents": '"C++"\nC++ is a language by Bjarne Stroustrup.'}
    asked = {"queries": ["C++", "none"], "topk": 1}
    assert post(address, {**asked, "return_scores": True}) == (
        200,
        {"result": [[{"document": document, "score": hit.score}], []]},
    )
    bare = (200, {"result": [[document], []]})
    assert post(address, {**asked, "return_scores": False}) == bare == post(address, asked)
    assert post(address, {**asked, "return_scores": None}) == bare
    assert post(address, {"queries": []}) == (200, {"result": []})
    status, reply = post(address, {"queries": ["Poland capital"], "topk": None})
    assert status == 200 and len(reply["result"][0]) == 3


def test_health(address: str) -> None:
    reply = httpx.get(address + "/health", trust_env=False)
    assert (reply.status_code, reply.json()) == (200, {"status": "ok", "retriever": "test", "passages": 9})
    with serving(FixedRetriever([])) as url:
        assert httpx.get(url + "/health", trust_env=False).json()["passages"] is None


@pytest.mark.parametrize(
    ("payload", "status", "message"),
    [
        (b"", 400, "the request is not JSON"),
        (b"{", 400, "the request is not JSON"),
        (b"\xff\xfe", 400, "the request is not JSON"),
        (b"[" * 1900, 400, "the request is not JSON"),
        (b'{"queries": ["x"], "topk": ' + b"9" * 1900 + b"}", 413, "topk: more than 20 are not given"),
        ([1], 400, "the request is a list; an object with queries is needed"),
        ({}, 400, "queries: a list of texts is needed"),
        ({"query": "x"}, 400, "queries: a list of texts is needed"),
        ({"queries": "x"}, 400, "queries: a list of texts is needed"),
        ({"queries": ["x", 3]}, 400, "queries: a list of texts is needed"),
        ({"queries": ["x"] * 6}, 413, "queries: 6 of them, but at most 5 are answered"),
        ({"queries": ["x" * 301]}, 413, "queries: one of 301 characters, but 300 are the most"),
        ({"queries": ["x"], "topk": 0}, 400, "topk: a whole number of at least 1 is needed"),
        ({"queries": ["x"], "topk": "3"}, 400, "topk: a whole number of at least 1 is needed"),
        ({"queries": ["x"], "topk": 1.5}, 400, "topk: a whole number of at least 1 is needed"),
        ({"queries": ["x"], "topk": True}, 400, "topk: a whole number of at least 1 is needed"),
        ({"queries": ["x"], "topk": 21}, 413, "topk: more than 20 are not given"),
        ({"queries": ["x"], "return_scores": "yes"}, 400, "return_scores: true or false is needed"),
        ({"queries": ["x" * 2500]}, 413, "the request is longer than 2000 bytes"),
    ],
)
def test_what_is_wrong_with_a_request_is_said(address: str, payload: Any, status: int, message: str) -> None:
    got, reply = post(address, payload)
    assert got == status and list(reply) == ["error"] and message in reply["error"]


def test_a_body_of_untold_length_is_limited_too(address: str) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * 500

    reply = httpx.post(address + "/retrieve", content=pieces(), trust_env=False, timeout=20)
    assert (reply.status_code, reply.json()) == (413, {"error": "the request is longer than 2000 bytes"})


def test_a_body_that_does_not_come_ends() -> None:
    with serving(FixedRetriever([]), body_seconds=0.3) as url:
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
            assert connection.recv(4000).startswith(b"HTTP/1.1 408 ")


def test_other_addresses_and_methods(address: str) -> None:
    for method, path, status in (("GET", "/retrieve", 405), ("POST", "/health", 405), ("GET", "/docs", 404)):
        reply = httpx.request(method, address + path, trust_env=False)
        assert reply.status_code == status
        assert reply.json()["error"].endswith("there are POST /retrieve, GET /health")


class Failing:
    """Raises what it is given."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        raise self.error


def test_a_search_that_fails_is_the_servers_fault() -> None:
    stamina.set_testing(True, attempts=2)
    try:
        with serving(Failing(RetrievalError("engine gone"))) as url:
            assert post(url, {"queries": ["x"]}) == (502, {"error": "engine gone"})
            with pytest.raises(RetrievalError, match="the server answers 502"):
                HttpRetriever(url).search(["x"], 1)
        with serving(Failing(UserError("not so"))) as url:
            assert post(url, {"queries": ["x"]}) == (400, {"error": "not so"})
        with serving(Failing(KeyError("secret"))) as url:
            status, reply = post(url, {"queries": ["x"]})
            assert status == 500 and "KeyError" in reply["error"] and "secret" not in reply["error"]
    finally:
        stamina.set_testing(False)


def test_odd_passages_travel() -> None:
    passages = [
        Passage("1", 'A "quoted" title', "text\nwith lines", 0.5),
        Passage("2", "", "no title", 0.25),
        Passage("3", "two\nlines", "x", -1.0),
        Passage("4", "lone", "\ud800 half", 0.0),
    ]
    with serving(FixedRetriever(passages)) as url:
        found = HttpRetriever(url).search(["q"], 4)[0]
    assert found[:2] == passages[:2] and found[2].title == "two lines" and found[3] == passages[3]


def test_a_slow_search_holds_up_neither_health_nor_others() -> None:
    class Slow(FixedRetriever):
        def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
            if queries == ["slow"]:
                release.wait(20)
            return super().search(queries, topk)

    release = threading.Event()
    with serving(Slow(PASSAGES), threads=2) as url, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(post, url, {"queries": ["slow"]})
        for _ in range(5):
            assert post(url, {"queries": ["quick"]})[0] == 200
        assert httpx.get(url + "/health", trust_env=False).status_code == 200
        assert not slow.done()
        release.set()
        assert slow.result()[0] == 200


def test_many_clients_at_once(address: str, retriever: Bm25Retriever) -> None:
    queries = ["Poland", "C++", "capital", "river", "Lincoln"] * 8
    client = HttpRetriever(address)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda query: client.search([query], 3)[0], queries))
    assert found == [retriever.search([query], 3)[0] for query in queries]


def test_an_episode_over_the_server(address: str, retriever: Bm25Retriever) -> None:
    observations = []
    for source in (address, retriever):
        env = envs.make("mempo/SearchQA-v0", tasks=TASKS, retriever=source)
        env.reset(seed=3)
        observations.append(env.step("<mem>m</mem><search>capital of Poland</search>")[0])
    assert observations[0] == observations[1] and "Doc 1(Title: Poland)" in observations[0]


def test_the_command_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"id": p.id, "contents": f"{p.title}\n{p.text}"}) + "\n" for p in PASSAGES)
    )
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "envs.retrieval.server",
            "--retriever",
            str(corpus),
            "--port",
            "0",
            "--topk",
            "2",
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(f"serving {corpus} at http://127.0.0.1:")
        url = line.split(" at ")[1].strip().removesuffix("/retrieve")
        status, reply = post(url, {"queries": ["Poland capital"]})
        assert status == 200 and len(reply["result"][0]) == 2
        assert HttpRetriever(url).search(["C++"], 1)[0][0].title == "C++"
        port = url.rpartition(":")[2]
        assert main(["--port", port]) == 2
        process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 30
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--retriever", "factbok", "--port", "0"], "unknown retriever 'factbok'; did you mean 'factbook'?"),
        (["--port", "70000"], "port 70000 is none; 0 to 65535 is needed"),
        (["--host", "192.0.2.1", "--port", "0"], "cannot listen on 192.0.2.1:0"),
        (["--port", "0", "--threads", "0"], "threads is 0; more than 0 is needed"),
        (["--port", "0", "--topk", "9", "--max-topk", "5"], "topk is 9, more than max_topk, which is 5"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_a_missing_library_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["--port", "0"]) == 2
    assert capsys.readouterr().err == 'error: the server needs uvicorn: pip install "mempo-gym[server]"\n'
