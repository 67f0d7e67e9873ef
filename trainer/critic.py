"""PPO's value network: a copy of the policy's decoder with a scalar head, and its own optimizer.

It exists only when `CriticConfig` asks for it, so that what a critic costs and gains can be measured against
group-relative advantages.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.advantages import generalised_advantages
from trainer.algorithm import CriticConfig, OptimizerConfig
from trainer.forward import decoder_hidden
from trainer.losses import value_loss
from trainer.optimizers import build_optimizer
from trainer.packing import MicroBatch
from trainer.row import FlatRows, Row


class Critic(nn.Module):
    """Value of the state before each token: ``head(decoder(prompt, tokens so far))``.

    Args:
        policy: the model it is started from; its decoder is copied, so nothing is shared.
        config: see `CriticConfig`.
        optimizer: the policy's settings; the critic uses its own learning rate, AdamW and the same schedule.
    """

    def __init__(self, policy: Any, config: CriticConfig, optimizer: OptimizerConfig) -> None:
        super().__init__()
        self.config = config
        self.decoder = copy.deepcopy(policy.get_decoder())
        for parameter in self.decoder.parameters():
            parameter.requires_grad_(True)
        weight = policy.get_output_embeddings().weight
        self.head = nn.Linear(weight.shape[1], 1, bias=True, dtype=weight.dtype, device=weight.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.optimizer = build_optimizer(
            self, optimizer.model_copy(update={"name": "adamw", "lr": config.lr})
        )

    def values(self, batch: MicroBatch) -> Tensor:
        """``(N,)`` values before the batch's trained tokens."""
        batch = batch.to(self.head.weight.device)
        hidden = decoder_hidden(self.decoder, batch)
        values: Tensor = self.head(hidden)[:, 0]
        return values

    def accumulate(self, batch: MicroBatch, old: Tensor, returns: Tensor, tokens: int) -> Tensor:
        """Add a micro-batch's share of the value loss (mean over ``tokens``) to the gradients; returns it."""
        values = self.values(batch)
        loss = value_loss(values, old.to(values), returns.to(values), self.config.value_clip).sum() / tokens
        torch.autograd.backward(loss)
        return loss.detach()

    def step(self, policy_is_finite: bool = True) -> bool:
        """Move the critic, unless its gradient (or the policy's) is not finite; says whether its own is."""
        finite = math.isfinite(float(self.optimizer.clip()))
        if finite and policy_is_finite:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return finite


def critic_advantages(
    rows: Sequence[Row], flat: FlatRows, values: Tensor, config: CriticConfig
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, ``(N,)`` each: GAE along each trajectory, over all its turns in order.

    Raises:
        ValueError: the rows carry no rewards.
    """
    if flat.rewards is None:
        raise ValueError("a critic needs rewards by token: make the rows with algorithm.advantage = 'critic'")
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    trajectories: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        trajectories.setdefault(row.trajectory, []).append(number)
    for members in trajectories.values():
        index = flat.index(sorted(members, key=lambda member: rows[member].turn))
        estimated, target = generalised_advantages(
            flat.rewards[index].tolist(), values[index].tolist(), gamma=config.gamma, lam=config.gae_lambda
        )
        advantages[index] = values.new_tensor(estimated)
        returns[index] = values.new_tensor(target)
    if config.whiten and len(advantages) > 1:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    return advantages, returns
