"""A slot cache: keys and values of many requests in preallocated storage, and attention over it.

Requests of similar length live together in an arena, one row each, positions from the left, rows without
gaps. A decode step appends one position to every row and attends arena by arena, so a short request does
not pay for a long one beside it. A request that ends is replaced by the arena's last row; one that outgrows
its arena moves to the next. A prefill writes whole rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "mempo_slots"
"""Name of this module's attention among those of transformers; used while a decode step runs."""

_HARMLESS_OPTIONS = {"dropout", "position_ids", "is_causal", "use_cache", "output_attentions"}


class Occupant(Protocol):
    """What lies in a row."""

    length: int
    """Positions held."""


def arena_widths(max_length: int) -> tuple[int, ...]:
    """Row lengths of the arenas: 64, 96, 128, 192, 256, ... up to the longest a request can be."""
    widths: list[int] = []
    for power in itertools.count(6):
        for width in (1 << power, 3 << (power - 1)):
            if width >= max_length:
                return (*widths, max_length)
            widths.append(width)
    raise AssertionError("unreachable")


@dataclass
class Block:
    """The rows of one arena in the decode step under way.

    Attributes:
        start, stop: its rows within the batch.
        width: positions that attention sees, the new one included.
        cells: flat index of the new position of each row and head, ``(rows * heads,)``.
        masks: by window of the layer (None: full attention) the first visible position of all rows and an
            additive mask ``(rows, 1, visible)``; the mask is None when all rows see all of it.
    """

    arena: int
    start: int
    stop: int
    width: int
    cells: torch.Tensor
    masks: dict[int | None, tuple[int, torch.Tensor | None]]


@dataclass
class Prefill:
    """What the prefill under way writes.

    Attributes:
        pieces: for each run of prompts that go to consecutive rows of one arena: arena, first row, first
            and last prompt (exclusive), positions written.
        use_prefix: the prompts continue the stored prefix.
        store_prefix: keep the result as the prefix, write no rows.
    """

    pieces: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    use_prefix: bool = False
    store_prefix: bool = False


class SlotLayer(CacheLayerMixin):
    """One layer: for each arena keys and values ``(rows, heads, width, head_dim)``, and the shared prefix."""

    is_sliding = False

    def __init__(self, owner: SlotCache, window: int | None) -> None:
        super().__init__()
        self.owner = owner
        self.window = window
        self.store: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.prefix: tuple[torch.Tensor, torch.Tensor] | None = None
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: arenas are allocated when their first row is written."""

    def _arena(
        self, arena: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Storage with room for all rows of the arena; grown by doubling, like the tensors given in kind."""
        needed = len(self.owner.rows[arena])
        known = self.store.get(arena)
        if known is not None and known[0].shape[0] >= needed:
            return known
        rows = max(needed, 2 * known[0].shape[0] if known else 4)
        # Zeros, not empty: masked positions are multiplied by a probability of 0, and 0 * nan is nan.
        made = tuple(
            like.new_zeros(rows, like.shape[1], self.owner.widths[arena], like.shape[3])
            for like in (keys, values)
        )
        if known is not None:
            for old, new in zip(known, made, strict=True):
                new[: old.shape[0]] = old
        self.store[arena] = (made[0], made[1])
        return self.store[arena]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values ``(B, heads, T, head_dim)``; in a prefill return all that attention
        must see.

        In a decode step `slot_attention` reads the store itself.
        """
        if self.owner.blocks:
            for block in self.owner.blocks:
                keys, values = self._arena(block.arena, key_states, value_states)
                rows = slice(block.start, block.stop)
                keys.view(-1, keys.shape[3]).index_copy_(0, block.cells, key_states[rows].flatten(0, 2))
                values.view(-1, values.shape[3]).index_copy_(0, block.cells, value_states[rows].flatten(0, 2))
            return key_states, value_states
        prefill = self.owner.prefill
        if prefill is None:
            raise RuntimeError("the slot cache was used outside a step of the engine")
        if prefill.use_prefix and self.prefix is not None:
            count = key_states.shape[0]
            key_states = torch.cat([self.prefix[0].expand(count, -1, -1, -1), key_states], dim=2)
            value_states = torch.cat([self.prefix[1].expand(count, -1, -1, -1), value_states], dim=2)
        if prefill.store_prefix:
            self.prefix = (key_states.clone(), value_states.clone())
        # What lies right of a shorter prompt is never read: every position is written before it counts.
        for arena, row, first, last, length in prefill.pieces:
            for stored, new in zip(
                self._arena(arena, key_states, value_states), (key_states, value_states), strict=True
            ):
                stored[row : row + last - first, :, :length] = new[first:last, :, :length]
        return key_states, value_states

    def copy_row(self, source: tuple[int, int], arena: int, rows: slice, length: int) -> None:
        """Copy the first `length` positions of a row to rows of an arena."""
        old = self.store[source[0]]
        for stored, new in zip(old, self._arena(arena, *old), strict=True):
            new[rows, :, :length] = stored[source[1], :, :length]

    def get_seq_length(self) -> int:
        return self.owner.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


class SlotCache(Cache):
    """All layers, and who lies in which row.

    Args:
        windows: for each layer its attention window, None for full attention.
        max_length: positions of the longest request.
    """

    current: SlotCache | None = None
    """The cache of the decode step under way in this process."""

    def __init__(self, windows: Sequence[int | None], heads: int, max_length: int) -> None:
        self.widths = arena_widths(max_length)
        self.rows: list[list[Occupant]] = [[] for _ in self.widths]
        self.heads = heads
        self.prefill: Prefill | None = None
        self.blocks: list[Block] = []
        self.prefix_ids: tuple[int, ...] = ()
        self.slot_layers = [SlotLayer(self, window) for window in windows]
        super().__init__(layers=list(self.slot_layers))

    def __len__(self) -> int:
        """Layers, as transformers counts them."""
        return len(self.slot_layers)

    @property
    def seen(self) -> int:
        """Positions before the ones a prefill computes: the prefix's."""
        return len(self.prefix_ids) if self.prefill is not None and self.prefill.use_prefix else 0

    def occupants(self) -> Iterator[Occupant]:
        """Who is in the cache, in batch order."""
        return itertools.chain.from_iterable(self.rows)

    def arena_for(self, length: int) -> int:
        """The narrowest arena with room for one more position."""
        return next(arena for arena, width in enumerate(self.widths) if width > length)

    def place(self, occupant: Occupant, length: int) -> tuple[int, int]:
        """A new row for `length` positions (to be written by a prefill or `copy_row`): arena and row."""
        arena = self.arena_for(length)
        self.rows[arena].append(occupant)
        return arena, len(self.rows[arena]) - 1

    def copy(self, source: tuple[int, int], arena: int, rows: slice, length: int) -> None:
        for layer in self.slot_layers:
            layer.copy_row(source, arena, rows, length)

    def remove(self, arena: int, row: int) -> None:
        """Free a row; the arena's last one takes its place."""
        rows = self.rows[arena]
        last = len(rows) - 1
        if row != last:
            self.copy((arena, last), arena, slice(row, row + 1), rows[last].length)
            rows[row] = rows[last]
        rows.pop()

    def remove_where(self, gone: set[int]) -> None:
        """Free the rows of all occupants whose ``id()`` is in `gone`."""
        for arena, rows in enumerate(self.rows):
            for row in range(len(rows) - 1, -1, -1):
                if id(rows[row]) in gone:
                    self.remove(arena, row)

    def promote(self) -> None:
        """Move rows without room for another position to a wider arena."""
        for arena, (rows, width) in enumerate(zip(self.rows, self.widths, strict=True)):
            for row in range(len(rows) - 1, -1, -1):
                occupant = rows[row]
                if occupant.length >= width:
                    target, place = self.place(occupant, occupant.length)
                    self.copy((arena, row), target, slice(place, place + 1), occupant.length)
                    self.remove(arena, row)

    def clear(self) -> None:
        """Free all rows."""
        for rows in self.rows:
            rows.clear()

    def forget_prefix(self) -> None:
        self.prefix_ids = ()
        for layer in self.slot_layers:
            layer.prefix = None

    def plan_decode(self, device: torch.device, dtype: torch.dtype) -> None:
        """Set up the blocks of the next decode step."""
        self.blocks = []
        start = 0
        for arena, rows in enumerate(self.rows):
            if not rows:
                continue
            lengths = torch.tensor([occupant.length for occupant in rows], device=device)
            row_heads = torch.arange(len(rows) * self.heads, device=device)
            cells = row_heads * self.widths[arena] + lengths.repeat_interleave(self.heads)
            longest, shortest = max(o.length for o in rows), min(o.length for o in rows)
            width = longest + 1
            masks: dict[int | None, tuple[int, torch.Tensor | None]] = {}
            for window in {layer.window for layer in self.slot_layers}:
                first = 0 if window is None else max(0, shortest + 1 - window)
                last = 0 if window is None else max(0, longest + 1 - window)
                mask = None
                if shortest != longest or first != last:
                    places = torch.arange(first, width, device=device)
                    hidden = places > lengths[:, None]
                    if window is not None:
                        hidden |= places <= lengths[:, None] - window
                    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
                    mask = mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]
                masks[window] = (first, mask)
            self.blocks.append(Block(arena, start, start + len(rows), width, cells, masks))
            start += len(rows)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Attention of one new position a row over the rows of the current `SlotCache`.

    Args:
        query: ``(B, query heads, 1, head_dim)``.

    Returns:
        ``(B, 1, query heads, head_dim)``, and no weights.
    """
    odd = [name for name, option in options.items() if option is not None and name not in _HARMLESS_OPTIONS]
    cache = SlotCache.current
    if odd or cache is None:
        raise NotImplementedError(f"attention with {', '.join(odd) or 'no slot cache'} is not supported")
    layer = cache.slot_layers[module.layer_idx]  # type: ignore[index]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    batch, query_heads, _, dim = query.shape
    output: torch.Tensor | None = None
    for block in cache.blocks:
        keys, values = layer.store[block.arena]
        heads = keys.shape[1]
        first, mask = block.masks[layer.window]
        rows = block.stop - block.start
        # Query heads that share a key head are rows of one small matrix product.
        asked = query[block.start : block.stop].reshape(rows * heads, query_heads // heads, dim)
        seen_keys = keys[:rows].flatten(0, 1)[:, first : block.width]
        seen_values = values[:rows].flatten(0, 1)[:, first : block.width]
        if output is None:
            output = query.new_empty(batch * query_heads, values.shape[3])
        target = output[block.start * query_heads : block.stop * query_heads]
        target = target.view(rows * heads, query_heads // heads, values.shape[3])
        scores = torch.bmm(asked * scale, seen_keys.transpose(1, 2))
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        if mask is not None:
            scores.view(rows, query_heads, -1).add_(mask)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
        torch.bmm(weights, seen_values, out=target)
    assert output is not None
    return output.view(batch, 1, query_heads, -1), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, slot_attention)
