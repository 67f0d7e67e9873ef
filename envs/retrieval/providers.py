"""Web search APIs: how a query is asked, and what a reply holds. A new one is a class with these five members.

`Brave` follows the documentation of the Brave Search API (web search, api-dashboard.search.brave.com/api-reference),
`Serper` that of serper.dev (its playground's requests and replies).
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import httpx


@dataclass(frozen=True)
class Hit:
    """One result of a web search."""

    title: str
    url: str
    snippet: str


@runtime_checkable
class SearchProvider(Protocol):
    """A search API.

    Attributes:
        name: as in ``web:NAME``.
        key_variable: of the environment, that holds the key.
        max_results: that a request may ask for.
    """

    @property
    def name(self) -> str: ...

    @property
    def key_variable(self) -> str: ...

    @property
    def max_results(self) -> int: ...

    def request(self, query: str, count: int, key: str) -> httpx.Request:
        """The request for ``count`` results. The key is in a header, nowhere else."""
        ...

    def hits(self, reply: Mapping[str, Any]) -> list[Hit]:
        """The results of a reply (an object of JSON), best first. Raises KeyError, TypeError or ValueError for
        a reply of another form."""
        ...


@dataclass(frozen=True)
class Brave:
    """``GET /res/v1/web/search`` with the key as ``X-Subscription-Token``; the results are ``web.results``."""

    endpoint: str = "https://api.search.brave.com/res/v1/web/search"
    name: str = "brave"
    key_variable: str = "BRAVE_API_KEY"
    max_results: int = 20

    def request(self, query: str, count: int, key: str) -> httpx.Request:
        parameters: dict[str, str | int] = {
            # At most 400 characters and 50 words, or the query is refused.
            "q": " ".join(query.split()[:50])[:400],
            "count": count,
            "result_filter": "web",
            "text_decorations": "false",
            "operators": "false",
        }
        headers = {"Accept": "application/json", "X-Subscription-Token": key}
        return httpx.Request("GET", self.endpoint, params=parameters, headers=headers)

    def hits(self, reply: Mapping[str, Any]) -> list[Hit]:
        # Nothing found: the reply has no "web".
        return [
            Hit(_plain(row["title"]), str(row["url"]), _joined(row))
            for row in (reply.get("web") or {}).get("results", [])
        ]


@dataclass(frozen=True)
class Serper:
    """``POST /search`` with the key as ``X-API-KEY``; the results are ``organic``. Google's, so operators are
    taken out of the query."""

    endpoint: str = "https://google.serper.dev/search"
    name: str = "serper"
    key_variable: str = "SERPER_API_KEY"
    max_results: int = 100

    def request(self, query: str, count: int, key: str) -> httpx.Request:
        payload = {"q": _without_operators(query)[:2000], "num": count}
        return httpx.Request("POST", self.endpoint, json=payload, headers={"X-API-KEY": key})

    def hits(self, reply: Mapping[str, Any]) -> list[Hit]:
        return [
            Hit(_plain(row["title"]), str(row["link"]), _plain(row.get("snippet") or ""))
            for row in reply.get("organic", [])
        ]


PROVIDERS: dict[str, type[Brave] | type[Serper]] = {"brave": Brave, "serper": Serper}


def _joined(row: Mapping[str, Any]) -> str:
    snippets = [row.get("description") or "", *(row.get("extra_snippets") or [])]
    return "\n".join(_plain(snippet) for snippet in snippets if snippet)


def _plain(text: Any) -> str:
    """Without the marks and entities of HTML that a reply may have."""
    return html.unescape(re.sub(r"</?(?:strong|b|em)>", "", str(text))).strip()


def _without_operators(query: str) -> str:
    """Quotes, a leading minus, ``site:`` and ``OR`` are text of the policy's, not orders to the search engine."""
    found = []
    for word in query.replace('"', " ").split():
        word = word.lower() if word in ("OR", "AND", "NOT") else word.lstrip("-+")
        found.append(re.sub(r"^([A-Za-z]+):(?=\S)", r"\1 ", word))
    return " ".join(word for word in found if word)
