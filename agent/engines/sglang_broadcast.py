"""Weights by broadcast: the trainer is rank 0 of a small process group with each server (NCCL, gloo on a CPU).

One group a server, not one for all: a server that dies leaves the others' groups whole, and one that comes back just
gets a new group. Nothing is written to a disk, and nothing is pickled.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from transformers import PreTrainedModel

from agent.engines.base import EngineError
from agent.engines.sglang_server import Server, ServerInfo
from agent.engines.sglang_weights import tensors

_BUCKET_BYTES = 1 << 29


class BroadcastCarrier:
    """Sends the prepared model's tensors, a bucket of them for each request.

    Args:
        host: this machine's address as the servers see it.
        timeout: seconds for a bucket, and for a server to join.
    """

    def __init__(self, host: str, timeout: float) -> None:
        self._host, self._timeout = host, timeout
        self._groups: dict[str, tuple[str, Any]] = {}
        self._model: PreTrainedModel | None = None
        self._threads = ThreadPoolExecutor(thread_name_prefix="sglang-update")

    def prepare(self, model: PreTrainedModel, version: int) -> None:
        self._model = model

    def send(self, server: Server, info: ServerInfo, label: str) -> None:
        assert self._model is not None, "prepare comes first"
        try:
            if server.url not in self._groups:
                self._groups[server.url] = self._join(server, info)
            name, group = self._groups[server.url]
            session = server.begin_update()
            for bucket in _buckets(self._model, info):
                described = [(key, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for key, t in bucket]
                request = self._threads.submit(server.receive, described, name, label)
                self._broadcast(server, group, [tensor for _, tensor in bucket], request)
            if session:
                server.end_update()
        except BaseException as error:
            # A collective that broke off in the middle cannot be taken up again.
            self.forget(server.url)
            if isinstance(error, EngineError) or not isinstance(error, RuntimeError | TimeoutError):
                raise
            reason = str(error) or type(error).__name__
            raise EngineError(f"{server.url}: the weights did not go over: {reason}") from error

    def forget(self, url: str) -> None:
        """Leave the group with a server that is gone."""
        known = self._groups.pop(url, None)
        if known is not None:
            _leave(known[1])

    def settle(self) -> None:
        pass

    def close(self) -> None:
        for url in list(self._groups):
            self.forget(url)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _join(self, server: Server, info: ServerInfo) -> tuple[str, Any]:
        assert self._model is not None
        backend = "nccl" if self._model.device.type == "cuda" and info.device == "cuda" else "gloo"
        name, port, world = f"mempo-{uuid.uuid4().hex[:12]}", _free_port(self._host), 1 + info.ranks
        limit = timedelta(seconds=self._timeout)
        request = self._threads.submit(server.join_group, self._host, port, world, name, backend)
        try:
            store = dist.TCPStore(
                self._host, port, world, is_master=True, timeout=limit, wait_for_workers=False
            )
            group, _ = distributed_c10d._new_process_group_helper(
                world,
                0,
                [],
                dist.Backend(backend),
                dist.PrefixStore(name, store),
                group_name=distributed_c10d.GroupName(name),
                timeout=limit,
            )
        except (RuntimeError, ValueError) as error:
            _raise_cause(request, f"{server.url} did not join the update group: {error}")
            raise
        distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
        request.result(self._timeout)
        return name, group

    def _broadcast(
        self, server: Server, group: Any, values: list[torch.Tensor], request: Future[None]
    ) -> None:
        handles = [dist.broadcast(value, src=0, group=group, async_op=True) for value in values]
        deadline = time.monotonic() + self._timeout
        while not request.done():
            if time.monotonic() > deadline:
                raise EngineError(f"{server.url} did not take the weights within {self._timeout:.0f} s")
            time.sleep(0.002)
        request.result()
        for handle in handles:
            handle.wait()


def _buckets(model: PreTrainedModel, info: ServerInfo) -> Iterator[list[tuple[str, torch.Tensor]]]:
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors(model).items():
        if info.device == "cpu":
            tensor = tensor.cpu()
        if bucket and size + tensor.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor.contiguous()))
        size += tensor.nbytes
    yield bucket


def _raise_cause(request: Future[None], message: str) -> None:
    error = request.exception(timeout=1) if request.done() else None
    raise EngineError(f"{message}{f' ({error})' if error else ''}")


def _leave(group: Any) -> None:
    ranks = distributed_c10d._world.pg_group_ranks
    try:
        dist.destroy_process_group(group)
    except (RuntimeError, ValueError, AssertionError, KeyError):
        ranks.pop(group, None)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
