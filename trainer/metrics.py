"""What one update reports about itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.losses import Surrogate, kl_penalty


class UpdateMetrics:
    """Sums over the micro-batches and steps of one update; `summary` turns them into plain numbers.

    Entries are means over the trained tokens that were computed, in all epochs, unless their name says
    otherwise. ``engine_*`` compare the trainer's log-probs with those the engine reported for the same
    tokens: they are taken in the first optimizer step only, before the weights have moved. A step that was
    skipped because something was not finite is in none of them.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._maxima: dict[str, float] = {}
        self._step_sums: dict[str, Tensor] = {}
        self._step_maxima: dict[str, Tensor] = {}
        self._norms: list[float] = []
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
        self._add("ratios", surrogate.ratio.new_full((), surrogate.ratio.numel()))
        self._raise("ratio_max", surrogate.ratio)
        self._raise("minus_ratio_min", -surrogate.ratio)

    def tokens(
        self,
        *,
        loss: Tensor,
        logprobs: Tensor,
        engine: Tensor,
        reference: Tensor | None,
        entropy: Tensor | None,
        correction: Tensor | None,
    ) -> None:
        """Token-level tensors of one micro-batch, detached; ``loss`` is its scalar share of the step's
        loss."""
        count = logprobs.new_full((), logprobs.numel())
        self._add("loss", loss)
        self._add("tokens", count)
        if entropy is not None:
            self._add("entropy", entropy.sum())
        if self._steps == 0:
            difference = (logprobs - engine).abs()
            self._add("engine_tokens", count)
            self._add("engine_diff", difference.sum())
            engine_kl = kl_penalty(engine, logprobs, "k3")
            self._add("engine_kl", engine_kl.sum())
            self._raise("engine_kl_max", engine_kl)
            self._raise("engine_diff_max", difference)
        if reference is not None:
            kl = kl_penalty(logprobs, reference, "k3")
            self._add("kl_reference", kl.sum())
            self._raise("kl_reference_max", kl)
        if correction is not None:
            self._add("importance", correction.sum())

    def critic(self, loss: Tensor) -> None:
        """A micro-batch's share of the step's value loss."""
        self._add("value_loss", loss)

    def loss_is_finite(self) -> bool:
        """Whether the loss of the step that is being made is finite."""
        return math.isfinite(float(self._step_sums.get("loss", 0.0)))

    def step(self, *, norm: float, lr: float, finite: bool) -> None:
        """An optimizer step ended, or was skipped because something was not finite."""
        self._steps += 1
        self._lr = lr
        if finite:
            self._norms.append(norm)
            for name, value in self._step_sums.items():
                self._sums[name] = self._sums.get(name, 0.0) + float(value)
            for name, value in self._step_maxima.items():
                self._maxima[name] = max(self._maxima.get(name, -math.inf), float(value))
        else:
            self._skipped += 1
        self._step_sums, self._step_maxima = {}, {}

    def summary(self) -> dict[str, float]:
        """Plain numbers; entries that were not measured are absent."""
        sums, maxima = self._sums, self._maxima
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
            summary["loss"] = sums.get("loss", 0.0) / len(self._norms)
            summary["grad_norm"] = sum(self._norms) / len(self._norms)
            summary["grad_norm_max"] = max(self._norms)
            if "value_loss" in sums:
                summary["value_loss"] = sums["value_loss"] / len(self._norms)
        if tokens:
            summary["clip_fraction"] = sums["clipped"] / sums["ratios"]
            summary["ratio_max"] = maxima["ratio_max"]
            summary["ratio_min"] = -maxima["minus_ratio_min"]
            for name in ("entropy", "kl_reference", "importance"):
                if name in sums:
                    summary[name] = sums[name] / tokens
            if "kl_reference_max" in maxima:
                summary["kl_reference_max"] = maxima["kl_reference_max"]
        if sums.get("engine_tokens"):
            for name in ("engine_diff", "engine_kl"):
                summary[f"{name}_mean"] = sums[name] / sums["engine_tokens"]
                summary[f"{name}_max"] = maxima[f"{name}_max"]
        return summary

    def _add(self, name: str, value: Tensor) -> None:
        value = value.detach()
        self._step_sums[name] = self._step_sums[name] + value if name in self._step_sums else value

    def _raise(self, name: str, values: Tensor) -> None:
        if values.numel():
            value = values.detach().max()
            known = self._step_maxima.get(name)
            self._step_maxima[name] = value if known is None else torch.maximum(known, value)
