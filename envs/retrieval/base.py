"""What a search gives back: a passage, and the protocol of everything that can search."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Passage:
    """One document of a corpus; ``score`` is the retriever's, 0 outside a result."""

    id: str
    title: str
    text: str
    score: float = 0.0
