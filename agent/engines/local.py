"""In-process generation for any decoder-only transformers model: continuous batching over a slot cache.

One decode step serves exactly the requests that are alive; one that ends leaves at once, and its place is
taken by the last one. New requests are collected whenever the driver comes round, prefilled together
(batched by length, identical prompts once, a long prefix common to all prompts once) and join the next
step. No clock and no thread takes part: the same requests in the same order give the same steps, and what a
request samples depends on its own seed only (see ``sampling``).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent.engines.base import Completion, EngineError, FinishReason, GenerationRequest, check_request
from agent.engines.kv_cache import SlotCache, Step
from agent.engines.sampling import sample
from agent.spans import token_bytes
from envs.errors import UserError

# A prefill call costs about as much as this many tokens beyond its own: padding up to it is cheaper than a
# call.
_CALL_COST = 256
_MAX_PREFILL_TOKENS = 16_384
_MIN_PREFIX = 64
_LAYER_KINDS = {"full_attention", "sliding_attention"}


class _Job:
    """One request on its way through the engine."""

    __slots__ = ("future", "ids", "logprobs", "request", "room", "stop_ids", "stops", "tail")

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
        self.room = min(request.max_new_tokens, max_context - len(request.prompt_ids))
        self.restart()

    def restart(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.tail = b""


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
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds - _LAYER_KINDS:
            raise UserError(
                f"the local engine has no cache for layers of kind {sorted(kinds - _LAYER_KINDS)}"
            )
        attention = getattr(config, "_attn_implementation", "sdpa")
        if attention not in ("sdpa", "eager"):
            raise UserError(f"the local engine needs attention 'sdpa' or 'eager', not {attention!r}")
        self.model = model
        self.tokenizer = tokenizer
        self.max_batch = max_batch
        self._version = weight_version
        self._max_context = int(config.max_position_embeddings)
        self._vocab_size = int(config.vocab_size)
        self._bytes = token_bytes(tokenizer)
        self._stop_ids = _end_ids(model, tokenizer)
        self._kinds = kinds
        # A config without layer types (Mistral) applies its window, if any, to every layer.
        windowed = "sliding_attention" in kinds or not getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None)
        self._window = int(window) if window and windowed else None
        self._head = model.get_output_embeddings()
        names = inspect.signature(type(model).forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._cache = SlotCache(int(config.num_hidden_layers), max_batch, self._max_context)
        self._waiting: list[_Job] = []
        self._active: list[_Job] = []
        # Per slot: positions in the cache, and the token sampled last, which is not in the cache yet.
        self._lengths = np.zeros(max_batch, dtype=np.int64)
        self._last = np.zeros(max_batch, dtype=np.int64)
        self._seeds = np.zeros(max_batch, dtype=np.uint64)
        self._temperatures = np.ones(max_batch, dtype=np.float64)
        self._counts = np.zeros(max_batch, dtype=np.int64)
        self._driver: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def max_context(self) -> int:
        return self._max_context

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion; see `Engine`. Cancelling the coroutine frees its slot before the next
        step."""
        if self._closed:
            raise EngineError("the engine is closed")
        check_request(request, self._vocab_size, self._max_context)
        loop = asyncio.get_running_loop()
        if self._driver is None or self._driver.done() or self._driver.get_loop() is not loop:
            # Whatever an interrupted loop left behind has nobody waiting for it.
            self._waiting, self._active = [], []
            self._driver = loop.create_task(self._drive())
        job = _Job(request, loop.create_future(), self._stop_ids, self._max_context)
        self._waiting.append(job)
        assert job.future is not None
        return await job.future

    def generate_all(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Sample completions for all requests, in order, without an event loop.

        Raises:
            EngineError: an asyncio driver is serving requests at the same time.
        """
        if self._active or self._waiting:
            raise EngineError("generate_all was called while other requests are in flight")
        for request in requests:
            check_request(request, self._vocab_size, self._max_context)
        jobs = [_Job(request, None, self._stop_ids, self._max_context) for request in requests]
        finished: dict[int, Completion] = {}
        self._waiting = list(jobs)
        try:
            while self._waiting or self._active:
                for job, completion in self._step():
                    finished[id(job)] = completion
        finally:
            self._waiting, self._active = [], []
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
        self._cache.forget_prefix()
        for job in self._active:
            job.restart()
        self._waiting = [*self._active, *self._waiting]
        self._active = []

    async def close(self) -> None:
        self._closed = True
        self._fail(EngineError("the engine was closed"))

    async def _drive(self) -> None:
        try:
            # Everything that is ready to ask does so before the first prefill.
            await asyncio.sleep(0)
            while self._waiting or self._active:
                for job, completion in self._step():
                    if job.future is not None and not job.future.done():
                        job.future.set_result(completion)
                await asyncio.sleep(0)
        except Exception as error:
            self._fail(EngineError(f"generation failed: {error}"), error)

    def _fail(self, failure: EngineError, cause: Exception | None = None) -> None:
        failure.__cause__ = cause
        jobs, self._active, self._waiting = [*self._active, *self._waiting], [], []
        for job in jobs:
            if job.future is not None and not job.future.done():
                job.future.set_exception(failure)

    def _step(self) -> list[tuple[_Job, Completion]]:
        """Admit what waits, decode one token for all that are active; return what ended."""
        self._drop_cancelled()
        training = self.model.training
        if training:
            self.model.eval()
        try:
            with torch.inference_mode():
                finished = self._admit()
                if self._active:
                    finished += self._decode()
        finally:
            if training:
                self.model.train()
        return finished

    def _drop_cancelled(self) -> None:
        self._waiting = [job for job in self._waiting if job.future is None or not job.future.done()]
        gone = [slot for slot, job in enumerate(self._active) if job.future is not None and job.future.done()]
        self._vacate(gone)

    def _admit(self) -> list[tuple[_Job, Completion]]:
        room = self.max_batch - len(self._active)
        jobs, self._waiting = self._waiting[:room], self._waiting[room:]
        if not jobs:
            return []
        # Identical prompts stand side by side: the first is computed, the others copy its row.
        by_prompt: dict[tuple[int, ...], list[_Job]] = {}
        for job in jobs:
            by_prompt.setdefault(job.request.prompt_ids, []).append(job)
        start = len(self._active)
        longest = max(map(len, by_prompt))
        self._cache.reserve(start + len(jobs), longest + 1)
        self._find_prefix(list(by_prompt))
        ordered = sorted(by_prompt.items(), key=lambda item: -len(item[0]))
        slots: dict[tuple[int, ...], int] = {}
        for prompt, same in ordered:
            slots[prompt] = len(self._active)
            for job in same:
                slot = len(self._active)
                self._active.append(job)
                self._lengths[slot] = len(prompt)
                self._seeds[slot] = job.request.seed & 0xFFFF_FFFF_FFFF_FFFF
                self._temperatures[slot] = job.request.temperature
                self._counts[slot] = 0
        logits = torch.cat([self._prefill(chunk, slots) for chunk in self._chunks([p for p, _ in ordered])])
        copies = [len(same) for _, same in ordered]
        for prompt, same in ordered:
            if len(same) > 1:
                first = slots[prompt]
                self._cache.duplicate(first, range(first + 1, first + len(same)), len(prompt))
        rows = torch.arange(len(ordered)).repeat_interleave(torch.tensor(copies))
        return self._sample(logits[rows.to(logits.device)], start)

    def _find_prefix(self, prompts: list[tuple[int, ...]]) -> None:
        """Keep the keys and values of a long prefix that several prompts share (few-shot examples, rules)."""
        known = self._cache.prefix_ids
        if known and any(prompt[: len(known)] == known and len(prompt) > len(known) for prompt in prompts):
            return
        if len(prompts) < 2:
            return
        low, high = min(prompts), max(prompts)
        shared = next(
            (i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high))
        )
        shared = min(shared, min(map(len, prompts)) - 1)
        if shared < _MIN_PREFIX:
            return
        self._cache.forget_prefix()
        self._forward_prompts([low[:shared]], slots=[0], store_prefix=True)
        self._cache.prefix_ids = low[:shared]

    def _chunks(self, prompts: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        """Split prompts, longest first, into batches of one prefix state where padding costs less than a
        call."""
        chunk: list[tuple[int, ...]] = []
        waste = 0
        for prompt in prompts:
            extra = len(chunk[0]) - len(prompt) if chunk else 0
            full = chunk and (len(chunk) + 1) * len(chunk[0]) > _MAX_PREFILL_TOKENS
            other = chunk and self._has_prefix(prompt) != self._has_prefix(chunk[0])
            if full or other or waste + extra > _CALL_COST:
                yield chunk
                chunk, waste, extra = [], 0, 0
            chunk.append(prompt)
            waste += extra
        yield chunk

    def _has_prefix(self, prompt: tuple[int, ...]) -> bool:
        prefix = self._cache.prefix_ids
        return bool(prefix) and len(prompt) > len(prefix) and prompt[: len(prefix)] == prefix

    def _prefill(self, prompts: list[tuple[int, ...]], slots: Mapping[tuple[int, ...], int]) -> torch.Tensor:
        rows = [slots[prompt] for prompt in prompts]
        if self._has_prefix(prompts[0]):
            skip = len(self._cache.prefix_ids)
            return self._forward_prompts([prompt[skip:] for prompt in prompts], rows, use_prefix=True)
        return self._forward_prompts(prompts, rows)

    def _forward_prompts(
        self,
        prompts: list[tuple[int, ...]],
        slots: list[int],
        use_prefix: bool = False,
        store_prefix: bool = False,
    ) -> torch.Tensor:
        """Right-padded prefill; logits ``(B, V)`` at each prompt's last token.

        Causal attention alone keeps the padding out of every real position, so the model makes its own masks.
        """
        device = self.model.device
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        self._cache.step = Step(
            False,
            torch.tensor(slots, device=device),
            lengths,
            use_prefix=use_prefix,
            store_prefix=store_prefix,
        )
        positions = torch.arange(width, device=device) + self._cache.seen
        with _last_positions(self._head, (lengths - 1).to(device)):
            output = self._call(ids.to(device), positions.expand(len(prompts), -1), None)
        self._cache.step = None
        return output[:, -1]

    def _decode(self) -> list[tuple[_Job, Completion]]:
        count = len(self._active)
        held = self._lengths[:count]
        width = int(held.max()) + 1
        self._cache.reserve(count, width)
        device = self.model.device
        lengths = torch.from_numpy(held.copy()).to(device)
        self._cache.step = Step(True, torch.arange(count, device=device), lengths, width)
        ids = torch.from_numpy(self._last[:count, None].copy()).to(device)
        logits = self._call(ids, lengths[:, None], self._masks(lengths, width))
        self._cache.step = None
        self._lengths[:count] += 1
        return self._sample(logits[:, -1], 0)

    def _masks(self, lengths: torch.Tensor, width: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive masks ``(n, 1, 1, width)`` that hide what a slot does not hold, by kind of layer."""
        places = torch.arange(width, device=lengths.device)
        hidden = places > lengths[:, None]
        masks = {"full_attention": hidden}
        if self._window is not None:
            masks["sliding_attention"] = hidden | (places <= lengths[:, None] - self._window)
        dtype = self.model.dtype
        low = torch.finfo(dtype).min
        built = {
            kind: torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, low)[
                :, None, None
            ]
            for kind, mask in masks.items()
        }
        if len(self._kinds) > 1:
            return built
        return built["sliding_attention" if self._window is not None else "full_attention"]

    def _call(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | dict[str, torch.Tensor] | None
    ) -> torch.Tensor:
        extra: dict[str, Any] = {self._cache_name: self._cache}
        output = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            return_dict=True,
            **extra,
        )
        return output.logits

    def _sample(self, logits: torch.Tensor, start: int) -> list[tuple[_Job, Completion]]:
        """Draw a token for the slots from `start` on; take out those that end with it."""
        stop = start + len(logits)
        ids, logprobs = sample(
            logits, self._temperatures[start:stop], self._seeds[start:stop], self._counts[start:stop]
        )
        self._last[start:stop] = ids
        self._counts[start:stop] += 1
        finished: list[tuple[_Job, Completion]] = []
        ended: list[int] = []
        for slot, token, logprob in zip(range(start, stop), ids.tolist(), logprobs.tolist(), strict=True):
            job = self._active[slot]
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
                ended.append(slot)
        self._vacate(ended)
        return finished

    def _stops_here(self, job: _Job, token: int) -> bool:
        text = job.tail + self._bytes.piece(token)
        job.tail = text[-max(map(len, job.stops)) :]
        return any(stop in text for stop in job.stops)

    def _vacate(self, slots: list[int]) -> None:
        """Empty slots; the last ones move into the holes."""
        for slot in reversed(slots):
            last = len(self._active) - 1
            if slot != last:
                self._cache.move(last, slot, int(self._lengths[last]))
                self._active[slot] = self._active[last]
                for state in (self._lengths, self._last, self._seeds, self._temperatures, self._counts):
                    state[slot] = state[last]
            self._active.pop()


def _end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    ends: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for value in (getattr(generation, "eos_token_id", None), tokenizer.eos_token_id):
        if isinstance(value, int):
            ends.add(value)
        elif value:
            ends.update(int(index) for index in value)
    return frozenset(ends)


@contextlib.contextmanager
def _last_positions(head: torch.nn.Module, last: torch.Tensor) -> Iterator[None]:
    """Let the output layer see only position ``last[b]`` of row b: full logits of long prompts do not fit."""

    def pick(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden = args[0]
        return (hidden[torch.arange(len(last), device=hidden.device), last][:, None], *args[1:])

    handle = head.register_forward_pre_hook(pick)
    try:
        yield
    finally:
        handle.remove()
