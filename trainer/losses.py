"""The policy loss: pure functions on tensors of response tokens.

Everything is flat: ``(N,)`` response tokens, whatever rows, micro-batches or paddings they came from. What a
token weighs in the whole optimizer step is handed in (`aggregation_weights`), fixed before the first
backward, so that no partition of the rows can change the gradient.

The KL to the reference, as a *loss* on tokens the policy sampled, has these expected gradients:

=====  ================================  ============================================================
kind   value                             expected gradient of its mean
=====  ================================  ============================================================
k1     log pi - log ref                  none: E[grad log pi] = 0
k2     (log pi - log ref)^2 / 2          exact: that of KL(pi || ref)
k3     ref/pi - 1 - log(ref/pi)          biased: that of the other direction, KL(ref || pi)
=====  ================================  ============================================================
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algorithm import Aggregation, KlKind, RatioKind

LOG_DIFFERENCE_LIMIT = 20.0
K3_LIMIT = 10.0


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: KlKind = "k3") -> Tensor:
    """KL(pi || ref) by token, estimated on sampled tokens.

    Args:
        logprobs: ``(N,)`` nats under the policy, with gradient.
        ref_logprobs: ``(N,)`` nats under the reference.
        kind: ``k1``, ``k2`` or ``k3``; the module's docstring says what each does as a loss.

    Returns:
        ``(N,)``. [choice] The log-difference is clamped to +-20 and the value of k3 to +-10.

    Raises:
        ValueError: unknown kind.
    """
    difference = (logprobs - ref_logprobs.detach()).clamp(-LOG_DIFFERENCE_LIMIT, LOG_DIFFERENCE_LIMIT)
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    if kind == "k3":
        return (torch.expm1(-difference) + difference).clamp(-K3_LIMIT, K3_LIMIT)
    raise ValueError(f"kl kind is {kind!r}; one of k1, k2, k3 is needed")


@dataclass(frozen=True)
class Surrogate:
    """The clipped surrogate by token.

    Attributes:
        loss: ``(N,)`` with gradient; exactly 0 at masked positions.
        ratio: ``(N,)`` detached; 1 at masked positions.
        clipped: ``(N,)`` bool: the clip was the smaller branch, so the token has no gradient.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    mask: Tensor | None = None,
    ratio: RatioKind = "token",
    sequence: Tensor | None = None,
    weights: Tensor | None = None,
) -> Surrogate:
    """``-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)`` by token (PPO, DAPO, GSPO).

    Args:
        logprobs: ``(N,)`` nats under the policy, with gradient.
        old_logprobs: ``(N,)`` nats under the policy that sampled.
        advantages: ``(N,)``.
        mask: ``(N,)`` bool, True where a token counts; what stands elsewhere, nan included, has no influence.
        ratio: ``token``, or ``sequence``: the geometric mean of the ratios of a sequence. Its gradient is
            GSPO-token's, equal to GSPO's when a sequence has one advantage, and it keeps each token's own
            advantage otherwise.
        sequence: ``(N,)`` int, the sequence of each token, counted from 0; needed for ``sequence``.
        weights: ``(N,)`` factors on the loss (importance correction), treated as constants.

    Raises:
        ValueError: unknown ratio, or no sequence index where one is needed.
    """
    if mask is not None:
        # Select before any arithmetic: the derivative of 0 * nan is nan.
        logprobs = torch.where(mask, logprobs, 0.0)
        old_logprobs = torch.where(mask, old_logprobs, 0.0)
        advantages = torch.where(mask, advantages, 0.0)
        weights = None if weights is None else torch.where(mask, weights, 0.0)
    advantages = advantages.detach()
    log_ratio = logprobs - old_logprobs.detach()
    if ratio == "sequence":
        if sequence is None:
            raise ValueError("ratio 'sequence' needs the sequence index of each token")
        mean = _sequence_mean(log_ratio.detach(), sequence, mask)
        log_ratio = mean + (logprobs - logprobs.detach())
    elif ratio != "token":
        raise ValueError(f"ratio is {ratio!r}; token or sequence is needed")
    ratios = log_ratio.clamp(-LOG_DIFFERENCE_LIMIT, LOG_DIFFERENCE_LIMIT).exp()
    plain = ratios * advantages
    bounded = ratios.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = -torch.minimum(plain, bounded)
    if weights is not None:
        loss = loss * weights.detach()
    return Surrogate(loss=loss, ratio=ratios.detach(), clipped=(bounded < plain).detach())


def importance_weights(trainer_logprobs: Tensor, engine_logprobs: Tensor, cap: float) -> Tensor:
    """Token-level truncated importance sampling, ``min(p_trainer / p_engine, cap)``, ``(N,)`` without
    gradient.

    It corrects for an engine that samples from slightly other probabilities than the trainer computes for the
    same weights.
    """
    difference = (trainer_logprobs - engine_logprobs).detach()
    return difference.clamp(-LOG_DIFFERENCE_LIMIT, LOG_DIFFERENCE_LIMIT).exp().clamp(max=cap)


@dataclass(frozen=True)
class Denominators:
    """What one optimizer step divides by, counted over all its rows on all ranks before the first backward.

    Attributes:
        tokens: trained response tokens.
        trajectories: trajectories with at least one of them.
    """

    tokens: int
    trajectories: int


def aggregation_weights(
    kind: Aggregation,
    trajectory_tokens: Tensor,
    denominators: Denominators,
    *,
    constant_length: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """What each response token weighs in the loss of the whole optimizer step.

    Args:
        kind: ``token``: 1 / tokens. ``trajectory``: 1 / (trajectories * tokens of the token's trajectory).
            ``constant``: 1 / (trajectories * constant_length).
        trajectory_tokens: ``(N,)`` trained tokens of the trajectory each token belongs to, over all its
            turns.
        denominators: see `Denominators`.

    Returns:
        ``(N,)``; the first two kinds sum to 1 over the whole step.

    Raises:
        ValueError: unknown kind, or no constant_length where one is needed.
    """
    if kind == "token":
        return torch.full_like(trajectory_tokens, 1.0 / max(denominators.tokens, 1), dtype=dtype)
    if kind == "trajectory":
        return 1.0 / (trajectory_tokens.to(dtype) * max(denominators.trajectories, 1))
    if kind == "constant":
        if constant_length is None:
            raise ValueError("aggregation 'constant' needs constant_length")
        total = max(denominators.trajectories, 1) * constant_length
        return torch.full_like(trajectory_tokens, 1.0 / total, dtype=dtype)
    raise ValueError(f"aggregation is {kind!r}; one of token, trajectory, constant is needed")


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """PPO's clipped value loss by token, ``max((v - R)^2, (clip(v) - R)^2) / 2``, ``(N,)``."""
    bounded = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum((values - returns).square(), (bounded - returns).square()) / 2


def _sequence_mean(log_ratio: Tensor, sequence: Tensor, mask: Tensor | None) -> Tensor:
    """``(N,)`` mean log-ratio of each token's sequence over its counted tokens."""
    counted = torch.ones_like(log_ratio) if mask is None else mask.to(log_ratio.dtype)
    size = int(sequence.max()) + 1 if sequence.numel() else 0
    sums = log_ratio.new_zeros(size).index_add_(0, sequence, log_ratio)
    counts = log_ratio.new_zeros(size).index_add_(0, sequence, counted)
    return (sums / counts.clamp(min=1))[sequence]
