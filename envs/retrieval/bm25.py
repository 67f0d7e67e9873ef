"""BM25 over passages in memory or over a corpus file, whose index is kept on disk beside it and
memory-mapped.

Scores come from the library ``bm25s`` (Lucene's variant, k1 = 1.5, b = 0.75), which stores the score of each
word in each passage: a query is a sum of a few sparse columns. Passages that share no word with the query are
not returned.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import bm25s
import numpy as np

from envs.errors import UserError
from envs.retrieval.base import Passage
from envs.retrieval.corpus import MappedCorpus, iterate_passages, line_starts
from envs.retrieval.folders import kept_index
from envs.retrieval.words import plain_word, query_words, raw_words

FORMAT = 1
"""Of the index folder; part of its fingerprint, with the rule that splits words."""

_MAX_QUERY_WORDS = 256
_FEW = 8


class Bm25Retriever:
    """Searches passages by their words; build one with `from_passages` or `from_file`."""

    def __init__(self, index: bm25s.BM25, passages: Sequence[Passage]) -> None:
        scores: Any = index.scores
        self._data, self._rows, self._starts = scores["data"], scores["indices"], scores["indptr"]
        self._vocabulary: dict[str, int] = index.vocab_dict
        self._passages = passages

    @classmethod
    def from_passages(cls, passages: Iterable[Passage]) -> Bm25Retriever:
        """Index passages in memory (about 10,000 a second).

        Raises:
            UserError: no passage, or none with a word in it.
        """
        held = list(passages)
        return cls(_build(held, "the passages"), held)

    @classmethod
    def from_file(cls, path: str | Path) -> Bm25Retriever:
        """Open the index of a corpus file, building it first when there is none for this content.

        It lies in ``FILE.bm25/``, or, where that cannot be written, under ``MEMPO_CACHE`` (default
        ``~/.cache/mempo``). It is complete or absent: built aside and renamed.

        Raises:
            UserError: no such file, an empty one, or a malformed row, named by file and line.
        """
        path = Path(path)
        if not path.is_file():
            raise UserError(
                f"corpus {path} does not exist (a file of JSON lines with id and contents is needed)"
            )

        def build(folder: Path) -> None:
            _build(iterate_passages(path), str(path)).save(folder, show_progress=False)
            np.save(folder / "lines.npy", line_starts(path), allow_pickle=False)

        return cls._open(kept_index(path, ".bm25", {"format": FORMAT}, build, "bm25"), path)

    @classmethod
    def _open(cls, folder: Path, path: Path) -> Bm25Retriever:
        index = bm25s.BM25.load(folder, mmap=True, show_progress=False)
        starts = np.load(folder / "lines.npy", mmap_mode="r", allow_pickle=False)
        return cls(index, MappedCorpus(path, starts))

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """See `envs.retrieval.base.Retriever`. Equal scores are in the corpus's order."""
        if topk < 1:
            raise UserError(f"topk is {topk}; at least 1 is needed")
        return [self._search(query, topk) for query in queries]

    def _search(self, query: str, topk: int) -> list[Passage]:
        known = (self._vocabulary.get(word) for word in query_words(query)[:_MAX_QUERY_WORDS])
        spans = [(int(self._starts[i]), int(self._starts[i + 1])) for i in known if i is not None]
        if not spans:
            return []
        rows = np.concatenate([self._rows[start:end] for start, end in spans])
        scores = np.concatenate([self._data[start:end] for start, end in spans])
        if len(spans) > 1 and len(rows) * 64 < len(self._passages):
            rows, where = np.unique(rows, return_inverse=True)
            scores = np.bincount(where, weights=scores)
        elif len(spans) > 1:
            scores = np.bincount(rows, weights=scores)
            rows = np.arange(len(scores))
        return [replace(self._passages[int(rows[i])], score=float(scores[i])) for i in _best(scores, topk)]


def _best(scores: np.ndarray, topk: int) -> list[int]:
    """Places of the topk positive scores, highest first, equal ones in their order."""
    if topk > _FEW:
        places = np.flatnonzero(scores > 0)
        if topk < len(places):
            values = scores[places]
            places = places[values >= np.partition(values, len(values) - topk)[len(values) - topk]]
        order = np.argsort(-scores[places], kind="stable")[:topk]
        return [int(place) for place in places[order]]
    # Faster for few than numpy's partition, which is slow on many equal values such as the zeros here.
    found: list[int] = []
    rest = scores.copy()
    while len(found) < topk and rest[best := int(rest.argmax())] > 0:
        found.append(best)
        rest[best] = 0
    return found


class _WordIds(dict[str, int]):
    """Id of a raw word; a new one is brought into its plain form, once."""

    def __init__(self, vocabulary: dict[str, int]) -> None:
        self._vocabulary = vocabulary

    def __missing__(self, word: str) -> int:
        self[word] = self._vocabulary.setdefault(plain_word(word), len(self._vocabulary))
        return self[word]


def _build(passages: Iterable[Passage], source: str) -> bm25s.BM25:
    vocabulary: dict[str, int] = {}
    known = _WordIds(vocabulary)
    ids: list[array[int]] = []
    for passage in passages:
        found = raw_words(f"{passage.title}\n{passage.text}")
        ids.append(array("i", [known[word] for word in found]))
    if not vocabulary:
        raise UserError(f"{source}: nothing to search, there is no passage with a word in it")
    index = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
    index.index((ids, vocabulary), create_empty_token=False, show_progress=False)
    return index
