"""Dense retrieval: passages and queries as vectors of an encoder, the nearest by inner product.

The search is exact: every vector is looked at, block by block. The vectors are kept on disk beside the corpus file in
half precision and memory-mapped, one folder for each encoder and its settings. As text of
`envs.retrieval.load_retriever`: ``dense:CORPUS?model=FOLDER_OR_ID``, with further settings after ``&``
(``query_prefix``, ``passage_prefix``, ``max_tokens``, ``batch``, ``device``, ``revision``, ``dtype``), written as in an
address: ``%20`` is a space. CORPUS is a file or the name of an embedded corpus.

A query's vector depends in its last bits on the texts that it is encoded with, as always with batches; passages whose
scores differ by less may then change places.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from envs.errors import UserError, did_you_mean
from envs.retrieval.base import Passage
from envs.retrieval.corpus import MappedCorpus, iterate_passages, line_starts
from envs.retrieval.encoder import Encoder
from envs.retrieval.folders import cache_root, kept_index

FORMAT = 1
"""Of the index folder; part of its fingerprint."""

DTYPES = ("float16", "float32")
SETTINGS = (
    "model",
    "revision",
    "query_prefix",
    "passage_prefix",
    "max_tokens",
    "batch",
    "device",
    "dtype",
)

_CHUNK = 2048
_BLOCK_VALUES = 1 << 24

_log = logging.getLogger(__name__)


class DenseRetriever:
    """Searches passages by the nearness of vectors; build one with `from_passages` or `from_file`.

    Every query that is not blank finds ``topk`` passages, or all there are: nearness has no natural zero.
    """

    def __init__(self, vectors: np.ndarray, passages: Sequence[Passage], encoder: Encoder) -> None:
        self._vectors = vectors
        self._passages = passages
        self._encoder = encoder
        self._file: tuple[Path, str] | None = None

    @classmethod
    def from_passages(
        cls, passages: Iterable[Passage], encoder: Encoder, dtype: str = "float32"
    ) -> DenseRetriever:
        """Encode passages and hold them in memory.

        Raises:
            UserError: no passage.
        """
        held = list(passages)
        if not held:
            raise UserError("the passages: nothing to search, there is no passage")
        vectors = encoder.encode_passages([_text(passage) for passage in held])
        return cls(vectors.astype(_checked(dtype)), held, encoder)

    @classmethod
    def from_file(cls, path: str | Path, encoder: Encoder, dtype: str = "float16") -> DenseRetriever:
        """Open the vectors of a corpus file, encoding it first when there are none for this content and encoder.

        They lie in ``FILE.dense-XXXXXXXXXXXX/`` or in the cache, complete or absent; see
        `envs.retrieval.folders.kept_index`.

        Raises:
            UserError: no such file, an empty one, or a malformed row, named by file and line.
        """
        path = Path(path)
        if not path.is_file():
            raise UserError(
                f"corpus {path} does not exist (a file of JSON lines with id and contents is needed)"
            )
        settings = {
            "format": FORMAT,
            "encoder": encoder.fingerprint,
            "passage_prefix": encoder.settings["passage_prefix"],
            "max_tokens": encoder.settings["max_tokens"],
            "dtype": _checked(dtype),
        }
        name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
        folder = kept_index(
            path, f".dense-{name}", settings, lambda aside: _build(aside, path, encoder, dtype), "dense"
        )
        vectors = np.load(folder / "vectors.npy", mmap_mode="r", allow_pickle=False)
        starts = np.load(folder / "lines.npy", mmap_mode="r", allow_pickle=False)
        retriever = cls(vectors, MappedCorpus(path, starts), encoder)
        retriever._file = path, dtype
        return retriever

    def __reduce__(self) -> tuple[Any, ...]:
        # A memory-mapped array would travel as its content.
        if self._file is not None:
            return DenseRetriever.from_file, (self._file[0], self._encoder, self._file[1])
        return DenseRetriever, (self._vectors, self._passages, self._encoder)

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """See `envs.retrieval.base.Retriever`. Scores are cosines; equal ones are in the corpus's order."""
        if topk < 1:
            raise UserError(f"topk is {topk}; at least 1 is needed")
        asked = [query for query in queries if query.strip()]
        if not asked:
            return [[] for _ in queries]
        rows, scores = nearest(self._vectors, self._encoder.encode_queries(asked), topk)
        hits = (
            [
                replace(self._passages[int(row)], score=float(score))
                for row, score in zip(rows[i], scores[i], strict=True)
            ]
            for i in range(len(asked))
        )
        return [next(hits) if query.strip() else [] for query in queries]


def nearest(vectors: np.ndarray, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows with the largest inner products, exactly.

    Args:
        vectors: (n, d), float16 or float32, maybe memory-mapped: read in blocks of 64 MiB as float32.
        queries: (m, d) float32.
        k: of them; at most n are given.

    Returns:
        Rows (m, min(k, n)) int64 and their products, float32, largest first, equal ones by row.
    """
    count, dim = vectors.shape
    k = min(k, count)
    rows = np.empty((len(queries), 0), dtype=np.int64)
    scores = np.empty((len(queries), 0), dtype=np.float32)
    step = max(1, _BLOCK_VALUES // dim)
    for start in range(0, count, step):
        block = np.asarray(vectors[start : start + step], dtype=np.float32)
        products = np.concatenate([scores, queries @ block.T], axis=1)
        numbers = np.arange(start, start + len(block), dtype=np.int64)
        kept_rows, kept_scores = [], []
        for i, values in enumerate(products):
            places = _largest(values, k)
            kept_rows.append(np.concatenate([rows[i], numbers])[places])
            kept_scores.append(values[places])
        rows, scores = np.stack(kept_rows), np.stack(kept_scores)
    return rows, scores


def _largest(values: np.ndarray, k: int) -> np.ndarray:
    """Places of the k largest values, largest first, equal ones in their order."""
    k = min(k, len(values))
    least = np.partition(values, len(values) - k)[len(values) - k]
    places = np.flatnonzero(values >= least)
    return places[np.argsort(-values[places], kind="stable")[:k]]


def from_source(source: str) -> DenseRetriever:
    """The retriever of ``CORPUS?model=…&…``; see the module's docstring.

    Raises:
        UserError: an unknown setting, a corpus or a model that is not there.
    """
    corpus, _, query = source.partition("?")
    settings: dict[str, Any] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in SETTINGS:
            raise UserError(
                f"dense:{source}: no setting {key!r}{did_you_mean(key, SETTINGS)} (settings: {', '.join(SETTINGS)})"
            )
        if key in ("max_tokens", "batch"):
            if not value.isdecimal():
                raise UserError(f"dense:{source}: {key} is {value!r}; a whole number is needed")
            settings[key] = int(value)
        else:
            settings[key] = value
    dtype = _checked(settings.pop("dtype", "float16"))
    if corpus in ("factbook", "factbook-tiny"):
        path = _embedded_corpus(corpus)
    elif not corpus:
        raise UserError(f"dense:{source}: no corpus; the form is dense:CORPUS?model=MODEL")
    else:
        path = Path(corpus)
    # Before the encoder, which takes long to load.
    if not path.is_file():
        raise UserError(f"dense:{source}: corpus file {corpus} does not exist")
    return DenseRetriever.from_file(path, Encoder(**settings), dtype)


def _checked(dtype: str) -> str:
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    return dtype


def _text(passage: Passage) -> str:
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text


def _build(folder: Path, path: Path, encoder: Encoder, dtype: str) -> None:
    starts = line_starts(path)
    count = len(starts) - 1
    if count == 0:
        raise UserError(f"{path}: nothing to search, there is no passage")
    np.save(folder / "lines.npy", starts, allow_pickle=False)
    vectors = np.lib.format.open_memmap(
        folder / "vectors.npy", mode="w+", dtype=dtype, shape=(count, encoder.dim)
    )
    done = 0
    for chunk in _chunks(iterate_passages(path)):
        vectors[done : done + len(chunk)] = encoder.encode_passages([_text(passage) for passage in chunk])
        done += len(chunk)
        _log.info("%s: %d of %d passages encoded", path, done, count)
    vectors.flush()


def _chunks(passages: Iterator[Passage]) -> Iterator[list[Passage]]:
    while chunk := list(islice(passages, _CHUNK)):
        yield chunk


def _embedded_corpus(name: str) -> Path:
    """The passages of an embedded corpus as a file in the cache, beside which its vectors can lie."""
    from envs.tasks.factbook import build_world

    world = build_world("tiny" if name == "factbook-tiny" else "full")
    path = cache_root() / "corpora" / f"{name}-{world.fingerprint[:16]}.jsonl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"{path.name}.{os.getpid()}")
        aside.write_text("".join(map(_row, world.passages)), encoding="utf-8")
        aside.replace(path)
    return path


def _row(passage: Passage) -> str:
    row: Mapping[str, str] = {"id": passage.id, "title": passage.title, "text": passage.text}
    return json.dumps(row, ensure_ascii=False) + "\n"
