"""Questions of the full world: hops, and the sentences that chain them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from envs.tasks.factbook.facts import Fact
from envs.tasks.factbook.joins import Bridge
from envs.tasks.factbook.questions import golds
from envs.tasks.factbook.relations_full import Link
from envs.tasks.factbook.source import Country
from envs.tasks.factbook.text import slug
from envs.tasks.task import Task


@dataclass(frozen=True)
class Located:
    """A fact and the passage that holds its answer; ``target``: the country that the answer names, if any."""

    fact: Fact
    passage: str
    link: Link | None = None
    target: Country | None = None

    @property
    def label(self) -> str:
        """What to search beside the country: the names of field and sub-field, as the passage has them."""
        return self.fact.relation.search or " ".join(self.fact.relation.path.split(" > ")[1:]).strip()


@dataclass(frozen=True)
class Clue:
    """What stands for a country in a question: a unique value of a fact, or a bridge.

    Attributes:
        described: ``country whose capital is Warsaw``.
        value: the words in it that tell the country from others.
    """

    key: str
    described: str
    value: str
    country: Country
    hop: dict[str, Any]


def fact_clue(located: Located) -> Clue:
    fact = located.fact
    described = f"country whose {fact.relation.phrase} is {fact.answer}"
    hop = _hop(
        f"Which is the {described}?",
        f"{located.label} {fact.answer}",
        fact.country.name,
        fact.country.name,
        located.passage,
    )
    return Clue(fact.relation.key, described, fact.answer, fact.country, hop)


def bridge_clue(bridge: Bridge) -> Clue:
    hop = _hop(
        f"Which is the {bridge.described}?",
        bridge.query,
        bridge.shown,
        bridge.passage.title,
        bridge.passage.id,
    )
    return Clue(bridge.key, bridge.described, bridge.passage.title, bridge.country, hop)


def make_task(source: str, final: Located, clue: Clue | None = None, link: Located | None = None) -> Task:
    """A question about ``final``.

    Its country is named outright; or described by ``clue``; or reached from the country of ``link``, which is
    named or, with both, described: one to three hops.
    """
    country = final.fact.country
    subject, hops, parts = country.name, [], [f"{slug(country.name)}/{final.fact.relation.key}"]
    if clue is not None:
        subject = f"the {clue.described}"
        hops.append(clue.hop)
        parts.append(f"by-{clue.key}-{slug(clue.value)}")
    if link is not None and link.link is not None:
        subject = subject if clue is not None else link.fact.country.name
        subject = f"the {link.link.phrase(subject)}"
        hops.append(_link_hop(link))
        parts.append(f"{link.link.key}-of-{slug(link.fact.country.name)}")
    phrase = final.fact.relation.phrase
    name = country.name
    hops.append(
        _hop(
            f"What is the {phrase} of {name}?",
            f"{name} {final.label}",
            final.fact.answer,
            name,
            final.passage,
        )
    )
    return Task(
        id=f"{source}/{'/'.join(parts)}",
        questions=(f"What is the {phrase} of {subject}?",),
        golds=(golds(final.fact),),
        source=source,
        metadata={"hops": len(hops), "chain": hops, "country": name, "relation": final.fact.relation.key},
    )


def countries_of(final: Located, clue: Clue | None, link: Located | None) -> Sequence[str]:
    """Every country on the way."""
    names = [final.fact.country.name]
    names += [clue.country.name] if clue else []
    names += [link.fact.country.name] if link else []
    return names


def _link_hop(located: Located) -> dict[str, Any]:
    fact = located.fact
    assert located.link is not None
    question = f"Which is the {located.link.phrase(fact.country.name)}?"
    return _hop(
        question, f"{fact.country.name} {located.label}", fact.answer, fact.country.name, located.passage
    )


def _hop(question: str, query: str, answer: str, title: str, passage: str) -> dict[str, Any]:
    return {"question": question, "query": query, "answer": answer, "title": title, "passage": passage}
