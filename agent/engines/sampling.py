"""Sampling that depends on the request alone: its seed, the token's position, the logits.

The noise comes from a counter-based generator (SplitMix64 as a hash of seed, position and lane), so no
generator state exists that another request could advance. The choice is exact categorical sampling in two
Gumbel-max stages, first a block of about sqrt(V) tokens, then a token within it: 2 sqrt(V) random numbers
instead of V, and rounding differences of logits between batches flip a choice only at near-ties.
"""

from __future__ import annotations

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def _mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014), elementwise on uint64, in place."""
    with np.errstate(over="ignore"):
        values ^= values >> np.uint64(30)
        values *= _MIX1
        values ^= values >> np.uint64(27)
        values *= _MIX2
        values ^= values >> np.uint64(31)
    return values


def gumbel_noise(seeds: np.ndarray, positions: np.ndarray, lanes: int) -> torch.Tensor:
    """Standard Gumbel noise, ``(B, lanes)`` float64 on the CPU, a pure function of each row's seed and
    position.

    Args:
        seeds: ``(B,)`` uint64.
        positions: ``(B,)`` integers, index of the token within its completion.
    """
    with np.errstate(over="ignore"):
        keys = _mix(seeds.astype(np.uint64) + _GOLDEN)
        keys = _mix(keys ^ (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
        counters = np.arange(1, lanes + 1, dtype=np.uint64) * _GOLDEN
        bits = _mix(keys[:, None] + counters[None, :])
    uniform = torch.from_numpy((bits >> np.uint64(11)).astype(np.float64))
    return uniform.add_(0.5).mul_(2.0**-53).log_().neg_().log_().neg_()


def sample(
    logits: torch.Tensor, temperatures: np.ndarray, seeds: np.ndarray, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token a row from ``softmax(logits / temperature)``; the likeliest one where the temperature
    is 0.

    Args:
        logits: ``(B, V)``; computed in float32 whatever the dtype.
        temperatures: ``(B,)``; 0 is greedy, with log-probs at temperature 1.
        seeds: ``(B,)`` uint64.
        positions: ``(B,)`` index of the token within its completion.

    Returns:
        Token ids ``(B,)`` int64 and their log-probs ``(B,)`` float64 (nats, of the temperature-scaled
        distribution).
    """
    rows, vocabulary = logits.shape
    scaled = logits.float()
    greedy = temperatures == 0
    scale = np.where(greedy, 1.0, temperatures)
    if (scale != 1.0).any():
        scaled = scaled / torch.as_tensor(scale, dtype=torch.float32, device=logits.device)[:, None]
    top = scaled.amax(-1, keepdim=True)
    width = max(8, 1 << round(vocabulary.bit_length() / 2))
    blocks = -(-vocabulary // width)
    weights = scaled.new_zeros(rows, blocks * width)
    torch.sub(scaled, top, out=weights[:, :vocabulary]).exp_()
    weights = weights.view(rows, blocks, width)
    mass = weights.sum(-1)
    total = mass.sum(-1, dtype=torch.float64) if logits.device.type != "mps" else mass.sum(-1).cpu().double()
    noise = gumbel_noise(seeds, positions, blocks + width)
    block = (mass.cpu().double().log_() + noise[:, :blocks]).argmax(-1)
    inside = weights[torch.arange(rows, device=logits.device), block.to(logits.device)]
    token = (inside.cpu().double().log_() + noise[:, blocks:]).argmax(-1) + block * width
    if greedy.any():
        token = torch.where(torch.from_numpy(greedy), scaled.argmax(-1).cpu(), token)
    chosen = scaled.gather(1, token.to(logits.device)[:, None])
    logprobs = (chosen - top).squeeze(1).cpu().double() - total.cpu().log()
    return token.numpy(), logprobs.clamp_(max=0.0).numpy()
