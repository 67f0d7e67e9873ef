"""What a step's rollouts looked like, as plain numbers: from groups, scores and advantages, never from tensors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, pstdev

from agent.memory_score import MemoryScore
from agent.trajectory import Group, Trajectory

Scores = Sequence[Sequence[Sequence[MemoryScore]]]
MemoryAdvantages = Sequence[Sequence[Sequence[float]]]
MemoryRewards = Sequence[Sequence[Sequence[float | None]]]

_ENOUGH = 8
"""Memories of one turn index below which its mean advantage says nothing."""


def rollout_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    """Rewards, behaviour, tokens and signs of collapse; keys are ``area/name``, values finite floats.

    Args:
        step: that learns from the groups, counted from 1: its weights have seen ``step`` - 1 updates.
    """
    return {
        **_rewards(groups),
        **_behaviour(groups),
        **_tokens(groups),
        **_repetition(groups),
        # Updates between the weights that sampled and those that learn from it.
        "rollout/weight_gap": _mean(
            step - 1 - turn.weight_version for t in _trajectories(groups) for turn in t.turns
        ),
    }


def memory_metrics(scores: Scores, advantages: MemoryAdvantages, rewards: MemoryRewards) -> dict[str, float]:
    """P_mem, P_full, R_M and A_M, over all turns and by turn index (counted from 1).

    Args:
        scores: by group, trajectory, turn.
        advantages: A_M in the same shape; 0 where a turn has no memory.
        rewards: R_M in the same shape, less the baseline that the run subtracts; None where a turn has none.
    """
    values: defaultdict[str, list[float]] = defaultdict(list)
    for group in zip(scores, advantages, rewards, strict=True):
        for trajectory in zip(*group, strict=True):
            for index, (score, advantage, reward) in enumerate(zip(*trajectory, strict=True), 1):
                if score.p_mem is None or reward is None:
                    continue
                for where in ("", f"_turn{index}"):
                    values[f"p_mem{where}"].append(score.p_mem)
                    values[f"p_full{where}"].append(score.p_full)
                    values[f"r_mem{where}"].append(reward)
                    values[f"a_mem{where}"].append(advantage)
    by_turn_mean = [
        abs(fmean(items))
        for key, items in values.items()
        if key.startswith("a_mem_turn") and len(items) >= _ENOUGH
    ]
    flat = values.get("a_mem", [])
    turns = [score for group in scores for trajectory in group for score in trajectory]
    return {
        **{f"memory/{key}": fmean(items) for key, items in sorted(values.items())},
        "memory/positive_share": _mean(float(a > 0) for a in flat),
        "memory/negative_share": _mean(float(a < 0) for a in flat),
        "memory/transcripts_cut": _mean(float(score.cut) for score in turns),
        # Far from 0: memories of early turns are judged for being early, not for what they say.
        "memory/a_mem_turn_bias": max(by_turn_mean, default=0.0),
    }


def _rewards(groups: Sequence[Group]) -> dict[str, float]:
    rewards = [
        [trajectory.reward for trajectory in group.trajectories if not math.isnan(trajectory.reward)]
        for group in groups
    ]
    alive = [group for group in rewards if group]
    metrics = {
        "reward/mean": _mean(reward for group in alive for reward in group),
        "reward/std_within_groups": _mean(pstdev(group) for group in alive),
        "reward/groups_without_spread": _mean(float(max(group) == min(group)) for group in alive),
        "reward/unscored": float(sum(math.isnan(t.reward) for t in _trajectories(groups))),
    }
    names = sorted({name for t in _trajectories(groups) for name in t.scores if name != "reward"})
    for name in names:
        metrics[f"score/{name}"] = _mean(t.scores.get(name, 0.0) for t in _trajectories(groups))
    return metrics


def _behaviour(groups: Sequence[Group]) -> dict[str, float]:
    trajectories = _trajectories(groups)
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    metrics = {
        "episode/turns": _mean(len(t.turns) for t in trajectories),
        "episode/answered": _mean(float(t.answer is not None) for t in trajectories),
        "episode/invalid_turns": _mean(float(turn.invalid is not None) for turn in turns),
        "episode/without_memory": _mean(float(turn.memory is None) for turn in turns),
        "episode/searches": _mean(sum(turn.query is not None for turn in t.turns) for t in trajectories),
    }
    for reason in sorted({t.stop_reason for t in trajectories}):
        metrics[f"stop/{reason}"] = _mean(float(t.stop_reason == reason) for t in trajectories)
    return metrics


def _tokens(groups: Sequence[Group]) -> dict[str, float]:
    trajectories = _trajectories(groups)
    memory = [
        turn.memory_span[1] - turn.memory_span[0]
        for trajectory in trajectories
        for turn in trajectory.turns
        if turn.memory_span is not None
    ]
    return {
        "tokens/total": _mean(t.total_tokens for t in trajectories),
        "tokens/peak": _mean(t.peak_tokens for t in trajectories),
        "tokens/completion": _mean(t.completion_tokens for t in trajectories),
        "tokens/prompt": _mean(t.total_tokens - t.completion_tokens for t in trajectories),
        "tokens/memory": sum(memory) / max(len(trajectories), 1),
        "tokens/thought_and_action": (sum(t.completion_tokens for t in trajectories) - sum(memory))
        / max(len(trajectories), 1),
        "tokens/memory_block": _mean(memory),
        "tokens/memory_block_max": float(max(memory, default=0)),
    }


def _repetition(groups: Sequence[Group]) -> dict[str, float]:
    """Signs of collapse: the same memory or query for different questions, or one rollout N times over."""
    distinct = [
        len({tuple(turn.text for turn in t.turns) for t in group.trajectories}) / len(group.trajectories)
        for group in groups
    ]
    return {
        "repeat/memories_across_questions": _shared(groups, "memory"),
        "repeat/queries_across_questions": _shared(groups, "query"),
        "repeat/distinct_rollouts_in_group": _mean(distinct),
    }


def _shared(groups: Sequence[Group], field: str) -> float:
    """Share of texts (each once a question) that also occur under another question."""
    owners: defaultdict[str, set[str]] = defaultdict(set)
    for group in groups:
        for trajectory in group.trajectories:
            for turn in trajectory.turns:
                text = getattr(turn, field)
                if text is not None:
                    owners[text].add(group.task.id)
    occurrences = sum(len(tasks) for tasks in owners.values())
    repeated = sum(len(tasks) for tasks in owners.values() if len(tasks) > 1)
    return repeated / occurrences if occurrences else 0.0


def _trajectories(groups: Sequence[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def _mean(values: Iterable[float]) -> float:
    items = [float(value) for value in values]
    return fmean(items) if items else 0.0
