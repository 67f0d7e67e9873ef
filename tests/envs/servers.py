"""Real HTTP servers on 127.0.0.1 whose answers a test decides, and which remember what they were asked."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass
class Asked:
    """A request as the server saw it. Names of headers are in lower case."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Reply:
    """``body`` is sent in its pieces; a number among them is a pause in seconds."""

    status: int = 200
    body: bytes | list[bytes | float] = b""
    headers: dict[str, str] = field(default_factory=dict)


def json_reply(value: Any, status: int = 200, **headers: str) -> Reply:
    return Reply(status, json.dumps(value).encode(), {"Content-Type": "application/json", **headers})


def html_reply(html: str, **headers: str) -> Reply:
    return Reply(200, html.encode(), {"Content-Type": "text/html; charset=utf-8", **headers})


@dataclass
class Server:
    """``url`` has no slash at its end."""

    url: str
    port: int
    asked: list[Asked]


@contextmanager
def serving(
    answer: Callable[[Asked], Reply],
    host: str = "127.0.0.1",
    tls: ssl.SSLContext | None = None,
    keep_alive: bool = False,
) -> Iterator[Server]:
    """A server that answers as ``answer`` says, on a free port; connections end with their answer, or are kept."""
    asked: list[Asked] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1" if keep_alive else "HTTP/1.0"

        def _serve(self) -> None:
            address = urlsplit(self.path)
            query = {
                key: values[0] for key, values in parse_qs(address.query, keep_blank_values=True).items()
            }
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {key.lower(): value for key, value in self.headers.items()}
            asked.append(Asked(self.command, address.path, query, headers, body))
            reply = answer(asked[-1])
            with suppress(BrokenPipeError, ConnectionResetError, ssl.SSLError):
                self._write(reply)

        def _write(self, reply: Reply) -> None:
            self.send_response(reply.status)
            for key, value in reply.headers.items():
                self.send_header(key, value)
            if isinstance(reply.body, bytes):
                self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            for piece in [reply.body] if isinstance(reply.body, bytes) else reply.body:
                if isinstance(piece, bytes):
                    self.wfile.write(piece)
                    self.wfile.flush()
                else:
                    closing.wait(piece)

        do_GET = do_POST = _serve

        def log_message(self, *_: Any) -> None:
            pass

    closing = threading.Event()
    server = ThreadingHTTPServer((host, 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    port = server.server_address[1]
    try:
        yield Server(f"{'https' if tls else 'http'}://{host}:{port}", port, asked)
    finally:
        closing.set()
        server.shutdown()
        server.server_close()
