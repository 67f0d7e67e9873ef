"""The best player of Errands: it reads what a model reads and keeps its state in the memory it writes.

Nothing is privileged and nothing is kept between turns: each turn starts from the memory in `info` and the
newest information, so an episode that it wins shows that a memory can carry the whole state. Its plans are
exact: an episode takes `House.fewest_turns` turns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from envs.errands import STEPS, best_order, route

_ROOM = re.compile(rf"^(?P<room>\w+): (?P<exits>(?:(?:{'|'.join(STEPS)}) \w+(?:, )?)+)\.$", re.MULTILINE)
_ERRAND = re.compile(r"^Errand \d+: the (\w+) from the (\w+) to the (\w+)\.$", re.MULTILINE)
_START = re.compile(r"A note in the (\w+), where you are")


class ErrandsPlayer:
    """Plays one episode after another; one object serves all."""

    def act(self, observation: str, info: Mapping[str, Any]) -> str:
        """The whole text of one turn."""
        if not info["information"]:
            return _turn("nothing known", "read")
        if info["memory"] is None or info["memory"] == "nothing known":
            start = _START.search(info["question"])
            if start is None:
                raise ValueError("the question names no room to start from: not an Errands episode")
            state = _State.of_note(info["information"], start[1])
        else:
            state = _State.of_memory(info["memory"])
            state.learn(info["information"])
        name, *arguments = state.next_action()
        if name == "answer":
            return f"<mem>{state.memory()}</mem><answer>{arguments[0]}</answer>"
        return _turn(state.memory(), name, *arguments)


def _turn(memory: str, tool: str, *arguments: str) -> str:
    argument = {"go": "direction", "take": "thing", "put": "thing"}
    call = {"name": tool, "arguments": {argument[tool]: arguments[0]} if arguments else {}}
    return f"<mem>{memory}</mem><tool_call>{json.dumps(call)}</tool_call>"


class _State:
    """What there is to know, with the memory's text as its only storage.

    The text has lines: ``at ROOM``, ``holding THING`` or ``holding nothing``, one ``ROOM: north OTHER, …`` a
        room,
    and one ``THING ORIGIN TARGET WORD`` an errand, with ``?`` for a word not yet heard.
    """

    def __init__(
        self, here: str, held: str, plan: dict[str, dict[str, str]], errands: list[list[str]]
    ) -> None:
        self.here, self.held, self.plan, self.errands = here, held, plan, errands

    @classmethod
    def of_note(cls, note: str, start: str) -> _State:
        errands = [[*match, "?"] for match in _ERRAND.findall(note)]
        return cls(start, "nothing", _read_plan(note), errands)

    @classmethod
    def of_memory(cls, memory: str) -> _State:
        here, held, *rest = memory.split("\n")
        errands = [line.split() for line in rest if ":" not in line]
        return cls(here.removeprefix("at "), held.removeprefix("holding "), _read_plan(memory), errands)

    def memory(self) -> str:
        rooms = [
            f"{room}: {', '.join(f'{way} {other}' for way, other in exits.items())}."
            for room, exits in self.plan.items()
        ]
        errands = [" ".join(errand) for errand in self.errands]
        return "\n".join([f"at {self.here}", f"holding {self.held}", *rooms, *errands])

    def learn(self, information: str) -> None:
        """From the reply to the last action."""
        if walked := re.match(r"You go \w+, into the (\w+)\.", information):
            self.here = walked[1]
        elif taken := re.match(r"You take the (\w+)\.", information):
            self.held = taken[1]
        elif told := re.match(r"You put down the (\w+)\. It tells: (\w+)\.", information):
            self.held = "nothing"
            for errand in self.errands:
                if errand[0] == told[1]:
                    errand[3] = told[2]

    def next_action(self) -> tuple[str, ...]:
        if self.held != "nothing":
            target = next(errand[2] for errand in self.errands if errand[0] == self.held)
            way = route(self.plan, self.here, target)
            return ("go", way[0]) if way else ("put", self.held)
        left = [errand for errand in self.errands if errand[3] == "?"]
        if not left:
            return "answer", "; ".join(errand[3] for errand in self.errands)
        order = best_order(self.plan, self.here, [(errand[1], errand[2]) for errand in left])
        thing, origin = left[order[0]][:2]
        way = route(self.plan, self.here, origin)
        return ("go", way[0]) if way else ("take", thing)


def _read_plan(text: str) -> dict[str, dict[str, str]]:
    return {
        match["room"]: {way: other for way, other in (door.split() for door in match["exits"].split(", "))}
        for match in _ROOM.finditer(text)
    }
