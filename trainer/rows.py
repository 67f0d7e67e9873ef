"""From groups and their memory scores to rows to train on: where advantages meet tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agent.trajectory import Group, Trajectory, Turn
from trainer.advantages import memory_advantages, memory_rewards, outcome_advantages, token_advantages
from trainer.algorithm import AlgorithmConfig
from trainer.row import Row


class Score(Protocol):
    """P_mem and P_full of one turn (`agent.memory_score.MemoryScore` is one)."""

    @property
    def p_mem(self) -> float | None: ...

    @property
    def p_full(self) -> float | None: ...


GroupScores = Sequence[Sequence[Score | None]]


@dataclass(frozen=True)
class GroupAdvantages:
    """The advantages of one group, by trajectory (and turn).

    Attributes:
        outcome: A_T.
        memory: A_M; 0 where a turn has no scored memory.
        memory_rewards: R_M; None where a turn has none.
    """

    outcome: list[float]
    memory: list[list[float]]
    memory_rewards: list[list[float | None]]

    def has_signal(self, group: Group, alpha: float) -> bool:
        """Whether the summed advantage of any trained token is other than 0."""
        whole = zip(group.trajectories, self.outcome, self.memory, strict=True)
        for trajectory, a_outcome, a_memory in whole:
            for turn, memory in zip(trajectory.turns, a_memory, strict=True):
                summed = token_advantages(a_outcome, memory, alpha, len(turn.sampled), turn.memory_span)
                if any(trained and value != 0.0 for trained, value in zip(turn.sampled, summed, strict=True)):
                    return True
        return False


@dataclass
class RowReport:
    """What was made of a step's groups.

    Attributes:
        advantages: of each group that was kept, in order.
        kept: indices of those groups.
        dropped: groups left out, by cause: ``all_zero`` (every outcome 0), ``all_equal`` (every outcome the
            same, not 0), ``unscored`` (fewer than two outcomes known). A cause is named only where no memory
            of the group carries a signal either.
    """

    advantages: list[GroupAdvantages] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)


def group_advantages(group: Group, scores: GroupScores | None, config: AlgorithmConfig) -> GroupAdvantages:
    """A_T and A_M of one group.

    Args:
        scores: by trajectory and turn; None when memories were not scored (then every A_M is 0).

    Raises:
        ValueError: scores do not have the group's shape.
    """
    outcome = outcome_advantages(
        [trajectory.reward for trajectory in group.trajectories],
        scale=config.outcome_scale,
        std=config.std,
        eps=config.eps,
        baseline=config.outcome_baseline,
    )
    rewards = _memory_rewards(group, scores, config)
    memory = memory_advantages(
        rewards,
        pool=config.memory_pool,
        scale=config.memory_scale,
        std=config.std,
        eps=config.eps,
        min_pool=config.memory_min_pool,
    )
    return GroupAdvantages(outcome, memory, rewards)


def rows_from_groups(
    groups: Sequence[Group], scores: Sequence[GroupScores] | None, config: AlgorithmConfig
) -> tuple[list[Row], RowReport]:
    """Every turn of every trajectory as a row with its advantages by token.

    Args:
        scores: by group, trajectory and turn (None: no memory there); None when memories were not scored,
            which only ``alpha = 0`` allows.

    Returns:
        Rows in the order of groups, trajectories and turns (``question`` is the group's index in ``groups``),
        and what became of the groups. Turns without a completion token are in it too; the learner skips them.

    Raises:
        ValueError: scores are missing or have another shape than the groups.
    """
    if scores is None and config.alpha > 0:
        raise ValueError("alpha is above 0 but memories were not scored: score them, or set alpha = 0")
    if scores is not None and len(scores) != len(groups):
        raise ValueError(f"{len(groups)} groups but scores of {len(scores)}")
    rows: list[Row] = []
    report = RowReport()
    number = 0
    for index, group in enumerate(groups):
        advantages = group_advantages(group, None if scores is None else scores[index], config)
        if config.drop_groups_without_signal and not advantages.has_signal(group, config.alpha):
            cause = _cause(group)
            report.dropped[cause] = report.dropped.get(cause, 0) + 1
            number += len(group.trajectories)
            continue
        report.kept.append(index)
        report.advantages.append(advantages)
        for place, trajectory in enumerate(group.trajectories):
            rows += _trajectory_rows(trajectory, place, advantages, config, question=index, number=number)
            number += 1
    return rows, report


def _trajectory_rows(
    trajectory: Trajectory,
    place: int,
    advantages: GroupAdvantages,
    config: AlgorithmConfig,
    *,
    question: int,
    number: int,
) -> list[Row]:
    critic = config.advantage == "critic"
    if critic and math.isnan(trajectory.reward):
        return []  # a critic would learn a return that nobody knows
    a_outcome, a_memory = advantages.outcome[place], advantages.memory[place]
    rewards = _token_rewards(trajectory, advantages.memory_rewards[place], config.alpha) if critic else None
    rows: list[Row] = []
    for index, turn in enumerate(trajectory.turns):
        length = len(turn.completion_ids)
        second: list[float] | None = None
        if critic:
            first = [0.0] * length
        elif config.separate_memory_loss:
            first = [a_outcome] * length
            second = token_advantages(0.0, a_memory[index], config.alpha, length, turn.memory_span)
        else:
            first = token_advantages(a_outcome, a_memory[index], config.alpha, length, turn.memory_span)
        rows.append(
            Row(
                prompt_ids=turn.prompt_ids,
                completion_ids=turn.completion_ids,
                sampled=turn.sampled,
                advantages=tuple(first),
                old_logprobs=turn.logprobs,
                question=question,
                trajectory=number,
                turn=index,
                memory_advantages=None if second is None else tuple(second),
                rewards=None if rewards is None else rewards[index],
            )
        )
    return rows


def _memory_rewards(
    group: Group, scores: GroupScores | None, config: AlgorithmConfig
) -> list[list[float | None]]:
    shape = [len(trajectory.turns) for trajectory in group.trajectories]
    if scores is None:
        return [[None] * turns for turns in shape]
    if [len(turns) for turns in scores] != shape:
        raise ValueError(
            f"group of task {group.task.id!r} has {shape} turns by trajectory, "
            f"its scores have {[len(turns) for turns in scores]}"
        )
    rewards: list[list[float | None]] = []
    for trajectory, turns in zip(group.trajectories, scores, strict=True):
        p_mem = [
            None if score is None or turn.memory_span is None else score.p_mem
            for score, turn in zip(turns, trajectory.turns, strict=True)
        ]
        p_full = [None if score is None else score.p_full for score in turns]
        rewards.append(memory_rewards(p_mem, p_full, baseline=config.memory_baseline) if p_mem else [])
    return rewards


def _token_rewards(
    trajectory: Trajectory, memory: Sequence[float | None], alpha: float
) -> list[tuple[float, ...]]:
    """[choice] PPO: alpha * R_M(t) on the last trained token of turn t's memory, R_T on the trajectory's
    last."""
    rewards = [[0.0] * len(turn.completion_ids) for turn in trajectory.turns]
    for turn, values, score in zip(trajectory.turns, rewards, memory, strict=True):
        if score is not None and turn.memory_span is not None:
            token = _last_trained(turn, turn.memory_span[1])
            if token is not None:
                values[token] += alpha * score
    for turn, values in zip(reversed(trajectory.turns), reversed(rewards), strict=True):
        token = _last_trained(turn, len(values))
        if token is not None:
            values[token] += trajectory.reward
            break
    return [tuple(values) for values in rewards]


def _last_trained(turn: Turn, before: int) -> int | None:
    return next((index for index in reversed(range(before)) if turn.sampled[index]), None)


def _cause(group: Group) -> str:
    known = [t.reward for t in group.trajectories if not math.isnan(t.reward)]
    if len(known) < 2:
        return "unscored"
    return "all_zero" if not any(known) else "all_equal"
