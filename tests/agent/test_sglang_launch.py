"""A server as a child process: found, started, watched, ended with its own children. SGLang is played by a script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from agent.engines import sglang_launch, sglang_start
from agent.engines.base import EngineError
from agent.engines.sglang_launch import LocalServer
from envs.errors import UserError

# Answers /model_info; has a child that ignores SIGTERM, as a process in the middle of a kernel does.
SERVER = """
import json, os, signal, subprocess, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
if "--fail" in sys.argv:
    print("ValueError: no such model", flush=True)
    print("that was it", flush=True)
    sys.exit(3)
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
child = subprocess.Popen([sys.executable, "-c", stubborn], stdin=subprocess.DEVNULL)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        data = json.dumps({"weight_version": "default", "child": child.pid, "argv": sys.argv[1:],
                           "environment": dict(os.environ)}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *args):
        pass
def end():
    while os.read(0, 100):
        pass
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=end, daemon=True).start()
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "server.py"
    file.write_text(SERVER, encoding="utf-8")
    monkeypatch.setattr(sglang_launch, "_SCRIPT", file)
    monkeypatch.setattr(sglang_launch, "_GRACE", 0.5)
    return file


def launch(tmp_path: Path, *arguments: str) -> LocalServer:
    return LocalServer(
        sys.executable, tmp_path, "float32", tmp_path / "log" / "server.log", arguments, device="cpu"
    )


def eventually(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def gone(*numbers: int) -> bool:
    return not any(
        psutil.pid_exists(number) and psutil.Process(number).status() != psutil.STATUS_ZOMBIE
        for number in numbers
    )


def test_started_killed_restarted_and_ended_with_its_children(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx

    monkeypatch.setenv("PYTHONPATH", "/somewhere/of/ours")
    server = launch(tmp_path, "--page-size", "16")
    assert not server.running
    server.start()
    server.wait(60)
    told = httpx.get(f"{server.url}/model_info").json()
    flags = told["argv"]
    assert flags[flags.index("--model-path") + 1] == str(tmp_path.resolve())
    assert flags[-2:] == ["--page-size", "16"]  # given last, so they count
    assert "--skip-server-warmup" in flags and flags[flags.index("--dtype") + 1] == "float32"
    # Its interpreter has packages of its own, and nothing of ours may come before them.
    assert "PYTHONPATH" not in told["environment"] and told["environment"]["OMP_NUM_THREADS"] == "1"
    url, first, child = server.url, server.group, told["child"]
    server.kill()
    assert not server.running
    eventually(lambda: gone(first, child))
    server.start()
    server.wait(60)
    second, child = server.group, httpx.get(f"{url}/model_info").json()["child"]  # at the same address
    assert second != first
    server.stop()
    eventually(lambda: gone(second, child))
    server.stop()  # twice is once


def test_a_server_that_ends_as_it_starts_says_why(script: Path, tmp_path: Path) -> None:
    server = launch(tmp_path, "--fail")
    server.start()
    with pytest.raises(
        EngineError, match=r"ended as it started: ValueError: no such model \(log: .*server\.log"
    ):
        server.wait(60)
    server.stop()


def test_a_server_ends_with_whoever_started_it(script: Path, tmp_path: Path) -> None:
    """Also when that was killed and could do nothing about it."""
    code = f"""
import sys, time
from pathlib import Path
from agent.engines import sglang_launch
sglang_launch._SCRIPT = Path({str(script)!r})
folder = Path({str(tmp_path)!r})
server = sglang_launch.LocalServer(sys.executable, folder, "float32", folder / "x.log", device="cpu")
server.start()
server.wait(60)
print(server.group, flush=True)
time.sleep(300)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    group = int(parent.stdout.readline())
    assert not gone(group)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    eventually(lambda: gone(group))
    parent.stdout.close()


def test_no_interpreter(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no interpreter at .*nowhere/python: `make sglang-env`"):
        LocalServer(str(tmp_path / "nowhere" / "python"), tmp_path, "float32", tmp_path / "log")


def test_the_start_script_watches_its_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[int, int]] = []
    pieces = [b"x", b""]
    monkeypatch.setattr(sglang_start.os, "read", lambda descriptor, size: pieces.pop(0))
    monkeypatch.setattr(sglang_start.os, "kill", lambda pid, kind: ended.append((pid, kind)))
    sglang_start._end_with_stdin()
    assert ended == [(os.getpid(), signal.SIGTERM)] and pieces == []
