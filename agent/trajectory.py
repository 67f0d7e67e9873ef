"""What a rollout leaves behind: turns, trajectories and groups, frozen and checked where they are made.

Every turn is one training row (prompt, completion): the context is rewritten each turn, so turns cannot be
concatenated. Rewards and statistics stay on trajectories. Invariants are checked once, here, so that nothing
downstream has to ask whether lengths agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from envs.tasks.task import Task


@dataclass(frozen=True)
class Turn:
    """One prompt and the completion the policy sampled for it.

    Attributes:
        prompt_ids: tokens the policy read, P of them, P >= 1.
        completion_ids: tokens as the engine returned them, C of them; never decoded and encoded again.
        logprobs: C log-probabilities (nats) under the temperature-scaled sampling distribution.
        sampled: C flags; False marks a token the policy did not sample (it is not trained).
        memory_span: token range ``[start, end)`` of the memory block within ``completion_ids``, tags included;
            None when the turn wrote no well-formed, non-blank memory.
        memory: the text inside that block; None exactly when ``memory_span`` is None.
        text: the decoded completion, for people and for the parser.
        observation: the text the policy read (without the system prompt).
        information: the environment's reply to this turn; empty when the episode ended with it.
        finish: why generation stopped: ``stop``, ``length`` or ``abort``.
        invalid: what was wrong with the action, or None.
        weight_version: version of the weights that sampled.
        query: the search query of this turn's call, or None.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampled: tuple[bool, ...]
    memory_span: tuple[int, int] | None
    memory: str | None
    text: str
    observation: str
    information: str = ""
    finish: str = "stop"
    invalid: str | None = None
    weight_version: int = 0
    query: str | None = None

    def __post_init__(self) -> None:
        count = len(self.completion_ids)
        if not self.prompt_ids:
            raise ValueError("a turn needs at least one prompt token: the first token has no log-prob")
        if not (len(self.logprobs) == len(self.sampled) == count):
            raise ValueError(
                f"turn with {count} completion tokens has {len(self.logprobs)} log-probs and "
                f"{len(self.sampled)} flags; the three must have one length"
            )
        if not (all(map(math.isfinite, self.logprobs)) and max(self.logprobs, default=0.0) <= 1e-6):
            for logprob, sampled in zip(self.logprobs, self.sampled, strict=True):
                if sampled and not (math.isfinite(logprob) and logprob <= 1e-6):
                    raise ValueError(f"log-prob {logprob} of a sampled token is not a finite number <= 0")
        if (self.memory is None) != (self.memory_span is None):
            raise ValueError("memory text and memory span must both be present or both be None")
        if self.memory_span is not None:
            start, end = self.memory_span
            if not 0 <= start < end <= count:
                raise ValueError(f"memory span {self.memory_span} lies outside the {count} completion tokens")


@dataclass(frozen=True)
class Trajectory:
    """One episode. ``reward`` is nan when it could not be scored; such a trajectory is left out of its group.

    Attributes:
        sample: index of this rollout within its group.
        turns: in order; may be empty only when the episode was truncated before the first action.
        reward: R_T.
        scores: named scores of the final answer (``em``, ``f1``, ...), for metrics.
        answer: the final answer's text, or None when none was given.
        stop_reason: ``answer``, ``max_turns``, ``length``, ``window``, ...
        terminated, truncated: as Gymnasium defines them; exactly one is True.
    """

    sample: int
    turns: tuple[Turn, ...]
    reward: float
    stop_reason: str
    terminated: bool
    truncated: bool
    answer: str | None = None
    scores: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.terminated == self.truncated:
            raise ValueError("a finished trajectory is either terminated or truncated, never both or neither")
        if self.answer is not None and self.truncated:
            raise ValueError("an answered episode is terminated, never truncated")

    @property
    def completion_tokens(self) -> int:
        return sum(len(turn.completion_ids) for turn in self.turns)

    @property
    def total_tokens(self) -> int:
        """Prompt and completion tokens over all turns (TT)."""
        return sum(len(turn.prompt_ids) + len(turn.completion_ids) for turn in self.turns)

    @property
    def peak_tokens(self) -> int:
        """The largest prompt plus completion of one turn (PT)."""
        return max((len(turn.prompt_ids) + len(turn.completion_ids) for turn in self.turns), default=0)


@dataclass(frozen=True)
class Group:
    """All rollouts of one task, with the golds that scoring needs."""

    task: Task
    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        samples = [trajectory.sample for trajectory in self.trajectories]
        if not samples:
            raise ValueError(f"group of task {self.task.id!r} is empty")
        if len(set(samples)) != len(samples):
            raise ValueError(f"group of task {self.task.id!r} holds a sample index twice: {samples}")
