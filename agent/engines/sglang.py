"""Generation on SGLang servers over their native `/generate`: token ids in; ids, log-probs and weight version out.

What keeps a rollout honest:

* A completion counts only when its server says that all of it was sampled by the weights that the engine stands for
  now. Whatever was in flight while weights changed is sampled again, from its prompt.
* A dropped connection is a dead server. Its requests go to another server, or wait for it. One that comes back serves
  what it was started with, so it gets the current weights, and is asked again only after they are verified.
* Requests that would end a server process (ids outside the vocabulary) or that it would answer with an error (no room
  in the window) are refused before they are sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import random
import shutil
import uuid
from pathlib import Path
from typing import Any

import httpx
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent.engines.base import Completion, EngineError, GenerationRequest, check_request
from agent.engines.http_streams import StreamTransport
from agent.engines.settings import SGLangSettings
from agent.engines.sglang_broadcast import BroadcastCarrier
from agent.engines.sglang_launch import LocalServer
from agent.engines.sglang_pool import Member, Pool
from agent.engines.sglang_reply import body_of, read_reply
from agent.engines.sglang_server import Server, ServerInfo, explain, key_header
from agent.engines.sglang_weights import Carrier, DiskCarrier, plain_model, refuse_other_server
from agent.models import save_model
from envs.errors import UserError

_BUSY = frozenset({429, 502, 503, 504})
"""A full queue, or a router whose server is away: nothing was sampled, so the request may be sent again."""
_POLL = 0.5


class _Loop:
    """What belongs to one event loop: connections, and tasks that wait for servers to come back."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pool: Pool, timeout: float) -> None:
        self.loop, self.returned = loop, asyncio.Event()
        self.waiting: dict[Member, asyncio.Task[None]] = {}
        self.errands: set[asyncio.Task[None]] = set()
        plain = all(member.url.startswith("http://") for member in pool.members)
        self.client = httpx.AsyncClient(
            headers={"Content-Type": "application/json", **key_header()},
            # The time limit of a request is kept outside: it covers the answer as a whole.
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=None),
            transport=StreamTransport() if plain else None,
            trust_env=False,
        )


class SGLangEngine:
    """Engine over one or many servers; made by `for_training` or `for_evaluation`.

    Completions are reproducible only as far as the servers are: see SGLang's deterministic inference.

    Args:
        pool: servers that are there already.
        model: whose configuration new weights must have; None where weights never change.
    """

    def __init__(
        self,
        pool: Pool,
        settings: SGLangSettings,
        vocab_size: int,
        max_context: int,
        model: PreTrainedModel | None = None,
        own_folder: Path | None = None,
    ) -> None:
        self.pool, self._settings, self._model = pool, settings, model
        self._vocab_size, self._max_context = vocab_size, max_context
        self._own_folder = own_folder
        # Odd while weights go over. A request that began under another count may have met both.
        self._pushes = 0
        self._closed = ""
        self._names = (f"{uuid.uuid4().hex[:12]}-{number}" for number in itertools.count())
        self._current: _Loop | None = None

    @classmethod
    def for_training(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: SGLangSettings,
        folder: Path,
    ) -> SGLangEngine:
        """An engine whose servers serve ``model``'s weights as version 0.

        Args:
            folder: of the run; logs and, unless the settings say otherwise, weights are written below it.

        Raises:
            UserError: no server named or none there, one of another model, no interpreter to launch one with.
            EngineError: a server did not start or take the weights.
        """
        own = (folder / "sglang").resolve()
        plain = plain_model(model, model)
        base = _base(model)
        config = base.config.get_text_config()
        start = own / "start"
        carrier: Carrier = (
            DiskCarrier(Path(settings.weights_folder or own) / f"weights-{uuid.uuid4().hex[:8]}", tokenizer)
            if settings.weights == "disk"
            else BroadcastCarrier(settings.host, settings.update_timeout)
        )
        pool = Pool([], settings, carrier)
        try:
            if settings.launch:
                save_model(plain, tokenizer, start)
            pool.members = _members(
                settings, start, str(base.dtype).removeprefix("torch."), folder / "sglang.log"
            )
            for member in pool.members:
                assert member.info is not None
                refuse_other_server(member.server, member.info, plain)
                member.alive = True
            pool.push(plain, 0)
        except BaseException:
            pool.close()
            shutil.rmtree(own, ignore_errors=True)
            raise
        context = _context(pool.members, int(config.max_position_embeddings))
        return cls(pool, settings, int(config.vocab_size), context, base, own)

    @classmethod
    def for_evaluation(cls, settings: SGLangSettings, vocab_size: int, max_context: int) -> SGLangEngine:
        """An engine over running servers that keep the weights they have.

        Raises:
            UserError: no server there, servers with different weights, or one that generates nothing.
        """
        members = _members(settings, None, "auto", Path("sglang.log"))
        for member in members:
            if not member.server.generates():
                raise UserError(
                    f"{member.url} generates nothing: a trainer that was killed may have left it paused "
                    f"(curl -X POST {member.url}/continue_generation --json '{{}}')"
                )
        labels = sorted({member.info.weight_version for member in members if member.info is not None})
        if len(labels) > 1:
            raise UserError(f"the servers serve different weights: {', '.join(labels)}")
        pool = Pool(members, settings, None)
        for member in members:
            member.alive = True
        number = labels[0].split("-")[0]
        pool.current = (labels[0], int(number) if number.isdecimal() else 0)
        return cls(pool, settings, vocab_size, _context(members, max_context))

    @property
    def weight_version(self) -> int:
        return self.pool.current[1]

    @property
    def max_context(self) -> int:
        return self._max_context

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion; see `Engine`. Cancelling the coroutine ends the request on its server, too.

        Raises:
            EngineError: refused, out of time, out of attempts, or no server came back in time.
            ValueError: a request that no server may see, see `check_request`.
        """
        check_request(request, self._vocab_size, self._max_context)
        busy = moved = 0
        while True:
            if self._closed:
                raise EngineError(self._closed)
            here = self._here()
            member = self.pool.choose(request.group)
            if member is None:
                await self._someone(here)
                continue
            pushes = self._pushes
            try:
                answer = await self._ask(here, member, request)
            except httpx.TransportError as error:
                self._lose(here, member, f"the connection dropped: {error}")
                moved += 1
                if moved > self._settings.moves:
                    raise EngineError(
                        f"{moved} servers in a row died under a request; the last: {error}"
                    ) from error
                continue
            if answer.status_code in _BUSY and busy < self._settings.retries:
                await asyncio.sleep(min(5.0, 0.1 * 2**busy) * random.uniform(0.5, 1.0))
                busy += 1
                continue
            if answer.status_code != 200:
                raise EngineError(f"{member.url}: {explain(answer)}")
            reply = read_reply(_json(answer))
            changed = pushes % 2 == 1 or self._pushes != pushes
            label, version = self.pool.current
            if reply.versions != {label}:
                if not changed:
                    others = ", ".join(sorted(reply.versions))
                    self._lose(here, member, f"it serves weights {others!r}, not {label!r}")
                    moved += 1
                    if moved > self._settings.moves:
                        raise EngineError(f"{member.url} keeps serving other weights: {others!r}")
                continue
            if reply.finish == "abort" and changed:
                continue
            return Completion(reply.ids, reply.logprobs, reply.finish, version)

    def load_weights(self, source: Any, version: int) -> None:
        """Serve ``source``'s weights as ``version`` from now on, on every server; may be called from any thread.

        Raises:
            EngineError: servers refused them or hold others afterwards; the engine is of no use any more then.
            ValueError: a version that does not grow, or weights of another model.
        """
        if self._model is None:
            raise ValueError("the weights of these servers are not ours to change")
        if version <= self.weight_version:
            raise ValueError(f"weight version {version} does not follow {self.weight_version}")
        model = plain_model(source, self._model)
        with self.pool.lock:
            self._pushes += 1
            try:
                self.pool.push(model, version)
            except BaseException as error:
                self._closed = f"weights {version} did not get over: {error}"
                raise
            finally:
                self._pushes += 1

    def fingerprint(self) -> str:
        """Hash of the weights that the servers have now, 16 hex digits.

        Raises:
            UserError: they do not all have the same.
        """
        sums = {json.dumps(member.server.checksums(), sort_keys=True) for member in self.pool.members}
        if len(sums) > 1:
            raise UserError("the servers serve different weights: their checksums differ")
        return hashlib.sha256(sums.pop().encode()).hexdigest()[:16]

    async def close(self) -> None:
        """End what waits; servers that were started here end with their children."""
        self._closed = "the engine is closed"
        current, self._current = self._current, None
        if current is not None and current.loop is asyncio.get_running_loop():
            for task in [*current.waiting.values(), *current.errands]:
                task.cancel()
            current.returned.set()
            await current.client.aclose()
        await asyncio.to_thread(self.pool.close)
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)

    async def _ask(self, here: _Loop, member: Member, request: GenerationRequest) -> httpx.Response:
        rid = next(self._names)
        content = json.dumps(body_of(request, rid, self._max_context)).encode()
        member.running += 1
        try:
            async with asyncio.timeout(self._settings.request_timeout):
                return await here.client.post(f"{member.url}/generate", content=content)
        except TimeoutError as error:
            self._abort(here, member, rid)
            limit = self._settings.request_timeout
            raise EngineError(f"{member.url} took longer than {limit:g} s for a request") from error
        except asyncio.CancelledError:
            self._abort(here, member, rid)
            raise
        finally:
            member.running -= 1

    def _abort(self, here: _Loop, member: Member, rid: str) -> None:
        """Nobody waits for this request any more: its slot is worth more than its tokens."""

        async def tell() -> None:
            with contextlib.suppress(httpx.HTTPError):
                await here.client.post(
                    f"{member.url}/abort_request", content=json.dumps({"rid": rid}).encode()
                )

        task = here.loop.create_task(tell())
        here.errands.add(task)
        task.add_done_callback(here.errands.discard)

    def _here(self) -> _Loop:
        """Connections and tasks cannot outlive the event loop they were made in."""
        loop = asyncio.get_running_loop()
        if self._current is None or self._current.loop is not loop:
            self._current = _Loop(loop, self.pool, self._settings.request_timeout)
            for member in self.pool.members:
                if not member.alive:
                    self._lose(self._current, member, member.why)
        return self._current

    def _lose(self, here: _Loop, member: Member, why: str) -> None:
        self.pool.lose(member, why)
        if member not in here.waiting:
            here.waiting[member] = here.loop.create_task(self._await_return(here, member))

    async def _await_return(self, here: _Loop, member: Member) -> None:
        try:
            while not self._closed and not await asyncio.to_thread(self.pool.take_back, member):
                await asyncio.sleep(_POLL)
        finally:
            del here.waiting[member]
        here.returned.set()

    async def _someone(self, here: _Loop) -> None:
        """Wait until a server is there."""
        for member in self.pool.members:
            if not member.alive:
                self._lose(here, member, member.why)
        here.returned.clear()
        try:
            async with asyncio.timeout(self._settings.start_timeout):
                await here.returned.wait()
        except TimeoutError:
            raise EngineError(f"no server is there: {self.pool.losses()}") from None


def _members(settings: SGLangSettings, start: Path | None, dtype: str, log: Path) -> list[Member]:
    """The servers that the settings name, all of which must be there."""
    limit = settings.update_timeout
    if settings.launch:
        if start is None:
            raise UserError("only a training run launches a server; name a running one")
        local = LocalServer(settings.python, start, dtype, log, settings.arguments)
        try:
            local.start()
            local.wait(settings.start_timeout)
            server = Server(local.url, limit)
            return [Member(server, local, server.info())]
        except BaseException:
            local.stop()
            raise
    if not settings.urls:
        raise UserError("no SGLang server is named")
    members = [Member(Server(url, limit)) for url in settings.urls]
    for member in members:
        try:
            member.info = member.server.info()
        except EngineError as error:
            raise UserError(f"no SGLang server at {member.url}: {error}") from None
    return members


def _context(members: list[Member], of_the_model: int) -> int:
    infos: list[ServerInfo] = [member.info for member in members if member.info is not None]
    return min([of_the_model, *(info.max_context for info in infos if info.max_context is not None)])


def _base(model: Any) -> PreTrainedModel:
    """The transformers model under its adapters."""
    found: PreTrainedModel = model.get_base_model() if hasattr(model, "get_base_model") else model
    return found


def _json(answer: httpx.Response) -> Any:
    try:
        return json.loads(answer.content)
    except ValueError:
        raise EngineError(f"an answer that is no JSON: {answer.text[:200]!r}") from None
