"""The web application of `envs.retrieval.server`: any retriever behind ``POST /retrieve``, with limits.

Requests and replies have Search-R1's form; see `envs.retrieval.http`, which is its client. What is wrong with a request
is said in ``{"error": …}``: 400 for what is malformed, 413 for what is more than the server gives, 408 for a body that
does not come. A search that fails is 502: the client may try again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.to_thread
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from envs.errors import UserError
from envs.retrieval.base import Passage, RetrievalError, Retriever


@dataclass(frozen=True)
class Limits:
    """What one request may ask for, and how many are searched for at once.

    Attributes:
        topk: passages for a request that names no number.
        max_queries, max_topk: of a request.
        max_query: characters of a query.
        max_body: bytes of a request.
        body_seconds: in which a request has to be there as a whole.
        threads: searches at once; further ones wait.
    """

    topk: int = 3
    max_queries: int = 256
    max_topk: int = 100
    max_query: int = 10_000
    max_body: int = 1_000_000
    body_seconds: float = 30.0
    threads: int = 4

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise UserError(f"{name} is {value}; more than 0 is needed")
        if self.topk > self.max_topk:
            raise UserError(f"topk is {self.topk}, more than max_topk, which is {self.max_topk}")


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def create_app(retriever: Retriever, name: str, limits: Limits | None = None) -> FastAPI:
    """The application.

    Args:
        retriever: shared by all requests, called from several threads.
        name: told by ``/health``.
        limits: of requests.
    """
    limits = limits or Limits()
    slots = anyio.CapacityLimiter(limits.threads)
    app = FastAPI(title="retrieval", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    async def health() -> Response:
        size = len(retriever) if isinstance(retriever, Sized) else None
        return _reply({"status": "ok", "retriever": name, "passages": size})

    @app.post("/retrieve")
    async def retrieve(request: Request) -> Response:
        try:
            queries, topk, with_scores = _asked(await _body(request, limits), limits)
            found = await anyio.to_thread.run_sync(retriever.search, queries, topk, limiter=slots)
        except _Refused as error:
            return _reply({"error": str(error)}, error.status)
        except UserError as error:
            return _reply({"error": str(error)}, 400)
        except RetrievalError as error:
            return _reply({"error": str(error)}, 502)
        return _reply({"result": [[_hit(passage, with_scores) for passage in hits] for hits in found]})

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        message = (
            f"{request.method} {request.url.path}: {error.detail}; there are POST /retrieve, GET /health"
        )
        return _reply({"error": message}, error.status_code)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return _reply({"error": f"the search failed ({type(error).__name__}); see the server's log"}, 500)

    return app


async def _body(request: Request, limits: Limits) -> bytes:
    too_long = _Refused(413, f"the request is longer than {limits.max_body} bytes")
    told = request.headers.get("Content-Length", "")
    if told.isdecimal() and int(told) > limits.max_body:
        raise too_long
    body = b""
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.max_body:
                    raise too_long
    except TimeoutError:
        raise _Refused(408, f"the request was not there in {limits.body_seconds:g} seconds") from None
    return body


def _asked(body: bytes, limits: Limits) -> tuple[list[str], int, bool]:
    """Queries, topk and whether scores are wanted."""
    try:
        payload: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise _Refused(400, 'the request is not JSON; {"queries": ["…"], "topk": 3} is needed') from None
    if not isinstance(payload, dict):
        raise _Refused(400, f"the request is a {type(payload).__name__}; an object with queries is needed")
    queries = payload.get("queries")
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise _Refused(400, "queries: a list of texts is needed")
    if len(queries) > limits.max_queries:
        raise _Refused(413, f"queries: {len(queries)} of them, but at most {limits.max_queries} are answered")
    longest = max(map(len, queries), default=0)
    if longest > limits.max_query:
        raise _Refused(413, f"queries: one of {longest} characters, but {limits.max_query} are the most")
    topk = payload.get("topk")
    if topk is None:
        topk = limits.topk
    if isinstance(topk, bool) or not isinstance(topk, int) or topk < 1:
        raise _Refused(400, "topk: a whole number of at least 1 is needed")
    if topk > limits.max_topk:
        raise _Refused(413, f"topk: more than {limits.max_topk} are not given")
    with_scores = payload.get("return_scores")
    if with_scores is not None and not isinstance(with_scores, bool):
        raise _Refused(400, "return_scores: true or false is needed")
    return queries, topk, bool(with_scores)


def _hit(passage: Passage, with_scores: bool) -> dict[str, Any]:
    title = " ".join(passage.title.split())
    document = {"id": passage.id, "contents": f'"{title}"\n{passage.text}'}
    return {"document": document, "score": passage.score} if with_scores else document


def _reply(value: Any, status: int = 200) -> Response:
    # Escaped: a corpus may hold lone surrogates, which no encoding can carry.
    return Response(json.dumps(value).encode("ascii"), status, media_type="application/json")
