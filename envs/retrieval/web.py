"""Search of the web through an API, with the text of the pages that it finds.

``web:brave`` needs the key of Brave Search in ``BRAVE_API_KEY``, ``web:serper`` that of serper.dev in
``SERPER_API_KEY``; another API is an object of `envs.retrieval.providers.SearchProvider`. A passage has the page's
address as id, its title, the engine's snippet, and of the page's text the paragraphs that share most words with the
query (extra ``web``: ``pip install "mempo-gym[web]"``). A page that cannot be had costs only its text.

Replies and pages are kept in ``web/`` under ``MEMPO_CACHE`` (default ``~/.cache/mempo``), each file complete or absent,
so that a run that is repeated reads what it read before; ``max_age`` limits that. What is busy (429, 5xx) is asked
again as its ``Retry-After`` or ``X-RateLimit-Reset`` says.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
import stamina

from envs.errors import UserError, did_you_mean
from envs.neutral import clip, replace_surrogates
from envs.retrieval.base import Passage, RetrievalError
from envs.retrieval.folders import cache_root
from envs.retrieval.pages import PageError, PageReader
from envs.retrieval.providers import PROVIDERS, Hit, SearchProvider
from envs.retrieval.words import query_words, words

FORMAT = 1
"""Of the cache; other files are not read."""

_LEAST_COUNT = 10
_PAGES_AT_ONCE = 8


class _Busy(Exception):
    """The API was not reached, or says that it cannot answer now; ``wait`` seconds if it says when it can."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


class WebRetriever:
    """Searches the web; see `envs.retrieval.base.Retriever`. Scores are 1, 1/2, 1/3, ...: APIs give an order only.

    Args:
        provider: a name of `PROVIDERS`, or a provider.
        pages: read the pages that are found; else a passage is the snippet.
        passage_chars: of a passage's text at most.
        timeout: seconds for one request to the API; the pages of one query have as long together.
        attempts: for a request that fails by the network, 429 or 5xx.
        max_wait: seconds between two attempts; when the API asks for more, the search fails.
        max_bytes: of a reply; a longer one is an error, and is not read to its end.
        cache: a folder; None for the default one.
        max_age: seconds for which what is kept is used; None for ever.
        reader: of pages, with limits of its own.

    Raises:
        UserError: an unknown provider, no key in the environment, a value out of range.
    """

    def __init__(
        self,
        provider: str | SearchProvider,
        *,
        pages: bool = True,
        passage_chars: int = 1500,
        timeout: float = 20.0,
        attempts: int = 4,
        max_wait: float = 60.0,
        max_bytes: int = 4_000_000,
        cache: str | Path | None = None,
        max_age: float | None = None,
        reader: PageReader | None = None,
    ) -> None:
        if min(passage_chars, attempts, max_bytes) < 1 or min(timeout, max_wait) <= 0:
            raise UserError(
                "passage_chars, attempts, max_bytes must be at least 1, timeout, max_wait more than 0"
            )
        self.provider = _provider(provider) if isinstance(provider, str) else provider
        self._key = _key(self.provider)
        self._settings: dict[str, Any] = {
            "pages": pages,
            "passage_chars": passage_chars,
            "timeout": timeout,
            "attempts": attempts,
            "max_wait": max_wait,
            "max_bytes": max_bytes,
            "cache": cache,
            "max_age": max_age,
            "reader": reader,
        }
        self._chars, self._timeout, self._attempts = passage_chars, timeout, attempts
        self._max_wait, self._max_bytes = max_wait, max_bytes
        self._reader = (reader or PageReader()) if pages else None
        self._cache = _Cache(Path(cache) if cache else cache_root() / "web", max_age)
        # Connections are not kept: two processes after a fork would share them.
        self._client = httpx.Client(timeout=timeout, limits=httpx.Limits(max_keepalive_connections=0))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.provider, self._settings)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        if topk < 1:
            raise UserError(f"topk is {topk}; at least 1 is needed")
        return [self._search(query, topk) for query in queries]

    def _search(self, query: str, topk: int) -> list[Passage]:
        query = " ".join(replace_surrogates(query).split())
        if not words(query):
            return []
        # A few more than asked for: searches that differ in topk alone share what is kept.
        count = min(max(topk, _LEAST_COUNT), self.provider.max_results)
        hits = self._hits(self.provider.request(query, count, self._key))[:topk]
        texts = self._texts([hit.url for hit in hits])
        return [
            Passage(
                hit.url,
                hit.title or hit.url,
                self._passage_text(hit, texts.get(hit.url, ""), query),
                1 / rank,
            )
            for rank, hit in enumerate(hits, 1)
        ]

    def _passage_text(self, hit: Hit, page: str, query: str) -> str:
        snippet = clip(hit.snippet, self._chars)
        part = relevant_part(page, query, self._chars - len(snippet) - 1) if page else ""
        return "\n".join(text for text in (snippet, part) if text)

    def _hits(self, request: httpx.Request) -> list[Hit]:
        # All that the reply depends on; the key is in a header.
        name = ("search", request.method, str(request.url), request.content.decode("utf-8"))
        kept = self._cache.get(name)
        if kept is None:
            reply = self._ask(request)
            try:
                hits = self.provider.hits(reply)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise RetrievalError(
                    f"{self.provider.name}: a reply of unknown form ({type(error).__name__}: {error})"
                ) from None
            kept = [[hit.title, hit.url, hit.snippet] for hit in hits]
            self._cache.put(name, kept)
        return [Hit(*row) for row in kept]

    def _texts(self, urls: Sequence[str]) -> dict[str, str]:
        """The texts of the pages that can be had in time."""
        if self._reader is None:
            return {}
        pool = ThreadPoolExecutor(_PAGES_AT_ONCE, thread_name_prefix="pages")
        futures = {url: pool.submit(self._page, url) for url in dict.fromkeys(urls)}
        done, _ = wait(futures.values(), timeout=self._timeout)
        # A page that is late ends by its own limit, unread.
        pool.shutdown(wait=False, cancel_futures=True)
        return {url: future.result() for url, future in futures.items() if future in done}

    def _page(self, url: str) -> str:
        assert self._reader is not None
        name = ("page", url)
        text = self._cache.get(name)
        if text is None:
            # A failure is not kept: it may be one of this hour.
            try:
                text = self._reader.read(url)
            except PageError:
                return ""
            self._cache.put(name, replace_surrogates(text))
        return str(text)

    def _ask(self, request: httpx.Request) -> Mapping[str, Any]:
        def when(error: Exception) -> bool | float:
            if not isinstance(error, _Busy) or (error.wait or 0) > self._max_wait:
                return False
            return True if error.wait is None else max(error.wait, 0.0)

        try:
            for attempt in stamina.retry_context(
                on=when, attempts=self._attempts, timeout=None, wait_initial=0.5
            ):
                with attempt:
                    return self._ask_once(request)
        except _Busy as error:
            raise RetrievalError(f"{self.provider.name}: {error}") from None
        raise AssertionError("a retry context ends with a return or an exception")

    def _ask_once(self, request: httpx.Request) -> Mapping[str, Any]:
        deadline = time.monotonic() + self._timeout
        body = b""
        try:
            response = self._client.send(request, stream=True)
            try:
                for chunk in response.iter_bytes():
                    body += chunk
                    if len(body) > self._max_bytes:
                        raise RetrievalError(
                            f"{self.provider.name}: the reply is longer than {self._max_bytes} bytes"
                        )
                    if time.monotonic() > deadline:
                        raise _Busy(f"no whole reply in {self._timeout:g} seconds")
            finally:
                response.close()
        except httpx.TransportError as error:
            raise _Busy(f"not reached, {type(error).__name__}: {error}") from None
        except httpx.DecodingError:
            raise RetrievalError(f"{self.provider.name}: the reply is broken") from None
        self._check(response, body)
        try:
            reply = json.loads(body)
        except (ValueError, RecursionError):
            raise RetrievalError(f"{self.provider.name}: the reply is not JSON") from None
        if not isinstance(reply, dict):
            raise RetrievalError(f"{self.provider.name}: the reply is no object of JSON")
        return reply

    def _check(self, response: httpx.Response, body: bytes) -> None:
        status = response.status_code
        if status == 200:
            return
        if status == 429 or status >= 500:
            pause = _pause(response.headers)
            asked = "" if pause is None else f" and asks to wait {pause:.0f} seconds"
            raise _Busy(f"the API answers {status}{asked}", pause)
        if status in (401, 403) or b"TOKEN_INVALID" in body:
            raise UserError(
                f"{self.provider.name} refuses the key in {self.provider.key_variable} (status {status})"
            )
        shown = body[:200].replace(self._key.encode(), b"...")
        raise RetrievalError(f"{self.provider.name}: the API answers {status}: {shown!r}")


class _Cache:
    """Values of JSON by name, a file each: complete or absent."""

    def __init__(self, folder: Path, max_age: float | None) -> None:
        self._folder, self._max_age = folder, max_age

    def get(self, name: Sequence[str]) -> Any:
        path = self._path(name)
        try:
            if self._max_age is not None and time.time() - path.stat().st_mtime > self._max_age:
                return None
            kept = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return kept["value"] if kept.get("name") == list(name) else None

    def put(self, name: Sequence[str], value: Any) -> None:
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        number, aside = tempfile.mkstemp(prefix=path.name, dir=path.parent)
        try:
            with os.fdopen(number, "w", encoding="utf-8") as file:
                json.dump({"name": list(name), "value": value}, file)
            os.replace(aside, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(aside)
            raise

    def _path(self, name: Sequence[str]) -> Path:
        digest = hashlib.sha256(json.dumps([FORMAT, *name]).encode()).hexdigest()
        return self._folder / name[0] / digest[:2] / f"{digest}.json"


def relevant_part(text: str, query: str, limit: int) -> str:
    """Of a text (paragraphs by line) those that share most words with the query, in the text's order.

    Args:
        limit: characters; the last paragraph taken is cut with a visible mark.
    """
    wanted = set(query_words(query))
    paragraphs = [line.strip() for line in text.split("\n") if line.strip()]
    shared = [len(wanted.intersection(words(paragraph))) for paragraph in paragraphs]
    taken: dict[int, str] = {}
    left = limit
    for i in sorted(range(len(paragraphs)), key=lambda i: (-shared[i], i)):
        if left < min(len(paragraphs[i]), 80):
            break
        taken[i] = clip(paragraphs[i], left)
        left -= len(taken[i]) + 1
    return "\n".join(taken[i] for i in sorted(taken))


def _rebuild(provider: SearchProvider, settings: Mapping[str, Any]) -> WebRetriever:
    return WebRetriever(provider, **settings)


def _provider(name: str) -> SearchProvider:
    if name not in PROVIDERS:
        raise UserError(
            f"no web search {name!r}{did_you_mean(name, PROVIDERS)} (there are: {', '.join(PROVIDERS)})"
        )
    return PROVIDERS[name]()


def _key(provider: SearchProvider) -> str:
    key = os.environ.get(provider.key_variable, "").strip()
    if not key:
        raise UserError(
            f"web:{provider.name} needs a key of its API in the environment variable {provider.key_variable}"
        )
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"the key in {provider.key_variable} has characters that no key has")
    return key


def _pause(headers: httpx.Headers) -> float | None:
    """Seconds after which one may ask again: ``Retry-After`` (seconds or a date), else ``X-RateLimit-Reset``, one
    number for each window, of the windows in which nothing remains."""
    after = headers.get("Retry-After", "").strip()
    if after.isdecimal():
        return float(after)
    if after:
        with suppress(ValueError):
            return max(0.0, parsedate_to_datetime(after).timestamp() - time.time())
    resets = [part.strip() for part in headers.get("X-RateLimit-Reset", "").split(",")]
    remaining = [part.strip() for part in headers.get("X-RateLimit-Remaining", "").split(",")]
    if not all(part.isdecimal() for part in resets):
        return None
    if "X-RateLimit-Remaining" not in headers or len(remaining) != len(resets):
        return float(resets[0])
    return max(
        (float(reset) for reset, rest in zip(resets, remaining, strict=True) if rest == "0"), default=None
    )
