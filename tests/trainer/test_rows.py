"""From groups to rows: spans, sums, dropped groups, the two-loss and the critic's variants."""

import dataclasses
import math
import random
from types import SimpleNamespace

import pytest

from agent.trajectory import Group, Trajectory, Turn
from envs.tasks.task import Task
from trainer.algorithm import AlgorithmConfig
from trainer.rows import rows_from_groups

TASK = Task(id="1", questions=("?",), golds=(("gold",),))
HALF = 0.5


def turn(tokens: int = 4, span: tuple[int, int] | None = (0, 2), unsampled: tuple[int, ...] = ()) -> Turn:
    return Turn(
        prompt_ids=(1,),
        completion_ids=tuple(range(tokens)),
        logprobs=(-1.0,) * tokens,
        sampled=tuple(i not in unsampled for i in range(tokens)),
        memory_span=span,
        memory=None if span is None else "m",
        text="",
        observation="",
    )


def group(*trajectories: tuple[float, list[Turn]]) -> Group:
    return Group(
        TASK,
        tuple(
            Trajectory(number, tuple(turns), reward, "answer", True, False)
            for number, (reward, turns) in enumerate(trajectories)
        ),
    )


def scored(*trajectories: list[float | None]) -> list[list[SimpleNamespace]]:
    """P_mem by turn, P_full 0."""
    return [[SimpleNamespace(p_mem=p, p_full=0.0) for p in turns] for turns in trajectories]


UNSCALED = AlgorithmConfig(outcome_scale="none", memory_scale="none")


def test_outcome_everywhere_memory_on_its_span():
    groups = [group((1.0, [turn(4, (1, 3))]), (0.0, [turn(3, None)]))]
    rows, _ = rows_from_groups(groups, [scored([0.25], [None])], UNSCALED)
    # The pool has one memory: A_M is 0.
    assert [row.advantages for row in rows] == [(HALF,) * 4, (-HALF,) * 3]
    groups = [group((1.0, [turn(4, (1, 3))]), (0.0, [turn(3, (0, 1))]))]
    rows, report = rows_from_groups(groups, [scored([0.75], [0.25])], UNSCALED)
    assert rows[0].advantages == (HALF, HALF + 0.25, HALF + 0.25, HALF)
    assert rows[1].advantages == (-HALF - 0.25, -HALF, -HALF)
    assert report.advantages[0].memory_rewards == [[0.75], [0.25]]


def test_every_row_of_a_trajectory_gets_the_trajectorys_advantage():
    """A: reward 1, four turns; B: reward 0, one turn. Counting rows would give 0.447 and -1.789."""
    groups = [group((1.0, [turn()] * 4), (0.0, [turn()]))]
    rows, _ = rows_from_groups(groups, None, AlgorithmConfig(alpha=0.0))
    assert [row.advantages[0] for row in rows] == pytest.approx(
        [math.sqrt(0.5)] * 4 + [-math.sqrt(0.5)], abs=2e-6
    )
    assert [(row.trajectory, row.turn) for row in rows] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]


def test_splitting_a_turn_changes_nobodys_outcome_advantage():
    whole = group((1.0, [turn(8, None)]), (0.0, [turn(8, None)]), (0.0, [turn(8, None)]))
    split = group((1.0, [turn(4, None), turn(4, None)]), (0.0, [turn(8, None)]), (0.0, [turn(8, None)]))
    config = AlgorithmConfig(alpha=0.0)
    by_trajectory = []
    for example in (whole, split):
        rows, _ = rows_from_groups([example], None, config)
        by_trajectory.append({row.trajectory: row.advantages[0] for row in rows})
    assert by_trajectory[0] == by_trajectory[1]


def test_permuting_rollouts_permutes_rows():
    rng = random.Random(3)
    trajectories = [(float(rng.random() < 0.5), [turn(rng.randrange(2, 6), (0, 1))] * 2) for _ in range(6)]
    p_mem: list[list[float | None]] = [[rng.random(), rng.random()] for _ in range(6)]
    order = [4, 0, 5, 2, 1, 3]
    plain, _ = rows_from_groups([group(*trajectories)], [scored(*p_mem)], AlgorithmConfig())
    mixed, _ = rows_from_groups(
        [group(*[trajectories[i] for i in order])], [scored(*[p_mem[i] for i in order])], AlgorithmConfig()
    )
    for place, original in enumerate(order):
        for t in range(2):
            assert mixed[2 * place + t].advantages == pytest.approx(plain[2 * original + t].advantages)


def test_unscored_trajectories_keep_their_rows_and_get_no_outcome():
    groups = [group((math.nan, [turn()]), (1.0, [turn()]), (0.0, [turn()]))]
    rows, _ = rows_from_groups(groups, None, AlgorithmConfig(alpha=0.0, outcome_scale="none"))
    assert [row.advantages[0] for row in rows] == [0.0, HALF, -HALF]


def test_groups_without_signal_are_dropped_by_cause_and_memory_signal_keeps_them():
    dropping = AlgorithmConfig(drop_groups_without_signal=True)
    groups = [
        group((0.0, [turn()]), (0.0, [turn()])),  # no outcome, equal memories
        group((1.0, [turn()]), (1.0, [turn()])),
        group((1.0, [turn()]), (math.nan, [turn()])),
        group((0.0, [turn()]), (0.0, [turn()])),  # no outcome, but memories that differ
        group((1.0, [turn()]), (0.0, [turn()])),
    ]
    scores = [scored([0.5], [0.5])] * 3 + [scored([0.5], [0.1]), scored([0.5], [0.5])]
    rows, report = rows_from_groups(groups, scores, dropping)
    assert report.dropped == {"all_zero": 1, "all_equal": 1, "unscored": 1}
    assert report.kept == [3, 4]
    assert [row.question for row in rows] == [3, 3, 4, 4]
    assert len({row.trajectory for row in rows}) == 4
    # GRPO sees no signal in the memories.
    _, report = rows_from_groups(groups, None, AlgorithmConfig(alpha=0.0, drop_groups_without_signal=True))
    assert report.kept == [4] and report.dropped["all_zero"] == 2
    # Without the setting nothing is dropped.
    assert len(rows_from_groups(groups, scores, AlgorithmConfig())[0]) == 10


def test_signal_does_not_depend_on_the_scale():
    groups = [group((0.0, [turn()]), (0.001, [turn()]))]
    for scale in ("std", "none"):
        config = AlgorithmConfig(alpha=0.0, outcome_scale=scale, drop_groups_without_signal=True)
        assert rows_from_groups(groups, None, config)[1].kept == [0]


def test_signal_on_tokens_that_are_not_trained_is_none():
    config = AlgorithmConfig(drop_groups_without_signal=True)
    hidden = turn(3, (0, 1), unsampled=(0,))
    _, report = rows_from_groups([group((0.0, [hidden]), (0.0, [hidden]))], [scored([0.9], [0.1])], config)
    assert report.kept == []


def test_two_losses_keep_the_parts_apart():
    config = UNSCALED.model_copy(update={"separate_memory_loss": True, "alpha": 2.0})
    groups = [group((1.0, [turn(3, (0, 1))]), (0.0, [turn(3, (0, 1))]))]
    rows, _ = rows_from_groups(groups, [scored([0.75], [0.25])], config)
    assert rows[0].advantages == (HALF, HALF, HALF)
    assert rows[0].memory_advantages == (0.5, 0.0, 0.0)
    assert rows[1].memory_advantages == (-0.5, 0.0, 0.0)


def test_a_critic_gets_rewards_by_token():
    config = AlgorithmConfig(advantage="critic", alpha=0.5)
    turns = [turn(4, (0, 3), unsampled=(2,)), turn(3, None, unsampled=(2,)), turn(0, None)]
    groups = [group((1.0, turns), (math.nan, [turn()]))]
    rows, _ = rows_from_groups(groups, [scored([0.6, None, None], [0.5])], config)
    # The unscored trajectory has no return to learn; the block's last token was not sampled.
    assert [row.rewards for row in rows] == [(0.0, 0.3, 0.0, 0.0), (0.0, 1.0, 0.0), ()]
    assert all(not any(row.advantages) for row in rows)


def test_empty_trajectories_and_completions_keep_the_group_whole():
    empty = Trajectory(1, (), 0.0, "window", False, True)
    full = Trajectory(0, (turn(0, None), turn(2, None)), 1.0, "answer", True, False)
    rows, _ = rows_from_groups([Group(TASK, (full, empty))], [scored([None, None], [])], UNSCALED)
    assert [row.advantages for row in rows] == [(), (HALF, HALF)]


def test_scores_must_fit():
    groups = [group((1.0, [turn()]), (0.0, [turn()]))]
    with pytest.raises(ValueError, match="memories were not scored"):
        rows_from_groups(groups, None, AlgorithmConfig())
    with pytest.raises(ValueError, match="1 groups but scores of 0"):
        rows_from_groups(groups, [], AlgorithmConfig())
    with pytest.raises(ValueError, match=r"\[1, 1\] turns by trajectory, its scores have \[1, 2\]"):
        rows_from_groups(groups, [scored([0.1], [0.1, 0.2])], AlgorithmConfig())


def test_rows_carry_the_engines_tokens_untouched():
    sampled = dataclasses.replace(turn(3, (0, 1)), logprobs=(-0.1, -0.2, -0.3), prompt_ids=(7, 8))
    [first, _], _ = rows_from_groups(
        [group((1.0, [sampled]), (0.0, [turn()]))], [scored([0.1], [0.2])], UNSCALED
    )
    assert (first.prompt_ids, first.completion_ids) == ((7, 8), (0, 1, 2))
    assert first.old_logprobs == (-0.1, -0.2, -0.3)
