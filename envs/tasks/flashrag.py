"""Questions in FlashRAG form: ``{"id", "question", "golden_answers": […], "metadata"?: {…}}``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from envs.errors import UserError
from envs.tasks.rows import text_of, texts_of
from envs.tasks.task import Task


def read_flashrag(row: Mapping[str, Any], where: str, identity: str) -> list[Task]:
    """One row as one task.

    Raises:
        UserError: a column is missing or of the wrong kind.
    """
    golds = texts_of(row, "golden_answers", where)
    metadata = _metadata(row.get("metadata"), where)
    return [Task(identity, (text_of(row, "question", where),), (golds,), "", metadata)]


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
