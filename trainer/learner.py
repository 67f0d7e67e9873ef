"""The learner: rows with advantages in, new weights and a step's metrics out.

One update is some epochs of mini-batches, counted in questions; each mini-batch is one optimizer step over
micro-batches that fit the memory. What the step divides by is counted before its first backward, so the
partition into micro-batches changes nothing. A micro-batch costs one forward and one backward; advantages,
old and reference log-probs are constants.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.algorithm import LearnerConfig
from trainer.forward import Forward, TokenScores, silence_dropout
from trainer.losses import (
    Denominators,
    aggregation_weights,
    clipped_surrogate,
    importance_weights,
    kl_penalty,
)
from trainer.metrics import UpdateMetrics
from trainer.optimizers import build_optimizer
from trainer.packing import FlatRows, MicroBatch, Row, flatten, micro_batches
from trainer.reference import attach_lora, frozen_copy, reference_mode


class NonFiniteError(RuntimeError):
    """Too many steps in a row had a loss or gradient that was not finite: stop, and go back to a
    checkpoint."""


class Learner:
    """Owns the policy's weights, their optimizer and the reference policy.

    Args:
        model: a transformers causal language model; it is trained in place (or wrapped, with
            ``config.lora``).
        config: see `LearnerConfig`.
        reference: the reference policy. None: a frozen copy of ``model`` as it is now, when ``kl_coef`` asks
            for one (the base under the adapters with LoRA). Build the learner on the cold-start model first
            and load a checkpoint's state after it, and the reference is the cold start also after a resume.
        seed: decides the order of mini-batches.
    """

    def __init__(self, model: Any, config: LearnerConfig, reference: Any = None, *, seed: int = 0) -> None:
        self.config = config
        self.reference = reference
        if config.lora is not None:
            model = attach_lora(model, config.lora)
        elif reference is None and config.kl_coef > 0:
            self.reference = frozen_copy(model)
        self.model = model
        silence_dropout(model)
        model.train(config.gradient_checkpointing)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            if config.lora is not None:
                model.enable_input_require_grads()
        self.optimizer = build_optimizer(model, config.optimizer)
        self._shuffle = torch.Generator().manual_seed(seed)
        self._nonfinite_in_a_row = 0
        self.skipped_steps = 0
        self._policy = self._forward_of(model)

    def update(self, rows: Sequence[Row]) -> dict[str, float]:
        """All epochs over the rows of one training step.

        Args:
            rows: every turn of every trajectory, also those without advantage: denominators count them.

        Returns:
            Metrics of the step, see `UpdateMetrics`.

        Raises:
            NonFiniteError: more than ``max_nonfinite_steps`` steps in a row had to be skipped.
            ValueError: no row has a trained token.
        """
        if not any(row.trained_tokens for row in rows):
            raise ValueError("an update needs at least one row with a trained token")
        flat = flatten(rows, self._dtype)
        reference = self._reference_of(rows, flat)
        old = (
            flat.engine_logprobs if self.config.old_logprobs == "engine" else self._scores(self._policy, rows)
        )
        metrics = UpdateMetrics()
        for _ in range(self.config.epochs):
            for chosen in self._mini_batches(rows):
                self._step(rows, chosen, flat, old, reference, metrics)
        return metrics.summary()

    def logprobs(self, rows: Sequence[Row]) -> list[list[float]]:
        """Log-probs of each row's trained tokens under the policy as it is now."""
        return _by_row(self._scores(self._policy, rows), rows)

    def reference_logprobs(self, rows: Sequence[Row]) -> list[list[float]]:
        """Log-probs of each row's trained tokens under the reference policy.

        Raises:
            ValueError: there is no reference policy.
        """
        return _by_row(self._reference_scores(rows), rows)

    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-exact resume needs: ``{"tensors": {name: Tensor}, "values": plain numbers}``.

        Trainable weights, moments and the shuffle's generator are tensors (safetensors takes them); counters
        are plain. The reference policy and frozen weights are not in it: they are the cold-start model's.
        """
        tensors = {f"model.{name}": p.detach() for name, p in self.optimizer.parameters.items()}
        tensors |= {f"optimizer.{name}": value for name, value in self.optimizer.state_tensors().items()}
        tensors["shuffle"] = self._shuffle.get_state()
        values = {
            "optimizer_steps": self.optimizer.steps,
            "skipped_steps": self.skipped_steps,
            "nonfinite_in_a_row": self._nonfinite_in_a_row,
        }
        return {"tensors": tensors, "values": values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave.

        Raises:
            ValueError: the state belongs to a model with other parameters.
        """
        tensors: dict[str, Tensor] = state["tensors"]
        saved = {name.removeprefix("model.") for name in tensors if name.startswith("model.")}
        own = self.optimizer.parameters
        if saved != set(own):
            differing = sorted(saved ^ set(own))
            raise ValueError(f"checkpoint of another model: parameter {differing[0]!r} is on one side only")
        for name, parameter in own.items():
            value = tensors[f"model.{name}"]
            if value.shape != parameter.shape:
                raise ValueError(
                    f"checkpoint of another model: {name} has shape {tuple(value.shape)}, "
                    f"not {tuple(parameter.shape)}"
                )
            with torch.no_grad():
                parameter.copy_(value)
        moments = {
            key.removeprefix("optimizer."): v for key, v in tensors.items() if key.startswith("optimizer.")
        }
        self.optimizer.load_state(moments, state["values"]["optimizer_steps"])
        self._shuffle.set_state(tensors["shuffle"].cpu())
        self.skipped_steps = state["values"]["skipped_steps"]
        self._nonfinite_in_a_row = state["values"]["nonfinite_in_a_row"]

    def _forward_of(self, model: Any) -> Forward:
        config = self.config
        return Forward(
            model,
            temperature=config.temperature,
            autocast=config.autocast,
            entropy_gradient=config.entropy_coef > 0,
        )

    @property
    def _dtype(self) -> torch.dtype:
        """Type of log-probs and loss: float32, or float64 for a float64 model."""
        return torch.float64 if self.model.dtype == torch.float64 else torch.float32

    def _lay_out(self, rows: Sequence[Row]) -> list[MicroBatch]:
        config = self.config
        if config.forward == "packed" and not self._policy.agrees("packed"):
            raise ValueError("this model does not tell packed rows apart: set learner.forward = 'padded'")
        share = config.share_prompts and config.forward == "padded" and self._policy.agrees("branches")
        return micro_batches(rows, config.tokens_per_micro_batch, layout=config.forward, share_prompts=share)

    @torch.no_grad()
    def _scores(self, forward: Forward, rows: Sequence[Row]) -> Tensor:
        """``(N,)`` log-probs of the rows' trained tokens, without gradient."""
        offsets = _offsets(rows)
        result = torch.zeros(offsets[-1], dtype=self._dtype)
        for batch in self._lay_out(rows):
            result[_token_index(offsets, batch.rows)] = forward(batch).logprobs.cpu().to(self._dtype)
        return result

    def _reference_scores(self, rows: Sequence[Row]) -> Tensor:
        with reference_mode(self.model, self.reference):
            model = self.model if self.reference is None else self.reference
            return self._scores(self._forward_of(model), rows)

    def _reference_of(self, rows: Sequence[Row], flat: FlatRows) -> Tensor | None:
        if flat.ref_logprobs is not None or self.config.kl_coef == 0:
            return flat.ref_logprobs
        return self._reference_scores(rows)

    def _mini_batches(self, rows: Sequence[Row]) -> list[list[int]]:
        """Row indices of each optimizer step: questions in random order, a few at a time, never split."""
        questions: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            questions.setdefault(row.question, []).append(index)
        members = list(questions.values())
        order = torch.randperm(len(members), generator=self._shuffle).tolist()
        size = self.config.mini_batch_questions or len(members)
        return [
            [index for question in order[start : start + size] for index in members[question]]
            for start in range(0, len(order), size)
        ]

    def _step(
        self,
        rows: Sequence[Row],
        chosen: Sequence[int],
        flat: FlatRows,
        old: Tensor,
        reference: Tensor | None,
        metrics: UpdateMetrics,
    ) -> None:
        """One optimizer step on the rows of one mini-batch."""
        config = self.config
        trained = [index for index in chosen if rows[index].trained_tokens]
        if not trained:
            return
        denominators = Denominators(
            tokens=sum(rows[index].trained_tokens for index in trained),
            trajectories=len({rows[index].trajectory for index in trained}),
        )
        # Without a KL or entropy term a row whose advantages are all 0 adds exactly 0: it only counts above.
        needed = trained
        if config.kl_coef == 0 and config.entropy_coef == 0:
            needed = [index for index in trained if rows[index].has_signal]
        self.optimizer.zero_grad()
        finite = True
        for batch in self._lay_out([rows[index] for index in needed]):
            index = flat.index([needed[row] for row in batch.rows])
            loss = self._loss(self._policy(batch), flat, index, old, reference, denominators, metrics)
            torch.autograd.backward(loss)
            metrics.computed(batch.tokens)
        norm = float(self.optimizer.clip()) if needed else 0.0
        finite = math.isfinite(norm) and metrics.loss_is_finite()
        metrics.step(norm=norm, lr=self.optimizer.lr, finite=finite)
        if finite:
            self._nonfinite_in_a_row = 0
            self.optimizer.step()
        else:
            self.skipped_steps += 1
            self._nonfinite_in_a_row += 1
        self.optimizer.zero_grad()
        if self._nonfinite_in_a_row > config.max_nonfinite_steps:
            raise NonFiniteError(
                f"{self._nonfinite_in_a_row} optimizer steps in a row had a loss or gradient that was not "
                f"finite (limit {config.max_nonfinite_steps}): continue from the last good checkpoint"
            )

    def _loss(
        self,
        scores: TokenScores,
        flat: FlatRows,
        index: Tensor,
        old: Tensor,
        reference: Tensor | None,
        denominators: Denominators,
        metrics: UpdateMetrics,
    ) -> Tensor:
        """A micro-batch's share of the step's loss: a scalar with gradient."""
        config = self.config
        device = scores.logprobs.device

        def pick(values: Tensor) -> Tensor:
            return values[index].to(device)

        logprobs = scores.logprobs
        weights = aggregation_weights(
            config.aggregation,
            flat.trajectory_tokens[index],
            denominators,
            constant_length=config.constant_length,
            dtype=logprobs.dtype,
        ).to(device)
        engine = pick(flat.engine_logprobs)
        correction = None
        if config.importance_cap is not None:
            correction = importance_weights(pick(old), engine, config.importance_cap)
        terms = (
            [flat.advantages] if flat.memory_advantages is None else [flat.advantages, flat.memory_advantages]
        )
        loss = logprobs.new_zeros(logprobs.shape)
        for advantages in terms:
            surrogate = clipped_surrogate(
                logprobs,
                pick(old),
                pick(advantages),
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                ratio=config.ratio,
                sequence=pick(flat.row),
                weights=correction,
            )
            loss = loss + surrogate.loss
            metrics.surrogate(surrogate)
        if reference is not None and config.kl_coef > 0:
            loss = loss + config.kl_coef * kl_penalty(logprobs, pick(reference), config.kl_kind)
        if config.entropy_coef > 0:
            loss = loss - config.entropy_coef * scores.entropy
        total = (loss * weights).sum()
        metrics.tokens(
            loss=total.detach(),
            logprobs=logprobs.detach(),
            engine=engine,
            reference=None if reference is None else pick(reference),
            entropy=scores.entropy.detach(),
            correction=correction,
        )
        return total


def _offsets(rows: Sequence[Row]) -> list[int]:
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + row.trained_tokens)
    return offsets


def _token_index(offsets: Sequence[int], rows: Sequence[int]) -> Tensor:
    return torch.cat([torch.arange(offsets[row], offsets[row + 1]) for row in rows])


def _by_row(flat: Tensor, rows: Sequence[Row]) -> list[list[float]]:
    values: list[float] = flat.tolist()
    offsets = _offsets(rows)
    return [values[start:end] for start, end in itertools.pairwise(offsets)]
