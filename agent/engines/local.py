"""In-process generation for any decoder-only transformers model: continuous batching over a slot cache.

One decode step serves exactly the requests that are alive; one that ends leaves at once, and its place is
taken by the last one. New requests are collected whenever the driver comes round, prefilled together
(batched by length, identical prompts once, a long prefix common to all prompts once) and join the next
step. No clock and no thread takes part: the same requests in the same order give the same steps, and what a
request samples depends on its own seed only (see ``sampling``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent.engines.base import Completion, EngineError, FinishReason, GenerationRequest, check_request
from agent.engines.kv_cache import Prefill
from agent.engines.sampling import sample
from agent.engines.slot_model import SlotModel
from agent.spans import token_bytes

# A prefill call costs about as much as this many tokens beyond its own: padding up to it is cheaper than a
# call.
_CALL_COST = 256
_MAX_PREFILL_TOKENS = 16_384
_MIN_PREFIX = 64


class _Job:
    """One request on its way through the engine."""

    __slots__ = (
        "future", "ids", "length", "logprobs", "request", "room", "seed", "stop_ids", "stops", "tail",
        "temperature",
    )  # fmt: skip

    def __init__(
        self,
        request: GenerationRequest,
        future: asyncio.Future[Completion] | None,
        stop_ids: frozenset[int],
        max_context: int,
    ) -> None:
        self.request = request
        self.future = future
        self.stop_ids = stop_ids | frozenset(request.stop_token_ids)
        self.stops = tuple(stop.encode() for stop in request.stop)
        self.seed = request.seed & 0xFFFF_FFFF_FFFF_FFFF
        self.temperature = request.temperature
        self.room = min(request.max_new_tokens, max_context - len(request.prompt_ids))
        self.restart()

    def restart(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.tail = b""
        # Positions in the cache: all but the token sampled last.
        self.length = len(self.request.prompt_ids)


class LocalEngine:
    """Engine over a model in this process.

    The model may be shared with a learner: it is used under ``inference_mode`` and in eval mode, and left
    as it was. Attention must be ``sdpa`` or ``eager``.

    Args:
        model: causal language model whose layers all use full or sliding-window attention.
        max_batch: requests decoded at once; further ones wait in order.
        weight_version: version of the weights the model has now.

    Raises:
        UserError: an architecture or attention implementation that a slot cache cannot serve.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_batch: int = 256,
        weight_version: int = 0,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_batch = max_batch
        self._version = weight_version
        self._bytes = token_bytes(tokenizer)
        self._stop_ids = _end_ids(model, tokenizer)
        self._slots = SlotModel(model)
        self._cache = self._slots.cache
        self._waiting: list[_Job] = []
        self._checked = False
        self._driver: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def max_context(self) -> int:
        return self._slots.max_context

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion; see `Engine`. Cancelling the coroutine frees its slot before the next
        step."""
        if self._closed:
            raise EngineError("the engine is closed")
        check_request(request, self._slots.vocab_size, self._slots.max_context)
        loop = asyncio.get_running_loop()
        if self._driver is None or self._driver.done() or self._driver.get_loop() is not loop:
            # Whatever an interrupted loop left behind has nobody waiting for it.
            self._reset()
            self._driver = loop.create_task(self._drive())
        job = _Job(request, loop.create_future(), self._stop_ids, self._slots.max_context)
        self._waiting.append(job)
        assert job.future is not None
        return await job.future

    def generate_all(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Sample completions for all requests, in order, without an event loop.

        Raises:
            EngineError: an asyncio driver is serving requests at the same time.
        """
        if self._busy:
            raise EngineError("generate_all was called while other requests are in flight")
        for request in requests:
            check_request(request, self._slots.vocab_size, self._slots.max_context)
        jobs = [_Job(request, None, self._stop_ids, self._slots.max_context) for request in requests]
        finished: dict[int, Completion] = {}
        self._waiting = list(jobs)
        try:
            while self._busy:
                for job, completion in self._step():
                    finished[id(job)] = completion
        finally:
            self._reset()
        return [finished[id(job)] for job in jobs]

    def load_weights(self, source: Mapping[str, torch.Tensor] | torch.nn.Module, version: int) -> None:
        """Take over new weights between two steps.

        Requests in flight start again from their prompt on the new weights with their seed, so every token
        of a completion belongs to the version it carries; cached keys and values are dropped.

        Args:
            source: the engine's own model (already updated in place), another module, or its state dict.
            version: must be larger than the current one.

        Raises:
            ValueError: a version that does not grow, or tensors that do not match the model.
        """
        if version <= self._version:
            raise ValueError(f"weight version {version} does not follow {self._version}")
        if source is not self.model:
            state = source.state_dict() if isinstance(source, torch.nn.Module) else source
            try:
                missing, unexpected = self.model.load_state_dict(state, strict=False)
            except RuntimeError as error:
                raise ValueError(f"weights do not fit the engine's model: {error}") from error
            tied = set(getattr(self.model, "_tied_weights_keys", None) or ())
            if unexpected or set(missing) - tied:
                wrong = [*unexpected, *(set(missing) - tied)]
                raise ValueError(f"weights do not fit the engine's model: {wrong[0]} is missing or unknown")
        self._version = version
        active = self._active()
        self._cache.clear()
        self._cache.forget_prefix()
        for job in active:
            job.restart()
        self._waiting = [*active, *self._waiting]

    async def close(self) -> None:
        self._closed = True
        self._fail(EngineError("the engine was closed"))

    async def _drive(self) -> None:
        try:
            # Everything that is ready to ask does so before the first prefill.
            await asyncio.sleep(0)
            while self._busy:
                for job, completion in self._step():
                    if job.future is not None and not job.future.done():
                        job.future.set_result(completion)
                await asyncio.sleep(0)
        except Exception as error:
            self._fail(EngineError(f"generation failed: {error}"), error)

    def _fail(self, failure: EngineError, cause: Exception | None = None) -> None:
        failure.__cause__ = cause
        jobs = [*self._active(), *self._waiting]
        self._reset()
        for job in jobs:
            if job.future is not None and not job.future.done():
                job.future.set_exception(failure)

    @property
    def _busy(self) -> bool:
        return bool(self._waiting) or any(self._cache.rows)

    def _active(self) -> list[_Job]:
        return list(self._cache.occupants())  # type: ignore[arg-type]

    def _reset(self) -> None:
        self._waiting = []
        self._cache.clear()

    def _step(self) -> list[tuple[_Job, Completion]]:
        """Admit what waits, decode one token for all that are active; return what ended."""
        # Module by module: a learner may keep a part of the model in eval mode while the rest trains.
        training = [module for module in self.model.modules() if module.training]
        for module in training:
            module.training = False
        try:
            with torch.inference_mode():
                if not self._checked:
                    self._slots.check()
                    self._checked = True
                self._drop_cancelled()
                finished = self._admit()
                if any(self._cache.rows):
                    finished += self._decode()
        finally:
            for module in training:
                module.training = True
        return finished

    def _drop_cancelled(self) -> None:
        self._waiting = [job for job in self._waiting if job.future is None or not job.future.done()]
        gone = {id(job) for job in self._active() if job.future is not None and job.future.done()}
        if gone:
            self._cache.remove_where(gone)

    def _admit(self) -> list[tuple[_Job, Completion]]:
        room = self.max_batch - sum(map(len, self._cache.rows))
        jobs, self._waiting = self._waiting[:room], self._waiting[room:]
        if not jobs:
            return []
        # An identical prompt is computed once; the others copy its row.
        by_prompt: dict[tuple[int, ...], list[_Job]] = {}
        for job in jobs:
            by_prompt.setdefault(job.request.prompt_ids, []).append(job)
        self._find_prefix(list(by_prompt))
        ordered = sorted(by_prompt, key=lambda prompt: (self._has_prefix(prompt), -len(prompt)))
        places = {prompt: self._cache.place(by_prompt[prompt][0], len(prompt)) for prompt in ordered}
        logits = torch.cat([self._prefill(chunk, places) for chunk in self._chunks(ordered)])
        admitted: list[_Job] = []
        copies = []
        for prompt in ordered:
            first, *others = by_prompt[prompt]
            for other in others:
                arena, row = self._cache.place(other, len(prompt))
            if others:
                rows = slice(row + 1 - len(others), row + 1)
                self._cache.copy(places[prompt], arena, rows, len(prompt))
            admitted += [first, *others]
            copies.append(1 + len(others))
        index = torch.arange(len(ordered)).repeat_interleave(torch.tensor(copies))
        return self._sample(logits[index.to(logits.device)], admitted)

    def _find_prefix(self, prompts: list[tuple[int, ...]]) -> None:
        """Keep the keys and values of a long prefix that several prompts share (few-shot examples, rules)."""
        if any(self._has_prefix(prompt) for prompt in prompts) or len(prompts) < 2:
            return
        low, high = min(prompts), max(prompts)
        pairs = enumerate(zip(low, high, strict=False))
        shared = next((place for place, (a, b) in pairs if a != b), min(len(low), len(high)))
        shared = min(shared, min(map(len, prompts)) - 1)
        if shared < _MIN_PREFIX:
            return
        self._cache.forget_prefix()
        self._slots.read([low[:shared]], Prefill(store_prefix=True))
        self._cache.prefix_ids = low[:shared]

    def _has_prefix(self, prompt: tuple[int, ...]) -> bool:
        prefix = self._cache.prefix_ids
        return bool(prefix) and len(prompt) > len(prefix) and prompt[: len(prefix)] == prefix

    def _chunks(self, prompts: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        """Split sorted prompts into batches of one prefix state where padding costs less than a call."""
        chunk: list[tuple[int, ...]] = []
        waste = 0
        for prompt in prompts:
            if chunk:
                extra = len(chunk[0]) - len(prompt)
                full = (len(chunk) + 1) * len(chunk[0]) > _MAX_PREFILL_TOKENS
                other = self._has_prefix(prompt) != self._has_prefix(chunk[0])
                if full or other or waste + extra > _CALL_COST:
                    yield chunk
                    chunk, waste = [], 0
                else:
                    waste += extra
            chunk.append(prompt)
        yield chunk

    def _prefill(
        self, prompts: list[tuple[int, ...]], places: Mapping[tuple[int, ...], tuple[int, int]]
    ) -> torch.Tensor:
        """Compute prompts and write their rows; logits ``(B, V)`` after each prompt."""
        pieces: list[tuple[int, int, int, int, int]] = []
        for index, prompt in enumerate(prompts):
            arena, row = places[prompt]
            if pieces and pieces[-1][0] == arena:
                # Sorted by length: the first prompt of a run is its longest, and rows are handed out in
                # order.
                same, first_row, first, _, length = pieces[-1]
                pieces[-1] = (same, first_row, first, index + 1, length)
            else:
                pieces.append((arena, row, index, index + 1, len(prompt)))
        if not self._has_prefix(prompts[0]):
            return self._slots.read(prompts, Prefill(pieces))
        skip = len(self._cache.prefix_ids)
        return self._slots.read([p[skip:] for p in prompts], Prefill(pieces, use_prefix=True))

    def _decode(self) -> list[tuple[_Job, Completion]]:
        self._cache.promote()
        jobs = self._active()
        logits = self._slots.append([job.ids[-1] for job in jobs])
        for job in jobs:
            job.length += 1
        return self._sample(logits, jobs)

    def _sample(self, logits: torch.Tensor, jobs: list[_Job]) -> list[tuple[_Job, Completion]]:
        """Draw a token for each job; take out those that end with it."""
        ids, logprobs = sample(
            logits,
            np.array([job.temperature for job in jobs]),
            np.array([job.seed for job in jobs], dtype=np.uint64),
            np.array([len(job.ids) for job in jobs]),
        )
        finished: list[tuple[_Job, Completion]] = []
        for job, token, logprob in zip(jobs, ids.tolist(), logprobs.tolist(), strict=True):
            job.ids.append(token)
            job.logprobs.append(logprob)
            reason: FinishReason | None = None
            if token in job.stop_ids or (job.stops and self._stops_here(job, token)):
                reason = "stop"
            elif len(job.ids) >= job.room:
                reason = "length"
            if reason is not None:
                completion = Completion(tuple(job.ids), tuple(job.logprobs), reason, self._version)
                finished.append((job, completion))
        if finished:
            self._cache.remove_where({id(job) for job, _ in finished})
        return finished

    def _stops_here(self, job: _Job, token: int) -> bool:
        text = job.tail + self._bytes.piece(token)
        job.tail = text[-max(map(len, job.stops)) :]
        return any(stop in text for stop in job.stops)


def _end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    ends: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for value in (getattr(generation, "eos_token_id", None), tokenizer.eos_token_id):
        if isinstance(value, int):
            ends.add(value)
        elif value:
            ends.update(int(index) for index in value)
    return frozenset(ends)
