"""What an episode cost, in tokens.

Ours: **TT** (total tokens) is prompt plus completion summed over all turns, every turn's prompt counted in
full, because the context is rewritten each turn; **PT** (peak tokens) is the largest prompt plus completion
of one turn. **Dependency** is the number of (generated token, earlier token it attends to) pairs, after
LightThinker (Zhang et al. 2025), which MEM1 (arXiv 2506.15841) reports: a turn with P prompt and C
completion tokens adds ``C * P + C * (C - 1) / 2``.

MEM1's own peak, for comparison with its tables: the prompt (system and question, which are the whole first
prompt) is left out, and only episodes with a right answer count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class CountedTurn(Protocol):
    """What cost needs to know of a turn."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def memory_tokens(self) -> int: ...
    @property
    def observation_tokens(self) -> int: ...


@dataclass(frozen=True)
class Cost:
    """Token counts of one episode; ``turns`` is a number of turns, ``dependency`` a number of token pairs."""

    turns: int
    total_tokens: int
    peak_tokens: int
    prompt_tokens: int
    completion_tokens: int
    memory_tokens: int
    observation_tokens: int
    dependency: int


def episode_cost(turns: Sequence[CountedTurn]) -> Cost:
    """Cost under our definitions; all 0 for an episode without a turn."""
    prompt = sum(turn.prompt_tokens for turn in turns)
    completion = sum(turn.completion_tokens for turn in turns)
    return Cost(
        turns=len(turns),
        total_tokens=prompt + completion,
        peak_tokens=max((turn.prompt_tokens + turn.completion_tokens for turn in turns), default=0),
        prompt_tokens=prompt,
        completion_tokens=completion,
        memory_tokens=sum(turn.memory_tokens for turn in turns),
        observation_tokens=sum(turn.observation_tokens for turn in turns),
        dependency=sum(
            turn.completion_tokens * turn.prompt_tokens
            + turn.completion_tokens * (turn.completion_tokens - 1) // 2
            for turn in turns
        ),
    )


def mem1_peak(turns: Sequence[CountedTurn]) -> int:
    """Largest context of one turn without the prompt of the first turn (system and question); 0 if no
    turn.
    """
    if not turns:
        return 0
    fixed = turns[0].prompt_tokens
    return max(max(0, turn.prompt_tokens - fixed) + turn.completion_tokens for turn in turns)


def mem1_mean_peak(episodes: Sequence[Sequence[CountedTurn]], right: Sequence[bool]) -> float:
    """Mean of `mem1_peak` over the episodes with a right answer; nan when none is right.

    Raises:
        ValueError: not one flag for each episode.
    """
    if len(episodes) != len(right):
        raise ValueError(f"{len(episodes)} episodes but {len(right)} flags")
    peaks = [mem1_peak(turns) for turns, ok in zip(episodes, right, strict=True) if ok]
    return math.fsum(peaks) / len(peaks) if peaks else math.nan
