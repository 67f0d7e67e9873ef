"""Rows of question-answering data sets in their own columns, each as tasks.

A reader takes a row, where it stands, and an id to use when the row has none; it raises UserError naming the
place when the row is not of its form. Golds are the value and its aliases together, always. Paragraphs that
come with a question are kept as ``passages`` with the ids of the ``supporting`` ones, so that they can be
searched or streamed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from envs.errors import UserError
from envs.retrieval.base import Passage
from envs.tasks.rows import text_of, texts_of
from envs.tasks.task import Task

Row = Mapping[str, Any]


def read_hotpotqa(row: Row, where: str, identity: str) -> list[Task]:
    """HotpotQA and 2WikiMultihopQA, as first released (lists of pairs) and on the hub (columns of lists)."""
    titles = _pairs(row, "context", "title", "sentences", where)
    support = _pairs(row, "supporting_facts", "title", "sent_id", where)
    passages = []
    for number, (title, sentences) in enumerate(titles):
        if not isinstance(sentences, Sequence) or not all(
            isinstance(sentence, str) for sentence in sentences
        ):
            raise UserError(f"{where}: context of {title!r} is no list of sentences")
        text = (
            sentences if isinstance(sentences, str) else " ".join(sentence.strip() for sentence in sentences)
        )
        passages.append(Passage(f"{identity}#{number}", str(title), text))
    needed = {str(title) for title, _ in support}
    metadata = {
        "passages": tuple(passages),
        "supporting": tuple(passage.id for passage in passages if passage.title in needed),
        **{key: row[key] for key in ("type", "level") if isinstance(row.get(key), str)},
    }
    return [_task(identity, text_of(row, "question", where), texts_of(row, "answer", where), metadata)]


def read_musique(row: Row, where: str, identity: str) -> list[Task]:
    """MuSiQue; a row that is marked as not answerable gives no task."""
    if row.get("answerable") is False:
        return []
    golds = texts_of(row, "answer", where)
    if row.get("answer_aliases"):
        golds = tuple(dict.fromkeys((*golds, *texts_of(row, "answer_aliases", where))))
    passages, supporting = [], []
    for number, paragraph in enumerate(_list(row, "paragraphs", where)):
        if not isinstance(paragraph, Mapping):
            raise UserError(f"{where}: paragraphs holds {type(paragraph).__name__}; objects are needed")
        place = f"{where}, paragraph {number + 1}"
        passage = Passage(
            f"{identity}#{number}",
            text_of(paragraph, "title", place),
            text_of(paragraph, "paragraph_text", place),
        )
        passages.append(passage)
        if paragraph.get("is_supporting"):
            supporting.append(passage.id)
    metadata = {"passages": tuple(passages), "supporting": tuple(supporting)}
    if row.get("question_decomposition"):
        metadata["decomposition"] = row["question_decomposition"]
    return [_task(identity, text_of(row, "question", where), golds, metadata)]


def read_triviaqa(row: Row, where: str, identity: str) -> list[Task]:
    """TriviaQA: ``answer`` has ``value`` and ``aliases``."""
    answer = row.get("answer")
    if not isinstance(answer, Mapping):
        raise UserError(f"{where}: answer is no object with value and aliases")
    golds = texts_of(answer, "value", f"{where}, answer")
    if answer.get("aliases"):
        golds = tuple(dict.fromkeys((*golds, *texts_of(answer, "aliases", f"{where}, answer"))))
    return [_task(identity, text_of(row, "question", where), golds, {})]


def read_popqa(row: Row, where: str, identity: str) -> list[Task]:
    """PopQA: ``possible_answers`` is a list, written as JSON in a text."""
    answers = _parsed(row, "possible_answers", where)
    golds = texts_of({"possible_answers": answers}, "possible_answers", where)
    return [_task(identity, text_of(row, "question", where), golds, {})]


def read_plain(row: Row, where: str, identity: str) -> list[Task]:
    """NQ-open (``answer`` is a list), Bamboogle (``Question``, ``Answer``), and what else has these two."""
    lower = {key.lower(): value for key, value in row.items()}
    return [_task(identity, text_of(lower, "question", where), texts_of(lower, "answer", where), {})]


def read_ruler(row: Row, where: str, identity: str) -> list[Task]:
    """RULER-HQA in MemAgent's form: ``context`` of ``Document i:`` blocks, ``input``, ``answers``."""
    golds = texts_of(row, "answers" if "answers" in row else "outputs", where)
    metadata = {"text": text_of(row, "context", where)}
    return [_task(identity, text_of(row, "input", where), golds, metadata)]


def _task(identity: str, question: str, golds: tuple[str, ...], metadata: Mapping[str, Any]) -> Task:
    return Task(identity, (question,), (golds,), "", metadata)


def _parsed(row: Row, column: str, where: str) -> Any:
    """A column's value; a text is read as JSON."""
    value = row.get(column)
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise UserError(f"{where}: {column} is a text that is not JSON") from None
    return value


def _list(row: Row, column: str, where: str) -> Sequence[Any]:
    value = _parsed(row, column, where)
    if not isinstance(value, list | tuple):
        raise UserError(f"{where}: {column} is no list")
    return value


def _pairs(row: Row, column: str, first: str, second: str, where: str) -> list[tuple[Any, Any]]:
    """``[[a, b], …]`` or ``{first: [a, …], second: [b, …]}`` as pairs; a missing column has none."""
    value = _parsed(row, column, where)
    if value is None:
        return []
    if isinstance(value, Mapping):
        ones, others = value.get(first), value.get(second)
        if isinstance(ones, list) and isinstance(others, list) and len(ones) == len(others):
            return list(zip(ones, others, strict=True))
    elif isinstance(value, list) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value):
        return [(pair[0], pair[1]) for pair in value]
    raise UserError(f"{where}: {column} has neither pairs nor the columns {first} and {second} of one length")
