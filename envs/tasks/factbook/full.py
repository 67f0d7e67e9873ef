"""The full world: all the Factbook's prose as a corpus, and questions of up to three hops over it."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain as concat

from envs.retrieval.base import Passage, Retriever
from envs.retrieval.bm25 import Bm25Retriever
from envs.tasks.factbook.chains import Clue, Located, bridge_clue, fact_clue, make_task
from envs.tasks.factbook.corpus import country_passages, field_id
from envs.tasks.factbook.facts import Fact, read_facts
from envs.tasks.factbook.index import WordIndex
from envs.tasks.factbook.joins import Atlas, airports, elements, versions
from envs.tasks.factbook.relations_full import FULL_RELATIONS, LINKS
from envs.tasks.factbook.source import Country, load_countries, source_version
from envs.tasks.factbook.text import content_words, leaks, slug
from envs.tasks.factbook.world import TRAIN_SHARE, World, finish, split_countries
from envs.tasks.task import Task

_SOURCE = "factbook"
_MAX_ANSWER_WORDS = 8
_MAX_NAME_WORDS = 5
# An answer that more countries share than this can be guessed without a search.
_MAX_SHARED_ANSWER = 30
# How many questions of each kind; the train side gets `TRAIN_SHARE` of them.
_WANTED = {"fact": 5000, "clue": 8000, "bridge": 2500, "link": 2500, "clue-link": 3500, "bridge-link": 1000}

# Passages of one search for the question itself, in which the answer of several hops must not stand.
_TOPK = 3

Candidate = tuple[Located, Clue | None, Located | None]


@lru_cache(maxsize=1)
def full_corpus() -> tuple[Mapping[str, Passage], Retriever]:
    """The passages of the full world by id, the same for every seed, and a search over them."""
    everyone = load_countries()
    atlas = Atlas(everyone)
    bridges = (bridge.passage for bridge in (*airports(atlas), *elements(atlas)))
    passages = {p.id: p for p in concat(*map(country_passages, everyone), bridges)}
    return passages, Bm25Retriever.from_passages(passages.values())


def build_full(seed: int) -> World:
    """See `envs.tasks.factbook.build_world`."""
    dropped: Counter[str] = Counter()
    everyone = load_countries()
    atlas = Atlas(everyone)
    bridges = [*airports(atlas), *elements(atlas)]
    passages, retriever = full_corpus()
    index = WordIndex(passages.values())

    countries = _distinct_countries(everyone, dropped)
    names = {country.name for country in countries}
    facts = _locate(countries, passages, index, dropped)
    links = _links(countries, atlas, passages)
    facts += [link for link in links if link.fact.relation.key in ("export-partner", "import-partner")]
    clues = [*_clues(facts, index, dropped), *(bridge_clue(b) for b in bridges if b.country.name in names)]

    sides: list[tuple[Task, ...]] = []
    for side, share in zip(split_countries(sorted(names), seed), (TRAIN_SHARE, 1 - TRAIN_SHARE), strict=True):
        world = _Side(side, facts, links, clues)
        rng = random.Random(f"factbook-full-{seed}-{len(sides)}")
        tasks: list[Task] = []
        for kind, wanted in _WANTED.items():
            candidates = list(world.candidates(kind))
            rng.shuffle(candidates)
            tasks += _take(candidates, round(wanted * share), index, retriever, dropped)
        sides.append(tuple(tasks))

    examined = sum(len(side) for side in sides) + sum(dropped[reason] for reason in _QUESTION_REASONS)
    report = {
        "source": source_version(),
        "joined": dict(versions()),
        "countries": len(countries),
        "passages": len(passages),
        "facts": len(facts),
        "links": len(links),
        "clues": dict(Counter(clue.key for clue in clues)),
        "dropped": dict(dropped),
        "dropped share": {
            "questions": round(sum(dropped[reason] for reason in _QUESTION_REASONS) / examined, 4),
        },
    }
    return finish("full", seed, tuple(passages.values()), sides[0], sides[1], report)


_LEAK = "answer stands in the question"
_ONE_PASSAGE = "one passage holds both clue and answer"
_ONE_SEARCH = "one search for the question shows the answer"
_QUESTION_REASONS = (_LEAK, _ONE_PASSAGE, _ONE_SEARCH)


class _Side:
    """All questions that can be asked about the countries of one side of the split."""

    def __init__(
        self, names: frozenset[str], facts: Iterable[Located], links: Iterable[Located], clues: Iterable[Clue]
    ) -> None:
        self.facts: dict[str, list[Located]] = defaultdict(list)
        self.clues: dict[str, list[Clue]] = defaultdict(list)
        for located in facts:
            if located.fact.country.name in names:
                self.facts[located.fact.country.name].append(located)
        for clue in clues:
            if clue.country.name in names:
                self.clues[clue.country.name].append(clue)
        self.links = [
            link
            for link in links
            if link.fact.country.name in names and link.target is not None and link.target.name in names
        ]

    def candidates(self, kind: str) -> Iterator[Candidate]:
        """``fact``: named country; ``clue``, ``bridge``: described one; ``link`` alone or behind either."""
        if kind == "fact":
            yield from ((located, None, None) for facts in self.facts.values() for located in facts)
        elif kind in ("clue", "bridge"):
            for name, facts in self.facts.items():
                yield from ((located, clue, None) for located in facts for clue in self._clues(name, kind))
        else:
            described = kind.removesuffix("-link")
            for link in self.links:
                assert link.target is not None
                finals = self.facts[link.target.name]
                starts = [None] if kind == "link" else list(self._clues(link.fact.country.name, described))
                yield from ((final, clue, link) for final in finals for clue in starts)

    def _clues(self, name: str, kind: str) -> Iterator[Clue]:
        for clue in self.clues[name]:
            if (clue.key in ("airport", "element")) == (kind == "bridge"):
                yield clue


def _take(
    candidates: Sequence[Candidate],
    wanted: int,
    index: WordIndex,
    retriever: Retriever,
    dropped: Counter[str],
) -> list[Task]:
    """The first ``wanted`` candidates that pass the filters; what fails on the way is counted."""
    tasks: list[Task] = []
    for final, clue, link in candidates:
        if len(tasks) == wanted:
            break
        if clue is not None and link is None and clue.key == final.fact.relation.key:
            continue
        task = make_task(_SOURCE, final, clue, link)
        start = clue.value if clue is not None else link.fact.country.name if link is not None else None
        if leaks(final.fact.answer, task.question):
            dropped[_LEAK] += 1
        elif start is not None and index.holding(content_words(start) | content_words(final.fact.answer)):
            dropped[_ONE_PASSAGE] += 1
        elif start is not None and _is_shown(task, retriever):
            dropped[_ONE_SEARCH] += 1
        else:
            tasks.append(task)
    return tasks


def _is_shown(task: Task, retriever: Retriever) -> bool:
    """Whether a search for the question as it stands shows an accepted answer."""
    (found,) = retriever.search([task.question], _TOPK)
    text = "\n".join(f"{passage.title} {passage.text}" for passage in found).lower()
    return any(
        gold.lower() in text and re.search(rf"(?<!\w){re.escape(gold.lower())}(?!\w)", text)
        for gold in task.golds[0]
    )


def _distinct_countries(countries: Sequence[Country], dropped: Counter[str]) -> list[Country]:
    """Countries with a name of at most five words that is not part of another's."""
    names = {country.name: content_words(country.name) for country in countries}
    kept = []
    for country in countries:
        own = names[country.name]
        if len(country.name.split()) > _MAX_NAME_WORDS:
            dropped["countries with a long name"] += 1
        elif any(own <= other for name, other in names.items() if name != country.name):
            dropped["countries whose name is part of another's"] += 1
        else:
            kept.append(country)
    return kept


def _locate(
    countries: Sequence[Country], passages: Mapping[str, Passage], index: WordIndex, dropped: Counter[str]
) -> list[Located]:
    """The facts to ask for, each with the passage that holds it."""
    mentions = {country.name: index.holding(content_words(country.name)) for country in countries}
    read = [fact for country in countries for fact in read_facts(country, FULL_RELATIONS)]
    shared = Counter((fact.relation.key, fact.answer.lower()) for fact in read)
    located = []
    for fact in read:
        passage = _passage_of(fact, passages)
        if len(fact.answer.split()) > _MAX_ANSWER_WORDS:
            dropped["long answer"] += 1
        elif ";" in fact.answer or passage is None:
            dropped["answer not verbatim"] += 1
        elif shared[fact.relation.key, fact.answer.lower()] > _MAX_SHARED_ANSWER:
            dropped["answer shared by many countries"] += 1
        elif _owners(mentions[fact.country.name], passage) != {slug(fact.country.name)}:
            dropped["country named under the same field of another"] += 1
        else:
            located.append(Located(fact, passage))
    return located


def _links(countries: Sequence[Country], atlas: Atlas, passages: Mapping[str, Passage]) -> list[Located]:
    names = {country.name for country in countries}
    located = []
    for country in countries:
        for link in LINKS:
            for fact in read_facts(country, (link.relation,)):
                target, passage = atlas.by_name(fact.answer), _passage_of(fact, passages)
                if passage and target and target.name in names and target.name != country.name:
                    other_names = tuple(dict.fromkeys((target.name, *atlas.aliases(target))))
                    located.append(Located(replace(fact, aliases=other_names), passage, link, target))
    return located


def _clues(facts: Sequence[Located], index: WordIndex, dropped: Counter[str]) -> Iterator[Clue]:
    """Values that stand for their country: no other country's passage of the same field holds their words."""
    for located in facts:
        fact = located.fact
        if not fact.relation.inverse:
            continue
        if len(_owners(index.holding(content_words(fact.answer)), located.passage)) != 1:
            dropped["clue shared by several countries"] += 1
        elif leaks(fact.country.name, fact.answer) or leaks(fact.answer, fact.country.name):
            dropped["clue gives the country away"] += 1
        else:
            yield fact_clue(located)


def _owners(holding: Iterable[str], passage: str) -> set[str]:
    """Whose passages of the same field are among those."""
    field = passage.split("/")[1]
    return {name.split("/")[0] for name in holding if name.split("/")[1] == field}


def _passage_of(fact: Fact, passages: Mapping[str, Passage]) -> str | None:
    """The passage of the fact's field that holds its answer."""
    prefix = field_id(fact.country, fact.relation.path.split(" > ")[1].strip())
    number = 0
    while True:
        name = f"{prefix}/{number}" if number else prefix
        if name not in passages:
            return None
        if fact.answer in passages[name].text:
            return name
        number += 1
