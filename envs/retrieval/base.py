"""What a search gives back, and the protocol of everything that can search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Passage:
    """One document of a corpus; ``score`` is the retriever's, 0 outside a result."""

    id: str
    title: str
    text: str
    score: float = 0.0


class RetrievalError(RuntimeError):
    """The retriever could not be reached or gave nonsense: not the policy's fault; retried, never scored."""


@runtime_checkable
class Retriever(Protocol):
    """Searches a corpus; shared by many environments, so `search` keeps no state that a caller could see."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """For each query its passages, best first: at most ``topk``, fewer or none when fewer match.

        A query is plain text without any syntax; a blank one finds nothing.

        Raises:
            UserError: ``topk`` under 1.
            RetrievalError: the search could not be made.
        """
        ...


def split_contents(contents: str) -> tuple[str, str]:
    """Title and text of a corpus row's ``contents``: the title is the first line, maybe in double quotes."""
    title, _, text = contents.partition("\n")
    title = title.strip()
    if len(title) >= 2 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return title, text.strip()


def render_passages(passages: Sequence[Passage]) -> str:
    """``Doc 1(Title: …) text``, one a line; says so when there is none."""
    if not passages:
        return "No passage matches the query."
    return "\n".join(
        f"Doc {number}(Title: {_one_line(passage.title)}) {_one_line(passage.text)}"
        for number, passage in enumerate(passages, 1)
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())
