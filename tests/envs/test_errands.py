"""Errands: the world obeys its rules; the best player needs no turn more than a brute-force search finds."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

import envs
from envs.errands import Errand, Errands, House, best_order, build_house, route, walk_length
from envs.errands_player import ErrandsPlayer
from envs.errors import UserError

OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}


def call(tool: str, argument: str = "") -> str:
    names = {"go": "direction", "take": "thing", "put": "thing"}
    arguments = f'{{"{names[tool]}": "{argument}"}}' if tool in names else "{}"
    return f'<tool_call>{{"name": "{tool}", "arguments": {arguments}}}</tool_call>'


def fewest_turns_by_search(house: House) -> int:
    """Breadth-first over (room, thing held, errands done), without any of the planner's code."""
    start = (house.start, -1, frozenset())
    queue, seen = deque([(start, 0)]), {start}
    while queue:
        (room, held, done), turns = queue.popleft()
        if len(done) == len(house.errands):
            return turns + 2  # reading the note and answering
        following = [(other, held, done) for other in house.plan[room].values()]
        for number, errand in enumerate(house.errands):
            if held == -1 and number not in done and errand.origin == room:
                following.append((room, number, done))
            if held == number and errand.target == room:
                following.append((room, -1, done | {number}))
        for state in following:
            if state not in seen:
                seen.add(state)
                queue.append((state, turns + 1))
    raise AssertionError("the errands cannot be done")


def play(env: Errands, player: Any, **reset: Any) -> dict[str, Any]:
    observation, info = env.reset(**reset)
    for _ in range(env.max_turns):
        observation, reward, terminated, truncated, info = env.step(player.act(observation, info))
        if terminated or truncated:
            return {**info, "reward": reward}
    raise AssertionError("the episode did not end")


@pytest.mark.parametrize(("rooms", "errands"), [(3, 1), (7, 3), (12, 4), (20, 6)])
def test_the_player_wins_every_episode_in_the_fewest_turns(rooms: int, errands: int) -> None:
    env = Errands(rooms=rooms, errands=errands)
    for seed in range(40):
        end = play(env, ErrandsPlayer(), seed=seed)
        assert end["reward"] == 1.0 and end["stop_reason"] == "answer"
        assert end["turn"] == env.house.fewest_turns
        if errands <= 4:
            assert end["turn"] == fewest_turns_by_search(env.house)


def test_the_player_needs_its_memory() -> None:
    """The same player with its memory blanked or cut never gets anywhere."""

    class Forgetful(ErrandsPlayer):
        def act(self, observation: str, info: Any) -> str:
            return super().act(observation, {**info, "memory": None})

    def wins(env: Errands, player: ErrandsPlayer, seed: int) -> bool:
        # A player that finds no house in its memory is lost, in one way or another.
        try:
            return bool(play(env, player, seed=seed)["reward"] == 1.0)
        except (KeyError, ValueError, StopIteration, AssertionError):
            return False

    for env, player, expected in (
        (Errands(), ErrandsPlayer(), 10),
        (Errands(), Forgetful(), 0),
        (Errands(memory_limit=5), ErrandsPlayer(), 0),
        (Errands(memory_limit=500), ErrandsPlayer(), 10),
    ):
        assert sum(wins(env, player, seed) for seed in range(10)) == expected


def test_houses_are_consistent_and_reachable() -> None:
    for seed in range(200):
        house = build_house(np.random.default_rng(seed), 3 + seed % 22, 1 + seed % 6)
        assert len(house.plan) == 3 + seed % 22 and house.start in house.plan
        for room, exits in house.plan.items():
            for direction, other in exits.items():
                assert house.plan[other][OPPOSITE[direction]] == room
            route(house.plan, house.start, room)
        assert len({errand.thing for errand in house.errands}) == len(
            {errand.word for errand in house.errands}
        )
        assert all(errand.origin != errand.target for errand in house.errands)


def test_route_and_order_on_a_corridor() -> None:
    plan = {
        "a": {"east": "b"},
        "b": {"east": "c", "west": "a"},
        "c": {"east": "d", "west": "b"},
        "d": {"west": "c"},
    }
    assert route(plan, "a", "d") == ["east", "east", "east"] and route(plan, "b", "b") == []
    trips = [("d", "c"), ("a", "b"), ("b", "d")]
    # From a: a-b, b-d, d-c costs 1 + 2 + 1; the given order costs 3 + 1 + 2 + 1 + 0 + 2.
    assert walk_length(plan, "a", trips) == 9
    assert best_order(plan, "a", trips) == [1, 2, 0]
    assert (
        House(plan, "a", tuple(Errand(str(i), *trip, "w") for i, trip in enumerate(trips))).fewest_turns == 12
    )


def test_the_rules_of_the_house() -> None:
    env = Errands(rooms=5, errands=2, max_turns=99)
    observation, _ = env.reset(seed=3)
    house = env.house
    errand = house.errands[0]
    assert observation.startswith(f"Question: A note in the {house.start}, where you are,")
    assert observation.endswith("What is the word of errand 1?; What is the word of errand 2?\n")

    def reply(action: str) -> tuple[str, Any]:
        info = env.step(action)[-1]
        return info["information"], info["invalid"]

    assert reply(call("read")) == (house.note, None)
    closed = next(way for way in OPPOSITE if way not in house.plan[house.start])
    assert reply(call("go", closed))[1] == f"there is no door {closed} of here"
    assert reply(call("go", "up"))[1] == "a direction is north, east, south or west"
    assert reply(call("put", errand.thing))[1] == "you do not hold it"
    for way in route(house.plan, house.start, errand.origin):
        text, invalid = reply(call("go", way.upper()))
        assert text.startswith(f"You go {way}, into the ") and invalid is None
    if errand.origin != house.start:
        assert errand.thing in text and reply(call("read"))[1] == "there is no note in this room"
    assert reply(call("take", "dragon"))[1] == "there is no such thing in this room"
    assert reply(call("take", f"the {errand.thing}")) == (f"You take the {errand.thing}.", None)
    assert reply(call("take", errand.thing))[1] == f"your hands hold the {errand.thing}"
    assert reply(call("put", errand.thing))[1] == f"the {errand.thing} does not belong in this room"
    for way in route(house.plan, errand.origin, errand.target):
        reply(call("go", way))
    assert reply(call("put", errand.thing)) == (
        f"You put down the {errand.thing}. It tells: {errand.word}.",
        None,
    )
    assert reply(call("take", errand.thing))[1] == "there is no such thing in this room"
    *_, info = env.step(f"<answer>{errand.word}; wrong</answer>")
    assert info["scores"]["em"] == 0.5 and info["scores"]["reward"] == 0.0


def test_tasks_by_index_and_id_and_the_turn_budget() -> None:
    env = Errands()
    by_index = env.reset(options={"index": 17})
    assert by_index[1]["task_id"] == "errands/7x3/17"
    assert env.reset(seed=99, options={"task_id": "errands/7x3/17"}) == by_index
    assert env.max_turns == by_index[1]["turns_left"] == 2 * env.house.fewest_turns
    assert Errands(max_turns=4).reset(seed=0)[1]["turns_left"] == 4
    assert len({env.reset(seed=seed)[1]["task_id"] for seed in range(50)}) == 50
    for bad in ("errands/7x3/", "errands/8x3/1", "x"):
        with pytest.raises(UserError, match="the form is errands/7x3/NUMBER"):
            env.reset(options={"task_id": bad})


def test_partial_reward_and_bad_settings() -> None:
    env = Errands(reward="partial")
    env.reset(seed=0)
    words = [errand.word for errand in env.house.errands]
    assert env.step(f"<answer>{words[0]}; x; {words[2]}</answer>")[1] == pytest.approx(2 / 3)
    for kwargs, message in (
        ({"rooms": 2}, "rooms is 2"),
        ({"rooms": 25}, "rooms is 25; at most 24"),
        ({"errands": 7}, "errands is 7; at most 6"),
        ({"reward": "f1"}, "reward 'f1'"),
    ):
        with pytest.raises(UserError, match=message):
            envs.make("mempo/Errands-v0", **kwargs)
