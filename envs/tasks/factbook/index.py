"""An exact word index: which passages hold a set of words. For filters that must not depend on a ranking."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from envs.retrieval.base import Passage
from envs.tasks.factbook.text import content_words


class WordIndex:
    """Which passages hold a set of words, in title or text."""

    def __init__(self, passages: Iterable[Passage]) -> None:
        self._by_word: dict[str, set[str]] = defaultdict(set)
        for passage in passages:
            for word in content_words(f"{passage.title} {passage.text}"):
                self._by_word[word].add(passage.id)

    def holding(self, query: frozenset[str]) -> set[str]:
        """Ids of the passages that hold every word of the query; none for an empty query."""
        sets = sorted((self._by_word.get(word, set()) for word in query), key=len)
        return set.intersection(*sets) if sets else set()
