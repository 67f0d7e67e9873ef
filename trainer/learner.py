"""The learner: rows with advantages in, new weights and a step's metrics out.

One update is some epochs of mini-batches, counted in questions; each mini-batch is one optimizer step over
micro-batches that fit the memory. What the step divides by is counted before its first backward, so the
partition into micro-batches changes nothing. A micro-batch costs one forward and one backward; advantages,
old and reference log-probs are constants.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.algorithm import LearnerConfig
from trainer.critic import Critic, critic_advantages
from trainer.forward import Forward, silence_dropout
from trainer.losses import Denominators
from trainer.metrics import UpdateMetrics
from trainer.objective import Experience, objective
from trainer.optimizers import OptimizerSet, build_optimizer
from trainer.packing import MicroBatch, empty_micro_batch, micro_batches
from trainer.reference import attach_lora, frozen_copy, reference_mode
from trainer.row import Row, flatten


class NonFiniteError(RuntimeError):
    """Too many steps in a row had a loss or gradient that was not finite: go back to a checkpoint."""


class Learner:
    """Owns the policy's weights, their optimizer, the reference policy and, under PPO, the critic.

    Args:
        model: a transformers causal language model, trained in place (and wrapped, with ``config.lora``).
        config: see `LearnerConfig`.
        reference: the reference policy. None: a frozen copy of ``model`` as it is now, when ``kl_coef`` asks
            for one (the base under the adapters with LoRA). Build the learner on the cold-start model first
            and load a checkpoint's state after it, and the reference is the cold start also after a resume.
        seed: decides the order of mini-batches, and fresh adapters.

    Attributes:
        model: the policy, under its adapters if it has any.
        critic: None unless ``config.critic`` asks for one.
        skipped_steps: optimizer steps left out so far because something was not finite.
    """

    def __init__(self, model: Any, config: LearnerConfig, reference: Any = None, *, seed: int = 0) -> None:
        self.config = config
        self.reference = reference
        silence_dropout(model)
        self.critic = None if config.critic is None else Critic(model, config.critic, config.optimizer)
        if config.lora is not None:
            model = attach_lora(model, config.lora, seed)
        elif reference is None and config.kl_coef > 0:
            self.reference = frozen_copy(model)
        self.model = model
        _prepare(model, config)
        self.optimizer = build_optimizer(model, config.optimizer)
        self.skipped_steps = 0
        self._nonfinite_in_a_row = 0
        self._warned = False
        self._shuffle = torch.Generator().manual_seed(seed)
        self._policy = self._forward_of(model)
        self._frozen = None if self.reference is None else self._forward_of(self.reference)

    def update(self, rows: Sequence[Row]) -> dict[str, float]:
        """All epochs over the rows of one training step.

        Args:
            rows: every turn of every trajectory, also those without advantage: denominators count them.

        Returns:
            Metrics of the step, see `UpdateMetrics`.

        Raises:
            NonFiniteError: more than ``max_nonfinite_steps`` steps in a row had to be skipped.
            ValueError: no row has a trained token, or only some rows have what the settings need.
        """
        if not any(row.trained_tokens for row in rows):
            raise ValueError("an update needs at least one row with a trained token")
        experience = self.experience(rows)
        metrics = UpdateMetrics()
        for _ in range(self.config.epochs):
            for chosen in self.mini_batches(rows):
                denominators = experience.denominators(chosen)
                if denominators.tokens:
                    self.accumulate(experience, chosen, denominators, metrics)
                    self.apply(metrics)
        return metrics.summary()

    @torch.no_grad()
    def experience(self, rows: Sequence[Row]) -> Experience:
        """What stays the same during an update, computed with the weights it starts from."""
        config = self.config
        flat = flatten(rows, self._dtype)
        reference = flat.ref_logprobs
        if reference is None and config.kl_coef > 0:
            reference = self._reference_scores(rows)
        old = flat.engine_logprobs
        if config.old_logprobs == "recomputed":
            old = self._scores(self._policy, rows)
        if self.critic is None:
            return Experience(rows, flat, flat.advantages, old, reference)
        values = torch.zeros_like(old)
        for batch in self._lay_out(rows):
            values[flat.index(batch.rows)] = self.critic.values(batch).cpu().to(values.dtype)
        advantages, returns = critic_advantages(rows, flat, values, self.critic.config)
        return Experience(rows, flat, advantages, old, reference, values, returns)

    def mini_batches(self, rows: Sequence[Row]) -> list[list[int]]:
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

    def accumulate(
        self,
        experience: Experience,
        chosen: Sequence[int],
        denominators: Denominators,
        metrics: UpdateMetrics,
        *,
        least: int = 0,
    ) -> None:
        """Add the gradient of some rows of an optimizer step: one forward and one backward a micro-batch.

        On several ranks each takes its share of ``chosen`` with the denominators of all, and gradients are
        summed before `apply`; a rank with fewer micro-batches than ``least`` adds empty ones, which are worth
        exactly 0 but take part in every collective operation.
        """
        needed = [index for index in chosen if self._matters(experience.rows[index])]
        batches = self._lay_out([experience.rows[index] for index in needed])
        batches += [empty_micro_batch() for _ in range(least - len(batches))]
        for batch in batches:
            index = experience.flat.index([needed[row] for row in batch.rows])
            with _training(self.model, self.config.gradient_checkpointing):
                scores = self._policy(batch, entropy=True)
                loss = objective(scores, experience, index, denominators, self.config, metrics)
                torch.autograd.backward(loss)
            metrics.computed(batch.tokens)
            if self.critic is not None:
                targets = experience.value_targets(index)
                metrics.critic(self.critic.accumulate(batch, *targets, denominators.tokens))

    def apply(self, metrics: UpdateMetrics) -> None:
        """End an optimizer step: clip and move the weights, or skip it when something was not finite.

        Raises:
            NonFiniteError: that happened more than ``max_nonfinite_steps`` times in a row.
        """
        norm = float(self.optimizer.clip())
        finite = math.isfinite(norm) and metrics.loss_is_finite()
        if self.critic is not None:
            finite = self.critic.step(finite) and finite
        metrics.step(norm=norm, lr=self.optimizer.lr, finite=finite)
        if finite:
            self.optimizer.step()
            self._nonfinite_in_a_row = 0
        else:
            self.skipped_steps += 1
            self._nonfinite_in_a_row += 1
        self.optimizer.zero_grad()
        if self._nonfinite_in_a_row > self.config.max_nonfinite_steps:
            raise NonFiniteError(
                f"{self._nonfinite_in_a_row} optimizer steps in a row had a loss or gradient that was not "
                f"finite (limit {self.config.max_nonfinite_steps}): continue from the last good checkpoint"
            )

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
        tensors: dict[str, Tensor] = {"shuffle": self._shuffle.get_state()}
        values: dict[str, Any] = {
            "skipped_steps": self.skipped_steps,
            "nonfinite_in_a_row": self._nonfinite_in_a_row,
        }
        for name, optimizer in self._optimizers():
            tensors |= {f"{name}.model.{key}": p.detach() for key, p in optimizer.parameters.items()}
            tensors |= {f"{name}.optimizer.{key}": value for key, value in optimizer.state_tensors().items()}
            values[f"{name}.steps"] = optimizer.steps
        return {"tensors": tensors, "values": values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave.

        Raises:
            ValueError: the state belongs to a model with other parameters, or only one side has a critic.
        """
        tensors: dict[str, Tensor] = state["tensors"]
        values: dict[str, Any] = state["values"]
        parts = sorted(key.removesuffix(".steps") for key in values if key.endswith(".steps"))
        own = sorted(name for name, _ in self._optimizers())
        if parts != own:
            raise ValueError(f"checkpoint holds {' and '.join(parts)}, this learner {' and '.join(own)}")
        for name, optimizer in self._optimizers():
            _load_weights(optimizer, _below(tensors, f"{name}.model."))
            optimizer.load_state(_below(tensors, f"{name}.optimizer."), values[f"{name}.steps"])
        self._shuffle.set_state(tensors["shuffle"].cpu())
        self.skipped_steps = values["skipped_steps"]
        self._nonfinite_in_a_row = values["nonfinite_in_a_row"]

    def _optimizers(self) -> list[tuple[str, OptimizerSet]]:
        critic = [] if self.critic is None else [("critic", self.critic.optimizer)]
        return [("policy", self.optimizer), *critic]

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
        share = config.share_prompts and config.forward == "padded"
        refusal = self._policy.why_not("branches") if share else None
        if refusal is not None:
            share = False
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{type(self.model).__name__} computes a prompt again for every row that has it, slower "
                    f"than with share_prompts: {refusal}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return micro_batches(rows, config.tokens_per_micro_batch, layout=config.forward, share_prompts=share)

    @torch.no_grad()
    def _scores(self, forward: Forward, rows: Sequence[Row]) -> Tensor:
        """``(N,)`` log-probs of the rows' trained tokens, without gradient."""
        offsets = _offsets(rows)
        result = torch.zeros(offsets[-1], dtype=self._dtype)
        for batch in self._lay_out(rows):
            index = torch.cat([torch.arange(offsets[row], offsets[row + 1]) for row in batch.rows])
            result[index] = forward(batch).logprobs.cpu().to(self._dtype)
        return result

    def _reference_scores(self, rows: Sequence[Row]) -> Tensor:
        with reference_mode(self.model, self.reference):
            return self._scores(self._frozen or self._policy, rows)

    def _matters(self, row: Row) -> bool:
        """Whether a row can add anything to the gradient; one that cannot is counted but not computed."""
        if not row.trained_tokens:
            return False
        always = self.config.kl_coef > 0 or self.config.entropy_coef > 0 or self.critic is not None
        return always or row.has_signal


def _prepare(model: Any, config: LearnerConfig) -> None:
    model.eval()
    if config.gradient_checkpointing:
        name = (
            "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
        )  # renamed in 5.x
        enable = getattr(model, f"{name}_checkpointing_enable")
        enable(**{f"{name}_checkpointing_kwargs": {"use_reentrant": False}})
        if config.lora is not None:
            model.enable_input_require_grads()


@contextlib.contextmanager
def _training(model: Any, wanted: bool) -> Iterator[None]:
    """Training mode, in which alone transformers checkpoints; generation and scoring share the model without
    it."""
    model.train(wanted)
    try:
        yield
    finally:
        model.eval()


def _load_weights(optimizer: OptimizerSet, weights: dict[str, Tensor]) -> None:
    own: dict[str, nn.Parameter] = optimizer.parameters
    if set(weights) != set(own):
        differing = sorted(set(weights) ^ set(own))
        raise ValueError(f"checkpoint of another model: parameter {differing[0]!r} is on one side only")
    with torch.no_grad():
        for name, parameter in own.items():
            if weights[name].shape != parameter.shape:
                raise ValueError(
                    f"checkpoint of another model: {name} has shape {tuple(weights[name].shape)}, "
                    f"not {tuple(parameter.shape)}"
                )
            parameter.copy_(weights[name])


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def _offsets(rows: Sequence[Row]) -> list[int]:
    return [0, *itertools.accumulate(row.trained_tokens for row in rows)]


def _by_row(flat: Tensor, rows: Sequence[Row]) -> list[list[float]]:
    values: list[float] = flat.tolist()
    return [values[start:end] for start, end in itertools.pairwise(_offsets(rows))]
