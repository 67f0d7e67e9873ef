"""Does the agent need its memory? Blank it, or swap it for another episode's, and see whether the score
falls.

The wrapper edits what the environment is told the policy wrote: the memory block of each action is replaced
before the environment sees it, so it carries the edited memory into the next observation. The policy's own
text, which is what gets recorded, stays as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import gymnasium as gym

from agent.seeds import derive
from envs.errors import UserError, did_you_mean
from envs.grammar import parse_turn
from eval.episode import Sample

Memory = Literal["keep", "blank", "swap"]


def check_mode(mode: str, donors: Sequence[Sample] | None) -> None:
    """Refuse a mode that is none, and a swap without episodes to take memories from."""
    if mode not in get_args(Memory):
        raise UserError(
            f"memory is {mode!r}; 'keep', 'blank' or 'swap' is needed{did_you_mean(mode, get_args(Memory))}"
        )
    if mode == "swap" and not any(turn.memory for donor in donors or () for turn in donor.turns):
        raise UserError("memory 'swap' needs the episodes of a run with memory 'keep' that wrote some memory")


class MemoryIntervention(gym.Wrapper[str, str, str, str]):
    """Replaces the memory written at turn t (from 0) by ``replacements[t]``; the last one also serves later
    turns.

    With no replacement the memory is blanked, which carries nothing. An action without a well-formed memory
    block passes unchanged: there is nothing to take away.
    """

    def __init__(self, env: gym.Env[str, str], replacements: Sequence[str] = ()) -> None:
        super().__init__(env)
        self._replacements = tuple(replacements)
        self._turn = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._turn = 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        replacement = ""
        if self._replacements:
            replacement = self._replacements[min(self._turn, len(self._replacements) - 1)]
        self._turn += 1
        observation, reward, terminated, truncated, info = self.env.step(replace_memory(action, replacement))
        return observation, float(reward), terminated, truncated, info


def replace_memory(action: str, memory: str) -> str:
    """`action` with the inner text of its memory block replaced; unchanged when it has none."""
    span = parse_turn(action).memory_span
    if span is None:
        return action
    return f"{action[: span[0]]}<mem>{memory}</mem>{action[span[1] :]}"


def swapped_memories(
    donors: Mapping[str, Sequence[Sample]], task_id: str, sample: int, seed: int
) -> tuple[str, ...]:
    """The memories, turn by turn, of one seeded episode of another task; empty (blank) when there is no
    other.

    A turn in which the donor wrote none takes its memory of the turn before.
    """
    others = [key for key in donors if key != task_id]
    if not others:
        return ()
    pick = derive(seed, "swap", task_id, sample)
    episodes = donors[others[pick % len(others)]]
    episode = episodes[(pick // len(others)) % len(episodes)]
    memories: list[str] = []
    for turn in episode.turns:
        memories.append(turn.memory or (memories[-1] if memories else ""))
    return tuple(memories)


def donors_by_task(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Episodes that wrote any memory, by task, in a fixed order whatever order they finished in."""
    found: dict[str, list[Sample]] = {}
    for sample in sorted(samples, key=lambda row: (row.task_id, row.sample)):
        if any(turn.memory for turn in sample.turns):
            found.setdefault(sample.task_id, []).append(sample)
    return found
