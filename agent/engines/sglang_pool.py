"""The servers of an engine: which one serves a group, which are away, and how all of them get the same weights."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from agent.engines.base import EngineError
from agent.engines.settings import SGLangSettings
from agent.engines.sglang_launch import LocalServer
from agent.engines.sglang_server import Server, ServerDied, ServerInfo
from agent.engines.sglang_weights import Carrier, check_weights, tensors
from envs.errors import UserError

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Member:
    """One server of a pool.

    Attributes:
        local: the process behind it, when it is ours.
        info: what it said when it was taken in.
        alive: whether it is asked for completions.
        running: requests that it has now.
        why: what happened when it was lost.
    """

    server: Server
    local: LocalServer | None = None
    info: ServerInfo | None = None
    alive: bool = False
    running: int = 0
    why: str = ""
    checksums: list[dict[str, str]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.server.url


class Pool:
    """Servers that serve one set of weights.

    Args:
        members: at least one.
        carrier: brings new weights; None for servers whose weights are not ours to change.

    Attributes:
        current: label and version of the weights that every completion must come from. The label is one that nobody
            else uses, so a server with another run's weights of the same version is told apart.
        lock: held while weights go over or a server is taken back.
    """

    def __init__(self, members: Sequence[Member], settings: SGLangSettings, carrier: Carrier | None) -> None:
        self.members, self.settings, self.carrier = list(members), settings, carrier
        self.current: tuple[str, int] = ("", 0)
        self.lock = threading.RLock()
        self._nonce = uuid.uuid4().hex[:8]
        self._model: PreTrainedModel | None = None
        self._sample = ""
        self._groups: dict[str, Member] = {}

    def choose(self, group: str) -> Member | None:
        """The server of a group, which is the one with the least to do when the group is new or lost its own."""
        known = self._groups.get(group) if group else None
        if known is not None and known.alive:
            return known
        alive = [member for member in self.members if member.alive]
        if not alive:
            return None
        found = min(alive, key=lambda member: member.running)
        if group:
            self._groups[group] = found
        return found

    def lose(self, member: Member, why: str) -> None:
        """A server is not asked any more until it was taken back."""
        if member.alive:
            _LOG.warning("%s is left out: %s", member.url, why)
        member.alive, member.why = False, why

    def losses(self) -> str:
        return "; ".join(f"{member.url}: {member.why}" for member in self.members if not member.alive)

    def push(self, model: PreTrainedModel, version: int) -> None:
        """Serve a model's weights as ``version`` on every server that is there; those that are not get them later.

        Pause (what runs is aborted), update, flush, compare label and checksums, and only then go on.

        Raises:
            EngineError: a server refused, or serves other weights afterwards; or none of them is there.
        """
        assert self.carrier is not None, "these servers' weights are not ours to change"
        with self.lock:
            self.carrier.prepare(model, version)
            there = [member for member in self.members if member.alive]
            try:
                there = self._each(there, lambda member: member.server.pause())
                self._model, self.current = model, (f"{version}-{self._nonce}", version)
                self._groups.clear()
                there = self._each(there, self._install)
            finally:
                with contextlib.suppress(EngineError):
                    self._each(there, lambda member: member.server.resume())
            if not any(member.alive for member in self.members):
                self.wait_for_one()
            self.carrier.settle()
            self._sample = _sample(model)

    def wait_for_one(self) -> None:
        """Block until a server is there with the current weights.

        Raises:
            EngineError: none came within the time that a start may take.
        """
        deadline = time.monotonic() + self.settings.start_timeout
        while not any([self.take_back(member) for member in self.members]):
            if time.monotonic() > deadline:
                raise EngineError(f"no server is there: {self.losses()}")
            time.sleep(0.5)

    def take_back(self, member: Member) -> bool:
        """Whether a server is there and serves the current weights, which it is given when it does not.

        A server of our own whose process ended is started again.
        """
        with self.lock:
            if member.alive:
                return True
            try:
                if member.local is not None and not member.local.running:
                    member.local.start()
                member.info = member.server.info(timeout=10.0)
                if self.carrier is None:
                    found = member.info.weight_version
                    if found != self.current[0]:
                        raise EngineError(f"it serves weights {found!r} now, not {self.current[0]!r}")
                elif self._model is not None:
                    self.carrier.forget(member.url)
                    member.server.pause()
                    try:
                        self._install(member)
                    finally:
                        member.server.resume()
            except (EngineError, UserError) as error:
                member.why = str(error)
                return False
            if member.why:
                _LOG.warning("%s is back", member.url)
            member.alive = True
            return True

    def close(self) -> None:
        """Let go of all servers; ours are ended."""
        for member in self.members:
            member.alive = False
            if member.local is not None:
                member.local.stop()
            member.server.close()
        if self.carrier is not None:
            self.carrier.close()

    def _install(self, member: Member) -> None:
        """Bring the current weights to a paused server and make sure that they are there."""
        assert self.carrier is not None and self._model is not None and member.info is not None
        label = self.current[0]
        self.carrier.send(member.server, member.info, label)
        member.server.flush()
        found = member.server.version()
        if found != label:
            raise EngineError(f"{member.url} says that it serves weights {found!r} after it took {label!r}")
        if not self.settings.verify or check_weights(member.server, member.info, self._model):
            return
        # The hashes are not ours to compute: at least they must move when the weights do.
        checksums = member.server.checksums()
        if checksums == member.checksums and self._sample and self._sample != _sample(self._model):
            raise EngineError(f"{member.url} took new weights, but its checksums are the old ones")
        member.checksums = checksums

    def _each(self, members: Sequence[Member], act: Callable[[Member], None]) -> list[Member]:
        """Do something on all servers at once; those that turn out to be dead are left out of what is returned."""
        if not members:
            return []
        with ThreadPoolExecutor(len(members)) as threads:
            futures = [(member, threads.submit(act, member)) for member in members]
        failures: list[BaseException] = []
        for member, future in futures:
            error = future.exception()
            if isinstance(error, ServerDied):
                self.lose(member, str(error))
            elif error is not None:
                failures.append(error)
        if failures:
            raise failures[0]
        return [member for member in members if member.alive]


def _sample(model: PreTrainedModel) -> str:
    """Hash of a few numbers of each tensor: tells whether weights moved, for next to nothing."""
    digest = hashlib.sha256()
    for tensor in tensors(model).values():
        digest.update(tensor.reshape(-1)[:256].float().cpu().numpy().tobytes())
    return digest.hexdigest()
