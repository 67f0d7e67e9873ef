"""A server with SGLang's routes and habits, as recorded from a real 0.5.23 (`sglang_answers/`), that tests can bend.

It reads weight folders and hashes them with numpy, knows nothing of the client, and can die and come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import json
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

ANSWERS = Path(__file__).with_name("sglang_answers")
GENERATE, ERRORS, OPERATIONS = (
    json.loads((ANSWERS / f"{name}.json").read_text(encoding="utf-8"))
    for name in ("generate", "errors", "operations")
)
Answer = tuple[int, Any]


def folder_checksums(folder: Path) -> dict[str, str]:
    """What SGLang shows for a Qwen2 folder: query, key and value as one tensor, gate and up as one."""
    arrays: dict[str, np.ndarray] = load_file(folder / "model.safetensors")
    found: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if "q_proj" in name:
            three = [arrays[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            found[name.replace("q_proj", "qkv_proj")] = np.concatenate(three)
        elif "gate_proj" in name:
            two = [arrays[name], arrays[name.replace("gate_proj", "up_proj")]]
            found[name.replace("gate_proj", "gate_up_proj")] = np.concatenate(two)
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            found[name] = array
    return {name: hashlib.sha256(array.tobytes()).hexdigest()[:16] for name, array in found.items()}


class FakeSGLang:
    """Listens on a free port of 127.0.0.1.

    Attributes:
        calls: (path, body) in order.
        queue: answers that the next calls of `/generate` get, before anything else.
        seconds: that a completion takes.
        folder: whose weights it serves, and ``label`` their version.
        corrupt, lies, refuses: other weights than it was given; another version; no update by broadcast.
        extra: tensors, with their hashes, that it shows beside those of its folder.
        sessions: whether it has the routes around an update; ``open``: whether it is within one.
    """

    def __init__(self, folder: Path, sessions: bool = True) -> None:
        self.start_folder, self.sessions = folder, sessions
        self.calls: list[tuple[str, Any]] = []
        self.queue: list[Answer] = []
        self.seconds = 0.0
        self.served: list[str] = []
        self.info = copy.deepcopy(OPERATIONS["model_info"]["body"]) | {"model_path": str(folder)}
        self.limits = copy.deepcopy(OPERATIONS["server_info"]["body"])
        self.corrupt = self.lies = self.refuses = False
        self.extra: dict[str, str] = {}
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def start(self) -> None:
        """Come up as it was started first, whatever it was given later."""
        self.folder, self.label, self.open = self.start_folder, "default", False
        self.sums = folder_checksums(self.folder)
        self._do(self._listen())

    def die(self) -> None:
        """Every connection drops, and nobody listens any more."""
        self._do(self._hang_up())

    def close(self) -> None:
        self.die()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def running(self) -> int:
        return self._running

    def _do(self, what: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(10)

    async def _listen(self) -> None:
        self._go_on, self._aborted = asyncio.Event(), asyncio.Event()
        self._go_on.set()
        self._running = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _hang_up(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._writers.add(writer)
        self._tasks.add(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                path = head.split(" ", 2)[1].partition("?")[0]
                lines = (line.partition(":") for line in head.split("\r\n")[1:])
                fields = {name.lower(): value.strip() for name, _, value in lines}
                content = await reader.readexactly(int(fields.get("content-length", 0)))
                body = json.loads(content) if content else None
                self.calls.append((path, body))
                status, found = await self._answer(path, body)
                data = found.encode() if isinstance(found, str) else json.dumps(found).encode()
                kind = "text/plain" if isinstance(found, str) else "application/json"
                lead = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n"
                writer.write(lead.encode() + data)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            with contextlib.suppress(Exception):
                writer.close()

    async def _answer(self, path: str, body: Any) -> Answer:
        name = path.removeprefix("/")
        if name == "generate":
            return await self._generate(body)
        if name in ("begin_weight_update", "end_weight_update") and self.sessions:
            opens = name == "begin_weight_update"
            if self.open == opens:
                return _recorded("session_open" if opens else "session_not_open")
            self.open = opens
            return 200, {"success": True, "message": "Success"}
        if name == "pause_generation":
            self._go_on.clear()
            self._aborted.set()
            while self._running:
                await asyncio.sleep(0.001)
            self._aborted.clear()
        elif name == "health_generate":
            return (200 if self._go_on.is_set() else 503), ""
        elif name == "continue_generation":
            self._go_on.set()
        elif name == "update_weights_from_disk":
            folder = Path(body["model_path"])
            if not (folder / "model.safetensors").is_file():
                return _recorded("bad_path")
            # Read now: weights stay in memory when their folder is gone.
            self.folder, self.sums = folder, folder_checksums(folder)
            self.label = "a lie" if self.lies else body["weight_version"]
            return 200, {"success": True, "message": "Succeeded to update model weights."}
        elif name == "update_weights_from_distributed":
            if self.refuses:
                return _recorded("no_session")
            self.label = body["weight_version"]
            return 200, {"success": True, "message": "Succeeded to update parameter online."}
        elif name == "flush_cache" and self._running:
            return _recorded("flush_busy")
        elif name == "model_info":
            return 200, self.info | {"weight_version": self.label}
        elif name == "server_info":
            return 200, self.limits
        elif name == "weights_checker":
            sums = self.sums | self.extra
            if self.corrupt:
                sums["model.norm.weight"] = "0" * 16
            return 200, {"success": True, "message": "Success.", "ranks": [{"checksums": sums}]}
        if name in OPERATIONS:
            return int(OPERATIONS[name]["status"]), OPERATIONS[name]["body"]
        if name == "abort_request":
            return 200, ""
        return _recorded("not_found")

    async def _generate(self, body: Any) -> Answer:
        if self.queue:
            return self.queue.pop(0)
        await self._go_on.wait()
        label, aborted = self.label, False
        self._running += 1
        try:
            if self.seconds:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._aborted.wait(), self.seconds)
                    aborted = True
        finally:
            self._running -= 1
        self.served.append(str(body["rid"]))
        return 200, completion("abort" if aborted else "stop_string", label)


def completion(kind: str, label: str = "default", now: str | None = None) -> Any:
    """A recorded answer whose tokens were sampled under ``label`` and that was sent under ``now``."""
    found = copy.deepcopy(GENERATE[kind]["body"])
    found["meta_info"]["weight_version"] = now or label
    for span in found["meta_info"]["weight_versions"]:
        span["version"] = label
    return found


def _recorded(kind: str) -> Answer:
    return int(ERRORS[kind]["status"]), ERRORS[kind]["body"]
