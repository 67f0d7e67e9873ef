"""The small world: short passages, one fact each, that a model of a million parameters can learn to read."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from envs.tasks.factbook.facts import Fact, read_facts
from envs.tasks.factbook.index import WordIndex
from envs.tasks.factbook.questions import banned_words, make_passage, passage_id, single_hop, two_hop
from envs.tasks.factbook.relations import TINY_RELATIONS
from envs.tasks.factbook.source import Country, load_countries, source_version
from envs.tasks.factbook.text import contains_words, content_words, leaks
from envs.tasks.factbook.world import World, finish, split_countries

_SOURCE = "factbook-tiny"
_TWO_HOP_SHARE = 0.2
_MAX_ANSWER_WORDS = 5
_MAX_NAME_WORDS = 3
# An answer that more countries share than this can be guessed without a search.
_MAX_SHARED_ANSWER = 10
_PASSAGE_WORDS = (9, 14)
# Long numbers: a small model copies words far more easily than it keeps its place in a row of digits.
_TOO_HARD = frozenset({"airports", "coastline", "area"})


def build_tiny(seed: int) -> World:
    dropped: Counter[str] = Counter()
    countries = _distinct_countries(load_countries(), dropped)
    relations = tuple(relation for relation in TINY_RELATIONS if relation.key not in _TOO_HARD)
    read = [fact for country in countries for fact in read_facts(country, relations)]
    shared = Counter((fact.relation.key, fact.answer.lower()) for fact in read)
    facts = [fact for fact in read if _keep_fact(fact, shared, dropped)]
    banned = banned_words(facts)
    passages = {passage_id(fact): make_passage(fact, *_PASSAGE_WORDS, banned) for fact in facts}
    index = WordIndex(passages.values())

    askable: list[Fact] = []
    for fact in facts:
        query = f"{fact.relation.phrase} of {fact.country.name}"
        if index.holding(content_words(query)) != {passage_id(fact)}:
            dropped["another passage holds every word of the query"] += 1
        else:
            askable.append(fact)

    keys: dict[str, list[Fact]] = defaultdict(list)
    for fact in facts:
        if not fact.relation.inverse:
            continue
        if shared[fact.relation.key, fact.answer.lower()] > 1:
            dropped["key shared by several countries"] += 1
        elif leaks(fact.country.name, fact.answer) or leaks(fact.answer, fact.country.name):
            dropped["key gives the country away"] += 1
        elif index.holding(content_words(f"{fact.relation.phrase} {fact.answer}")) != {passage_id(fact)}:
            dropped["another passage holds every word of the key"] += 1
        else:
            keys[fact.country.name].append(fact)

    train_names, heldout_names = split_countries([country.name for country in countries], seed)
    rng = random.Random(f"factbook-tiny-{seed}")
    sides = []
    for names in (train_names, heldout_names):
        side = [fact for fact in askable if fact.country.name in names]
        singles = [single_hop(fact, _SOURCE) for fact in side]
        pairs = [
            (key, fact)
            for fact in side
            for key in keys[fact.country.name]
            if key.relation.key != fact.relation.key
            and not leaks(fact.answer, f"{key.relation.phrase} {key.answer}")
            and not contains_words(passages[passage_id(key)].text, fact.answer)
        ]
        wanted = min(len(pairs), round(len(singles) * _TWO_HOP_SHARE / (1 - _TWO_HOP_SHARE)))
        chosen = [two_hop(key, fact, _SOURCE) for key, fact in rng.sample(pairs, wanted)]
        sides.append(tuple(singles + chosen))

    report = {
        "source": source_version(),
        "countries": len(countries),
        "facts read": len(read),
        "facts": len(facts),
        "relations": dict(Counter(fact.relation.key for fact in askable)),
        "keys": sum(len(value) for value in keys.values()),
        "dropped": dict(dropped),
        "dropped share": {
            "facts": round(1 - len(askable) / len(read), 4),
            "keys": round(1 - sum(map(len, keys.values())) / sum(fact.relation.inverse for fact in facts), 4),
        },
    }
    return finish("tiny", seed, tuple(passages.values()), sides[0], sides[1], report)


def _distinct_countries(countries: Sequence[Country], dropped: Counter[str]) -> list[Country]:
    """Countries with a short plain name that no other country's name contains."""
    names = {country.name: content_words(country.name) for country in countries}
    kept = []
    for country in countries:
        own = names[country.name]
        if not country.name.isascii() or len(country.name.split()) > _MAX_NAME_WORDS or "," in country.name:
            dropped["countries with a long or unusual name"] += 1
        elif any(own <= other for name, other in names.items() if name != country.name):
            dropped["countries whose name is part of another's"] += 1
        else:
            kept.append(country)
    return kept


def _keep_fact(fact: Fact, shared: Mapping[tuple[str, str], int], dropped: Counter[str]) -> bool:
    if not (fact.answer.isascii() and fact.head.isascii()):
        dropped["unusual characters"] += 1
    elif len(fact.answer.split()) > _MAX_ANSWER_WORDS or len(fact.answer) > 40:
        dropped["long answer"] += 1
    elif ";" in fact.answer or fact.answer not in fact.head:
        dropped["answer not verbatim"] += 1
    elif leaks(fact.answer, f"What is the {fact.relation.phrase} of {fact.country.name}?"):
        dropped["answer stands in the question"] += 1
    elif content_words(fact.head) & content_words(fact.country.name):
        dropped["value names the country"] += 1
    elif shared[fact.relation.key, fact.answer.lower()] > _MAX_SHARED_ANSWER:
        dropped["answer shared by many countries"] += 1
    else:
        return True
    return False
