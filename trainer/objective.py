"""The loss of one micro-batch: everything about the rows that does not change during an update, and the
terms.

Left out on purpose: a second backward. All terms are summed per token before the one backward, also those of
the two-loss variant, whose two surrogates are clipped apart and share their denominator, so that at ratio 1
it has the gradient of the summed advantage and differs from it by its clipping alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algorithm import LearnerConfig
from trainer.forward import TokenScores
from trainer.losses import (
    Denominators,
    aggregation_weights,
    clipped_surrogate,
    importance_weights,
    kl_penalty,
)
from trainer.metrics import UpdateMetrics
from trainer.row import FlatRows, Row


@dataclass(frozen=True)
class Experience:
    """The constants of an update, ``(N,)`` tensors over all trained tokens, none with gradient.

    Attributes:
        rows: what the numbers belong to.
        flat: their tokens' numbers.
        advantages: the rows' own, or those estimated with a critic.
        old: log-probs in the denominator of the ratio.
        reference: log-probs under the reference policy, or None.
        old_values, returns: PPO with a critic only.
    """

    rows: Sequence[Row]
    flat: FlatRows
    advantages: Tensor
    old: Tensor
    reference: Tensor | None
    old_values: Tensor | None = None
    returns: Tensor | None = None

    def value_targets(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Old values and returns of some tokens.

        Raises:
            ValueError: the experience was made without a critic.
        """
        if self.old_values is None or self.returns is None:
            raise ValueError("no values or returns: the experience was made without a critic")
        return self.old_values[index], self.returns[index]

    def denominators(self, chosen: Sequence[int]) -> Denominators:
        """What a step over the rows ``chosen`` divides by; rows without a trained token count nowhere."""
        trained = [index for index in chosen if self.rows[index].trained_tokens]
        return Denominators(
            tokens=sum(self.rows[index].trained_tokens for index in trained),
            trajectories=len({self.rows[index].trajectory for index in trained}),
        )


def objective(
    scores: TokenScores,
    experience: Experience,
    index: Tensor,
    denominators: Denominators,
    config: LearnerConfig,
    metrics: UpdateMetrics,
) -> Tensor:
    """A micro-batch's share of the step's loss.

    Args:
        scores: ``(N,)`` log-probs with gradient, and entropies, of the micro-batch's trained tokens.
        index: ``(N,)`` where those tokens stand in the experience.
        denominators: of the whole optimizer step.

    Returns:
        A scalar with gradient; the shares of all micro-batches sum to the step's loss.
    """
    logprobs = scores.logprobs
    flat = experience.flat

    def pick(values: Tensor) -> Tensor:
        return values[index].to(logprobs.device)

    weights = aggregation_weights(
        config.aggregation,
        pick(flat.trajectory_tokens),
        denominators,
        constant_length=config.constant_length,
        dtype=logprobs.dtype,
    )
    old, engine = pick(experience.old), pick(flat.engine_logprobs)
    correction = None
    if config.importance_cap is not None:
        correction = importance_weights(old, engine, config.importance_cap)
    terms = [experience.advantages]
    if flat.memory_advantages is not None:
        terms.append(flat.memory_advantages)
    loss = torch.zeros_like(logprobs)
    for advantages in terms:
        surrogate = clipped_surrogate(
            logprobs,
            old,
            pick(advantages),
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            ratio=config.ratio,
            sequence=pick(flat.row),
            weights=correction,
        )
        loss = loss + surrogate.loss
        metrics.surrogate(surrogate)
    reference = None if experience.reference is None else pick(experience.reference)
    if reference is not None and config.kl_coef > 0:
        loss = loss + config.kl_coef * kl_penalty(logprobs, reference, config.kl_kind)
    if config.entropy_coef > 0 and scores.entropy is not None:
        loss = loss - config.entropy_coef * scores.entropy
    total = (loss * weights).sum()
    metrics.tokens(
        loss=total.detach(),
        logprobs=logprobs.detach(),
        engine=engine,
        reference=reference,
        entropy=None if scores.entropy is None else scores.entropy.detach(),
        correction=correction,
    )
    return total
