"""The reference policy: the cold-start model, frozen for the whole run, also after a resume.

Without adapters it is a copy of the model as it was handed to the learner. Under LoRA it is the base below
the adapters: a cold start that was itself an adapter is merged first, so that switching the adapters off
gives the cold-start model back, at no memory of its own.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import nn

from trainer.algorithm import LoraConfig


def frozen_copy(model: Any) -> Any:
    """A copy that no gradient and no later update reaches."""
    duplicate = copy.deepcopy(model)
    for parameter in duplicate.parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    return duplicate.eval()


def attach_lora(model: Any, config: LoraConfig, seed: int = 0) -> Any:
    """The model under fresh low-rank adapters; adapters it already has are merged into its weights first.

    The fresh adapters' output is exactly 0, so the wrapped model still is the cold-start model.

    Args:
        seed: decides the adapters' random half.

    Raises:
        ImportError: `peft` is not installed.
    """
    import peft

    if isinstance(model, peft.PeftModel):
        model = model.merge_and_unload()
    targets = config.targets if isinstance(config.targets, str) else list(config.targets)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    device = next(model.parameters()).device
    with torch.random.fork_rng([] if device.type == "cpu" else [device]):
        torch.manual_seed(seed)
        return peft.get_peft_model(model, settings)


def reference_mode(model: Any, reference: nn.Module | None) -> contextlib.AbstractContextManager[Any]:
    """Within it, `reference` (or, when None, `model` with its adapters off) computes as the reference policy.

    Raises:
        ValueError: there is neither a reference nor an adapter to switch off.
    """
    if reference is not None:
        return contextlib.nullcontext()
    if not hasattr(model, "disable_adapter"):
        raise ValueError("no reference policy: hand one to the learner, or set kl_coef above 0 or lora")
    disabled: contextlib.AbstractContextManager[Any] = model.disable_adapter()
    return disabled
