"""A slot cache: keys and values of many requests in preallocated storage, one row a request, no gaps.

Row i holds the request in slot i, positions ``0 .. length_i - 1`` from the left. A prefill writes rows, a
decode step appends one position to the first n rows and hands the model views of them (no copy), a finished
request's row is filled by the last one, so that the active rows stay the first n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

_GRAIN = 64


@dataclass
class Step:
    """What the forward pass now under way does to the cache; shared by all layers.

    Attributes:
        decode: append one position to each of the first ``len(lengths)`` rows, else write whole rows.
        slots: rows written by a prefill, ``(B,)``.
        lengths: decode: positions already held by each row; prefill: new positions of each prompt.
        width: decode: positions handed to attention; at least max(lengths) + 1.
        use_prefix: prefill: the prompts continue the stored prefix.
        store_prefix: prefill of one row: keep the result as the prefix, write no row.
    """

    decode: bool
    slots: torch.Tensor
    lengths: torch.Tensor
    width: int = 0
    use_prefix: bool = False
    store_prefix: bool = False


class SlotLayer(CacheLayerMixin):
    """One layer's rows, ``(slots, heads, capacity, head_dim)``, and its part of a prefix shared by
    prompts."""

    is_sliding = False

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self.owner = owner
        self.prefix: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device = key_states.device
        self.keys, self.values = self._storage(key_states), self._storage(value_states)
        self.is_initialized = True

    def _storage(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros, not empty: masked positions are multiplied by a probability of 0, and 0 * nan is nan.
        shape = (self.owner.slots, like.shape[1], self.owner.capacity, like.shape[3])
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def fit(self) -> None:
        """Grow the storage to what the owner now asks for."""
        if not self.is_initialized or self.keys is None or self.values is None:
            return
        slots, _, capacity, _ = self.keys.shape
        if (slots, capacity) != (self.owner.slots, self.owner.capacity):
            old_keys, old_values = self.keys, self.values
            self.keys, self.values = self._storage(old_keys), self._storage(old_values)
            self.keys[:slots, :, :capacity] = old_keys
            self.values[:slots, :, :capacity] = old_values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new keys and values ``(B, heads, T, head_dim)``; return all that attention has to see."""
        step = self.owner.step
        if step is None:
            raise RuntimeError("the slot cache was used outside a step of the engine")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if step.decode:
            rows = step.slots
            self.keys[rows, :, step.lengths] = key_states[:, :, 0]
            self.values[rows, :, step.lengths] = value_states[:, :, 0]
            count = len(rows)
            return self.keys[:count, :, : step.width], self.values[:count, :, : step.width]
        if step.use_prefix and self.prefix is not None:
            count = key_states.shape[0]
            key_states = torch.cat([self.prefix[0].expand(count, -1, -1, -1), key_states], dim=2)
            value_states = torch.cat([self.prefix[1].expand(count, -1, -1, -1), value_states], dim=2)
        if step.store_prefix:
            self.prefix = (key_states.clone(), value_states.clone())
        else:
            # What lies right of a shorter prompt is never read: every position is written before it counts.
            self.keys[step.slots, :, : key_states.shape[2]] = key_states
            self.values[step.slots, :, : key_states.shape[2]] = value_states
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.owner.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


class SlotCache(Cache):
    """The layers together, their size, and the moves between rows."""

    def __init__(self, layers: int, max_slots: int, max_capacity: int) -> None:
        self.max_slots, self.max_capacity = max_slots, max_capacity
        self.slots, self.capacity = 0, 0
        self.step: Step | None = None
        self.prefix_ids: tuple[int, ...] = ()
        self.slot_layers = [SlotLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self.slot_layers))

    @property
    def seen(self) -> int:
        """Positions before the ones a prefill computes: the prefix's."""
        return len(self.prefix_ids) if self.step is not None and self.step.use_prefix else 0

    def reserve(self, slots: int, capacity: int) -> None:
        """Make room for so many rows of so many positions; amortised, contents kept."""
        if slots > self.slots:
            self.slots = min(self.max_slots, max(slots, 2 * self.slots))
        if capacity > self.capacity:
            grown = -(-max(capacity, self.capacity * 5 // 4) // _GRAIN) * _GRAIN
            self.capacity = max(capacity, min(grown, self.max_capacity))
        for layer in self.slot_layers:
            layer.fit()

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one row over another."""
        for layer in self.slot_layers:
            assert layer.keys is not None and layer.values is not None
            layer.keys[target, :, :length] = layer.keys[source, :, :length]
            layer.values[target, :, :length] = layer.values[source, :, :length]

    def duplicate(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy one row's first `length` positions to each of `targets`, consecutive rows."""
        rows = slice(targets[0], targets[-1] + 1)
        for layer in self.slot_layers:
            assert layer.keys is not None and layer.values is not None
            layer.keys[rows, :, :length] = layer.keys[source, :, :length]
            layer.values[rows, :, :length] = layer.values[source, :, :length]

    def forget_prefix(self) -> None:
        self.prefix_ids = ()
        for layer in self.slot_layers:
            layer.prefix = None
