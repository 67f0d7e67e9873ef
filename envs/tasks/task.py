"""One episode's question and what counts as right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Task:
    """A question (or several, asked in one episode) with its gold answers.

    Golds are privileged: they travel with the task to scoring and never into an observation.

    Attributes:
        id: stable and unique within its source.
        questions: the objectives in order; one for single-question tasks.
        golds: for each objective the accepted answers (aliases), best form first.
        source: where the task came from, e.g. ``factbook/train``.
        metadata: whatever the source knows beside that (hops, supporting passages, decomposition).
    """

    id: str
    questions: tuple[str, ...]
    golds: tuple[tuple[str, ...], ...]
    source: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.questions or len(self.questions) != len(self.golds):
            raise ValueError(
                f"task {self.id!r}: {len(self.questions)} questions but {len(self.golds)} lists of golds; "
                "one non-empty list of golds for each question is needed"
            )
        if any(not golds for golds in self.golds):
            raise ValueError(f"task {self.id!r}: an objective without a gold answer cannot be scored")

    @property
    def question(self) -> str:
        """The objectives joined as MEM1 does: ``q1; q2``."""
        return "; ".join(self.questions)

    @property
    def gold_answer(self) -> str:
        """The answer in the form it has inside ``<answer>``: first gold of each objective, ``a1; a2``."""
        return "; ".join(golds[0] for golds in self.golds)
