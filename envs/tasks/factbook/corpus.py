"""The whole Factbook as passages of prose: one a field of a country, long fields cut at clauses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from envs.retrieval.base import Passage
from envs.tasks.factbook.source import Country, clean
from envs.tasks.factbook.text import clauses, slug

MAX_WORDS = 100
# A field whose sub-fields have more words than this together is shown sub-field by sub-field.
_TOGETHER = 30


def field_id(country: Country, field: str) -> str:
    """Prefix of the ids of a field's passages."""
    return f"{slug(country.name)}/{slug(field)}"


def country_passages(country: Country) -> Iterator[Passage]:
    """Every field of a country as one or more passages; a field that two sections repeat comes once.

    The title is the country's name. The text is country and field, then the sub-fields, each behind its name:
    ``Poland, Coastline: 440 km``; a long field has a passage a sub-field: ``Poland, Capital - name: Warsaw``.
    """
    seen: set[str] = set()
    for fields in country.fields.values():
        for field, node in fields.items():
            field = field.strip()
            if field in seen:
                continue
            seen.add(field)
            number = 0
            for label, body in _bodies(field, node):
                for part in _cut(body, MAX_WORDS - len(label.split())):
                    suffix = f"/{number}" if number else ""
                    yield Passage(
                        field_id(country, field) + suffix, country.name, f"{country.name}, {label}: {part}"
                    )
                    number += 1


def _bodies(field: str, node: Any) -> list[tuple[str, str]]:
    """Label and text of what becomes a passage of its own."""
    body = _flatten(node, field)
    if not body:
        return []
    if not isinstance(node, Mapping) or len(body.split()) <= _TOGETHER:
        return [(field, body)]
    parts = [(key.strip(), _flatten(value, key.strip())) for key, value in node.items()]
    return [(field if key in ("text", field) else f"{field} - {key}", text) for key, text in parts if text]


def _flatten(node: Any, label: str) -> str:
    """``name: Warsaw; geographic coordinates: 52 15 N, 21 00 E`` of nested fields."""
    if isinstance(node, str):
        return clean(node)
    if not isinstance(node, Mapping):
        return ""
    parts = []
    for key, value in node.items():
        key = key.strip()
        text = _flatten(value, key)
        if not text:
            continue
        named = key in ("text", label) or text.lower().startswith((f"{key.lower()}:", "note"))
        parts.append(text if named else f"{key}: {text}")
    return "; ".join(parts)


def _cut(text: str, max_words: int) -> Sequence[str]:
    """Parts of at most ``max_words`` words, cut at clauses; a longer clause is cut at a word."""
    if len(text.split()) <= max_words:
        return [text]
    parts: list[str] = []
    current: list[str] = []
    for clause in clauses(text):
        tokens = clause.split()
        while len(current) + len(tokens) > max_words:
            if not current:
                current, tokens = tokens[:max_words], tokens[max_words:]
            parts.append(" ".join(current))
            current = []
        current += tokens
    if current:
        parts.append(" ".join(current))
    return parts
