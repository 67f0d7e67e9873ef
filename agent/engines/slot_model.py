"""A decoder-only model over a slot cache: a forward pass over prompts, and one over the next token of every row."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from agent.engines.kv_cache import ATTENTION, Prefill, SlotCache
from envs.errors import UserError

_LAYER_KINDS = {"full_attention", "sliding_attention"}


@dataclass
class _Probe:
    length: int


class SlotModel:
    """A model whose keys and values lie in slots.

    Attributes:
        cache: the slots.
        max_context: positions that the model knows.
        vocab_size: rows of its output layer.

    Raises:
        UserError: an architecture or attention implementation that a slot cache cannot serve.
    """

    def __init__(self, model: PreTrainedModel) -> None:
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
        self.max_context = int(config.max_position_embeddings)
        self.vocab_size = int(config.vocab_size)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.cache = SlotCache(_windows(config), int(heads), self.max_context)
        self._config = config
        self._head = model.get_output_embeddings()
        names = inspect.signature(type(model).forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    def read(self, prompts: Sequence[tuple[int, ...]], prefill: Prefill) -> torch.Tensor:
        """Right-padded forward pass; logits ``(B, V)`` at each prompt's last token.

        Causal attention alone keeps the padding out of every real position, so the model makes its own masks.
        """
        device = self.model.device
        width = max(map(len, prompts))
        ids = torch.tensor([(*prompt, *(0,) * (width - len(prompt))) for prompt in prompts], device=device)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
        self.cache.prefill = prefill
        try:
            positions = torch.arange(width, device=device) + self.cache.seen
            with _last_positions(self._head, last):
                return self._call(ids, positions.expand(len(prompts), -1))
        finally:
            self.cache.prefill = None

    def append(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append one token to each row, in batch order; logits ``(B, V)`` after it."""
        device = self.model.device
        positions = torch.tensor([[each.length] for each in self.cache.occupants()], device=device)
        attention = self._config._attn_implementation
        self.cache.plan_decode(device, self.model.dtype)
        SlotCache.current = self.cache
        self._config._attn_implementation = ATTENTION
        try:
            return self._call(torch.tensor([[token] for token in tokens], device=device), positions)
        finally:
            self._config._attn_implementation = attention
            SlotCache.current = None
            self.cache.blocks = []

    def check(self) -> None:
        """Decode a few tokens through the slots and compare with a plain forward pass.

        Guards against architectures whose attention has something (position biases, sinks) that the slots
        lack.

        Raises:
            UserError: the two differ.
        """
        ids = [(17 * i + 3) % self.vocab_size for i in range(8)]
        plain = self.model(input_ids=torch.tensor([ids], device=self.model.device), use_cache=False).logits
        probe = _Probe(5)
        arena, row = self.cache.place(probe, 5)
        found = [self.read([tuple(ids[:5])], Prefill([(arena, row, 0, 1, 5)]))]
        for token in ids[5:]:
            found.append(self.append([token]))
            probe.length += 1
        self.cache.remove(arena, row)
        gap = (
            (torch.cat(found).float().log_softmax(-1) - plain[0, 4:].float().log_softmax(-1))
            .abs()
            .max()
            .item()
        )
        if not gap <= (1e-3 if self.model.dtype == torch.float32 else 0.5):
            name = type(self.model).__name__
            raise UserError(
                f"the local engine cannot serve {name}: log-probs differ by {gap:.2g} from its own"
            )

    def _call(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cache: dict[str, Any] = {self._cache_name: self.cache}
        output = self.model(input_ids=ids, position_ids=positions, use_cache=True, return_dict=True, **cache)
        return output.logits[:, -1]


def _windows(config: Any) -> list[int | None]:
    """The attention window of each layer; a config without layer types (Mistral) has one window for all."""
    layers = int(config.num_hidden_layers)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return [int(window) if window and kind == "sliding_attention" else None for kind in kinds]


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
