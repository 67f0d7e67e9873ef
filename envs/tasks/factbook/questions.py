"""Facts to passages and tasks: for each kind of question one template, and one query that copies it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from envs.retrieval.base import Passage
from envs.tasks.factbook.facts import Fact
from envs.tasks.factbook.relations import COMMON_FILLERS
from envs.tasks.factbook.source import lower_surnames, without_note
from envs.tasks.factbook.text import clauses, content_words, fold, slug
from envs.tasks.task import Task


def passage_id(fact: Fact) -> str:
    return f"{slug(fact.country.name)}/{fact.relation.key}"


def make_passage(fact: Fact, min_words: int, max_words: int, banned: frozenset[str]) -> Passage:
    """The fact, then clauses of neighbouring fields: ``min_words`` to ``max_words`` long where they suffice.

    Args:
        banned: content words that a filler clause may not hold (markers of other relations, names of
            countries): a passage names its own country once, in the title, and its own relation once.
    """
    text = f"{fact.relation.marker}: {_trim(fact.head, fact.answer, max_words - 6)}"
    text += "" if text.endswith((".", "!", "?")) else "."
    length = len(text.split()) + len(fact.country.name.split())
    own = content_words(fact.country.name) | content_words(fact.answer)
    shown = {fact.relation.path}
    for label, path in (*fact.relation.fillers, *COMMON_FILLERS):
        room = max_words - length - len(label.split())
        if length >= min_words or path in shown:
            continue
        filler = _filler(fact.country.value(path), min_words - length, room, (banned, own))
        if filler:
            shown.add(path)
            sentence = f"{label}: {filler}" if label else filler[0].upper() + filler[1:]
            text += f" {sentence}."
            length += len(sentence.split())
    # Without quotation marks a name is spelt in the passage as it will be in a memory or an answer.
    return Passage(passage_id(fact), fact.country.name, text.replace('"', ""))


def single_hop(fact: Fact, profile: str) -> Task:
    """``What is the capital of Poland?``; the query is the question's own words."""
    asked = f"{fact.relation.phrase} of {fact.country.name}"
    question = f"What is the {asked}?"
    hop = {
        "question": question,
        "query": asked,
        "answer": fact.answer,
        "title": fact.country.name,
        "passage": passage_id(fact),
    }
    return Task(
        id=f"{profile}/{passage_id(fact)}",
        questions=(question,),
        golds=(golds(fact),),
        source=profile,
        metadata={"hops": 1, "chain": [hop], "country": fact.country.name, "relation": fact.relation.key},
    )


def two_hop(key: Fact, fact: Fact, profile: str) -> Task:
    """``What is the currency of the country whose capital is Warsaw?``: ``key`` stands for the country."""
    described = f"country whose {key.relation.phrase} is {key.answer}"
    question = f"What is the {fact.relation.phrase} of the {described}?"
    first = {
        "question": f"Which is the {described}?",
        "query": described,
        "answer": key.country.name,
        "title": key.country.name,
        "passage": passage_id(key),
    }
    second = single_hop(fact, profile).metadata["chain"][0]
    return Task(
        id=f"{profile}/{passage_id(fact)}/by-{key.relation.key}",
        questions=(question,),
        golds=(golds(fact),),
        source=profile,
        metadata={
            "hops": 2,
            "chain": [first, second],
            "country": fact.country.name,
            "relation": fact.relation.key,
            "by": key.relation.key,
        },
    )


def golds(fact: Fact) -> tuple[str, ...]:
    """The answer, its aliases, their forms without accents; none with ``;``, which separates objectives."""
    forms = [fact.answer, *fact.aliases]
    forms += [fold(form) for form in forms]
    return tuple(dict.fromkeys(form for form in forms if form and ";" not in form))


def banned_words(facts: Iterable[Fact]) -> frozenset[str]:
    """Every word that a query may hold (phrases, names, ``country``): fillers keep away from them."""
    banned = {"country"}
    for fact in facts:
        banned |= content_words(fact.country.name) | content_words(fact.relation.phrase)
    return frozenset(banned)


def _trim(head: str, answer: str, max_words: int) -> str:
    """The head up to the last clause that fits, the answer always whole."""
    if len(head.split()) <= max_words:
        return head
    kept = ""
    for clause in clauses(head):
        candidate = f"{kept} {clause}".strip()
        if len(candidate.split()) > max_words and answer in kept:
            break
        kept = candidate
    kept = kept.rstrip(",; ")
    return kept if answer in kept and len(kept.split()) <= max_words else answer


@lru_cache(maxsize=2**14)
def _shown_clauses(value: str) -> tuple[str, ...]:
    return tuple(clauses(lower_surnames(without_note(value))))


def _filler(value: str, wanted: int, room: int, banned: tuple[frozenset[str], ...]) -> str:
    """The first clauses of a value, until ``wanted`` words are reached, at most ``room``; may be empty."""
    kept = ""
    for clause in _shown_clauses(value):
        candidate = f"{kept} {clause}".strip()
        size = len(candidate.split())
        balanced = candidate.count("(") == candidate.count(")")
        if size > room or not clause.isascii() or not all(map(content_words(clause).isdisjoint, banned)):
            break
        kept = candidate
        if size >= wanted and balanced:
            break
    kept = kept.rstrip(" .,;")
    return kept if kept.count("(") == kept.count(")") else ""
