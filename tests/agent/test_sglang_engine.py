"""The SGLang engine against a server with recorded answers: failures, moves, pushes, and what is never scored."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from agent.engines.base import Completion, EngineError, GenerationRequest
from agent.engines.settings import SGLangSettings
from agent.engines.sglang import SGLangEngine
from agent.engines.sglang_reply import body_of, read_reply
from agent.engines.sglang_server import Server
from agent.models import save_model
from agent.tiny import build_tokenizer
from envs.errors import UserError
from tests.agent.fake_sglang import ERRORS, GENERATE, FakeSGLang, completion

TOKENIZER: PreTrainedTokenizerFast = build_tokenizer(["nothing"], 300)
SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
REQUEST = GenerationRequest((1, 2, 3), seed=5, max_new_tokens=24, stop=("</search>",))


def make_model(seed: int = 0, **changes: Any) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**{**SIZES, **changes}))
    for parameter in model.parameters():  # biases and norms too: what is all 0 or 1 hides a mix-up
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def move(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model(), TOKENIZER, tmp_path_factory.mktemp("models") / "start")


@pytest.fixture
def fakes(folder: Path) -> Iterator[list[FakeSGLang]]:
    servers = [FakeSGLang(folder), FakeSGLang(folder)]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def fake(folder: Path) -> Iterator[FakeSGLang]:
    server = FakeSGLang(folder)
    yield server
    server.close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses between attempts are written down, not waited for."""
    waited: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float, *rest: Any) -> None:
        waited.append(seconds)
        await real(min(seconds, 0.002))

    monkeypatch.setattr("agent.engines.sglang.asyncio.sleep", sleep)
    return waited


@contextlib.contextmanager
def training(
    servers: list[FakeSGLang], tmp_path: Path, model: Any = None, **settings: Any
) -> Iterator[SGLangEngine]:
    chosen = SGLangSettings(urls=tuple(server.url for server in servers), **settings)
    engine = SGLangEngine.for_training(model or make_model(), TOKENIZER, chosen, tmp_path)
    for server in servers:
        server.calls.clear()
    try:
        yield engine
    finally:
        asyncio.run(engine.close())


@contextlib.contextmanager
def evaluating(servers: list[FakeSGLang], **settings: Any) -> Iterator[SGLangEngine]:
    chosen = SGLangSettings(urls=tuple(server.url for server in servers), **settings)
    engine = SGLangEngine.for_evaluation(chosen, 300, 64)
    for server in servers:
        server.calls.clear()
    try:
        yield engine
    finally:
        asyncio.run(engine.close())


def ask(engine: SGLangEngine, request: GenerationRequest = REQUEST) -> Completion:
    return asyncio.run(engine.generate(request))


def test_ids_logprobs_and_version_come_as_they_were_sampled(fake: FakeSGLang) -> None:
    with evaluating([fake]) as engine:
        found = ask(engine)
    recorded = GENERATE["stop_string"]["body"]
    assert found.ids == (658, 573, 3061, 3064, 66, 347, 269, 3065)  # the stop string's token stays
    assert not recorded["text"].endswith("</search>")  # and is cut off the text, which nobody reads
    assert found.logprobs == tuple(entry[0] for entry in recorded["meta_info"]["output_token_logprobs"])
    assert (found.finish, found.weight_version) == ("stop", 0)
    body = fake.calls[0][1]
    assert body["input_ids"] == [1, 2, 3] and body["return_logprob"] is True and "text" not in body
    sampling = body["sampling_params"]
    assert (sampling["temperature"], sampling["max_new_tokens"], sampling["stop"]) == (1.0, 24, ["</search>"])
    assert (sampling["top_p"], sampling["top_k"], sampling["min_p"]) == (1.0, -1, 0.0)


@pytest.mark.parametrize(
    ("kind", "finish"),
    [("stop_token", "stop"), ("length", "length"), ("greedy", "length"), ("abort", "abort")],
)
def test_finish_reasons(kind: str, finish: str) -> None:
    reply = read_reply(GENERATE[kind]["body"])
    assert reply.finish == finish
    assert len(reply.ids) == len(reply.logprobs) == GENERATE[kind]["body"]["meta_info"]["completion_tokens"]
    if kind == "stop_token":
        assert reply.ids[-1] == 257  # kept in the ids


def test_the_length_is_cut_to_the_window() -> None:
    request = GenerationRequest(tuple(range(1, 60)), seed=0, max_new_tokens=24)
    assert body_of(request, "r", 64)["sampling_params"]["max_new_tokens"] == 5


def change(path: str, value: Any) -> Any:
    found = completion("length")
    place = found
    *parents, last = path.split(".")
    for part in parents:
        place = place[part]
    place[last] = value
    return found


@pytest.mark.parametrize(
    "broken",
    [
        [],
        {"text": "hello"},
        change("output_ids", [748, 3064]),
        change("output_ids", [748, 3064, 749]),
        change("meta_info.output_token_logprobs", []),
        change("meta_info.output_token_logprobs", [[None, 748, None], [-1.0, 3064, None], [-1.0, 748, None]]),
        change("meta_info.output_token_logprobs", [[0.7, 748, None], [-1.0, 3064, None], [-1.0, 748, None]]),
        change("meta_info.finish_reason", {"type": "tired"}),
        change("meta_info.finish_reason", None),
    ],
)
def test_an_answer_of_another_form_is_an_error_and_no_completion(broken: Any) -> None:
    with pytest.raises(EngineError):
        read_reply(broken)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("too_long", "status 400: The input (1101 tokens) is longer than the model's context length"),
        ("bad_type", "status 400: 3 validation errors:"),
        ("contract", 'status 400: invalid type: string "x", expected i64'),
        ("not_found", "status 404: Not Found"),
        ("wrong_method", "status 405: Method Not Allowed"),
        ("bad_temperature", "status 400: temperature must be a non-negative finite number, got -1."),
    ],
)
def test_every_form_of_error_becomes_one_line_and_is_not_asked_again(
    fake: FakeSGLang, kind: str, message: str
) -> None:
    with evaluating([fake]) as engine:
        fake.queue.append((ERRORS[kind]["status"], ERRORS[kind]["body"]))
        with pytest.raises(EngineError) as caught:
            ask(engine)
        assert message in str(caught.value) and "\n" not in str(caught.value)
        assert fake.paths == ["/generate"]
        assert ask(engine).finish == "stop"  # the server is fine


def test_a_full_queue_is_waited_for(fake: FakeSGLang, short_pauses: list[float]) -> None:
    full = (503, {"object": "error", "message": "The request queue is full.", "type": "503", "code": 503})
    with evaluating([fake], retries=3) as engine:
        fake.queue += [full] * 3
        short_pauses.clear()
        assert ask(engine).finish == "stop"
        assert len(short_pauses) == 3 and short_pauses[0] < short_pauses[2] <= 0.4
        fake.queue += [full] * 4
        with pytest.raises(EngineError, match=r"status 503: The request queue is full\."):
            ask(engine)


@pytest.mark.parametrize("ids", [(), (1, 300), (-1, 4), tuple(range(64))])
def test_what_would_harm_a_server_is_not_sent(fake: FakeSGLang, ids: tuple[int, ...]) -> None:
    with evaluating([fake]) as engine:
        with pytest.raises(ValueError):
            ask(engine, GenerationRequest(ids, seed=0))
        assert fake.calls == []


def test_an_abort_from_outside_is_passed_on(fake: FakeSGLang) -> None:
    with evaluating([fake]) as engine:
        fake.queue.append((200, completion("abort")))
        assert ask(engine).finish == "abort"


async def eventually(what: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.002)


def run(what: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(what)


def test_a_late_or_cancelled_request_is_ended_on_the_server(fake: FakeSGLang) -> None:
    fake.seconds = 60
    with evaluating([fake], request_timeout=0.2) as engine:

        async def late() -> None:
            with pytest.raises(EngineError, match=r"took longer than 0\.2 s"):
                await engine.generate(REQUEST)
            await eventually(lambda: "/abort_request" in fake.paths)

        run(late())
        (first,) = [body["rid"] for path, body in fake.calls if path == "/generate"]
        assert [body["rid"] for path, body in fake.calls if path == "/abort_request"] == [first]
    with evaluating([fake]) as engine:

        async def cancelled() -> None:
            task = asyncio.create_task(engine.generate(REQUEST))
            await eventually(lambda: fake.paths == ["/generate"])
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await eventually(lambda: "/abort_request" in fake.paths)

        run(cancelled())


def test_groups_stay_together_and_are_spread(fakes: list[FakeSGLang]) -> None:
    for server in fakes:
        server.seconds = 0.05

    async def play(engine: SGLangEngine) -> None:
        requests = [
            GenerationRequest((10 + group, sample), seed=sample, group=f"g{group}")
            for sample in range(4)
            for group in range(6)
        ]
        await asyncio.gather(*map(engine.generate, requests))
        await asyncio.gather(*map(engine.generate, requests))  # a second turn finds the cache of the first

    with evaluating(fakes) as engine:
        run(play(engine))
    groups = [{body["input_ids"][0] for _, body in server.calls} for server in fakes]
    assert groups[0] | groups[1] == set(range(10, 16)) and not groups[0] & groups[1]
    assert [len(server.calls) for server in fakes] == [24, 24]


def test_a_dead_servers_requests_move_and_it_is_taken_back(fakes: list[FakeSGLang]) -> None:
    dying, other = fakes
    for server in fakes:
        server.seconds = 0.3

    async def play(engine: SGLangEngine) -> list[Completion]:
        tasks = [
            asyncio.create_task(engine.generate(GenerationRequest((10 + g,), seed=g, group=f"g{g}")))
            for g in range(8)
        ]
        await eventually(lambda: dying.running() == 4 and other.running() == 4)
        dying.die()
        found = await asyncio.gather(*tasks)
        assert len(other.served) == 8 and not dying.served
        dying.start()
        await eventually(lambda: all(member.alive for member in engine.pool.members))
        for server in fakes:
            server.seconds = 0.0
        for g in range(20, 30):
            await engine.generate(GenerationRequest((g,), seed=g, group=f"g{g}"))
        return list(found)

    with evaluating(fakes) as engine:
        found = run(play(engine))
        assert [completion.finish for completion in found] == ["stop"] * 8
        assert dying.served


def test_the_only_server_is_waited_for_across_event_loops(fake: FakeSGLang) -> None:
    with evaluating([fake]) as engine:
        assert ask(engine).finish == "stop"
        fake.die()

        async def play() -> Completion:
            task = asyncio.create_task(engine.generate(REQUEST))
            await eventually(lambda: not engine.pool.members[0].alive)
            fake.start()
            return await task

        assert run(play()).finish == "stop"
        fake.die()
        fake.start()
        assert ask(engine).finish == "stop"  # kept connections are gone, the server is not


def test_a_server_that_stays_away_is_an_error_that_says_so(fake: FakeSGLang) -> None:
    with evaluating([fake], start_timeout=0.3) as engine:
        fake.die()
        with pytest.raises(EngineError, match=r"no server is there: http://127.0.0.1:\d+: .*not there"):
            ask(engine)


def test_a_request_that_kills_every_server_does_not_kill_them_for_ever(fakes: list[FakeSGLang]) -> None:
    for server in fakes:
        server.seconds = 60

    async def play(engine: SGLangEngine) -> None:
        task = asyncio.create_task(engine.generate(REQUEST))
        for _ in range(3):
            await eventually(lambda: any(server.running() for server in fakes))
            for server in fakes:
                if server.running():
                    server.die()
                    server.start()
        with pytest.raises(EngineError, match="3 servers in a row died under a request"):
            await task

    with evaluating(fakes, moves=2) as engine:
        run(play(engine))


def test_nobody_there_at_the_start(folder: Path, tmp_path: Path) -> None:
    settings = SGLangSettings(urls=("http://127.0.0.1:9",))
    with pytest.raises(UserError, match=r"no SGLang server at http://127\.0\.0\.1:9"):
        SGLangEngine.for_evaluation(settings, 300, 64)
    with pytest.raises(UserError, match=r"no SGLang server at http://127\.0\.0\.1:9"):
        SGLangEngine.for_training(make_model(), TOKENIZER, settings, tmp_path)
    assert not (tmp_path / "sglang").exists()


def test_a_server_that_was_left_paused_is_not_evaluated_and_is_trained_on(
    fake: FakeSGLang, tmp_path: Path
) -> None:
    operator = Server(fake.url)
    operator.pause()  # and whoever did it was killed
    with pytest.raises(UserError, match=rf"{fake.url} generates nothing: .*paused"), evaluating([fake]):
        pass
    with training([fake], tmp_path) as engine:
        assert ask(engine).weight_version == 0
    operator.close()
    with evaluating([fake]) as engine:
        assert ask(engine).finish == "stop"


def test_servers_with_different_weights_are_refused(fakes: list[FakeSGLang]) -> None:
    fakes[0].label = "7-abc"
    with pytest.raises(UserError, match="different weights: 7-abc, default"), evaluating(fakes):
        pass
    fakes[1].label = "7-abc"
    with evaluating(fakes) as engine:
        assert engine.weight_version == 7 and ask(engine).weight_version == 7
