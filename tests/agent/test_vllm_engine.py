"""The vLLM engine against a server of known logits that answers in vLLM's forms."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from agent.engines.base import Completion, EngineError, GenerationRequest
from agent.engines.vllm import VLLMEngine, body_of, read_completion
from agent.prompts import PromptBuilder
from agent.rollout import Sampling, play_episode
from agent.spans import token_bytes
from agent.tiny import build_tokenizer
from envs.errors import UserError
from envs.registry import make
from eval import bench
from tests.envs.servers import Asked, Reply, json_reply, serving

SHIPPED = Path(__file__).parents[2] / "trainer" / "assets" / "tiny-cold-start"
LOGITS = [0.0, 1.0, 3.0, -2.0]
MODELS = {
    "object": "list",
    "data": [{"id": "some/model", "object": "model", "owned_by": "vllm", "max_model_len": 64}],
}
# As vLLM 0.32.0 answered a greedy request of the shipped model; the stop string's token stays in the ids.
ANSWER: dict[str, Any] = {
    "id": "cmpl-8c877b3891fd6667",
    "object": "text_completion",
    "created": 1795987974,
    "model": "some/model",
    "choices": [
        {
            "index": 0,
            "text": "apital</search>",
            "logprobs": {
                "text_offset": [0, 6],
                "token_logprobs": [-0.003585697151720524, -1.4305104514278355e-06],
                "tokens": ["apital", "</search>"],
                "top_logprobs": [{"apital": -0.003585697151720524}, {"</search>": -1.4305104514278355e-06}],
            },
            "finish_reason": "stop",
            "stop_reason": "</search>",
            "token_ids": [2, 3],
            "prompt_logprobs": None,
            "prompt_token_ids": [1, 2],
            "routed_experts": None,
        }
    ],
    "service_tier": None,
    "system_fingerprint": "vllm-0.32.0-d0e5a578",
    "usage": {
        "prompt_tokens": 2,
        "total_tokens": 4,
        "completion_tokens": 2,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    },
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "metrics": None,
}
# And these it refused, each with status 400 (the last 404).
REFUSALS: dict[str, Any] = {
    "maximum context length is 1000 tokens": {
        "error": {
            "message": "This model's maximum context length is 1000 tokens. However, your prompt contains 2000 input "
            "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the "
            "input prompt. (parameter=input_tokens, value=2000)",
            "type": "BadRequestError",
            "param": "input_tokens",
            "code": 400,
        }
    },
    "Token id 1000000 is out of vocabulary": {
        "error": {
            "message": "Token id 1000000 is out of vocabulary",
            "type": "BadRequestError",
            "param": None,
            "code": 400,
        }
    },
    "temperature must be in": {
        "error": {
            "message": "temperature must be in [0, 2], got 4.0. (parameter=temperature, value=4.0)",
            "type": "BadRequestError",
            "param": "temperature",
            "code": 400,
        }
    },
    "The model `x` does not exist": {
        "error": {
            "message": "The model `x` does not exist.",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
        }
    },
}


def scores(temperature: float) -> list[float]:
    scaled = [value / temperature for value in LOGITS]
    total = math.log(sum(map(math.exp, scaled)))
    return [value - total for value in scaled]


class Server:
    """Answers from a queue first; then with the likeliest token, and log-probs in the mode it was started in."""

    def __init__(
        self, processed: bool = False, queue: list[httpx.Response | Exception] | None = None
    ) -> None:
        self.processed, self.queue = processed, queue or []
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.keys.append(request.headers.get("authorization"))
        if request.url.path == "/v1/models":
            return httpx.Response(200, json=MODELS)
        assert request.url.path == "/v1/completions"
        body = json.loads(request.content)
        self.asked.append(body)
        if self.queue:
            answer = self.queue.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        known = scores(body["temperature"] or 1.0 if self.processed else 1.0)
        top = {str(i): value for i, value in enumerate(known)}
        choice = {
            **ANSWER["choices"][0],
            "token_ids": [2],
            "finish_reason": "length",
            "stop_reason": None,
            "logprobs": {"token_logprobs": [known[2]], "top_logprobs": [{"2": top["2"]}], "tokens": ["x"]},
        }
        return httpx.Response(200, json={**ANSWER, "choices": [choice]})


def engine(server: Server, **settings: Any) -> VLLMEngine:
    return VLLMEngine("http://127.0.0.1:9/v1/", 4, transport=httpx.MockTransport(server), **settings)


def generate(server: Server, request: GenerationRequest, **settings: Any) -> Completion:
    return asyncio.run(engine(server, **settings).generate(request))


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waited: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float, *rest: Any) -> None:
        waited.append(seconds)
        await real(0, *rest)

    monkeypatch.setattr("agent.engines.vllm.asyncio.sleep", sleep)
    return waited


REQUEST = GenerationRequest(
    (1, 2), seed=2**64 - 1, max_new_tokens=100, stop=("</answer>",), stop_token_ids=(3,)
)


def test_what_is_sent_literally() -> None:
    assert body_of(REQUEST, "m", 64) == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 62,  # the window has no room for more
        "temperature": 1.0,
        "seed": 2**63 - 1,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
        "stop": ["</answer>"],
        "stop_token_ids": [3],
    }
    assert not {"stop", "stop_token_ids"} & set(body_of(GenerationRequest((1,), seed=0), "m", 64))


def test_what_comes_back_is_what_was_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    server = Server(queue=[httpx.Response(200, json=ANSWER)])
    assert generate(server, REQUEST) == Completion(
        (2, 3), (-0.003585697151720524, -1.4305104514278355e-06), "stop", 0
    )
    assert server.asked[0] == body_of(REQUEST, "some/model", 64)
    assert server.keys == ["Bearer secret"] * 2


def test_window_and_version_are_the_servers() -> None:
    found = engine(Server())
    assert (found.max_context, found.weight_version, found.model) == (64, 0, "some/model")
    for bad in ((), (4,), (-1,), tuple([1] * 64)):
        with pytest.raises(ValueError, match="prompt"):
            asyncio.run(found.generate(GenerationRequest(bad, seed=0)))
    foreign = httpx.Response(200, json=_changed(token_ids=[2, 4]))
    with pytest.raises(UserError, match=r"a token outside 0\.\.3: it serves another model"):
        generate(Server(queue=[foreign]), REQUEST)


@pytest.mark.parametrize("processed", [False, True])
def test_log_probs_of_another_distribution_are_refused(processed: bool) -> None:
    server = Server(processed)
    hot = GenerationRequest((1, 2), seed=0, temperature=0.5)
    if processed:
        found = generate(server, hot)
        assert found.logprobs == (pytest.approx(scores(0.5)[2]),)
        assert [body["temperature"] for body in server.asked] == [1.0, 2.0, 0.5]
    else:
        with pytest.raises(UserError, match="processed_logprobs"):
            generate(server, hot)
        # An evaluation reads none.
        assert generate(Server(), hot, exact_logprobs=False).ids == (2,)
    for temperature in (0.0, 1.0):  # the same in both modes
        at = GenerationRequest((1, 2), seed=0, temperature=temperature)
        assert generate(Server(processed), at).logprobs == (pytest.approx(scores(1.0)[2]),)


def test_the_mode_is_asked_for_once() -> None:
    server = Server(processed=True)

    async def many() -> None:
        hot = engine(server)
        await asyncio.gather(
            *(hot.generate(GenerationRequest((1,), seed=i, temperature=2.0)) for i in range(5))
        )
        await hot.close()

    asyncio.run(many())
    assert len(server.asked) == 7


def test_an_engine_lives_through_one_event_loop_after_another_and_ends_in_none_of_them() -> None:
    """As in a training run: a loop for each step, one more to close the engine."""

    def answer(asked: Asked) -> Reply:
        return json_reply(ANSWER if asked.body else MODELS)

    with serving(answer, keep_alive=True) as server:
        found = VLLMEngine(server.url, 4)
        for _ in range(2):
            assert asyncio.run(found.generate(REQUEST)).ids == (2, 3)
        asyncio.run(found.close())
        assert asyncio.run(found.generate(REQUEST)).ids == (2, 3)

    async def in_one() -> None:
        engine = VLLMEngine(server.url, 4)
        await engine.generate(REQUEST)
        await engine.close()
        assert engine._client is None

    with serving(answer, keep_alive=True) as server:
        asyncio.run(in_one())


def test_a_busy_or_absent_server_is_asked_again(pauses: list[float]) -> None:
    queue: list[httpx.Response | Exception] = [
        httpx.Response(503, json={"error": {"message": "busy"}}),
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        httpx.Response(200, json=ANSWER),
    ]
    assert generate(Server(queue=queue), REQUEST).ids == (2, 3)
    assert len(pauses) == 3 and pauses == sorted(pauses)
    gone = Server(queue=[httpx.ConnectError("refused")] * 3)
    with pytest.raises(EngineError, match="no answer in 3 attempts; the last: ConnectError refused"):
        generate(gone, REQUEST, attempts=3)


@pytest.mark.parametrize("said", list(REFUSALS))
def test_a_refusal_is_not_repeated(said: str) -> None:
    refusal = REFUSALS[said]
    server = Server(queue=[httpx.Response(refusal["error"]["code"], json=refusal)])
    with pytest.raises(EngineError, match=f"refuses the request, status 40[04]: .*{re.escape(said)}"):
        generate(server, REQUEST)
    assert len(server.asked) == 1


def _changed(**choice: Any) -> dict[str, Any]:
    return {**ANSWER, "choices": [{**ANSWER["choices"][0], **choice}]}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"choices": []}, "another form"),
        ("text", "another form"),
        (_changed(token_ids=None), "0.10.2"),
        (_changed(token_ids=["2", "3"]), "0.10.2"),
        (_changed(token_ids=[2]), "1 tokens came with 2 log-probs"),
        (_changed(logprobs=None), "2 tokens came with 0"),
        (_changed(logprobs={"token_logprobs": [-0.1, None]}), "no finite number"),
        (_changed(logprobs={"token_logprobs": [-0.1, 0.5]}), "no finite number"),
        (_changed(finish_reason="tool_calls"), "unknown finish reason"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_an_error(data: Any, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        read_completion(data)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (httpx.Response(200, json={**MODELS, "data": []}), "no model"),
        (httpx.Response(200, json={"data": [{"id": "a"}]}), "how long a context"),
        (httpx.Response(404, json={"detail": "Not Found"}), "not answer as a vLLM server: Not Found"),
        (httpx.Response(200, text="<html>"), "not answer as a vLLM server"),
        (httpx.ConnectError("refused"), "no vLLM server at http://127.0.0.1:9: refused"),
    ],
)
def test_another_server_is_named_at_the_start(answer: httpx.Response | Exception, said: str) -> None:
    def answering(request: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(UserError, match=said):
        VLLMEngine("http://127.0.0.1:9", 4, transport=httpx.MockTransport(answering))
    with pytest.raises(UserError, match="serves some/model; name one"):
        engine(Server(), model="other")
    with pytest.raises(UserError, match="no address"):
        VLLMEngine("localhost:8000", 4)


def _speaking(
    texts: list[str], encode: Callable[[str], list[int]]
) -> Callable[[httpx.Request], httpx.Response]:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            data = [{**MODELS["data"][0], "max_model_len": 4096}]  # type: ignore[index]
            return httpx.Response(200, json={**MODELS, "data": data})
        ids = encode(texts.pop(0))
        logprobs = {"token_logprobs": [-0.5] * len(ids), "tokens": [], "top_logprobs": []}
        return httpx.Response(200, json=_changed(token_ids=ids, logprobs=logprobs, text="something else"))

    return answer


def test_an_episode_keeps_the_ids_as_they_came() -> None:
    tokenizer = build_tokenizer(["What is the capital of Poland? Warsaw"] * 20, 300)

    def spelt(text: str) -> list[int]:
        return [i for letter in text for i in tokenizer.encode(letter, add_special_tokens=False)]

    said = ["<mem>a b</mem><search>capital</search>", "<mem>b</mem><answer>x</answer>"]
    server = httpx.MockTransport(_speaking(list(said), spelt))
    env = make("mempo/SearchQA-v0", tasks="factbook-tiny:train", retriever="factbook-tiny")
    trajectory = asyncio.run(
        play_episode(
            env,
            VLLMEngine("http://127.0.0.1:9", len(tokenizer), transport=server),
            PromptBuilder(tokenizer),
            seed_key=(0,),
            sampling=Sampling(max_new_tokens=64),
        )
    )
    assert trajectory.terminated and [turn.text for turn in trajectory.turns] == said
    for turn, text in zip(trajectory.turns, said, strict=True):
        assert list(turn.completion_ids) == spelt(text) != tokenizer.encode(text, add_special_tokens=False)
        assert turn.memory_span is not None
        block = token_bytes(tokenizer).text(turn.completion_ids[slice(*turn.memory_span)])
        assert block == text[: text.index("</mem>") + 6]


def test_an_evaluation_on_a_server_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(SHIPPED)
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json=MODELS | {"data": [{"id": "m", "max_model_len": 1024}]})
        body = json.loads(request.content)
        asked.append(tokenizer.decode(body["prompt"]))
        ids = tokenizer.encode("<mem>a</mem><answer>b</answer>", add_special_tokens=False)
        logprobs = {"token_logprobs": [-0.5] * len(ids)}
        return httpx.Response(200, json=_changed(token_ids=ids, logprobs=logprobs))

    real = VLLMEngine.__init__

    def faked(self: Any, *places: Any, **named: Any) -> None:
        real(self, *places, **named, transport=httpx.MockTransport(answer))

    monkeypatch.setattr(VLLMEngine, "__init__", faked)
    base = ["--model", str(SHIPPED), "--engine", "vllm", "--questions", "3", "--benchmark", "factbook-tiny-2"]
    one = ["--server", "http://127.0.0.1:9"]
    assert bench.main([*base, *one, "--prompt", "compact", "--out", str(tmp_path / "run")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == len(asked) == 3 and {row["answer"] for row in rows} == {"b"}
    assert all(prompt.startswith("<|im_start|>user\nQuestion: ") for prompt in asked)
    assert bench.main([*base, *one, *one, "--out", str(tmp_path / "two")]) == 2
    assert bench.main([*base, "--out", str(tmp_path / "none")]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2 and "2 vLLM servers" in errors[0] and "name a server" in errors[1]
