"""What the SGLang client costs: processor time a request, and its share of a bare HTTP load's tokens a second.

Processor time is measured against a server of constant answers in another process. The share is measured on a real
server that ``/slow_down`` makes slow (so that it, and not this machine, is what is waited for): the same requests once
through the engine, once as plain posts with nothing around them, in turns.

Run: ``make sglang-client``, or ``python -m benchmarks.sglang_client`` for the first part alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch

from agent.engines.base import Completion, GenerationRequest
from agent.engines.http_streams import StreamTransport
from agent.engines.settings import SGLangSettings
from agent.engines.sglang import SGLangEngine
from agent.engines.sglang_launch import LocalServer
from agent.engines.sglang_reply import body_of
from agent.engines.sglang_server import Server
from agent.models import load_tokenizer
from trainer.cold_start import SHIPPED

_PROMPT, _COMPLETION, _VOCABULARY = 250, 60, 3000


def constant_server(pipe: Any) -> None:
    """Answers every request with a completion of `_COMPLETION` tokens; sends its port through the pipe."""
    scored = [[-1.2345678901, number + 5, None] for number in range(_COMPLETION)]
    meta = {
        "id": "x",
        "finish_reason": {"type": "length", "length": _COMPLETION},
        "weight_version": "default",
        "output_token_logprobs": scored,
        "weight_versions": [{"version": "default", "start": 0, "end": _COMPLETION}],
    }
    completion = json.dumps({"text": "x" * 200, "output_ids": [i for _, i, _ in scored], "meta_info": meta})
    answers = {
        "/generate": completion,
        "/model_info": json.dumps({"model_path": "m", "weight_version": "default"}),
        "/server_info": json.dumps({"device": "cpu", "tp_size": 1}),
    }

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = head.partition("content-length: ")[2].partition("\r\n")[0]
                await reader.readexactly(int(length or 0))
                data = answers[head.split(" ")[1]].encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


def requests_of(count: int, length: int, new_tokens: int) -> list[GenerationRequest]:
    rng = random.Random(0)
    return [
        GenerationRequest(
            tuple(rng.randrange(50, _VOCABULARY) for _ in range(length)),
            seed=number,
            max_new_tokens=new_tokens,
            group=str(number // 16),
        )
        for number in range(count)
    ]


async def through_the_engine(engine: SGLangEngine, requests: Sequence[GenerationRequest]) -> int:
    found: list[Completion] = await asyncio.gather(*map(engine.generate, requests))
    return sum(len(completion.ids) for completion in found)


async def bare_posts(url: str, requests: Sequence[GenerationRequest], window: int) -> int:
    """The load that a client could at best put on a server; answers are only counted."""
    bodies = [json.dumps(body_of(each, f"bare-{n}", window)).encode() for n, each in enumerate(requests)]
    async with httpx.AsyncClient(
        timeout=None, transport=StreamTransport(), headers={"Content-Type": "application/json"}
    ) as client:
        answers = await asyncio.gather(*(client.post(f"{url}/generate", content=body) for body in bodies))
    return sum(len(answer.json()["output_ids"]) for answer in answers)


def processor_time(count: int, rounds: int) -> float:
    """Milliseconds of processor time of this process for one request, the median of some rounds."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=constant_server, args=(there,), daemon=True)
    process.start()
    try:
        url = f"http://127.0.0.1:{here.recv()}"
        engine = SGLangEngine.for_evaluation(SGLangSettings(urls=(url,)), _VOCABULARY, 4096)
        requests = requests_of(count, _PROMPT, _COMPLETION)
        asyncio.run(through_the_engine(engine, requests[:64]))
        costs = []
        for _ in range(rounds):
            before = time.process_time()
            asyncio.run(through_the_engine(engine, requests))
            costs.append((time.process_time() - before) / count * 1e3)
        asyncio.run(engine.close())
    finally:
        process.kill()
        process.join()
    return statistics.median(costs)


def rates(url: str, model: str, count: int, new_tokens: int, slow: float, rounds: int) -> tuple[float, float]:
    """Tokens a second through the engine and as bare posts, medians of rounds in turns."""
    _, config = load_tokenizer(model)
    window = int(config.max_position_embeddings)
    engine = SGLangEngine.for_evaluation(SGLangSettings(urls=(url,)), int(config.vocab_size), window)
    operator = Server(url)
    requests = requests_of(count, 40, new_tokens)

    def rate(load: Coroutine[Any, Any, int]) -> float:
        operator.flush()
        before = time.perf_counter()
        tokens = asyncio.run(load)
        return tokens / (time.perf_counter() - before)

    asyncio.run(through_the_engine(engine, requests))
    operator.slow_down(slow)
    try:
        ours, bare = [], []
        for _ in range(rounds):
            ours.append(rate(through_the_engine(engine, requests)))
            bare.append(rate(bare_posts(url, requests, window)))
    finally:
        operator.slow_down(0.0)
        operator.close()
        asyncio.run(engine.close())
    return statistics.median(ours), statistics.median(bare)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server", metavar="URL", help="a real SGLang server, for the second part")
    parser.add_argument("--model", metavar="FOLDER", help="what it serves")
    parser.add_argument("--slow", type=float, default=0.2, help="seconds it sleeps in every forward pass")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--at-once", type=int, default=48, help="requests of the second part")
    parser.add_argument("--launch", action="store_true", help="start a server with the cold-start model")
    parser.add_argument("--python", default=SGLangSettings().python, help="of SGLang's environment")
    options = parser.parse_args()
    if options.server is not None and options.model is None:
        parser.error("--server needs --model")
    torch.set_num_threads(1)
    cost = processor_time(options.requests, options.rounds)
    print(f"processor time: {cost:.2f} ms a request ({_PROMPT} prompt and {_COMPLETION} new tokens)")
    local: LocalServer | None = None
    with tempfile.TemporaryDirectory() as folder:
        if options.launch:
            local = LocalServer(options.python, SHIPPED, "float32", Path(folder) / "server.log")
            local.start()
        try:
            if local is not None:
                local.wait(900)
                options.server, options.model = local.url, str(SHIPPED)
            if options.server is not None:
                ours, bare = rates(
                    options.server,
                    options.model,
                    options.at_once,
                    options.new_tokens,
                    options.slow,
                    options.rounds,
                )
                print(f"engine {ours:.1f} tokens/s, bare posts {bare:.1f} tokens/s: {ours / bare:.1%}")
        finally:
            if local is not None:
                local.stop()


if __name__ == "__main__":
    main()
