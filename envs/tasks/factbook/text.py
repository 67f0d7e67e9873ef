"""Words, clauses and leaks: pure text rules that the world is built and filtered with."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

# What a bag-of-words search drops, and question words: they tell no passage from another.
STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a an and are as at be but by for from has have if in into is it its no not of on or such that the "
        "their then there these they this to was were what when where which who whose will with",
    )
)
_WORD = re.compile(r"\w+")
_CLAUSE_END = re.compile(r"(?<=[;.!?])\s+|(?<=,)\s+(?=[a-z0-9])")


def words(text: str) -> list[str]:
    """Lower-case words in order, accents folded, an apostrophe inside a word dropped."""
    return _WORD.findall(fold(text.lower().replace("'", "").replace("’", "")))


@lru_cache(maxsize=2**16)
def content_words(text: str) -> frozenset[str]:
    """The words that a search can go by, plurals as their singulars (``Laos`` is named by ``Lao People``)."""
    return frozenset(map(_singular, set(words(text)) - STOP_WORDS))


@lru_cache(maxsize=2**14)
def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and word[-2] not in "siu" else word


def fold(text: str) -> str:
    """The text without accents, e.g. ``São Tomé`` -> ``Sao Tome``."""
    if text.isascii():
        return text
    return "".join(char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))


def contains_words(text: str, part: str) -> bool:
    """Whether the words of ``part`` stand in ``text`` one after the other."""
    return _row(part) in _row(text)


@lru_cache(maxsize=2**14)
def _row(text: str) -> str:
    return f" {' '.join(words(text))} "


def leaks(answer: str, question: str, prefix: int = 4) -> bool:
    """Whether the question gives the answer away: each content word is there, or starts like one there.

    ``Mexico City`` leaks in a question about Mexico only if ``City`` does too; ``Luxembourg`` always does.
    """
    asked = content_words(question)
    answered = content_words(answer)
    if not answered:
        return contains_words(question, answer)

    stems = _stems(question, prefix)
    return all(len(word) >= prefix and word[:prefix] in stems for word in answered - asked)


@lru_cache(maxsize=2**14)
def _stems(text: str, length: int) -> frozenset[str]:
    return frozenset(word[:length] for word in content_words(text) if len(word) >= length)


def clauses(text: str) -> list[str]:
    """The text cut at the ends of sentences and clauses, each with its closing mark."""
    return [clause.strip() for clause in _CLAUSE_END.split(text) if clause.strip()]


@lru_cache(maxsize=2**14)
def slug(text: str) -> str:
    """``Côte d'Ivoire`` -> ``cote-divoire``."""
    return "-".join(words(text))
