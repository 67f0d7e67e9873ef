"""A retrieval server over HTTP, in Search-R1's form or in BrowseComp-Plus's flat one.

Search-R1: ``POST {"queries": […], "topk": 3, "return_scores": true}`` gives ``{"result": [[{"document": {"id",
"contents"}, "score"}]]}``, one inner list a query; bare documents are read too. Flat: ``POST {"query", "topk"}`` gives
``{"result": [{"document": {"title", "text"}, "docid"}]}``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import httpx
import stamina

from envs.errors import UserError
from envs.neutral import replace_surrogates
from envs.retrieval.base import Passage, RetrievalError, split_contents

Dialect = Literal["auto", "search-r1", "flat"]


class _TryAgain(Exception):
    """The server was not reached, or said that it is busy or broken."""


class HttpRetriever:
    """Searches through a server; see `envs.retrieval.base.Retriever`.

    Args:
        url: of the search; ``/retrieve`` is added to a bare address.
        dialect: ``auto`` tries Search-R1's form and, when the server refuses it as malformed, the flat one.
        timeout: seconds for one request, until the whole reply is there.
        batch: queries in one request at most.
        attempts: for a request that fails by the network, 429 or 5xx, with growing pauses.
        max_bytes: of a reply; a longer one is an error, and is not read to its end.
        transport: for tests.

    Raises:
        UserError: no http address, or a value out of range.
    """

    def __init__(
        self,
        url: str,
        *,
        dialect: Dialect = "auto",
        timeout: float = 30.0,
        batch: int = 64,
        attempts: int = 4,
        max_bytes: int = 16_000_000,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        try:
            parsed = httpx.URL(url) if url.startswith(("http://", "https://")) else None
        except httpx.InvalidURL:
            parsed = None
        if parsed is None or not parsed.host or (parsed.port or 80) > 65535:
            raise UserError(
                f"{url!r} is no address of a retrieval server; http://host:port/retrieve is needed"
            )
        if dialect not in ("auto", "search-r1", "flat"):
            raise UserError(f"dialect {dialect!r} is none of 'auto', 'search-r1', 'flat'")
        if min(batch, attempts, max_bytes) < 1 or timeout <= 0:
            raise UserError("batch, attempts, max_bytes must be at least 1, and timeout more than 0")
        self.url = str(parsed.copy_with(path="/retrieve")) if parsed.path in ("", "/") else url
        self._dialect: Dialect = dialect
        self._settings = {"timeout": timeout, "batch": batch, "attempts": attempts, "max_bytes": max_bytes}
        self._batch, self._attempts, self._max_bytes = batch, attempts, max_bytes
        self._timeout = timeout
        # The address is the user's own choice: proxies of the environment have no part in it.
        self._client = httpx.Client(timeout=timeout, transport=transport, trust_env=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.url, self._dialect, self._settings)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        if topk < 1:
            raise UserError(f"topk is {topk}; at least 1 is needed")
        asked = [replace_surrogates(query) for query in queries if query.strip()]
        found: list[list[Passage]] = []
        for start in range(0, len(asked), self._batch):
            found.extend(self._search(asked[start : start + self._batch], topk))
        replies = iter(found)
        return [next(replies) if query.strip() else [] for query in queries]

    def _search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        if self._dialect != "flat":
            status, body = self._post({"queries": queries, "topk": topk, "return_scores": True})
            if status not in (400, 422) or self._dialect != "auto":
                lists = self._result(status, body)
                if len(lists) != len(queries) or not all(isinstance(hits, list) for hits in lists):
                    raise RetrievalError(
                        f"{self.url}: {len(queries)} queries, but the reply is no list for each"
                    )
                return [self._passages(hits, topk) for hits in lists]
        replies = [self._result(*self._post({"query": query, "topk": topk})) for query in queries]
        self._dialect = "flat"
        return [self._passages(hits, topk) for hits in replies]

    def _post(self, payload: Mapping[str, Any]) -> tuple[int, bytes]:
        try:
            for attempt in stamina.retry_context(
                on=_TryAgain, attempts=self._attempts, wait_initial=0.2, timeout=None
            ):
                with attempt:
                    return self._post_once(payload)
        except _TryAgain as error:
            raise RetrievalError(f"{self.url}: {error} ({self._attempts} attempts)") from None
        raise AssertionError("a retry context ends with a return or an exception")

    def _post_once(self, payload: Mapping[str, Any]) -> tuple[int, bytes]:
        deadline = time.monotonic() + self._timeout
        try:
            with self._client.stream("POST", self.url, json=payload) as response:
                if response.status_code == 429 or response.status_code >= 500:
                    raise _TryAgain(f"the server answers {response.status_code}")
                body = b""
                for chunk in response.iter_bytes():
                    body += chunk
                    if len(body) > self._max_bytes:
                        raise RetrievalError(f"{self.url}: the reply is longer than {self._max_bytes} bytes")
                    # The client's own limit is for each piece of a reply.
                    if time.monotonic() > deadline:
                        raise _TryAgain(f"no whole reply in {self._timeout:g} seconds")
                return response.status_code, body
        except httpx.TransportError as error:
            raise _TryAgain(f"not reached, {type(error).__name__}: {error}") from None
        except httpx.DecodingError:
            raise RetrievalError(f"{self.url}: the reply is broken") from None

    def _result(self, status: int, body: bytes) -> list[Any]:
        if status != 200:
            raise RetrievalError(f"{self.url}: the server answers {status}: {body[:200]!r}")
        try:
            reply = json.loads(body)
        except (ValueError, RecursionError):
            raise RetrievalError(f"{self.url}: the reply is not JSON") from None
        result = reply.get("result") if isinstance(reply, dict) else None
        if not isinstance(result, list):
            raise RetrievalError(f"{self.url}: the reply has no list named result")
        return result

    def _passages(self, hits: Sequence[Any], topk: int) -> list[Passage]:
        passages = [_passage(hit) for hit in hits[:topk]]
        if None in passages:
            raise RetrievalError(f"{self.url}: a hit has no document with contents or text")
        return [passage for passage in passages if passage is not None]


def _rebuild(url: str, dialect: Dialect, settings: Mapping[str, Any]) -> HttpRetriever:
    return HttpRetriever(url, dialect=dialect, **settings)


def _passage(hit: Any) -> Passage | None:
    """A hit with a score, or a bare document."""
    if not isinstance(hit, Mapping):
        return None
    document = hit.get("document", hit)
    score = hit.get("score")
    number = float(score) if isinstance(score, int | float) else 0.0
    if isinstance(document, str):
        document = {"contents": document}
    if not isinstance(document, Mapping):
        return None
    identity = str(document.get("id", hit.get("docid", hit.get("id", ""))))
    if isinstance(document.get("contents"), str):
        title, text = split_contents(document["contents"])
    elif isinstance(document.get("text"), str):
        title, text = str(document.get("title") or ""), document["text"]
    else:
        return None
    return Passage(identity, title, text, number)
