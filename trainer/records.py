"""JSONL files that survive a kill: whole rows reach the disk one by one, and half a row is never read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from envs.errors import UserError


class StepLog:
    """One row a training step; each is on the disk when `append` returns.

    Args:
        path: made with its folder when missing.
        start_step: steps that are done. Rows of later steps, and half a row at the end, are cut off: a
            resumed run makes them anew.
    """

    def __init__(self, path: str | Path, start_step: int = 0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = list(read_steps(self.path)) if self.path.exists() else []
        kept = [row for row in rows if row["step"] <= start_step]
        self._last = kept[-1]["step"] if kept else 0
        write_lines(self.path, (_line(row) for row in kept))

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        """Add a row; numbers that are not finite become null.

        Raises:
            ValueError: a step that is not after the last one.
        """
        if step <= self._last:
            raise ValueError(f"{self.path}: step {step} comes after step {self._last}")
        self._last = step
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line({"step": step, **values}))
            file.flush()
            os.fsync(file.fileno())


def read_steps(path: str | Path) -> Iterator[dict[str, Any]]:
    """Rows of a `StepLog` in order; a last line without its end is left out.

    Raises:
        UserError: the file is missing, or a whole line is no row (named with its number).
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist")
    with path.open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{path}, line {number}: no JSON ({error})") from None
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise UserError(f'{path}, line {number}: an object with "step" is needed')
            yield row


def write_lines(path: Path, lines: Iterator[str]) -> None:
    """Replace a file as a whole: the old one or the new one is there, never a part."""
    aside = path.with_name(f".{path.name}.new")
    with aside.open("w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(_finite(row), ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
