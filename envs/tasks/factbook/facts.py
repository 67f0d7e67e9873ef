"""Relations: how one field of a country's file becomes a fact with a short, verbatim answer.

A relation that finds nothing clean in a value returns None, and the fact does not exist. The traps of the
source are met here: several capitals, ``;`` alternatives, parenthesised local names, ``note:`` tails,
"unnamed elevation", currencies without a code.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from envs.tasks.factbook.source import Country, lower_surnames, without_note

_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_PAREN = re.compile(r"\s*\(([^()]*)\)")


@dataclass(frozen=True)
class Reading:
    """What a relation reads from a value: ``head`` is the text to show, with ``answer`` verbatim in it."""

    answer: str
    head: str
    aliases: tuple[str, ...] = ()


Extract = Callable[[str], Reading | None]
# Pairs of a label (may be empty) and a path.
Fillers = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Relation:
    """One kind of fact.

    Attributes:
        key: stable name in ids.
        phrase: how a question names it (``What is the {phrase} of Poland?``).
        marker: what the passage begins with, in front of ``: ``.
        path: where the value stands in the country's file.
        extract: reads it.
        fillers: fields whose clauses may follow in the passage, each behind its label.
        inverse: whether its value may stand for the country in a question (when unique).
        search: words to search for; empty means those that the world's own rule gives.
    """

    key: str
    phrase: str
    marker: str
    path: str
    extract: Extract
    fillers: Fillers
    inverse: bool = False
    search: str = ""


@dataclass(frozen=True)
class Fact:
    """``relation`` of ``country`` is ``answer``; ``aliases`` count as right too."""

    country: Country
    relation: Relation
    answer: str
    aliases: tuple[str, ...]
    head: str


def read_facts(country: Country, relations: tuple[Relation, ...]) -> list[Fact]:
    """Every relation's fact about one country, where its value is clean."""
    facts = []
    for relation in relations:
        value = country.value(relation.path)
        reading = relation.extract(value) if value and value.lower() not in ("none", "na") else None
        if reading is not None:
            facts.append(Fact(country, relation, reading.answer, reading.aliases, reading.head))
    return facts


def _tidy(head: str) -> str:
    return without_note(head).rstrip(" -;,.:")


def _aliases(answer: str, *more: str) -> tuple[str, ...]:
    """Obvious other forms: without a leading article, with a parenthesised second name on its own."""
    forms: list[str] = []
    for form in more:
        form = form.strip(" ,\"'")
        if form and form != answer and form not in forms:
            forms.append(form)
    return tuple(forms)


def read_capital(value: str) -> Reading | None:
    head = _tidy(without_note(value).split(";")[0])
    answer = _PAREN.sub("", head).strip()
    if "capital" in head or " in " in answer or answer.startswith(("no ", "administered")):
        return None
    if "," in answer and answer != "Washington, D.C.":
        return None
    inner = _PAREN.search(head)
    other = inner.group(1) if inner and re.fullmatch(r"[A-Z][\w' -]+", inner.group(1)) else ""
    short = answer.split(",")[0]
    return Reading(answer, head, _aliases(answer, other, short))


def read_elevation(value: str) -> Reading | None:
    match = re.match(r"(?P<name>\D+?),?\s+(?P<height>-?[\d,.]+)(?:\s*m\b)?", value)
    if not match:
        return None
    name = match["name"].strip()
    answer = re.split(r"\s*\(|\s+on\s+|,\s+|\s+at\s+|/", name)[0].strip()
    if re.match(r"(unnamed|near|junction|along|reclaimed|ocean|coastal)", name) or not answer[:1].isupper():
        return None
    if re.search(r"\b(and|of Mount|summit|pre-eruption|unnamed|more than)\b", name):
        return None
    if "/" in name and re.search(r"\b(Seas?|Oceans?|Bay)\b", name):
        return None
    inner = _PAREN.search(name)
    other = inner.group(1) if inner and re.fullmatch(r"[A-Z][\w' .-]+", inner.group(1)) else ""
    return Reading(answer, f"{name} {match['height'].rstrip(',.')} m", _aliases(answer, other, name))


def read_anthem(value: str) -> Reading | None:
    value = value.replace("“", '"').replace("”", '"')
    titles = re.findall(r'"([^"]+)"', value)
    match = re.match(r'"([^"]+)"\s*(?:\(([^()]+)\))?', value)
    if not match or len(titles) != 1 or ";" in match[1]:
        return None
    return Reading(match[1], match[0].strip(), _aliases(match[1], match[2] or ""))


def read_currency(value: str) -> Reading | None:
    match = re.match(r"([^()/,]+?)\s*(?:\(([A-Z]{2,3})\))?\s*per US dollar", value)
    if not match or " or " in match[1]:
        return None
    code = match[2] or ""
    singular = match[1][:-1] if match[1].endswith("s") and not match[1].endswith("ss") else ""
    both = f"{match[1]} ({code})" if code else ""
    return Reading(match[1], match[0], _aliases(match[1], singular, both, code))


def read_full(pattern: str) -> Extract:
    """The whole value, when it has one plain form."""

    def extract(value: str) -> Reading | None:
        value = _tidy(value)
        return Reading(value, value) if re.fullmatch(pattern, value) else None

    return extract


def read_domain(value: str) -> Reading | None:
    match = re.fullmatch(r"\.([a-z]{2})", value)
    return Reading(value, value, (match[1],)) if match else None


def read_date(value: str) -> Reading | None:
    match = re.match(rf"(\d{{1,2}} (?:{_MONTHS}) \d{{3,4}})\b", value)
    if not match:
        return None
    month_first = re.sub(r"(\d+) (\w+) (\d+)", r"\2 \1, \3", match[1])
    return Reading(match[1], _tidy(value.split(";")[0]), (month_first,))


def read_holiday(value: str) -> Reading | None:
    value = lower_surnames(value)
    match = re.match(
        rf"([^,:;()]+?)(?:\s\(([^)]*)\))?, (\d{{1,2}} (?:{_MONTHS}))\b(?: \(\d{{3,4}}\))?", value
    )
    if not match or match[1].startswith("Official"):
        return None
    other = match[2] if match[2] and re.fullmatch(r"[A-Z][\w' -]+ (?:Day|Holiday)", match[2]) else ""
    return Reading(match[1], match[0], _aliases(match[1], other))


def read_first(separators: str) -> Extract:
    """The first item of a list; the items after it stay visible."""

    def extract(value: str) -> Reading | None:
        value = _tidy(value.split(";")[0])
        answer = re.split(separators, value)[0].strip()
        if not answer or "%" in answer or answer.startswith("highly"):
            return None
        return Reading(answer, value, _aliases(answer))

    return extract


def read_symbol(value: str) -> Reading | None:
    head = _tidy(value.split(";")[0])
    answer = _PAREN.sub("", head).strip()
    if ":" in head or " or " in head or answer.startswith(("no ", "the ")) or "," in answer:
        return None
    bare = re.sub(r"^(?:an?|the) ", "", answer)
    return Reading(answer, head, _aliases(answer, bare)) if answer and answer in head else None


def read_legislature(value: str) -> Reading | None:
    head = _tidy(value.split(";")[0])
    answer = _PAREN.sub("", head).strip()
    if not answer or " or " in head or " - " in head or not head.startswith(answer):
        return None
    inner = _PAREN.search(head)
    return Reading(answer, head, _aliases(answer, head, inner.group(1) if inner else ""))


def read_single_name(value: str) -> Reading | None:
    value = _tidy(value)
    return Reading(value, value) if re.fullmatch(r"[\w' -]+", value) and " or " not in value else None


def read_former(value: str) -> Reading | None:
    head = _tidy(_PAREN.sub("", value).split(";")[0])
    names = [name.strip() for name in head.split(",")]
    if not names[0] or not all(re.fullmatch(r"[A-Z][\w' /-]+", name) for name in names):
        return None
    return Reading(names[0], names[0], _aliases(names[0], head, *names[1:]))


def read_number(unit: str) -> Extract:
    """A number with its unit (or none), golds with and without the unit and the separators."""

    def extract(value: str) -> Reading | None:
        match = re.match(rf"([\d,]+(?:\.\d+)?){unit}(?=\s|;|$)", value)
        if not match or match[1] in ("0", "1", "2", "3"):
            return None
        return Reading(match[0], _tidy(value.split(";")[0]), _aliases(match[0], match[1]))

    return extract
