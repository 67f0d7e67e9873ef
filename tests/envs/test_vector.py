"""Many environments at once: sync and async, with turns of every kind side by side."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

import envs
from envs.spaces import TextSpace

SETTINGS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"vector_kwargs": {"shared_memory": False}},
}
TURNS = [
    ("<mem>a</mem><search>capital of Poland</search>", "<answer>x</answer>", "no action"),
    (
        '<tool_call>{"name": "search", "arguments": {"query": 3}}</tool_call>',
        "ignored",
        "<search>river</search>",
    ),
    ("<think>t</think><answer>y</answer>", "<search>flag</search>", '<tool_call>{"name": 3}</tool_call>'),
]


def play(mode: str) -> list[Any]:
    vector = gymnasium.make_vec("mempo/SearchQA-v0", num_envs=3, vectorization_mode=mode, **SETTINGS[mode])
    record: list[Any] = [vector.reset(seed=[5, 6, 7])]
    for turns in TURNS:
        record.append(vector.step(list(turns)))
    vector.close()
    return record


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_every_environment_goes_its_own_way(mode: str) -> None:
    record = play(mode)
    single = envs.make("mempo/SearchQA-v0")
    for place, seed in enumerate((5, 6, 7)):
        assert record[0][0][place] == single.reset(seed=seed)[0] != "0"
        assert record[1][0][place] == single.step(TURNS[0][place])[0]
    _, _, terminated, truncated, info = record[1]
    assert terminated.tolist() == [False, True, False] and truncated.tolist() == [False] * 3
    assert info["invalid"].tolist() == [None, None, "no action: a tool call or an answer is needed"]
    assert info["memory"].tolist() == ["a", None, None] and info["query"].tolist()[0] == "capital of Poland"
    # The second one is reset by its next step, whatever the action.
    observations, *_, info = record[2]
    assert observations[1].startswith("Question: ") and observations[1].endswith("?\n")
    assert (
        info["turn"].tolist() == [2, 0, 2] and info["invalid"][0] == "search needs the text argument 'query'"
    )


def test_sync_and_async_agree() -> None:
    assert repr(play("sync")) == repr(play("async"))


def test_the_batched_space_is_a_tuple_of_ours() -> None:
    vector = gymnasium.make_vec("mempo/MultiObjectiveQA-v0", num_envs=2, vectorization_mode="sync")
    space = vector.action_space
    assert isinstance(space, gymnasium.spaces.Tuple) and all(
        isinstance(part, TextSpace) for part in space.spaces
    )
    vector.reset(seed=1)
    space.seed(3)
    for _ in range(20):
        observations, *_ = vector.step(space.sample())
        assert observations in vector.observation_space
    vector.close()


def random_play(id: str, mode: str, steps: int = 25) -> list[Any]:
    """A random agent in three environments at once, from one seed: all that it saw."""
    vector = gymnasium.make_vec(id, num_envs=3, vectorization_mode=mode, max_turns=4, **SETTINGS[mode])
    vector.action_space.seed(11)
    try:
        record: list[Any] = [vector.reset(seed=12)]
        for _ in range(steps):
            record.append(vector.step(vector.action_space.sample()))
            observations, rewards, terminated, truncated, _ = record[-1]
            assert observations in vector.observation_space and np.isfinite(rewards).all()
            assert not (terminated & truncated).any()
        return record
    finally:
        vector.close()


@pytest.mark.parametrize("id", envs.list_ids())
def test_a_random_agent_steps_many_at_once(id: str) -> None:
    record = random_play(id, "sync")
    answered = sum(int(step[2].sum()) for step in record[1:])
    cut_off = sum(int(step[3].sum()) for step in record[1:])
    assert answered >= 3 and cut_off >= 3, "episodes end both ways, and begin anew"
    assert len({observation for step in record for observation in step[0]}) > 10
    assert repr(record) == repr(random_play(id, "async"))
