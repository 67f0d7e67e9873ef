"""One SGLang server as its operator sees it: what it is, pausing, weights, checksums. Blocking, one call a request.

Routes and their habits were read off a running 0.5.23; `begin_weight_update` and `end_weight_update` came with 0.5.22,
and a server without them answers 404, which is taken for "not needed".
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from agent.engines.base import EngineError
from agent.engines.replies import error_message

_CONNECT = 10.0
KEY_VARIABLE = "SGLANG_API_KEY"
"""Environment variable with the key of servers that were started with one."""


class ServerDied(EngineError):
    """The connection was refused or dropped: the server is not there (any more)."""


@dataclass(frozen=True)
class ServerInfo:
    """What a server says about itself.

    Attributes:
        model_type: of its model's configuration, such as ``qwen2``.
        architectures: of its model's configuration.
        model_path: folder or hub id that it serves now.
        dtype: of its weights, such as ``float32``; ``auto`` for what the folder says.
        device: ``cpu``, ``cuda``, ...
        max_context: tokens of prompt and completion together, one more than the longest prompt that it takes.
        ranks: processes that hold a share of the weights.
        tensor_parallel: how many of them split one layer.
        weight_version: the label of its weights; ``default`` as started.
    """

    model_type: str
    architectures: tuple[str, ...]
    model_path: str
    dtype: str
    device: str
    max_context: int | None
    ranks: int
    tensor_parallel: int
    weight_version: str


class Server:
    """Operates one server.

    Args:
        url: ``http://host:port``.
        timeout: seconds one call may take.
        transport: for tests.
    """

    def __init__(
        self, url: str, timeout: float = 600.0, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._client = httpx.Client(
            base_url=self.url,
            headers=key_header(),
            timeout=httpx.Timeout(timeout, connect=_CONNECT),
            trust_env=False,
            transport=transport,
        )

    def close(self) -> None:
        self._client.close()

    def info(self, timeout: float = 30.0) -> ServerInfo:
        """Raises EngineError when it does not answer, or answers as no SGLang server does."""
        model = self._json("GET", "/model_info", timeout=timeout)
        server = self._json("GET", "/server_info", timeout=timeout)
        try:
            architectures = tuple(model.get("architectures") or ())
            longest = server.get("max_req_input_len")
            return ServerInfo(
                model_type=str(model.get("model_type") or ""),
                architectures=architectures,
                model_path=str(model["model_path"]),
                dtype=str(server.get("dtype", "auto")).removeprefix("torch."),
                device=str(server.get("device") or ""),
                max_context=int(longest) + 1 if longest else None,
                ranks=int(server.get("tp_size", 1)) * int(server.get("pp_size", 1)),
                tensor_parallel=int(server.get("tp_size", 1)),
                weight_version=str(model.get("weight_version", "default")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self.url} does not describe itself as an SGLang server does: {error}"
            ) from None

    def version(self, timeout: float = 10.0) -> str:
        """The label of the weights that it serves."""
        return str(self._json("GET", "/model_info", timeout=timeout).get("weight_version", "default"))

    def generates(self) -> bool:
        """Whether tokens come out of it, which it finds out by itself within 20 s."""
        return self._call("GET", "/health_generate", None, allowed=(404, 503)).status_code != 503

    def pause(self) -> None:
        """Abort what runs; what is asked from now on waits."""
        self._json("POST", "/pause_generation", {"mode": "abort"})

    def resume(self) -> None:
        self._json("POST", "/continue_generation", {})

    def flush(self) -> None:
        """Forget cached prefixes: their keys and values belong to the weights that computed them."""
        self._call("POST", "/flush_cache", None, {"timeout": "30"})

    def load_folder(self, folder: str, label: str) -> None:
        """Take the weights of a folder, under a version label."""
        body = {"model_path": folder, "weight_version": label, "flush_cache": True}
        self._succeed("/update_weights_from_disk", body)

    def join_group(self, host: str, port: int, world: int, name: str, backend: str) -> None:
        """Become rank 1 and following of a process group whose rank 0 waits at ``host:port``."""
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world,
            "group_name": name,
            "backend": backend,
        }
        self._succeed("/init_weights_update_group", body)

    def leave_group(self, name: str) -> None:
        self._succeed("/destroy_weights_update_group", {"group_name": name})

    def begin_update(self) -> bool:
        """Whether this server has sessions of updates, and one is open now.

        One that an earlier update left open (its trainer was killed, a collective broke off) is ended first: all
        tensors come anew.
        """
        answer = self._call("POST", "/begin_weight_update", {}, allowed=(400, 404, 405))
        if answer.status_code == 400:
            with contextlib.suppress(EngineError):
                self.end_update()
            answer = self._call("POST", "/begin_weight_update", {})
        if answer.status_code in (404, 405):
            return False
        _check_success(self.url, "/begin_weight_update", answer)
        return True

    def end_update(self) -> None:
        self._succeed("/end_weight_update", {})

    def receive(self, tensors: Sequence[tuple[str, str, Sequence[int]]], group: str, label: str) -> None:
        """Receive tensors, given as (name, dtype, shape), from rank 0 of a group."""
        body = {
            "names": [name for name, _, _ in tensors],
            "dtypes": [dtype for _, dtype, _ in tensors],
            "shapes": [list(shape) for _, _, shape in tensors],
            "group_name": group,
            "weight_version": label,
            "flush_cache": True,
        }
        self._succeed("/update_weights_from_distributed", body)

    def checksums(self) -> list[dict[str, str]]:
        """Hash of each tensor by name, for each process of the server."""
        found = self._json("POST", "/weights_checker", {"action": "checksum"})
        try:
            return [
                {str(name): str(value) for name, value in rank["checksums"].items()}
                for rank in found["ranks"]
            ]
        except (KeyError, TypeError, AttributeError):
            raise EngineError(f"{self.url}/weights_checker answered in another form") from None

    def slow_down(self, seconds: float) -> None:
        """Sleep in every forward pass: makes timing tests deterministic."""
        self._call("POST", "/slow_down", {"forward_sleep_time": seconds})

    def abort(self, rid: str) -> None:
        self._call("POST", "/abort_request", {"rid": rid})

    def _succeed(self, path: str, body: Mapping[str, Any]) -> None:
        _check_success(self.url, path, self._call("POST", path, body))

    def _json(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> dict[str, Any]:
        answer = self._call(method, path, body, timeout=timeout)
        try:
            found = answer.json()
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise EngineError(f"{self.url}{path} answered no JSON object: {answer.text[:200]!r}")
        return found

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        params: Mapping[str, str] | None = None,
        allowed: Sequence[int] = (),
        timeout: float | None = None,
    ) -> httpx.Response:
        extra: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        try:
            answer = self._client.request(method, path, json=body, params=params, **extra)
        except httpx.TimeoutException as error:
            raise EngineError(f"{self.url}{path} did not answer in time ({type(error).__name__})") from error
        except httpx.TransportError as error:
            raise ServerDied(f"{self.url} is not there: {error}") from error
        if answer.status_code != 200 and answer.status_code not in allowed:
            raise EngineError(f"{self.url}{path}: {explain(answer)}")
        return answer


def key_header() -> dict[str, str]:
    key = os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def explain(answer: httpx.Response) -> str:
    """One line from an answer that is no success."""
    return f"status {answer.status_code}: {error_message(answer)}"


def _check_success(url: str, path: str, answer: httpx.Response) -> None:
    try:
        found = answer.json()
    except ValueError:
        found = {}
    if not (isinstance(found, dict) and found.get("success") is True):
        raise EngineError(f"{url}{path}: {explain(answer)}")
