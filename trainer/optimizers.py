"""AdamW or Muon, one learning-rate schedule over both, and their state as named tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.algorithm import OptimizerConfig, Schedule


def lr_factor(step: int, kind: Schedule, warmup: int, total: int | None, floor: float = 0.0) -> float:
    """What the peak learning rate is multiplied with at an optimizer step, counted from 0.

    Step ``s`` of a warm-up of ``w`` has ``(s + 1) / w``, so the first step moves. ``linear`` and ``cosine``
    fall from 1 at the end of the warm-up to ``floor`` at step ``total`` and stay there.
    """
    if step < warmup:
        return (step + 1) / warmup
    if kind == "constant" or total is None:
        return 1.0
    progress = min((step - warmup) / (total - warmup), 1.0)
    if kind == "linear":
        return 1.0 - (1.0 - floor) * progress
    return floor + (1.0 - floor) * (1.0 + math.cos(math.pi * progress)) / 2


class OptimizerSet:
    """One or two torch optimizers that step together under one schedule.

    Args:
        parameters: the named parameters they hold; the names key the state.
        parts: the optimizers; each param group's learning rate is its peak.
        config: schedule and clipping.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        parts: Iterable[torch.optim.Optimizer],
        config: OptimizerConfig,
    ) -> None:
        self.parameters = parameters
        self.parts = tuple(parts)
        self.config = config
        self.steps = 0
        for group in self._groups():
            group["peak"] = group["lr"]

    @property
    def factor(self) -> float:
        config = self.config
        return lr_factor(self.steps, config.schedule, config.warmup_steps, config.total_steps, config.floor)

    @property
    def lr(self) -> float:
        """AdamW's learning rate at the next step."""
        return self.config.lr * self.factor

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def clip(self) -> Tensor:
        """Scale gradients down to the largest norm allowed; returns their norm before."""
        return nn.utils.clip_grad_norm_(self.parameters.values(), self.config.max_grad_norm)

    def step(self, factor: float | None = None) -> None:
        """Move the weights and the schedule; ``factor`` stands in for the schedule's."""
        factor = self.factor if factor is None else factor
        for group in self._groups():
            group["lr"] = group["peak"] * factor
        for part in self.parts:
            part.step()
        self.steps += 1

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments by ``<parameter>.<entry>``; a parameter that never had a gradient has none."""
        tensors: dict[str, Tensor] = {}
        for part, name, parameter in self._held():
            for entry, value in part.state.get(parameter, {}).items():
                tensors[f"{name}.{entry}"] = value
        return tensors

    def load_state(self, tensors: dict[str, Tensor], steps: int) -> None:
        """Take up the state that `state_tensors` gave; bit for bit."""
        for part, name, parameter in self._held():
            entries: dict[str, Any] = {
                key[len(name) + 1 :]: value
                for key, value in tensors.items()
                if key.startswith(f"{name}.") and "." not in key[len(name) + 1 :]
            }
            part.state.pop(parameter, None)
            if entries:
                part.state[parameter] = {
                    entry: value.clone() if entry == "step" else value.to(parameter.device, copy=True)
                    for entry, value in entries.items()
                }
        self.steps = steps

    def _groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def _held(self) -> list[tuple[torch.optim.Optimizer, str, nn.Parameter]]:
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        return [
            (part, names[id(parameter)], parameter)
            for part in self.parts
            for group in part.param_groups
            for parameter in group["params"]
        ]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> OptimizerSet:
    """The optimizer of a model's trainable parameters, as `OptimizerConfig` says.

    Weight decay applies to matrices only. With ``muon``, hidden matrices go to `torch.optim.Muon`;
    embeddings, the vocabulary head, norms and biases stay with AdamW.

    Raises:
        ValueError: nothing in the model can be trained.
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not parameters:
        raise ValueError("the model has no parameter with requires_grad: there is nothing to train")
    ends = _embeddings_and_heads(model)
    hidden = [p for p in parameters.values() if p.ndim == 2 and id(p) not in ends]
    adam = [p for p in parameters.values() if config.name == "adamw" or p.ndim != 2 or id(p) in ends]
    parts: list[torch.optim.Optimizer] = []
    if config.name == "muon" and hidden:
        decay = config.weight_decay if config.muon_weight_decay is None else config.muon_weight_decay
        parts.append(
            torch.optim.Muon(hidden, lr=config.muon_lr, momentum=config.muon_momentum, weight_decay=decay)
        )
    groups = [
        {"params": [p for p in adam if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in adam if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if groups:
        parts.append(
            torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.adam_eps)
        )
    return OptimizerSet(parameters, parts, config)


def _embeddings_and_heads(model: nn.Module) -> set[int]:
    found = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    output = getattr(model, "get_output_embeddings", lambda: None)()
    if output is not None:
        found.add(id(output.weight))
    return found
