"""What a rollout may leave behind: broken turns, trajectories and groups are refused where they are made."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from agent.trajectory import Group, Trajectory, Turn
from envs.tasks.task import Task


def turn(**changes: Any) -> Turn:
    values: dict[str, Any] = {
        "prompt_ids": (1, 2),
        "completion_ids": (3, 4, 5),
        "logprobs": (-0.5, 0.0, -2.0),
        "sampled": (True, True, True),
        "memory_span": (0, 2),
        "memory": "m",
        "text": "t",
        "observation": "o",
    }
    return Turn(**{**values, **changes})


def trajectory(**changes: Any) -> Trajectory:
    values: dict[str, Any] = {
        "sample": 0,
        "turns": (turn(), turn(prompt_ids=(1,) * 10)),
        "reward": 1.0,
        "stop_reason": "answer",
        "terminated": True,
        "truncated": False,
    }
    return Trajectory(**{**values, **changes})


@pytest.mark.parametrize("value", [nan, inf, -inf, 0.5, 1e-5])
def test_log_probs_of_sampled_tokens_are_finite_and_not_above_zero(value: float) -> None:
    for place in range(3):
        logprobs = tuple(value if i == place else -1.0 for i in range(3))
        with pytest.raises(ValueError, match=rf"log-prob {value} of a sampled token is not a finite"):
            turn(logprobs=logprobs)
        # One that the policy did not sample is trained by nobody.
        assert turn(logprobs=logprobs, sampled=tuple(i != place for i in range(3))).logprobs == logprobs


def test_log_probs_of_rounding_errors_pass() -> None:
    assert turn(logprobs=(1e-7, -0.0, -80.0)).logprobs[0] == 1e-7
    assert turn(completion_ids=(), logprobs=(), sampled=(), memory=None, memory_span=None).text == "t"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt_ids": ()}, "at least one prompt token"),
        ({"logprobs": (-1.0,)}, "has 1 log-probs and 3 flags"),
        ({"sampled": (True,)}, "has 3 log-probs and 1 flags"),
        ({"memory": None}, "both be present or both be None"),
        ({"memory_span": None}, "both be present or both be None"),
        ({"memory_span": (2, 2)}, "lies outside the 3"),
        ({"memory_span": (0, 4)}, "lies outside the 3"),
    ],
)
def test_broken_turns(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        turn(**changes)


def test_trajectories_and_groups() -> None:
    whole = trajectory()
    assert (whole.completion_tokens, whole.total_tokens, whole.peak_tokens) == (6, 18, 13)
    for changes in ({"truncated": True}, {"terminated": False}):
        with pytest.raises(ValueError, match="either terminated or truncated"):
            trajectory(**changes)
    with pytest.raises(ValueError, match="never truncated"):
        trajectory(terminated=False, truncated=True, answer="a")
    task = Task("t", ("q",), (("a",),))
    with pytest.raises(ValueError, match="'t' is empty"):
        Group(task, ())
    with pytest.raises(ValueError, match=r"twice: \[0, 0\]"):
        Group(task, (whole, whole))
