"""The transport against raw bytes on a socket: lengths, chunks, kept and dropped connections, nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest

from agent.engines.http_streams import StreamTransport

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = head.lower().partition("content-length: ")[2].partition("\r\n")[0]
    return head, await reader.readexactly(int(length or 0))


def exchange(handler: Handler, calls: int = 1, path: str = "/x?a=1") -> list[httpx.Response]:
    async def main() -> list[httpx.Response]:
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with httpx.AsyncClient(transport=StreamTransport()) as client:
            found = [await client.post(url + path, content=b"hello") for _ in range(calls)]
        server.close()
        return found

    return asyncio.run(main())


def saying(*pieces: bytes, close: bool = False) -> Handler:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await read_request(reader)
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if close:
                    break
        except asyncio.IncompleteReadError:
            pass
        writer.close()

    return handler


def test_what_is_sent() -> None:
    seen: list[tuple[str, bytes]] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Name: v\r\n\r\nok")

    (answer,) = exchange(handler)
    assert (answer.status_code, answer.content, answer.headers["x-name"]) == (200, b"ok", "v")
    head, body = seen[0]
    assert head.startswith("POST /x?a=1 HTTP/1.1\r\n") and "\r\nHost: 127.0.0.1:" in head and body == b"hello"


@pytest.mark.parametrize(
    "pieces",
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n", b"01234", b"56789"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n0123\r\n",
            b"6;x=y\r\n456789\r\n0\r\nT: t\r\n\r\n",
        ),
        (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n0123456789"),
    ],
)
def test_bodies(pieces: tuple[bytes, ...]) -> None:
    answers = exchange(saying(*pieces), calls=3)
    assert [answer.content for answer in answers] == [b"0123456789"] * 3


def test_a_body_that_ends_with_the_connection() -> None:
    answers = exchange(saying(b"HTTP/1.0 200 OK\r\n\r\nall of it", close=True), calls=2)
    assert [answer.content for answer in answers] == [b"all of it"] * 2


def test_one_connection_serves_many_and_a_dropped_idle_one_is_opened_again() -> None:
    opened = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        for _ in range(2):
            await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx")
        writer.close()

    assert [answer.content for answer in exchange(handler, calls=4)] == [b"x"] * 4
    assert opened == 2


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ((), httpx.RemoteProtocolError),
        ((b"HTTP/1.1 200 OK\r\ncontent-len",), httpx.RemoteProtocolError),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n0123",), httpx.RemoteProtocolError),
        ((b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\n01",), httpx.RemoteProtocolError),
        ((b"SSH-2.0-OpenSSH_9.2\r\n\r\n",), httpx.RemoteProtocolError),
        ((b"hello there\r\n\r\n",), httpx.RemoteProtocolError),
        ((b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nmany\r\n01",), httpx.RemoteProtocolError),
        ((b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-4\r\n01",), httpx.RemoteProtocolError),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: ten\r\n\r\n01",), httpx.RemoteProtocolError),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n01",), httpx.RemoteProtocolError),
    ],
)
def test_a_server_that_hangs_up_or_talks_nonsense(pieces: tuple[bytes, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        exchange(saying(*pieces, close=True))


def test_nobody_listens() -> None:
    async def main() -> None:
        async with httpx.AsyncClient(transport=StreamTransport()) as client:
            await client.get("http://127.0.0.1:9/")

    with pytest.raises(httpx.ConnectError, match=r"127\.0\.0\.1:9"):
        asyncio.run(main())


def test_the_answer_of_a_cancelled_request_is_not_the_next_ones() -> None:
    turn = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal turn
        try:
            while True:
                await read_request(reader)
                turn += 1
                text = f"answer {turn}".encode()
                await asyncio.sleep(0.2 if turn == 1 else 0)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(text) + text)
        except asyncio.IncompleteReadError:
            writer.close()

    async def main() -> bytes:
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        async with httpx.AsyncClient(transport=StreamTransport()) as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await client.get(url)
            found = (await client.get(url)).content
        server.close()
        return found

    assert asyncio.run(main()) == b"answer 2"
