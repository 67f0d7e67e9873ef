"""Long conversations with questions about them: LongMemEval and LoCoMo, a session to a chunk."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from envs.errors import UserError
from envs.tasks.rows import text_of, texts_of
from envs.tasks.task import Task

ADVERSARIAL = 5
"""LoCoMo's category of questions that the conversation does not answer."""

NOT_MENTIONED = ("not mentioned", "not mentioned in the conversation", "no information available")
"""Right answers to those, as LoCoMo's evaluation accepts them."""


def read_longmemeval(row: Mapping[str, Any], where: str, identity: str) -> list[Task]:
    """``haystack_sessions`` is a list of sessions, each a list of ``{role, content}``; the answer may be a
    number.

    The day of asking belongs to the question: some ask how long ago something was.
    """
    sessions = row.get("haystack_sessions")
    if not isinstance(sessions, list) or not sessions:
        raise UserError(f"{where}: haystack_sessions is no list of sessions")
    dates = row.get("haystack_dates") or []
    chunks = []
    for number, session in enumerate(sessions, 1):
        place = f"{where}, session {number}"
        turns = _turns(session, "role", "content", place)
        date = f" ({dates[number - 1]})" if number <= len(dates) else ""
        chunks.append("\n".join([f"Session {number}{date}.", *turns]))
    question = text_of(row, "question", where)
    if isinstance(row.get("question_date"), str):
        question += f" (Asked on {row['question_date']}.)"
    kind = row.get("question_type")
    metadata = {"chunks": tuple(chunks), "type": kind if isinstance(kind, str) else ""}
    return [Task(identity, (question,), (texts_of(row, "answer", where),), "", metadata)]


def read_locomo(row: Mapping[str, Any], where: str, identity: str) -> list[Task]:
    """One conversation with all its questions; those of category 5 have no answer, which is to be said."""
    conversation = row.get("conversation")
    if not isinstance(conversation, Mapping):
        raise UserError(f"{where}: conversation is no object with sessions")
    # A table has every column for every row, so a conversation may have empty sessions at its end.
    numbers = sorted(
        int(match[1])
        for key, session in conversation.items()
        if session is not None and (match := re.fullmatch(r"session_(\d+)", key))
    )
    chunks = []
    for number in numbers:
        turns = _turns(conversation[f"session_{number}"], "speaker", "text", f"{where}, session {number}")
        date = conversation.get(f"session_{number}_date_time")
        chunks.append("\n".join([f"Session {number}{f' ({date})' if date else ''}.", *turns]))
    if not chunks:
        raise UserError(f"{where}: conversation has no session_1, session_2, …")
    asked = row.get("qa")
    if not isinstance(asked, list) or not asked:
        raise UserError(f"{where}: qa is no list of questions")
    shared = tuple(chunks)
    tasks = []
    for number, item in enumerate(asked, 1):
        place = f"{where}, question {number}"
        if not isinstance(item, Mapping):
            raise UserError(f"{place}: an object is needed")
        category = item.get("category")
        metadata: dict[str, Any] = {"chunks": shared, "category": category}
        if category == ADVERSARIAL:
            golds: tuple[str, ...] = NOT_MENTIONED
            metadata["adversarial_answer"] = item.get("adversarial_answer") or item.get("answer")
        else:
            golds = texts_of(item, "answer", place)
        tasks.append(
            Task(f"{identity}/{number}", (text_of(item, "question", place),), (golds,), "", metadata)
        )
    return tasks


def _turns(session: Any, speaker: str, text: str, where: str) -> Sequence[str]:
    """``name: what was said`` for each turn, a shared picture by its caption."""
    if not isinstance(session, list):
        raise UserError(f"{where}: a list of turns is needed, not {type(session).__name__}")
    lines = []
    for number, turn in enumerate(session, 1):
        if not isinstance(turn, Mapping):
            raise UserError(f"{where}, turn {number}: an object with {speaker} and {text} is needed")
        said = turn.get(text)
        picture = turn.get("blip_caption")
        shown = f" [shares a picture: {picture}]" if isinstance(picture, str) and picture else ""
        if not isinstance(said, str):
            raise UserError(f"{where}, turn {number}: {text} is missing")
        lines.append(f"{text_of(turn, speaker, f'{where}, turn {number}')}: {' '.join(said.split())}{shown}")
    return lines
