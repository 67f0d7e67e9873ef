"""``python -m envs.retrieval.server``: a retriever for many processes or machines, over HTTP.

    python -m envs.retrieval.server --retriever factbook-tiny
    python -m envs.retrieval.server --retriever corpus.jsonl --host 0.0.0.0 --port 8000
    python -m envs.retrieval.server --retriever 'dense:corpus.jsonl?model=intfloat/e5-base-v2'

It serves ``POST /retrieve`` in Search-R1's form and ``GET /health`` (see `envs.retrieval.service`); environments use it
as ``retriever="http://HOST:8000/retrieve"``. It asks nobody for a password: keep it within a network of your own.
Needs the extra ``server``.
"""

from __future__ import annotations

import argparse
import logging
import socket
import sys
from collections.abc import Sequence

from envs.errors import UserError
from envs.retrieval import load_retriever

_OPTIONS = {
    "topk": "passages for a request that names no number",
    "max_queries": "queries in a request at most",
    "max_topk": "passages for a query at most",
    "max_body": "bytes of a request at most",
    "threads": "searches at once",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until interrupted.

    Returns:
        The exit code: 0, or 2 for bad input.
    """
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        return _serve(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m envs.retrieval.server", description="Serve a retriever over HTTP."
    )
    parser.add_argument(
        "--retriever",
        default="factbook-tiny",
        help="as for the environments: factbook, factbook-tiny, a corpus file, dense:CORPUS?model=MODEL, "
        "web:PROVIDER (default factbook-tiny)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="0 for any free one (default 8000)")
    for name, meaning in _OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=meaning)
    return parser


def _serve(options: argparse.Namespace) -> int:
    try:
        import uvicorn

        from envs.retrieval.service import Limits, create_app
    except ImportError as error:
        raise UserError(f'the server needs {error.name}: pip install "mempo-gym[server]"') from None
    given = {name: getattr(options, name) for name in _OPTIONS if getattr(options, name) is not None}
    limits = Limits(**given)
    # Before the retriever, which may take long: a port that is taken is said at once.
    listening = _listen(options.host, options.port)
    with listening:
        app = create_app(load_retriever(options.retriever), options.retriever, limits)
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"serving {options.retriever} at http://{shown}:{port}/retrieve", flush=True)
        config = uvicorn.Config(app, log_level="warning", access_log=False, limit_concurrency=256)
        uvicorn.Server(config).run(sockets=[listening])
    return 0


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise UserError(f"port {port} is none; 0 to 65535 is needed")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return socket.create_server(found[0][4][:2], family=found[0][0])
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"cannot listen on {host}:{port} ({reason}); another --host or --port is needed"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
