"""The text of a web page, fetched with care: an address comes from a search engine, so nobody vouches for it.

The host's name is resolved here, every address it has must be a public one (none of this machine, of a local network,
link-local, reserved or multicast), and the connection goes to the address that was checked, so that a second answer of
the name server changes nothing; a redirect goes through the same. Proxies of the environment are not used, since they
would resolve names themselves. Size and time are limited, also of what a compressed body unfolds to. The text is taken
out of the HTML by ``trafilatura``.
"""

from __future__ import annotations

import importlib
import ipaddress
import logging
import socket
import ssl
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx

from envs.errors import UserError

Resolve = Callable[[str, int], Sequence[str]]

MAX_REDIRECTS = 5

_HEADERS = {
    "User-Agent": "mempo-gym (research; reads pages that a search found)",
    "Accept": "text/html, application/xhtml+xml, text/plain",
    "Accept-Encoding": "gzip",
}
# For documents and the old 6to4 relays, which this version of `ipaddress` may not know.
_MORE = (ipaddress.ip_network("3fff::/20"), ipaddress.ip_network("192.88.99.0/24"))
_HTML = ("text/html", "application/xhtml+xml")


class PageError(Exception):
    """A page gives no text, or may not be fetched; the message says why."""


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host as the system knows them. Raises OSError when there is none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the internet at large.

    Addresses that wrap another one (IPv4 in IPv6) are judged by what they wrap, or refused (6to4, Teredo,
    NAT64, ISATAP).
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        isatap = int(ip) >> 32 & 0xFDFFFFFF == 0x5EFE
        if ip.sixtofour is not None or ip.teredo is not None or ip.is_site_local or isatap:
            return False
    if any(ip in network for network in _MORE):
        return False
    return ip.is_global and not (
        ip.is_multicast or ip.is_reserved or ip.is_unspecified or ip.is_loopback or ip.is_link_local
    )


class GuardedTransport(httpx.BaseTransport):
    """Sends a request to an address of its host that was checked; see the module's docstring.

    Args:
        allowed_networks: that may be reached although they are not public, such as ``10.1.0.0/16``.
        resolve: the addresses of a host and port.
        verify: certificates as `httpx` takes it.
    """

    def __init__(
        self,
        allowed_networks: Sequence[str] = (),
        resolve: Resolve = resolve,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        try:
            self._allowed = [ipaddress.ip_network(network) for network in allowed_networks]
        except ValueError as error:
            raise UserError(f"allowed_networks: {error}; a network such as 10.1.0.0/16 is needed") from None
        self._resolve = resolve
        # Connections are not kept: one belongs to an address, and the next host there may be another one.
        self._inner = httpx.HTTPTransport(
            verify=verify, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        if url.scheme not in ("http", "https") or not url.host:
            raise PageError(f"no http address: {str(url)[:200]}")
        host = url.raw_host.decode("ascii")
        try:
            addresses = self._resolve(host, url.port or (443 if url.scheme == "https" else 80))
        except (OSError, UnicodeError) as error:
            raise PageError(f"host {host} is not known ({error})") from None
        refused = [address for address in addresses if not self._may(address)]
        if refused or not addresses:
            raise PageError(f"host {host} is refused: {', '.join(refused) or 'no'} address is not public")
        failure: httpx.ConnectError | None = None
        for address in addresses:
            pinned = httpx.Request(
                request.method,
                url.copy_with(host=address.partition("%")[0]),
                headers=request.headers,  # with the Host of the name
                stream=request.stream,
                extensions={**request.extensions, "sni_hostname": host},
            )
            try:
                return self._inner.handle_request(pinned)
            except httpx.ConnectError as error:
                failure = error
        raise failure or PageError(f"host {host} has no address")

    def _may(self, address: str) -> bool:
        ip = ipaddress.ip_address(address.partition("%")[0])
        return is_public(address) or any(ip in network for network in self._allowed)

    def close(self) -> None:
        self._inner.close()


class PageReader:
    """Fetches pages and gives their text; may be shared by threads.

    Args:
        timeout: seconds for a page, redirects included.
        max_bytes: of a page, also after decompression; a longer one is cut there.
        allowed_networks, resolve, verify: see `GuardedTransport`.

    Raises:
        UserError: a value out of range, or ``trafilatura`` is not installed.
    """

    def __init__(
        self,
        *,
        timeout: float = 10.0,
        max_bytes: int = 2_000_000,
        allowed_networks: Sequence[str] = (),
        resolve: Resolve = resolve,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        if timeout <= 0 or max_bytes < 1:
            raise UserError("timeout must be more than 0 and max_bytes at least 1")
        try:
            # Now, so that its import takes nothing of a page's time.
            importlib.import_module("trafilatura")
        except ImportError:
            raise UserError('the text of web pages needs trafilatura: pip install "mempo-gym[web]"') from None
        self.settings: dict[str, Any] = {
            "timeout": timeout,
            "max_bytes": max_bytes,
            "allowed_networks": tuple(allowed_networks),
            "resolve": resolve,
            "verify": verify,
        }
        self._timeout, self._max_bytes = timeout, max_bytes
        self._transport = GuardedTransport(allowed_networks, resolve, verify)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.settings,)

    def read(self, url: str) -> str:
        """The text of the page at ``url``, paragraphs by line.

        Raises:
            PageError: there is none: refused, not reached, no page of text, too slow.
        """
        deadline = time.monotonic() + self._timeout
        # A client each time, over one transport: cookies stay within one page and its redirects.
        client = httpx.Client(transport=self._transport, trust_env=False, headers=_HEADERS)
        try:
            request = client.build_request("GET", url)
            for _ in range(MAX_REDIRECTS + 1):
                left = max(0.001, deadline - time.monotonic())
                request.extensions["timeout"] = httpx.Timeout(left).as_dict()
                response = client.send(request, stream=True)
                try:
                    if response.next_request is None:
                        return self._text(response, deadline)
                    request = response.next_request
                finally:
                    response.close()
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            raise PageError(f"not reached, {type(error).__name__}: {error}") from None
        raise PageError(f"more than {MAX_REDIRECTS} redirects")

    def _text(self, response: httpx.Response, deadline: float) -> str:
        if response.status_code != 200:
            raise PageError(f"the server answers {response.status_code}")
        kind = response.headers.get("Content-Type", "text/html").partition(";")[0].strip().lower()
        if kind not in (*_HTML, "text/plain"):
            raise PageError(f"no page of text, but {kind[:80]}")
        body = b""
        for chunk in _unfolded(response, self._max_bytes):
            body += chunk
            if time.monotonic() > deadline:
                raise PageError(f"not read in {self._timeout:g} seconds")
            if len(body) >= self._max_bytes:
                break
        text = _decoded(body[: self._max_bytes], response.charset_encoding)
        if kind in _HTML:
            text = text_of_html(text)
        elif isinstance(text, bytes):
            text = text.decode("utf-8", errors="replace")
        if not text.strip():
            raise PageError("no text was found in the page")
        return text


def _rebuild(settings: dict[str, Any]) -> PageReader:
    return PageReader(**settings)


def _unfolded(response: httpx.Response, limit: int) -> Iterator[bytes]:
    """The body in pieces of at most ``limit`` bytes, whatever it was compressed to."""
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding == "identity":
        yield from response.iter_raw()
        return
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise PageError(f"compressed as {encoding[:40]}, which was not asked for")
    unfold = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    try:
        for chunk in response.iter_raw():
            yield unfold.decompress(chunk, limit)
    except zlib.error as error:
        raise PageError(f"broken compression ({error})") from None


def _decoded(body: bytes, charset: str | None) -> str | bytes:
    """Text when the server says how it is coded, else bytes: the page may say it itself."""
    try:
        return body.decode(charset, errors="replace") if charset else body
    except LookupError:
        return body


def text_of_html(html: str | bytes) -> str:
    """The main text of a page, paragraphs by line, without menus and comments; empty when there is none."""
    import trafilatura

    # It reports every odd page as an error of its own.
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    try:
        return trafilatura.extract(html, include_comments=False, include_tables=True) or ""
    except Exception as error:  # whatever a stranger's page does to a parser costs that page alone
        raise PageError(f"no text can be taken out, {type(error).__name__}: {error}") from None
