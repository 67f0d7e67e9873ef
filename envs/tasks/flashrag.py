"""Questions in FlashRAG form: ``{"id", "question", "golden_answers": […], "metadata"?: {…}}``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envs.errors import UserError
from envs.tasks.rows import iterate_rows, text_of, texts_of
from envs.tasks.task import Task


def read_tasks(path: Path) -> list[Task]:
    """All tasks of a ``.jsonl``, ``.json`` or ``.parquet`` file.

    Raises:
        UserError: a missing or empty file, a malformed row or an id that comes twice, named by file and line.
    """
    tasks: list[Task] = []
    seen: dict[str, str] = {}
    for where, row in iterate_rows(path):
        task = read_task(row, where, source=path.stem)
        if task.id in seen:
            raise UserError(f"{where}: id {task.id!r} stands already in {seen[task.id]}")
        seen[task.id] = where
        tasks.append(task)
    if not tasks:
        raise UserError(f"{path}: no questions in it")
    return tasks


def read_task(row: Mapping[str, Any], where: str, source: str) -> Task:
    """One row as a task; ``source`` goes on the task.

    Raises:
        UserError: a column is missing or of the wrong kind.
    """
    identity = row.get("id")
    if isinstance(identity, bool) or not isinstance(identity, str | int) or identity == "":
        raise UserError(f"{where}: id is {identity!r}; a text or a whole number is needed")
    return Task(
        id=str(identity),
        questions=(text_of(row, "question", where),),
        golds=(texts_of(row, "golden_answers", where),),
        source=source,
        metadata=_metadata(row.get("metadata"), where),
    )


def _metadata(value: Any, where: str) -> dict[str, Any]:
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise UserError(f"{where}: metadata is a text that is not JSON; an object is needed") from None
    if not isinstance(value, dict):
        raise UserError(f"{where}: metadata is a {type(value).__name__}; an object is needed")
    return value
