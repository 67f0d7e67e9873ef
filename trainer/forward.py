"""Log-probs of trained tokens under a causal language model, without ever holding all logits.

Works on any transformers decoder-only model: the decoder runs on the whole micro-batch, its hidden states are
selected where a trained token is predicted, and only those meet the vocabulary head, in chunks. Models that
do something else between head and logits (Cohere's scale) are noticed by a probe and take the model's own
head instead, all at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.packing import MicroBatch, micro_batches
from trainer.row import Row

# Logits of one chunk (float32: 64 MiB); more than that are computed again in the backward pass. An
# accelerator needs larger chunks to be busy.
_KEPT_LOGITS = 2**24
_KEPT_LOGITS_ACCELERATOR = 2**27


Layout = Literal["branches", "packed"]


@dataclass(frozen=True)
class TokenScores:
    """``(N,)`` log-probs (nats, temperature applied) of a micro-batch's trained tokens and the entropies
    there.

    ``entropy`` is None when it was not wanted, and detached unless its gradient was.
    """

    logprobs: Tensor
    entropy: Tensor | None


class Forward:
    """The forward pass of one model.

    Args:
        model: a transformers causal language model, bare or wrapped by peft.
        temperature: logits are divided by it.
        autocast: ``bfloat16`` runs the decoder in it; head and log-softmax stay in float32 at least.
        entropy_gradient: keep the gradient of the entropies.
    """

    def __init__(
        self, model: Any, *, temperature: float = 1.0, autocast: str = "none", entropy_gradient: bool = False
    ) -> None:
        self.model = model
        self.temperature = temperature
        self.autocast = autocast
        self.entropy_gradient = entropy_gradient
        self._plain = _base(model)
        self._own_head: bool | None = None
        self._refusals: dict[str, str | None] = {}

    def agrees(self, layout: Layout) -> bool:
        """Whether the model computes the same in a layout as row by row, found out once on a few tokens.

        ``branches``: prompts shared under an explicit mask; ``packed``: rows told apart by their positions
        alone.
        """
        return self.why_not(layout) is None

    def why_not(self, layout: Layout) -> str | None:
        """What stands against a layout, or None."""
        if layout not in self._refusals:
            self._refusals[layout] = _why_not(self, layout)
        return self._refusals[layout]

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    def __call__(self, batch: MicroBatch, *, entropy: bool = False) -> TokenScores:
        """One pass over the micro-batch; with gradient unless the caller switched it off."""
        batch = batch.to(self.device)
        if self._own_head is None:
            self._own_head = not _head_is_last(self._plain)
        if self._own_head:
            logits = self._through_own_head(batch)
            return self._score(logits, batch.targets, entropy)
        with self._precision():
            hidden = decoder_hidden(self._plain.get_decoder(), batch)
        return self._chunks(hidden, batch.targets, entropy)

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast == "none":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=getattr(torch, self.autocast))

    def _chunks(self, hidden: Tensor, targets: Tensor, entropy: bool) -> TokenScores:
        head = self._plain.get_output_embeddings()
        vocabulary = head.weight.shape[0]
        hidden = hidden.to(head.weight.dtype)
        kept = _KEPT_LOGITS if hidden.device.type == "cpu" else _KEPT_LOGITS_ACCELERATOR
        size = max(1, kept // vocabulary)
        if hidden.shape[0] <= size:
            return self._score(self._capped(head(hidden)), targets, entropy)

        def score(states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None]:
            scores = self._score(self._capped(head(states)), ids, entropy)
            return scores.logprobs, scores.entropy

        pieces = [
            checkpoint(score, states, ids, use_reentrant=False)
            for states, ids in zip(torch.split(hidden, size), torch.split(targets, size), strict=True)
        ]
        return TokenScores(
            logprobs=torch.cat([logprobs for logprobs, _ in pieces]),
            entropy=torch.cat([entropies for _, entropies in pieces]) if entropy else None,
        )

    def _capped(self, logits: Tensor) -> Tensor:
        return soft_cap(logits, self._plain.config)

    def _score(self, logits: Tensor, targets: Tensor, with_entropy: bool) -> TokenScores:
        if not _is_wide(logits.dtype):
            logits = logits.float()
        if self.temperature != 1.0:
            logits = logits / self.temperature
        distribution = torch.log_softmax(logits, dim=-1)
        logprobs = distribution.gather(-1, targets[:, None])[:, 0]
        if not with_entropy:
            return TokenScores(logprobs=logprobs, entropy=None)
        with torch.set_grad_enabled(self.entropy_gradient and torch.is_grad_enabled()):
            # The clamp keeps 0 * -inf out (models that forbid tokens); exp(-100) adds nothing.
            entropy = -(distribution.exp() * distribution.clamp(min=-100)).sum(-1)
        return TokenScores(logprobs=logprobs, entropy=entropy)

    def _through_own_head(self, batch: MicroBatch) -> Tensor:
        """``(N, V)`` logits: the model's head on the columns where any line predicts a trained token."""
        width = batch.input_ids.shape[1]
        columns, column_of = torch.unique(batch.sources % width, return_inverse=True)
        with self._precision():
            logits: Tensor = self._plain(**_inputs(self._plain, batch), logits_to_keep=columns).logits
        return logits[batch.sources // width, column_of]


def decoder_hidden(decoder: Any, batch: MicroBatch) -> Tensor:
    """``(N, H)`` hidden states that predict the trained tokens; the batch is on the decoder's device."""
    hidden: Tensor = decoder(**_inputs(decoder, batch)).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, batch.sources)


def _inputs(model: Any, batch: MicroBatch) -> dict[str, Any]:
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
    if batch.positions is not None:
        inputs["position_ids"] = batch.positions
    if batch.mask is not None:
        inputs["attention_mask"] = batch.mask
        if model.config._attn_implementation != "sdpa":  # eager attention adds its mask
            dtype = model.dtype
            zeros = torch.zeros(batch.mask.shape, dtype=dtype, device=batch.mask.device)
            inputs["attention_mask"] = zeros.masked_fill(~batch.mask, torch.finfo(dtype).min)
    return inputs


def soft_cap(logits: Tensor, config: Any) -> Tensor:
    """Gemma 2's bound on logits, ``cap * tanh(logits / cap)``, for models whose configuration has one."""
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _is_wide(dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.float64)


def _base(model: Any) -> Any:
    """The transformers model inside a peft wrapper (its adapted layers stay in place), or the model
    itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@torch.no_grad()
def _head_is_last(model: Any) -> bool:
    """Whether logits are the head's output and nothing else, found out on four tokens."""
    head = model.get_output_embeddings()
    if head is None:
        return False
    device = next(model.parameters()).device
    ids = torch.arange(4, device=device)[None] % head.weight.shape[0]
    with _evaluating(model):
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        expected = model(input_ids=ids, use_cache=False).logits
    return torch.allclose(soft_cap(head(hidden), model.config), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def _why_not(forward: Forward, layout: Layout) -> str | None:
    plain = forward._plain
    implementation = plain.config._attn_implementation
    if layout == "branches" and implementation not in ("sdpa", "eager"):
        return f"its attention implementation is {implementation!r}, which takes no explicit mask"
    if layout == "branches" and _is_windowed(plain.config):
        return "it has sliding-window layers, for which one explicit mask cannot stand"
    vocabulary = plain.get_output_embeddings().weight.shape[0]
    rows = [_probe(tuple(token % vocabulary for token in completion)) for completion in ((5, 6, 7), (8, 9))]
    single = torch.cat([forward(micro_batches([row], 64)[0]).logprobs for row in rows])
    try:
        if layout == "branches":
            batch = micro_batches(rows, 64, share_prompts=True)[0]
        else:
            batch = micro_batches(rows, 64, layout="packed")[0]
        together = forward(batch).logprobs
    except (TypeError, ValueError, RuntimeError) as error:
        return f"it takes no positions, or not this mask ({type(error).__name__})"
    if not torch.allclose(single, together, rtol=0.0, atol=1e-3 if forward.autocast == "none" else 0.1):
        return "its log-probs differ from those of separate rows"
    return None


def _is_windowed(config: Any) -> bool:
    """Whether any layer looks back over a limited number of columns, which a short probe cannot notice."""
    kinds = [
        *(getattr(config, "layer_types", None) or ()),
        *(getattr(config, "attention_layers", None) or ()),
    ]
    if kinds:
        return any(kind not in ("full_attention", "global") for kind in kinds)
    return any(getattr(config, name, None) is not None for name in ("sliding_window", "attention_chunk_size"))


def _probe(completion: tuple[int, ...]) -> Row:
    count = len(completion)
    zeros = (0.0,) * count
    return Row((1, 2, 3, 4), completion, (True,) * count, zeros, zeros, question=0, trajectory=0, turn=0)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def silence_dropout(model: nn.Module) -> None:
    """Switch dropout off for good: a ratio compares two passes over the same tokens, so both must agree."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "attn_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
