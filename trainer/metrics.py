"""What one update reports about itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.losses import Surrogate, kl_penalty


class UpdateMetrics:
    """Sums over the micro-batches and steps of one update; `summary` turns them into plain numbers.

    Every entry is a mean over the trained tokens that were computed, in all epochs, unless its name says
    otherwise. ``engine_*`` compare the trainer's log-probs with those the engine reported for the same
    tokens: they are taken in the first optimizer step only, before the weights have moved.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._norms: list[float] = []
        self._step_loss: list[Tensor] = []
        self._losses: list[float] = []
        self._lr = 0.0
        self._steps = 0
        self._skipped = 0
        self._micro_batches = 0
        self._computed_tokens = 0

    def computed(self, tokens: int) -> None:
        """A micro-batch went through forward and backward."""
        self._micro_batches += 1
        self._computed_tokens += tokens

    def surrogate(self, surrogate: Surrogate) -> None:
        self._add("clipped", surrogate.clipped.sum())
        self._add("ratios", torch.tensor(float(surrogate.ratio.numel())))
        self._raise("ratio_max", surrogate.ratio)
        self._raise("minus_ratio_min", -surrogate.ratio)

    def tokens(
        self,
        *,
        loss: Tensor,
        logprobs: Tensor,
        engine: Tensor,
        reference: Tensor | None,
        entropy: Tensor,
        correction: Tensor | None,
    ) -> None:
        """Token-level tensors of one micro-batch, all detached; ``loss`` is its scalar share of the step's
        loss."""
        self._step_loss.append(loss)
        self._add("tokens", torch.tensor(float(logprobs.numel())))
        self._add("entropy", entropy.sum())
        if self._steps == 0:
            difference = (logprobs - engine).abs()
            self._add("engine_tokens", torch.tensor(float(logprobs.numel())))
            self._add("engine_diff", difference.sum())
            self._add("engine_kl", kl_penalty(engine, logprobs, "k3").sum())
            self._raise("engine_diff_max", difference)
        if reference is not None:
            kl = kl_penalty(logprobs, reference, "k3")
            self._add("kl_reference", kl.sum())
            self._raise("kl_reference_max", kl)
        if correction is not None:
            self._add("importance", correction.sum())

    def loss_is_finite(self) -> bool:
        """Whether the loss of the step that is being made is finite so far."""
        return not self._step_loss or math.isfinite(float(torch.stack(self._step_loss).sum()))

    def step(self, *, norm: float, lr: float, finite: bool) -> None:
        """An optimizer step ended (or was skipped, when something was not finite)."""
        self._steps += 1
        self._lr = lr
        if finite:
            self._losses.append(float(torch.stack(self._step_loss).sum()) if self._step_loss else 0.0)
            self._norms.append(norm)
        else:
            self._skipped += 1
        self._step_loss = []

    def summary(self) -> dict[str, float]:
        """Plain numbers; entries that were not measured are absent."""
        sums = {name: float(value) for name, value in self._sums.items()}
        maxima = {name: float(value) for name, value in self._maxima.items()}
        tokens = sums.get("tokens", 0.0)
        summary = {
            "optimizer_steps": float(self._steps - self._skipped),
            "skipped_steps": float(self._skipped),
            "micro_batches": float(self._micro_batches),
            "computed_tokens": float(self._computed_tokens),
            "trained_tokens": tokens,
            "lr": self._lr,
        }
        if self._norms:
            summary["loss"] = sum(self._losses) / len(self._losses)
            summary["grad_norm"] = sum(self._norms) / len(self._norms)
            summary["grad_norm_max"] = max(self._norms)
        if tokens:
            summary["entropy"] = sums["entropy"] / tokens
            summary["clip_fraction"] = sums["clipped"] / sums["ratios"]
            summary["ratio_max"] = maxima["ratio_max"]
            summary["ratio_min"] = -maxima["minus_ratio_min"]
            for name in ("kl_reference", "importance"):
                if name in sums:
                    summary[name] = sums[name] / tokens
            if "kl_reference_max" in maxima:
                summary["kl_reference_max"] = maxima["kl_reference_max"]
        if "engine_tokens" in sums:
            summary["engine_diff_mean"] = sums["engine_diff"] / sums["engine_tokens"]
            summary["engine_diff_max"] = maxima["engine_diff_max"]
            summary["engine_kl"] = sums["engine_kl"] / sums["engine_tokens"]
        return summary

    def _add(self, name: str, value: Tensor) -> None:
        value = value.detach().to(torch.float64)
        self._sums[name] = (
            self._sums[name] + value.to(self._sums[name].device) if name in self._sums else value
        )

    def _raise(self, name: str, values: Tensor) -> None:
        if values.numel():
            value = values.detach().max()
            self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value
