"""A corpus on disk: JSON lines of ``{"id", "contents"}``, read by row without holding it in memory."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envs.errors import UserError
from envs.retrieval.base import Passage, split_contents

_CHUNK = 1 << 20


def read_row(line: bytes | str, where: str) -> Passage:
    """One corpus row: ``contents``, or ``title`` and ``text``; the id may be a number.

    Raises:
        UserError: not such a row; ``where`` (file and line) is in the message.
    """
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not a line of JSON ({error})") from None
    if not isinstance(row, dict):
        raise UserError(f'{where}: a corpus row is an object {{"id", "contents"}}, not {type(row).__name__}')
    identity = row.get("id", row.get("_id", row.get("docid")))
    if isinstance(identity, bool) or not isinstance(identity, str | int):
        raise UserError(f"{where}: the row has no id (text or whole number)")
    if isinstance(row.get("contents"), str):
        title, text = split_contents(row["contents"])
    elif isinstance(row.get("text"), str):
        title, text = str(row.get("title") or ""), row["text"]
    else:
        raise UserError(f"{where}: the row has no contents (title, newline, text)")
    return Passage(str(identity), title, text)


def iterate_passages(path: Path) -> Iterator[Passage]:
    """All passages of a file in order. Blank lines are skipped.

    Raises:
        UserError: a malformed row, named by file and line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield read_row(line, f"{path}, line {number}")


def line_starts(path: Path) -> np.ndarray:
    """Byte offsets of the non-blank lines, int64, and the file's size at the end: (rows + 1,)."""
    starts = []
    position = 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                starts.append(position)
            position += len(line)
    return np.array([*starts, position], dtype=np.int64)


def file_digest(path: Path) -> str:
    """sha256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


class MappedCorpus(Sequence[Passage]):
    """Rows of a corpus file by number, memory-mapped: only what is read takes memory."""

    def __init__(self, path: Path, starts: np.ndarray) -> None:
        self._path = path
        self._starts = starts
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a corpus with {len(self)}")
        row %= len(self)
        line = self._bytes[int(self._starts[row]) : int(self._starts[row + 1])]
        return read_row(line, f"{self._path}, row {row + 1}")

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedCorpus, (self._path, np.asarray(self._starts))
