"""Search behind one protocol: BM25 or vectors over the embedded world or a corpus file, a server over HTTP, the web.

Texts that `load_retriever` takes:

==============================  ====================================================================================
``factbook``, ``factbook-tiny`` BM25 over an embedded corpus
``PATH``                        BM25 over a corpus file; see `envs.retrieval.bm25`
``dense:CORPUS?model=MODEL``    vectors over a corpus file or an embedded corpus; see `envs.retrieval.dense`
``http://HOST:PORT/retrieve``   a retrieval server; see `envs.retrieval.http`, and `envs.retrieval.server` for ours
``web:brave``, ``web:serper``   a web search API, its key from the environment; see `envs.retrieval.web`
==============================  ====================================================================================
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from envs.errors import UserError, did_you_mean
from envs.retrieval.base import Passage, RetrievalError, Retriever, render_passages, split_contents

__all__ = [
    "Passage",
    "RetrievalError",
    "Retriever",
    "load_retriever",
    "render_passages",
    "split_contents",
]

EMBEDDED = ("factbook", "factbook-tiny")
"""Corpora that come with the package."""


def load_retriever(source: str) -> Retriever:
    """The retriever that a text names; one object in this process, shared by all that ask for it.

    Args:
        source: ``factbook`` or ``factbook-tiny`` (embedded), the path of a corpus file (BM25), or the address of a
            server (``http://host:8000/retrieve``), ``dense:CORPUS?model=MODEL``, ``web:brave`` or ``web:serper``.

    Raises:
        UserError: none of these, or a malformed file.
    """
    if source in EMBEDDED:
        return _embedded(source)
    if source.startswith(("http://", "https://")):
        return _from_server(source)
    if source.startswith("dense:"):
        return _dense(source.removeprefix("dense:"))
    if source.startswith("web:"):
        return _web(source.removeprefix("web:"))
    path = Path(source)
    if not path.is_file():
        if path.suffix in (".jsonl", ".json"):
            raise UserError(f"corpus file {source} does not exist")
        raise UserError(
            f"unknown retriever {source!r}{did_you_mean(source, EMBEDDED)} "
            f"(embedded: {', '.join(EMBEDDED)}; or the path of a corpus file, an http address, "
            "dense:CORPUS?model=MODEL, web:PROVIDER)"
        )
    state = path.stat()
    return _from_file(str(path), state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=4)
def _embedded(source: str) -> Retriever:
    if source == "factbook":
        from envs.tasks.factbook.full import full_corpus

        return full_corpus()[1]
    from envs.retrieval.bm25 import Bm25Retriever
    from envs.tasks.factbook import build_world

    return Bm25Retriever.from_passages(build_world("tiny").passages)


@lru_cache(maxsize=16)
def _from_server(source: str) -> Retriever:
    from envs.retrieval.http import HttpRetriever

    return HttpRetriever(source)


@lru_cache(maxsize=4)
def _dense(source: str) -> Retriever:
    from envs.retrieval.dense import from_source

    return from_source(source)


@lru_cache(maxsize=4)
def _web(name: str) -> Retriever:
    from envs.retrieval.web import WebRetriever

    return WebRetriever(name)


@lru_cache(maxsize=16)
def _from_file(source: str, mtime_ns: int, size: int) -> Retriever:
    from envs.retrieval.bm25 import Bm25Retriever

    return Bm25Retriever.from_file(source)
