"""Forms of question files: which one a file has is seen from its first row's columns, or said by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from envs.errors import UserError
from envs.tasks.conversations import read_locomo, read_longmemeval
from envs.tasks.flashrag import read_flashrag
from envs.tasks.mem1 import read_mem1
from envs.tasks.native import read_hotpotqa, read_musique, read_plain, read_popqa, read_ruler, read_triviaqa
from envs.tasks.rows import Row
from envs.tasks.task import Task

Reader = Callable[[Mapping[str, Any], str, str], list[Task]]


@dataclass(frozen=True)
class Form:
    """``read`` makes tasks of a row that has all of ``columns``; its id is in the first of ``ids`` it has."""

    columns: frozenset[str]
    read: Reader
    ids: tuple[str, ...] = ("id", "_id")


# From the most to the least particular: the first whose columns are all there is taken.
FORMS: dict[str, Form] = {
    "mem1": Form(frozenset(("prompt", "reward_model")), read_mem1, ("id",)),
    "flashrag": Form(frozenset(("id", "question", "golden_answers")), read_flashrag),
    "longmemeval": Form(
        frozenset(("question", "answer", "haystack_sessions")), read_longmemeval, ("question_id",)
    ),
    "locomo": Form(frozenset(("conversation", "qa")), read_locomo, ("sample_id",)),
    "ruler-hqa": Form(frozenset(("context", "input", "answers")), read_ruler, ("id", "index")),
    "musique": Form(frozenset(("question", "answer", "paragraphs")), read_musique),
    "2wiki": Form(frozenset(("question", "answer", "context", "evidences")), read_hotpotqa),
    "hotpotqa": Form(frozenset(("question", "answer", "context", "supporting_facts")), read_hotpotqa),
    "popqa": Form(frozenset(("question", "possible_answers")), read_popqa),
    "triviaqa": Form(frozenset(("question", "question_id", "answer")), read_triviaqa, ("question_id",)),
    "nq-open": Form(frozenset(("question", "answer")), read_plain),
    "bamboogle": Form(frozenset(("Question", "Answer")), read_plain),
}


def detect_form(row: Mapping[str, Any], where: str) -> str:
    """The name of the form of a row.

    Raises:
        UserError: none fits; the message has the columns that there are.
    """
    for name, form in FORMS.items():
        if form.columns <= row.keys():
            return name
    columns = ", ".join(map(str, row)) or "none"
    raise UserError(
        f"{where}: columns {columns} are of no known form; FlashRAG's are id, question, golden_answers "
        f"(forms: {', '.join(FORMS)})"
    )


def tasks_of_rows(rows: Iterable[Row], source: str, place: str, form: str | None = None) -> list[Task]:
    """All tasks of a file or table.

    Args:
        rows: with the place of each.
        source: goes on the tasks, and in front of a row's number where rows have no id.
        place: of the whole, for messages.
        form: a key of `FORMS`; None to see from the first row.

    Raises:
        UserError: no rows, a malformed one, or an id that comes twice.
    """
    tasks: list[Task] = []
    seen: dict[str, str] = {}
    for number, (where, row) in enumerate(rows, 1):
        form = form or detect_form(row, where)
        for task in FORMS[form].read(row, where, _identity(row, FORMS[form], f"{source}/{number}", where)):
            if task.id in seen:
                raise UserError(f"{where}: id {task.id!r} stands already in {seen[task.id]}")
            seen[task.id] = where
            tasks.append(replace(task, source=source))
    if not tasks:
        raise UserError(f"{place}: no questions in it")
    return tasks


def _identity(row: Mapping[str, Any], form: Form, fallback: str, where: str) -> str:
    for column in form.ids:
        if row.get(column) is not None:
            value = row[column]
            if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
                raise UserError(f"{where}: {column} is {value!r}; a text or a whole number is needed")
            return str(value)
    if form.read is read_flashrag:
        raise UserError(f"{where}: id is missing; a text or a whole number is needed")
    return fallback
