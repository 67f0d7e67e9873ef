"""Log-probs of answers from any causal model: through trees where it takes them, as sequences where not.

Whether a model takes a tree is found out by asking it: a small tree is scored both ways and compared
(`why_no_trees`), and later the longest path of real trees (`disagreement`). That covers what no configuration
says: models that ignore position ids, build a mask of their own, carry a state, or look back in columns.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent.score_tree import Ids, Query, Target, TreeRow, build_row

LOGIT_ELEMENTS = 1 << 27
"""Logits of one forward pass at most (512 MB in float32): a 262k vocabulary leaves room for 512 positions."""

PROBE_TOLERANCE = 0.1
"""A tree must be ten times closer to separate sequences than the same row without mask and positions is."""

REFUSALS = (TypeError, ValueError, RuntimeError, LookupError, AttributeError)
"""How models say that they do not take a mask of this shape."""

LogProbs = dict[Hashable, list[NDArray[np.float64]]]
"""By query key: for each answer the log-probs (nats) of its tokens."""


def text_config(model: torch.nn.Module) -> Any:
    """The language part's configuration, also of wrapped (peft, multi-modal) models."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def sliding_window(config: Any) -> int | None:
    """Tokens that a sliding-window layer sees (its own included), None where every layer sees everything."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    return getattr(config, "sliding_window", None)


def score_trees(model: torch.nn.Module, rows: Sequence[TreeRow], token_budget: int) -> LogProbs:
    """Score tree rows in padded batches of at most ``token_budget`` tokens.

    Rows are right-aligned, so that the needed outputs are the last columns of every row.
    """
    config = text_config(model)
    logprobs: LogProbs = {}
    for batch in _batches(rows, token_budget, config, right_aligned=True):
        width, keep = max(len(row) for row in batch), max(row.outputs for row in batch)
        ids = np.zeros((len(batch), width), dtype=np.int64)
        positions = np.zeros((len(batch), width), dtype=np.int64)
        mask = np.zeros((len(batch), 1, width, width), dtype=np.bool_)
        mask[:, 0, range(width), range(width)] = True  # padding sees itself: a row of -inf would be nan
        for index, row in enumerate(batch):
            start = width - len(row)
            ids[index, start:] = row.ids
            positions[index, start:] = row.positions
            mask[index, 0, start:, start:] = row.mask
        logits = _forward(
            model,
            ids,
            keep,
            position_ids=_to(model, positions),
            attention_mask=_attention_mask(model, config, mask, positions),
        )
        for index, row in enumerate(batch):
            _collect(logprobs, logits[index], row.targets, shift=keep - len(row))
    return logprobs


def score_sequences(model: torch.nn.Module, queries: Sequence[Query], token_budget: int) -> LogProbs:
    """The same numbers from right-padded sequences, without a mask: a causal model never sees the padding."""
    rows = [
        build_row([Query((query.key, index), query.context, (answer,))])
        for query in queries
        for index, answer in enumerate(query.answers)
    ]
    single: LogProbs = {}
    for batch in _batches(rows, token_budget, text_config(model), right_aligned=False):
        width = max(len(row) for row in batch)
        keep = width - min(len(row) - row.outputs for row in batch)
        ids = np.zeros((len(batch), width), dtype=np.int64)
        for index, row in enumerate(batch):
            ids[index, : len(row)] = row.ids
        logits = _forward(model, ids, keep)
        for index, row in enumerate(batch):
            _collect(single, logits[index], row.targets, shift=keep - width)
    return {
        query.key: [single[query.key, index][0] for index in range(len(query.answers))] for query in queries
    }


def why_no_trees(model: torch.nn.Module) -> str | None:
    """Why this model cannot score trees, or None when it can, as far as a small tree tells."""
    config = text_config(model)
    kinds = set(getattr(config, "layer_types", None) or ())
    kinds -= {"full_attention", "sliding_attention", "chunked_attention"}
    if kinds:
        return f"it has layers of other kinds than attention over a mask ({', '.join(sorted(kinds))})"
    implementation = getattr(config, "_attn_implementation", "eager")
    if implementation not in ("eager", "sdpa"):
        return f"its attention implementation is {implementation!r}; load it with 'sdpa' or 'eager'"
    if not _takes(model, "position_ids"):
        return "its forward takes no position_ids"
    return _probe(model)


def disagreement(model: torch.nn.Module, query: Query, found: LogProbs) -> str | None:
    """What a tree said about a query against a sequence of its own; None when they agree."""
    device = next(model.parameters()).device.type
    coarse = next(model.parameters()).dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(
        device
    )
    alone = score_sequences(model, [query], token_budget=1)[query.key]
    worst = max(float(np.abs(a - b).max()) for a, b in zip(found[query.key], alone, strict=True))
    if worst > (0.5 if coarse else 0.02):
        return f"its log-probs of a context of {query.depth} tokens differ by {worst:.2g} under a tree mask"
    return None


def tree_refusal(error: Exception) -> str:
    return f"it refused a tree mask ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


def _probe(model: torch.nn.Module) -> str | None:
    """Score one small tree in three ways and compare token by token."""
    vocabulary = int(getattr(text_config(model), "vocab_size", 2))
    draw = np.random.default_rng(0)

    def some(count: int) -> Ids:
        return draw.integers(vocabulary, size=count)

    trunk = some(12)
    cuts = (len(trunk) - 4, len(trunk), 4)
    queries = [Query(cut, np.concatenate([trunk[:cut], some(3)]), (some(8),)) for cut in cuts]
    row = build_row(queries)
    expected = score_sequences(model, queries, token_budget=1)
    unmasked: LogProbs = {}
    _collect(unmasked, _forward(model, row.ids[None], row.outputs)[0], row.targets, row.outputs - len(row))
    try:
        found = score_trees(model, [row], token_budget=1)
    except REFUSALS as error:
        return tree_refusal(error)
    error_of_tree, scale = (
        float(np.linalg.norm([logprobs[cut][0] - expected[cut][0] for cut in cuts]))
        for logprobs in (found, unmasked)
    )
    if error_of_tree > PROBE_TOLERANCE * scale + 1e-6:
        return "its log-probs under a tree mask differ from those of separate sequences"
    return None


def _batches(
    rows: Sequence[TreeRow], token_budget: int, config: Any, *, right_aligned: bool
) -> Iterator[list[TreeRow]]:
    """Rows of like length together; a batch is bounded by padded tokens and by logits, and never empty."""
    vocabulary = int(getattr(config, "vocab_size", None) or 1)
    batch: list[TreeRow] = []
    for row in sorted(rows, key=len):  # stable: equal lengths keep their order
        grown = [*batch, row]
        keep = (
            max(r.outputs for r in grown)
            if right_aligned
            else len(row) - min(len(r) - r.outputs for r in grown)
        )
        if batch and (
            len(grown) * len(row) > token_budget or len(grown) * keep * vocabulary > LOGIT_ELEMENTS
        ):
            yield batch
            grown = [row]
        batch = grown
    if batch:
        yield batch


def _attention_mask(model: torch.nn.Module, config: Any, mask: np.ndarray, positions: np.ndarray) -> Any:
    """The explicit mask in the form the model's layers want: one for all, or one for each kind of layer."""
    window = sliding_window(config)
    if window is None or positions.max() < window:
        return _mask_tensor(model, config, mask)
    near = (positions[:, None, :, None] - positions[:, None, None, :]) < window
    if "full_attention" not in (getattr(config, "layer_types", None) or ()):
        return _mask_tensor(model, config, mask & near)
    return {
        "full_attention": _mask_tensor(model, config, mask),
        "sliding_attention": _mask_tensor(model, config, mask & near),
    }


def _mask_tensor(model: torch.nn.Module, config: Any, mask: np.ndarray) -> Tensor:
    visible = _to(model, mask)
    if getattr(config, "_attn_implementation", "eager") == "sdpa":
        return visible
    dtype = next(model.parameters()).dtype
    zero = torch.zeros((), dtype=dtype, device=visible.device)
    return torch.where(visible, zero, torch.finfo(dtype).min)


def _to(model: torch.nn.Module, array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).to(next(model.parameters()).device)


def _takes(model: torch.nn.Module, argument: str) -> bool:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return argument in inspect.signature(inner.forward).parameters


def _forward(model: torch.nn.Module, ids: np.ndarray, keep: int, **inputs: Any) -> Tensor:
    """Logits of the last ``keep`` columns, (B, keep, V)."""
    if _takes(model, "logits_to_keep"):
        inputs["logits_to_keep"] = keep
    if _takes(model, "use_cache"):
        inputs["use_cache"] = False
    logits: Tensor = model(input_ids=_to(model, ids), **inputs).logits
    return logits[:, -keep:]


def _collect(found: LogProbs, logits: Tensor, targets: Sequence[Target], shift: int) -> None:
    """Add the answers' log-probs; row column c is column c + ``shift`` of ``logits`` (K, V)."""
    columns = np.concatenate([target.columns for target in targets]) + shift
    ids = np.concatenate([target.ids for target in targets])
    scores = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    logprobs = (scores[columns, ids] - scores.logsumexp(-1)[columns]).double().cpu().numpy()
    ends = np.cumsum([len(target.ids) for target in targets])
    for target, of_answer in zip(targets, np.split(logprobs, ends[:-1]), strict=True):
        found.setdefault(target.key, []).append(of_answer)
