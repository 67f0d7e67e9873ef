"""A long text as pieces of limited size, cut where a reader would cut."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from envs.errors import UserError
from envs.retrieval.base import render_passages
from envs.tasks.task import Task

_SENTENCE = re.compile(r"(?<=[.!?;。！？])\s+")


def split_text(text: str, size: int) -> list[str]:
    """Pieces of at most ``size`` characters that together hold all of the text but white space at the cuts.

    Lines stay whole where they fit; longer ones are cut between sentences, else between words, else anywhere.
    Blank lines are left out.

    Raises:
        UserError: ``size`` under 1.
    """
    if size < 1:
        raise UserError(f"size is {size}; pieces of at least 1 character are needed")
    return list(_pack(_fitting_lines(text, size), size, "\n"))


def _fitting_lines(text: str, size: int) -> Iterator[str]:
    for line in text.splitlines():
        line = line.strip()
        if len(line) <= size:
            yield line
        else:
            yield from _pack(_fitting_parts(line, size), size, " ")


def _fitting_parts(line: str, size: int) -> Iterator[str]:
    for sentence in _SENTENCE.split(line):
        if len(sentence) <= size:
            yield sentence
            continue
        for word in sentence.split():
            for start in range(0, len(word), size):
                yield word[start : start + size]


def _pack(parts: Iterable[str], size: int, joiner: str) -> Iterator[str]:
    """As many neighbouring parts together as fit."""
    piece = ""
    for part in parts:
        if not part:
            continue
        if piece and len(piece) + len(joiner) + len(part) > size:
            yield piece
            piece = part
        else:
            piece = f"{piece}{joiner}{part}" if piece else part
    if piece:
        yield piece


def chunks_of(task: Task, size: int) -> list[str]:
    """What a stream of a task shows, in order.

    Args:
        task: with one of these in its metadata: ``text`` (str), ``chunks`` (texts that begin a new piece
            each, such as sessions), ``passages`` (`Passage` objects).
        size: characters of a piece at most.

    Raises:
        UserError: the task carries nothing to read.
    """
    metadata = task.metadata
    if metadata.get("chunks"):
        found = [piece for chunk in metadata["chunks"] for piece in split_text(chunk, size)]
    elif metadata.get("passages"):
        found = split_text(render_passages(metadata["passages"]), size)
    else:
        found = split_text(str(metadata.get("text") or ""), size)
    if not found:
        raise UserError(
            f"task {task.id!r} from {task.source or 'nowhere'} has nothing to read: "
            "text, chunks or passages in its metadata"
        )
    return found
