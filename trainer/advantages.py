"""From rewards and memory scores to advantages: pure functions on plain numbers.

Statistics are over trajectories (outcome) or scored memories (memory), never over rows or tokens, so
splitting or merging turns changes nobody's advantage. All results are detached numbers: gradients flow only
through the new log-probabilities of the loss. Source: MemPO, arXiv 2603.00680, with this project's choices
where it is silent (marked as such).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainer.algorithm import MemoryBaseline, MemoryPool, OutcomeBaseline, Scale, StdKind

# Values whose spread is below a few units in the last place of a float32 are equal: dividing that noise by a
# standard deviation of the same size would turn it into advantages of order one.
_EQUAL = 4 * 2.0**-23


def outcome_advantages(
    rewards: Sequence[float],
    *,
    scale: Scale = "std",
    std: StdKind = "sample",
    eps: float = 1e-6,
    baseline: OutcomeBaseline = "mean",
) -> list[float]:
    """A_T of one group: ``(R - mean) / (std + eps)``, one number a trajectory.

    Args:
        rewards: one R_T a trajectory; nan (not scored) is left out of the statistics and gets 0.
        scale: ``std`` divides by the standard deviation, ``none`` does not (Dr.GRPO, RLOO).
        std: ``sample`` (n - 1) or ``population`` (n).
        eps: added to the standard deviation.
        baseline: the group's ``mean``, ``leave_one_out``, the mean of the others (RLOO), or ``none``: the
            reward itself, unscaled (with rewards of 0 and 1: imitation of the right rollouts).

    Returns:
        As many numbers as rewards; exactly 0 for equal rewards and for a lone scored trajectory (with a
        baseline).

    Raises:
        ValueError: a reward is infinite, or a setting is unknown.
    """
    _check(scale, ("std", "none"), "scale")
    _check(baseline, ("mean", "leave_one_out", "none"), "baseline")
    known = [index for index, reward in enumerate(rewards) if not math.isnan(reward)]
    _check_finite([rewards[index] for index in known])
    if baseline == "none":
        return [0.0 if math.isnan(reward) else float(reward) for reward in rewards]
    values = _standardise([rewards[index] for index in known], scale, std, eps, baseline == "leave_one_out")
    advantages = [0.0] * len(rewards)
    for index, value in zip(known, values, strict=True):
        advantages[index] = value
    return advantages


def memory_rewards(
    p_mem: Sequence[float | None], p_full: Sequence[float | None], *, baseline: MemoryBaseline = "full"
) -> list[float | None]:
    """R_M of one trajectory, turn by turn.

    Args:
        p_mem: P_mem(t); None where turn t has no memory.
        p_full: P_full(t), the same length; its first entry has the question alone as context. It may be None
            where it was not computed and ``baseline`` does not need it.
        baseline: what is subtracted: ``full`` P_full(t) (paper), ``none`` nothing, ``previous`` P_mem(t - 1).

    Returns:
        One number a turn, None where it cannot be known. [choice] ``previous`` compares with the question
        alone (P_full of turn 1) at turn 1 and after a turn without memory, since then nothing was carried
        over.

    Raises:
        ValueError: lengths differ, or the baseline is unknown.
    """
    _check(baseline, ("full", "none", "previous"), "baseline")
    if len(p_mem) != len(p_full):
        raise ValueError(
            f"p_mem has {len(p_mem)} turns and p_full {len(p_full)}: one value a turn is needed in both"
        )
    rewards: list[float | None] = []
    for turn, probability in enumerate(p_mem):
        subtracted: float | None = 0.0
        if baseline == "full":
            subtracted = p_full[turn]
        elif baseline == "previous":
            before = p_mem[turn - 1] if turn else None
            subtracted = before if before is not None else p_full[0]
        rewards.append(None if probability is None or subtracted is None else probability - subtracted)
    return rewards


def memory_advantages(
    scores: Sequence[Sequence[float | None]],
    *,
    pool: MemoryPool = "group",
    scale: Scale = "std",
    std: StdKind = "sample",
    eps: float = 1e-6,
    min_pool: int = 1,
) -> list[list[float]]:
    """A_M of one group: ``(R_M - mean) / (std + eps)`` within a pool of memories.

    Args:
        scores: R_M by trajectory and turn; None or nan (no memory, not scored) stays out of the pool and gets
            0.
        pool: ``group``, all turns of all trajectories together (paper), or ``turn``, equal turn indices only.
        scale, std, eps: as in `outcome_advantages`.
        min_pool: with the pool ``turn``, a turn index with fewer scored memories joins the pool of the one
            before (the first joins the next): late turns, where few episodes are alive, keep a signal.

    Returns:
        Numbers in the shape of ``scores``; exactly 0 in a pool of fewer than two values or without spread.

    Raises:
        ValueError: a score is infinite, or a setting is unknown.
    """
    _check(scale, ("std", "none"), "scale")
    _check(pool, ("group", "turn"), "pool")
    advantages = [[0.0] * len(turns) for turns in scores]
    scored: dict[int, list[tuple[int, float]]] = {}
    for trajectory, turns in enumerate(scores):
        for turn, score in enumerate(turns):
            if score is not None and not math.isnan(score):
                scored.setdefault(turn, []).append((trajectory, score))
    for members in _pools(scored, pool, min_pool):
        values = _standardise([score for _, _, score in members], scale, std, eps, leave_one_out=False)
        for (trajectory, turn, _), value in zip(members, values, strict=True):
            advantages[trajectory][turn] = value
    return advantages


def token_advantages(
    a_outcome: float, a_memory: float, alpha: float, length: int, memory_span: tuple[int, int] | None
) -> list[float]:
    """One turn's advantages by token: A_T everywhere, ``A_T + alpha * A_M`` on the memory block, tags
    included.

    Args:
        length: completion tokens of the turn.
        memory_span: token range ``[start, end)`` of the block; None: the turn has none.

    Raises:
        ValueError: the span lies outside the completion.
    """
    advantages = [a_outcome] * length
    if memory_span is not None:
        start, end = memory_span
        if not 0 <= start < end <= length:
            raise ValueError(f"memory span {memory_span} lies outside a completion of {length} tokens")
        advantages[start:end] = [a_outcome + alpha * a_memory] * (end - start)
    return advantages


def generalised_advantages(
    rewards: Sequence[float], values: Sequence[float], *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[list[float], list[float]]:
    """GAE over the tokens that the policy wrote in one trajectory, all its turns in order (PPO with a
    critic).

    Args:
        rewards: one number a token; the outcome stands on the last one.
        values: the critic's value before each token; after the last one the episode is over and worth 0.
        gamma, lam: discount and trace decay per token.

    Returns:
        Advantages and the returns the critic learns (advantage + value), one each a token.

    Raises:
        ValueError: lengths differ.
    """
    if len(rewards) != len(values):
        raise ValueError(f"{len(rewards)} rewards but {len(values)} values: one of each per token is needed")
    advantages = [0.0] * len(rewards)
    following_value = following_advantage = 0.0
    for index in reversed(range(len(rewards))):
        error = rewards[index] + gamma * following_value - values[index]
        following_advantage = error + gamma * lam * following_advantage
        advantages[index] = following_advantage
        following_value = values[index]
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


def _standardise(
    values: Sequence[float], scale: Scale, std: StdKind, eps: float, leave_one_out: bool
) -> list[float]:
    _check(std, ("sample", "population"), "std")
    _check_finite(values)
    count = len(values)
    if count < 2 or max(values) - min(values) <= _EQUAL * max(abs(value) for value in values):
        return [0.0] * count
    mean = math.fsum(values) / count
    centred = [value - mean for value in values]
    divisor = 1.0
    if scale == "std":
        variance = math.fsum(value * value for value in centred) / (count - 1 if std == "sample" else count)
        divisor = math.sqrt(variance) + eps
    # Leaving a value out of its own baseline stretches its distance from the mean by n / (n - 1).
    factor = (count / (count - 1) if leave_one_out else 1.0) / divisor
    return [value * factor for value in centred]


def _pools(
    scored: dict[int, list[tuple[int, float]]], pool: MemoryPool, min_pool: int
) -> list[list[tuple[int, int, float]]]:
    """Members (trajectory, turn, score) of each pool."""
    pools: list[list[tuple[int, int, float]]] = []
    for turn in sorted(scored):
        members = [(trajectory, turn, score) for trajectory, score in scored[turn]]
        if pools and (pool == "group" or len(members) < min_pool or len(pools[-1]) < min_pool):
            pools[-1].extend(members)
        else:
            pools.append(members)
    return pools


def _check_finite(values: Sequence[float]) -> None:
    for value in values:
        if not math.isfinite(value):
            raise ValueError(
                f"{value} is no reward or score: a finite number, or nan for 'not scored', is needed"
            )


def _check(value: str, known: tuple[str, ...], name: str) -> None:
    if value not in known:
        raise ValueError(f"{name} is {value!r}; one of {', '.join(known)} is needed")
