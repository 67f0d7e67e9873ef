"""Training rows in MEM1's form, which MemPO's released data follows: several questions joined with ``;`` in a
prompt.

``prompt`` (a chat or a text whose last ``Question:`` or ``Questions:`` is followed by the questions),
``reward_model.ground_truth.target`` (for each question the list of its golds), ``extra_info``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from envs.errors import UserError
from envs.tasks.rows import texts_of
from envs.tasks.task import Task

_ASKED = re.compile(r"questions?\s*:", re.IGNORECASE)
# A question may hold a semicolon, so one that follows a question mark is believed first.
_SEPARATORS = (r"(?<=\?)\s*;\s*", r";\s+", r";")


def read_mem1(row: Mapping[str, Any], where: str, identity: str) -> list[Task]:
    """One row as one task with as many questions as it has golds.

    Raises:
        UserError: a column is missing, or the number of questions is not the number of golds.
    """
    golds = _golds(row, where)
    questions = _questions(_prompt(row, where), len(golds), where)
    metadata: dict[str, Any] = {}
    if isinstance(row.get("context"), str) and row["context"].strip():
        metadata["text"] = row["context"]
    return [Task(identity, questions, golds, "", metadata)]


def _golds(row: Mapping[str, Any], where: str) -> tuple[tuple[str, ...], ...]:
    value: Any = row.get("reward_model")
    value = _loaded(value)
    value = value.get("ground_truth") if isinstance(value, Mapping) else None
    value = _loaded(value)
    value = value.get("target", value) if isinstance(value, Mapping) else value
    if isinstance(value, str | int | float):
        value = [value]
    if not isinstance(value, list) or not value:
        raise UserError(
            f"{where}: reward_model.ground_truth.target is missing; a list of lists of golds is needed"
        )
    if not any(isinstance(golds, list) for golds in value):
        value = [value]  # the golds of a single question
    return tuple(
        texts_of({"target": golds}, "target", f"{where}, objective {n}") for n, golds in enumerate(value, 1)
    )


def _loaded(value: Any) -> Any:
    """A text that is JSON (an object or a list) as what it says."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _prompt(row: Mapping[str, Any], where: str) -> str:
    prompt = _loaded(row.get("prompt"))
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], Mapping):
        prompt = prompt[-1].get("content")
    if not isinstance(prompt, str) or not prompt.strip():
        raise UserError(f"{where}: prompt is neither a text nor a chat")
    return prompt


def _questions(prompt: str, count: int, where: str) -> tuple[str, ...]:
    starts = [match.end() for match in _ASKED.finditer(prompt)]
    asked = prompt[starts[-1] :] if starts else prompt
    asked = asked.strip().rstrip(";").strip()
    if count == 1 and asked:
        return (asked,)
    for separator in _SEPARATORS:
        parts = tuple(part.strip() for part in re.split(separator, asked) if part.strip())
        if len(parts) == count:
            return parts
    raise UserError(
        f"{where}: the prompt does not split into {count} questions at ';', but there are {count} golds"
    )
