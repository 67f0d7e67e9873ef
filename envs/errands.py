"""Errands: a house to walk through, things to carry, and nothing remembered but what the memory holds.

A note in the first room gives the plan of the house and the errands, once; it can be read again only by
walking back. Every step shows the result of one action and no more, so where one is, what one holds and what
is done must be carried in the memory. A thing that is put where it belongs tells a word; the words, in the
order of the errands, are the answer. Houses, things and words are generated from the seed; there are no files
and no retrieval.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from envs.base import InvalidAction, MemoryEnv, Tool, _at_least
from envs.errors import UserError
from envs.grammar import ToolCall
from envs.rewards import RewardSetting, read_reward
from envs.scoring import score_objectives
from envs.tasks import Task

_ROOM_NAMES = """hall kitchen attic cellar library study pantry parlour nursery bathroom garage workshop
laundry balcony greenhouse chapel gallery armoury stable dairy larder vestry terrace loft"""
_THING_NAMES = """lamp kettle ladder mirror basket candle clock broom violin globe pillow hammer bottle anchor
drum umbrella saddle teapot compass lantern"""
_WORD_LIST = """amber birch cobalt dune ember flint grove hazel iris jasper kelp linen maple nickel opal pearl
quartz reed slate topaz umber velvet willow yarrow zinc"""
ROOMS, THINGS, WORDS = _ROOM_NAMES.split(), _THING_NAMES.split(), _WORD_LIST.split()
STEPS = {"north": (0, 1), "east": (1, 0), "south": (0, -1), "west": (-1, 0)}

Plan = Mapping[str, Mapping[str, str]]
"""For each room the room that lies in each direction."""


@dataclass(frozen=True)
class Errand:
    """Carry ``thing`` from ``origin`` to ``target``; it then tells ``word``."""

    thing: str
    origin: str
    target: str
    word: str


@dataclass(frozen=True)
class House:
    """A house with its errands. ``start`` is where the note hangs."""

    plan: Plan
    start: str
    errands: tuple[Errand, ...]

    @property
    def note(self) -> str:
        """What the note says: a line for each room, a line for each errand."""
        rooms = [
            f"{room}: {', '.join(f'{direction} {other}' for direction, other in exits.items())}."
            for room, exits in self.plan.items()
        ]
        errands = [
            f"Errand {number}: the {errand.thing} from the {errand.origin} to the {errand.target}."
            for number, errand in enumerate(self.errands, 1)
        ]
        return "\n".join(["Plan of the house.", *rooms, *errands])

    @property
    def fewest_turns(self) -> int:
        """Turns of the best episode: read the note, walk, take and put, answer."""
        trips = [(errand.origin, errand.target) for errand in self.errands]
        order = best_order(self.plan, self.start, trips)
        return 2 + 2 * len(trips) + walk_length(self.plan, self.start, [trips[i] for i in order])


def build_house(rng: np.random.Generator, rooms: int, errands: int) -> House:
    """A connected house on a grid: a random tree of doors and a few more, so that ways can be chosen."""
    names = [str(name) for name in rng.choice(ROOMS, size=rooms, replace=False)]
    cells = [(0, 0)]
    while len(cells) < rooms:
        x, y = cells[int(rng.integers(len(cells)))]
        dx, dy = list(STEPS.values())[int(rng.integers(4))]
        if (x + dx, y + dy) not in cells:
            cells.append((x + dx, y + dy))
    place = dict(zip(cells, names, strict=True))
    plan: dict[str, dict[str, str]] = {name: {} for name in names}
    for index, (x, y) in enumerate(cells):
        # A cell joins one earlier neighbour for certain, the other ones by chance.
        earlier = [cell for cell in cells[:index] if abs(cell[0] - x) + abs(cell[1] - y) == 1]
        certain = int(rng.integers(len(earlier))) if earlier else 0
        for number, cell in enumerate(earlier):
            if number == certain or rng.random() < 0.4:
                _join(plan, place, (x, y), cell)
    things = rng.choice(THINGS, size=errands, replace=False)
    words = rng.choice(WORDS, size=errands, replace=False)
    chosen = []
    for thing, word in zip(things, words, strict=True):
        origin, target = rng.choice(names, size=2, replace=False)
        chosen.append(Errand(str(thing), str(origin), str(target), str(word)))
    ordered = {room: {way: plan[room][way] for way in STEPS if way in plan[room]} for room in names}
    return House(ordered, names[0], tuple(chosen))


def _join(
    plan: dict[str, dict[str, str]],
    place: Mapping[tuple[int, int], str],
    one: tuple[int, int],
    other: tuple[int, int],
) -> None:
    step = (other[0] - one[0], other[1] - one[1])
    for direction, (dx, dy) in STEPS.items():
        if (dx, dy) == step:
            plan[place[one]][direction] = place[other]
        if (-dx, -dy) == step:
            plan[place[other]][direction] = place[one]


def route(plan: Plan, origin: str, target: str) -> list[str]:
    """Directions of a shortest way, in the order of `STEPS` among equals; empty when there already."""
    previous: dict[str, tuple[str, str]] = {}
    queue = deque([origin])
    while queue and target not in previous and origin != target:
        room = queue.popleft()
        for direction, other in plan[room].items():
            if other != origin and other not in previous:
                previous[other] = (room, direction)
                queue.append(other)
    directions: list[str] = []
    while target != origin:
        target, direction = previous[target]
        directions.append(direction)
    return directions[::-1]


def walk_length(plan: Plan, start: str, trips: Sequence[tuple[str, str]]) -> int:
    """Steps of a walk from ``start`` through trips (from, to) in their order."""
    length, here = 0, start
    for origin, target in trips:
        length += len(route(plan, here, origin)) + len(route(plan, origin, target))
        here = target
    return length


def best_order(plan: Plan, start: str, trips: Sequence[tuple[str, str]]) -> list[int]:
    """An order of trips with the shortest walk, exact: dynamic programming over sets of trips."""
    gap = [[len(route(plan, one[1], other[0])) for other in trips] for one in trips]
    first = [len(route(plan, start, trip[0])) for trip in trips]

    @cache
    def rest(last: int, left: frozenset[int]) -> tuple[int, tuple[int, ...]]:
        options = []
        for trip in sorted(left):
            length, order = rest(trip, left - {trip})
            options.append(((first[trip] if last < 0 else gap[last][trip]) + length, (trip, *order)))
        return min(options, default=(0, ()))

    return list(rest(-1, frozenset(range(len(trips))))[1])


class Errands(MemoryEnv):
    """Errands in a house whose plan is shown once; reward 1 when every word is right and in its place.

    Args:
        rooms: of a house, from 3 to 24.
        errands: of an episode, from 1 to 6.
        reward: ``em`` (every word right) or ``partial`` (the share of right words); or as in `envs.rewards`.
        max_turns: None gives each episode twice the turns that it takes at best.
        settings: of `MemoryEnv`.

    Reset options: ``index``, which is a seed of its own, or ``task_id`` (``errands/7x3/INDEX``).
    """

    tools = (
        Tool("read", "reads the note; only in the room where it hangs"),
        Tool("go", "walks through a door", {"direction": "north, east, south or west"}),
        Tool("take", "takes a thing that is in the room; hands hold one", {"thing": "its name"}),
        Tool("put", "puts down what is held; only where it belongs", {"thing": "its name"}),
    )

    def __init__(
        self,
        *,
        rooms: int = 7,
        errands: int = 3,
        reward: RewardSetting = "em",
        max_turns: int | None = None,
        **settings: Any,
    ) -> None:
        self.rooms = _between("rooms", rooms, 3, len(ROOMS))
        self.errands = _between("errands", errands, 1, 6)
        self.payment = read_reward(reward, ("em", "partial"))
        self._fixed_turns = max_turns is not None
        # No walk between two rooms is longer than the number of rooms.
        longest = 2 * (2 + 2 * self.errands * (1 + self.rooms))
        super().__init__(max_turns=longest if max_turns is None else max_turns, **settings)

    def draw_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        prefix = f"errands/{self.rooms}x{self.errands}/"
        index = int(rng.integers(2**31))
        if "task_id" in options:
            number = str(options["task_id"]).removeprefix(prefix)
            if not number.isdecimal():
                raise UserError(f"no task {options['task_id']!r}: the form is {prefix}NUMBER")
            index = int(number)
        elif "index" in options:
            index = _between("index", options["index"], 0, 2**31)
        self.house = build_house(np.random.default_rng([0xE44A, index]), self.rooms, self.errands)
        if not self._fixed_turns:
            self.max_turns = 2 * self.house.fewest_turns
        self._here = self.house.start
        self._held: str | None = None
        self._lying = {errand.thing: errand.origin for errand in self.house.errands}
        setting = (
            f"A note in the {self.house.start}, where you are, has the plan of the house and {self.errands} "
            "errands. A thing tells a word when it is put where it belongs."
        )
        asked = [f"What is the word of errand {number}?" for number in range(1, self.errands + 1)]
        golds = tuple((errand.word,) for errand in self.house.errands)
        return Task(f"{prefix}{index}", (f"{setting} {asked[0]}", *asked[1:]), golds, "errands")

    def execute(self, call: ToolCall) -> str:
        if call.name == "read":
            return self._read()
        if call.name == "go":
            return self._go(str(call.arguments["direction"]).strip().lower())
        thing = str(call.arguments["thing"]).strip().lower().removeprefix("the ")
        return self._take(thing) if call.name == "take" else self._put(thing)

    def score(self, answer: str, task: Task) -> Mapping[str, float]:
        scores = score_objectives(answer, task.golds)
        return {"reward": self.payment.of_answer({"em": scores["em_all"], "partial": scores["em"]}), **scores}

    def _read(self) -> str:
        if self._here != self.house.start:
            raise InvalidAction("there is no note in this room")
        return self.house.note

    def _go(self, direction: str) -> str:
        if direction not in STEPS:
            raise InvalidAction("a direction is north, east, south or west")
        if direction not in self.house.plan[self._here]:
            raise InvalidAction(f"there is no door {direction} of here")
        self._here = self.house.plan[self._here][direction]
        things = [thing for thing, room in self._lying.items() if room == self._here]
        seen = f" You see: {', '.join(things)}." if things else ""
        return f"You go {direction}, into the {self._here}.{seen}"

    def _take(self, thing: str) -> str:
        if self._held is not None:
            raise InvalidAction(f"your hands hold the {self._held}")
        if self._lying.get(thing) != self._here:
            raise InvalidAction("there is no such thing in this room")
        del self._lying[thing]
        self._held = thing
        return f"You take the {thing}."

    def _put(self, thing: str) -> str:
        if self._held != thing:
            raise InvalidAction("you do not hold it")
        errand = next(errand for errand in self.house.errands if errand.thing == thing)
        if errand.target != self._here:
            raise InvalidAction(f"the {thing} does not belong in this room")
        self._held = None
        return f"You put down the {thing}. It tells: {errand.word}."


def _between(name: str, value: Any, least: int, most: int) -> int:
    if _at_least(name, value, least) > most:
        raise UserError(f"{name} is {value}; at most {most} is possible")
    return int(value)
