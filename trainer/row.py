"""A row to train on, and the numbers of many rows as flat tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """One turn to train on. The C-long fields follow ``completion_ids``; lengths are checked here, once.

    Attributes:
        prompt_ids: P tokens the policy read, P >= 1.
        completion_ids: C tokens as sampled.
        sampled: C flags; False marks a token that is not trained (its other entries are never read).
        advantages: C summed advantages.
        old_logprobs: C log-probs as the engine reported them.
        question: index of the question (group) within the update; mini-batches are made of questions.
        trajectory: index of the trajectory within the update, unique over questions.
        turn: index of the turn within its trajectory.
        ref_logprobs: C log-probs under the reference policy, or None: the learner computes them.
        memory_advantages: C advantages of a second clipped loss (two-loss variant), or None.
        rewards: C rewards by token (PPO with a critic), or None.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    sampled: tuple[bool, ...]
    advantages: tuple[float, ...]
    old_logprobs: tuple[float, ...]
    question: int
    trajectory: int
    turn: int
    ref_logprobs: tuple[float, ...] | None = None
    memory_advantages: tuple[float, ...] | None = None
    rewards: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("a row needs at least one prompt token: the first token has no log-prob")
        count = len(self.completion_ids)
        for name in ("sampled", "advantages", "old_logprobs", "ref_logprobs", "memory_advantages", "rewards"):
            field = getattr(self, name)
            if field is not None and len(field) != count:
                raise ValueError(
                    f"row with {count} completion tokens has {len(field)} {name}; one a token is needed"
                )

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def trained_tokens(self) -> int:
        return sum(self.sampled)

    @property
    def has_signal(self) -> bool:
        """Whether any trained token has an advantage other than 0."""
        second = self.memory_advantages or (0.0,) * len(self.advantages)
        return any(
            sampled and (first != 0.0 or other != 0.0)
            for sampled, first, other in zip(self.sampled, self.advantages, second, strict=True)
        )


@dataclass(frozen=True)
class FlatRows:
    """The numbers of all trained tokens of some rows, as ``(N,)`` tensors in the rows' order.

    Attributes:
        offsets: where each row's tokens start; one more entry at the end, N.
        row: row index of each token.
        advantages, engine_logprobs: by token.
        ref_logprobs, memory_advantages, rewards: by token, or None when no row has them.
        trajectory_tokens: trained tokens of the trajectory each token belongs to, over all its turns.
    """

    offsets: tuple[int, ...]
    row: Tensor
    advantages: Tensor
    engine_logprobs: Tensor
    ref_logprobs: Tensor | None
    memory_advantages: Tensor | None
    rewards: Tensor | None
    trajectory_tokens: Tensor

    def index(self, rows: Sequence[int]) -> Tensor:
        """Positions of the tokens of ``rows``, in that order."""
        ranges = [torch.arange(self.offsets[row], self.offsets[row + 1]) for row in rows]
        return torch.cat(ranges) if ranges else torch.zeros(0, dtype=torch.long)


def flatten(rows: Sequence[Row], dtype: torch.dtype = torch.float32) -> FlatRows:
    """Gather the trained tokens' numbers of rows.

    Raises:
        ValueError: some rows have reference log-probs (or memory advantages) and others have not.
    """
    offsets = [0]
    owners: list[int] = []
    counts: dict[int, int] = {}
    for index, row in enumerate(rows):
        trained = row.trained_tokens
        offsets.append(offsets[-1] + trained)
        owners.extend([index] * trained)
        counts[row.trajectory] = counts.get(row.trajectory, 0) + trained

    def gather(name: str) -> Tensor | None:
        fields = [getattr(row, name) for row in rows]
        if all(field is None for field in fields):
            return None
        if any(field is None for field in fields):
            raise ValueError(f"some rows have {name} and others have not: all or none is needed")
        return torch.tensor(
            [
                value
                for field, row in zip(fields, rows, strict=True)
                for value, sampled in zip(field, row.sampled, strict=True)
                if sampled
            ],
            dtype=dtype,
        )

    advantages, engine = gather("advantages"), gather("old_logprobs")
    empty = torch.zeros(0, dtype=dtype)
    return FlatRows(
        offsets=tuple(offsets),
        row=torch.tensor(owners, dtype=torch.long),
        advantages=empty if advantages is None else advantages,
        engine_logprobs=empty if engine is None else engine,
        ref_logprobs=gather("ref_logprobs"),
        memory_advantages=gather("memory_advantages"),
        rewards=gather("rewards"),
        trajectory_tokens=torch.tensor(
            [counts[rows[owner].trajectory] for owner in owners], dtype=torch.long
        ),
    )
