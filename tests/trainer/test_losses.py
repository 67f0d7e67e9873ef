"""Losses: numbers worked out by hand, exact expectations over a small vocabulary, and garbage under the
mask."""

import math

import pytest
import torch

from tests.trainer.toy import row
from trainer.algorithm import LearnerConfig
from trainer.forward import TokenScores
from trainer.losses import (
    Denominators,
    aggregation_weights,
    clipped_surrogate,
    importance_weights,
    kl_penalty,
    value_loss,
)
from trainer.metrics import UpdateMetrics
from trainer.objective import Experience, objective
from trainer.row import flatten

DOUBLE = torch.float64


def tensor(*values):
    return torch.tensor(values, dtype=DOUBLE)


def test_kl_estimators_by_token():
    logprobs, reference = tensor(-1, -2), tensor(-1.5, -1)
    assert kl_penalty(logprobs, reference, "k1").tolist() == [0.5, -1]
    assert kl_penalty(logprobs, reference, "k2").tolist() == [0.125, 0.5]
    assert kl_penalty(logprobs, reference, "k3").tolist() == pytest.approx([0.1065, 0.7183], abs=1e-4)
    assert kl_penalty(logprobs, reference).tolist() == kl_penalty(logprobs, reference, "k3").tolist()


def test_kl_is_bounded():
    far = kl_penalty(tensor(-500, 0, -30), tensor(0, -500, -1), "k3")
    # exp(-20) - 1 + 20 and exp(20) - 21 are both over 10; exp(29) likewise.
    assert far.tolist() == [10, 10, 10]
    assert kl_penalty(tensor(-500, 0), tensor(0, -500), "k1").tolist() == [-20, 20]
    assert kl_penalty(tensor(-500, 0), tensor(0, -500), "k2").tolist() == [200, 200]
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_penalty(tensor(0), tensor(0), "k4")  # type: ignore[arg-type]


def test_expected_kl_gradients_are_what_the_docstring_says():
    """Exact expectation over five tokens: k1 none, k2 that of KL(pi || ref), k3 that of KL(ref || pi)."""
    torch.manual_seed(0)
    logits = (torch.randn(5, dtype=DOUBLE) / 2).requires_grad_()
    reference = torch.log_softmax(torch.randn(5, dtype=DOUBLE) / 2, -1)
    assert (reference - torch.log_softmax(logits, -1)).max() < 2  # k3 stays under its clamp

    def expected_gradient(kind):
        logprobs = torch.log_softmax(logits, -1)
        loss = (logprobs.detach().exp() * kl_penalty(logprobs, reference, kind)).sum()
        return torch.autograd.grad(loss, logits)[0]

    def exact_gradient(forward):
        logprobs = torch.log_softmax(logits, -1)
        if forward:
            kl = (logprobs.exp() * (logprobs - reference)).sum()
        else:
            kl = (reference.exp() * (reference - logprobs)).sum()
        return torch.autograd.grad(kl, logits)[0]

    assert expected_gradient("k1").abs().max() < 1e-15
    torch.testing.assert_close(expected_gradient("k2"), exact_gradient(True), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(expected_gradient("k3"), exact_gradient(False), rtol=1e-12, atol=1e-14)
    assert (exact_gradient(True) - exact_gradient(False)).abs().max() > 0.01


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.1, 2.0, -2.2, -2.2, False),
        (1.5, 2.0, -2.56, 0.0, True),  # up and good: stopped at 1.28
        (0.5, 2.0, -1.0, -1.0, False),  # down though good: pulled back
        (0.5, -2.0, 1.6, 0.0, True),  # down and bad: stopped at 0.8
        (1.5, -2.0, 3.0, 3.0, False),  # up though bad: pushed down
        (1.5, 0.0, 0.0, 0.0, False),
    ],
)
def test_clipped_surrogate_on_both_sides(ratio, advantage, loss, slope, clipped):
    """`slope` is d loss / d log-prob = -ratio * A where the clip does not hold."""
    logprobs = tensor(math.log(ratio) - 1).requires_grad_()
    result = clipped_surrogate(logprobs, tensor(-1), tensor(advantage), clip_low=0.2, clip_high=0.28)
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(loss)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(slope)
    assert result.clipped.item() is clipped
    assert result.ratio.item() == pytest.approx(ratio)


def test_log_ratio_is_clamped_before_the_exponential():
    logprobs = tensor(-1.0).requires_grad_()
    result = clipped_surrogate(logprobs, tensor(-1000.0), tensor(-1.0))
    assert result.ratio.item() == pytest.approx(math.exp(20))
    assert math.isfinite(result.loss.item())


def test_sequence_ratio_is_the_geometric_mean():
    """GSPO: two sequences, log-ratios (0.1, 0.3) and (-0.4); ratios exp(0.2) and exp(-0.4)."""
    old = tensor(-1, -2, -3)
    logprobs = (old + tensor(0.1, 0.3, -0.4)).requires_grad_()
    sequence = torch.tensor([0, 0, 1])
    advantages = tensor(1, 1, -1)
    result = clipped_surrogate(
        logprobs, old, advantages, clip_low=0.5, clip_high=0.5, ratio="sequence", sequence=sequence
    )
    assert result.ratio.tolist() == pytest.approx([math.exp(0.2), math.exp(0.2), math.exp(-0.4)])
    result.loss.sum().backward()
    # With one advantage a sequence the gradient is that of -length * exp(mean log-ratio) * A.
    direct = logprobs.detach().clone().requires_grad_()
    mean = torch.stack([(direct[:2] - old[:2]).mean(), (direct[2:] - old[2:]).mean()])
    (-(mean.exp() * tensor(2, -1)).sum()).backward()
    torch.testing.assert_close(logprobs.grad, direct.grad)
    with pytest.raises(ValueError, match="sequence index"):
        clipped_surrogate(logprobs, old, advantages, ratio="sequence")


def test_sequence_ratio_keeps_each_tokens_own_advantage():
    """The memory token's advantage moves the memory token, not its neighbours."""
    old = tensor(-1, -2)
    logprobs = old.clone().requires_grad_()
    result = clipped_surrogate(logprobs, old, tensor(3, 0), ratio="sequence", sequence=torch.tensor([0, 0]))
    result.loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-3, 0]


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_masked_garbage_cannot_leak(garbage, ratio):
    mask = torch.tensor([True, False, True])
    bad = torch.tensor([0.0, garbage, 0.0], dtype=DOUBLE)
    sequence = torch.tensor([0, 0, 0])

    def run(noise):
        logprobs = (tensor(-1.1, -2, -3.2) + noise).requires_grad_()
        result = clipped_surrogate(
            logprobs,
            tensor(-1, -2, -3) + noise,
            tensor(1, 1, -1) + noise,
            mask=mask,
            ratio=ratio,
            sequence=sequence,
            weights=tensor(1, 1, 1) + noise,
        )
        result.loss.sum().backward()
        assert logprobs.grad is not None
        return result.loss.detach(), logprobs.grad

    loss, gradient = run(bad)
    clean_loss, clean_gradient = run(torch.zeros(3, dtype=DOUBLE))
    assert torch.equal(loss, clean_loss) and torch.equal(gradient, clean_gradient)
    assert loss[1] == 0 and gradient[1] == 0 and gradient[0] != 0


def test_constants_carry_no_gradient():
    logprobs, old = tensor(-1, -2).requires_grad_(), tensor(-1.1, -1.9).requires_grad_()
    advantages, reference = tensor(1, -1).requires_grad_(), tensor(-1, -1).requires_grad_()
    engine = tensor(-1.2, -2.2).requires_grad_()
    weights = importance_weights(old, engine, cap=2.0)
    loss = clipped_surrogate(logprobs, old, advantages, weights=weights).loss + kl_penalty(
        logprobs, reference
    )
    loss.sum().backward()
    assert logprobs.grad is not None
    assert old.grad is None and advantages.grad is None and reference.grad is None and engine.grad is None


def test_importance_weights_are_truncated_above_only():
    weights = importance_weights(tensor(-1, -1, -3), tensor(-1, -3, -1), cap=2.0)
    assert weights.tolist() == pytest.approx([1, 2, math.exp(-2)])


def test_token_mean_however_rows_are_split():
    """(2 tokens, loss 1 each) and (4 tokens, loss 4 each): (2 + 16) / 6 = 3."""
    losses, lengths = tensor(1, 1, 4, 4, 4, 4), torch.tensor([2, 2, 4, 4, 4, 4])
    denominators = Denominators(tokens=6, trajectories=2)
    for cuts in ([6], [2, 4], [1, 3, 2], [1] * 6):
        total = 0.0
        for part, length in zip(losses.split(cuts), lengths.split(cuts), strict=True):
            total += float((part * aggregation_weights("token", length, denominators, dtype=DOUBLE)).sum())
        assert total == pytest.approx(3.0)


def test_weights_of_one_turn_against_four():
    """One trajectory of 1 turn x 10 tokens, one of 4 x 10."""
    lengths = torch.tensor([10] * 10 + [40] * 40)
    denominators = Denominators(tokens=50, trajectories=2)
    by_token = aggregation_weights("token", lengths, denominators, dtype=DOUBLE)
    by_trajectory = aggregation_weights("trajectory", lengths, denominators, dtype=DOUBLE)
    assert [by_token[:10].sum().item(), by_token[10:].sum().item()] == pytest.approx([0.2, 0.8])
    assert [by_trajectory[:10].sum().item(), by_trajectory[10:].sum().item()] == pytest.approx([0.5, 0.5])
    constant = aggregation_weights("constant", lengths, denominators, constant_length=100, dtype=DOUBLE)
    assert [constant[:10].sum().item(), constant[10:].sum().item()] == pytest.approx([0.05, 0.2])


@pytest.mark.parametrize("aggregation", ["token", "trajectory", "constant"])
def test_every_tensor_stays_on_the_devices_of_its_inputs(aggregation):
    """The meta device refuses to mix with the CPU as an accelerator does."""
    there = torch.device("meta")
    rows = [row([1], [2, 3])]
    flat = flatten(rows)
    experience = Experience(rows, flat, flat.advantages, flat.engine_logprobs, flat.engine_logprobs)
    logprobs = torch.empty(2, device=there, requires_grad=True)
    config = LearnerConfig(
        aggregation=aggregation,
        constant_length=5 if aggregation == "constant" else None,
        old_logprobs="recomputed",
        importance_cap=2.0,
        entropy_coef=0.1,
    )
    scores = TokenScores(logprobs, torch.empty(2, device=there))
    loss = objective(scores, experience, torch.arange(2), Denominators(2, 1), config, UpdateMetrics())
    assert loss.device == there and loss.shape == ()


def test_aggregation_refuses_what_it_cannot_do():
    lengths, denominators = torch.tensor([1]), Denominators(1, 1)
    with pytest.raises(ValueError, match="constant_length"):
        aggregation_weights("constant", lengths, denominators)
    with pytest.raises(ValueError, match="token, trajectory, constant"):
        aggregation_weights("row", lengths, denominators)  # type: ignore[arg-type]


def test_value_loss_takes_the_larger_of_the_two():
    # Return 1, old value 0, clip 0.2: 0.1 moves freely; at 0.9 the clipped value 0.2 is farther from 1.
    values = tensor(0.1, 0.9).requires_grad_()
    loss = value_loss(values, tensor(0, 0), tensor(1, 1), clip=0.2)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([0.405, 0.32])
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-0.9, 0.0])
