"""An httpx transport for many long requests to few servers: HTTP/1.1 over asyncio streams, without a pool.

httpx's own transport costs several milliseconds of processor time a request here, most of it in the pool, which looks
through all of its connections at every change; a rollout asks thousands of times a step. This one keeps a stack of
idle connections for each server and parses what a server of JSON sends: a status line, headers, a body with a length
or in chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict

import httpx

_HEAD_END = b"\r\n\r\n"
_LIMIT = 1 << 20
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class StreamTransport(httpx.AsyncBaseTransport):
    """Plain HTTP/1.1; the connections belong to the event loop that opened them.

    Args:
        connect: seconds for opening a connection.

    Raises:
        httpx.ConnectError: nobody listens, or not within ``connect`` seconds.
        httpx.RemoteProtocolError: the server hung up before its answer was whole, or sent no HTTP.
    """

    def __init__(self, connect: float = 10.0) -> None:
        self._connect = connect
        self._idle: dict[tuple[str, int], list[Connection]] = defaultdict(list)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        place = (request.url.host, request.url.port or 80)
        payload = _head(request) + await request.aread()
        while True:
            kept = self._pop(place)
            connection = kept or await self._open(place)
            try:
                return await self._exchange(place, connection, payload)
            except _HungUp as error:
                # A server closes connections that were idle for long: nothing was answered, so ask anew.
                if kept is not None and not error.answered:
                    continue
                raise httpx.RemoteProtocolError(f"{place[0]}:{place[1]} hung up: {error}") from error

    async def aclose(self) -> None:
        for connections in self._idle.values():
            for _, writer in connections:
                with contextlib.suppress(OSError, RuntimeError):
                    writer.close()
        self._idle.clear()

    def _pop(self, place: tuple[str, int]) -> Connection | None:
        idle = self._idle[place]
        while idle:
            reader, writer = idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        return None

    async def _open(self, place: tuple[str, int]) -> Connection:
        try:
            async with asyncio.timeout(self._connect):
                return await asyncio.open_connection(*place, limit=_LIMIT)
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no connection within {self._connect} s"
            raise httpx.ConnectError(f"{place[0]}:{place[1]}: {reason}") from error

    async def _exchange(
        self, place: tuple[str, int], connection: Connection, payload: bytes
    ) -> httpx.Response:
        reader, writer = connection
        answered = whole = False
        try:
            writer.write(payload)
            await writer.drain()
            status, headers, keep = await _read_head(reader)
            answered = True
            body = await _read_body(reader, status, headers)
            whole = True
        except (ValueError, asyncio.LimitOverrunError) as error:
            raise httpx.RemoteProtocolError(
                f"{place[0]}:{place[1]} sent a malformed body: {error}"
            ) from error
        except (OSError, asyncio.IncompleteReadError) as error:
            answered = answered or bool(getattr(error, "partial", b""))
            raise _HungUp(str(error), answered) from error
        finally:
            # Also when the caller was cancelled: an answer that nobody reads must not be the next one's.
            if not whole:
                writer.close()
        if keep:
            self._idle[place].append(connection)
        else:
            writer.close()
        return httpx.Response(status, headers=list(headers.items()), content=body)


class _HungUp(Exception):
    def __init__(self, message: str, answered: bool) -> None:
        super().__init__(message)
        self.answered = answered


def _head(request: httpx.Request) -> bytes:
    lines = [b"%s %s HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    lines += [b"%s: %s" % pair for pair in request.headers.raw if pair[0].lower() != b"transfer-encoding"]
    return b"\r\n".join(lines) + _HEAD_END


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bool]:
    while True:
        try:
            lines = (await reader.readuntil(_HEAD_END)).decode("latin-1").split("\r\n")
            version, code, *_ = lines[0].split(" ")
            status = int(code)
            headers = {
                name.strip().lower(): value.strip()
                for name, separator, value in (line.partition(":") for line in lines[1:])
                if separator
            }
        except (ValueError, asyncio.LimitOverrunError) as error:
            raise httpx.RemoteProtocolError(f"this is no HTTP answer: {error}") from error
        if not version.startswith("HTTP/1."):
            raise httpx.RemoteProtocolError(f"this is no HTTP answer: {version[:40]!r}")
        if status >= 200:
            keep = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
            return status, headers, keep and ("content-length" in headers or "transfer-encoding" in headers)


async def _read_body(reader: asyncio.StreamReader, status: int, headers: dict[str, str]) -> bytes:
    if headers.pop("transfer-encoding", "").lower() == "chunked":
        pieces = []
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            pieces.append(await reader.readexactly(size))
            await reader.readexactly(2)
        while (await reader.readuntil(b"\r\n")) != b"\r\n":
            pass
        return b"".join(pieces)
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    return b"" if status == 204 else await reader.read()
