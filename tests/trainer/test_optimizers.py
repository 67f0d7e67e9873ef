"""Schedules by hand; which parameters meet which optimizer; state that comes back bit for bit."""

import pytest
import torch

from tests.trainer import toy
from trainer.algorithm import OptimizerConfig
from trainer.optimizers import build_optimizer, lr_factor


def test_warm_up_then_constant():
    factors = [lr_factor(step, "constant", 4, None) for step in range(6)]
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_and_cosine_fall_to_their_floor_and_stay():
    linear = [lr_factor(step, "linear", 2, 6, floor=0.2) for step in (0, 1, 2, 4, 6, 9)]
    assert linear == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2, 0.2])
    cosine = [lr_factor(step, "cosine", 0, 4, floor=0.0) for step in (0, 1, 2, 3, 4, 5)]
    assert cosine == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0], abs=1e-6)


def test_muon_takes_hidden_matrices_only():
    model = toy.qwen(dtype=torch.float32)
    optimizer = build_optimizer(model, OptimizerConfig(name="muon"))
    muon, adam = optimizer.parts
    held = {id(p) for group in muon.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        is_hidden_matrix = parameter.ndim == 2 and ("proj" in name)
        assert (id(parameter) in held) == is_hidden_matrix, name
    count = sum(len(group["params"]) for part in (muon, adam) for group in part.param_groups)
    assert count == len(list(model.parameters()))


def test_weight_decay_shrinks_matrices_only():
    model = toy.qwen(dtype=torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        expected = before[name] * (1 - 0.1 * 0.5) if parameter.ndim == 2 else before[name]
        torch.testing.assert_close(parameter.detach(), expected)


def test_decay_and_factor_of_the_cold_start():
    """Hidden matrices shrink by lr * factor * decay; embeddings, which are AdamW's, do not move."""
    model = toy.qwen(dtype=torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    settings = OptimizerConfig(name="muon", lr=0.1, muon_lr=0.2, muon_weight_decay=0.5)
    optimizer = build_optimizer(model, settings)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.25)
    for name, parameter in model.named_parameters():
        hidden = parameter.ndim == 2 and "embed" not in name
        expected = before[name] * (1 - 0.2 * 0.25 * 0.5) if hidden else before[name]
        torch.testing.assert_close(parameter.detach(), expected)
    assert optimizer.steps == 1


def _steps(optimizer, model, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.clip()
        optimizer.step()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_comes_back_bit_for_bit(name):
    config = OptimizerConfig(name=name, lr=0.01, warmup_steps=3)
    first, second = toy.qwen(dtype=torch.float32), toy.qwen(seed=1, dtype=torch.float32)
    optimizer = build_optimizer(first, config)
    _steps(optimizer, first, 2, seed=0)
    resumed = build_optimizer(second, config)
    second.load_state_dict(first.state_dict())
    resumed.load_state({k: v.clone() for k, v in optimizer.state_tensors().items()}, optimizer.steps)
    _steps(optimizer, first, 2, seed=1)
    _steps(resumed, second, 2, seed=1)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    assert optimizer.steps == resumed.steps == 4


def test_gradients_are_scaled_down_to_the_norm():
    model = toy.qwen(dtype=torch.float64)
    optimizer = build_optimizer(model, OptimizerConfig(max_grad_norm=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    count = sum(p.numel() for p in model.parameters())
    assert float(optimizer.clip()) == pytest.approx(0.1 * count**0.5)
    after = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert float(after.norm()) == pytest.approx(0.5, rel=1e-5)


def test_nothing_to_train_is_refused():
    model = toy.qwen().requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        build_optimizer(model, OptimizerConfig())
