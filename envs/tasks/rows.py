"""Rows of a data file, one at a time, each with the place it came from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from envs.errors import UserError

Row = tuple[str, Mapping[str, Any]]
"""Where a row stands (``file, line 3``), and its columns."""


def iterate_rows(path: Path) -> Iterator[Row]:
    """Rows of a ``.jsonl`` or ``.parquet`` file, or of a ``.json`` file that is a list of objects.

    Raises:
        UserError: another kind of file, one that cannot be read, or a malformed row, named by file and line.
    """
    if not path.is_file():
        raise UserError(f"data file {path} does not exist")
    if path.suffix == ".parquet":
        yield from _parquet(path)
    elif path.suffix == ".json":
        yield from _json(path)
    elif path.suffix in (".jsonl", ".ndjson"):
        yield from _jsonl(path)
    else:
        raise UserError(f"data file {path}: the name must end with .jsonl, .json or .parquet")


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}, line {number}"
                yield where, _object(_load(line, where), where)


def _json(path: Path) -> Iterator[Row]:
    data = _load(path.read_bytes(), str(path))
    if not isinstance(data, list):
        raise UserError(f"{path}: a list of objects is needed, not {type(data).__name__}")
    for number, row in enumerate(data, 1):
        where = f"{path}, row {number}"
        yield where, _object(row, where)


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        number = 0
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{path}: not a parquet file that can be read ({str(error).splitlines()[0]})"
        ) from None


def _load(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error})") from None


def _object(row: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise UserError(f"{where}: an object is needed, not {type(row).__name__}")
    return row


def text_of(row: Mapping[str, Any], column: str, where: str) -> str:
    """A column's text, not blank.

    Raises:
        UserError: it is missing, blank or something else.
    """
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: {column} is {_shown(value)}; a text is needed")
    return value.strip()


def texts_of(row: Mapping[str, Any], column: str, where: str) -> tuple[str, ...]:
    """A column's list of texts, without blank and repeated ones; a single text or number counts as a list.

    Raises:
        UserError: it is missing, empty or holds something else.
    """
    value = row.get(column)
    values = value if isinstance(value, list | tuple) else [value]
    texts = []
    for item in values:
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise UserError(f"{where}: {column} holds {_shown(item)}; a list of texts is needed")
        texts.append(str(item).strip())
    kept = tuple(dict.fromkeys(text for text in texts if text))
    if not kept:
        raise UserError(f"{where}: {column} is empty; at least one text is needed")
    return kept


def _shown(value: Any) -> str:
    shown = "missing" if value is None else repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
