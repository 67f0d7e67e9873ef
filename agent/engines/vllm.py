"""Generation on a vLLM server through its OpenAI routes, in token ids: `/v1/completions` with `return_token_ids`.

For evaluation, and for the rollouts of a training run. **It takes no weights**: the routes for them belong to vLLM's
development mode and are not used here, so a run that samples here learns from the policy that the server was started
with, while its own moves away. A vLLM server of 0.10.2 or newer is needed (older ones return no ids).

What a server gives as log-probs is its own choice. Started as it comes (`--logprobs-mode raw_logprobs`) they belong
to temperature 1, whatever was sampled with; with `--logprobs-mode processed_logprobs` to the scaled distribution,
which is what a `Completion` promises. The engine finds out, and asks for the flag where it matters.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from typing import Any

import httpx

from agent.engines.base import Completion, EngineError, FinishReason, GenerationRequest, check_request
from agent.engines.replies import error_message
from agent.engines.settings import check_address
from envs.errors import UserError

KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable with the key of servers that were started with one."""

_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
_PROBE = 2.0


class VLLMEngine:
    """Engine over one vLLM server.

    Args:
        url: ``http://host:port``, with or without ``/v1``.
        vocab_size: ids that the model knows, 0 to ``vocab_size`` - 1; others are refused before they are sent.
        model: its name there; None takes the only one that the server has.
        exact_logprobs: refuse to sample at another temperature than 1 from a server whose log-probs are not those of
            the distribution sampled from. False takes them as they come (evaluation does not read them).
        concurrency: connections at once.
        attempts: of one request, while the server is busy or away; generating again changes nothing there.
        timeout: seconds for one request.
        transport: for tests.

    Raises:
        UserError: no vLLM server there, or none with that model.
    """

    def __init__(
        self,
        url: str,
        vocab_size: int,
        *,
        model: str | None = None,
        exact_logprobs: bool = True,
        concurrency: int = 256,
        attempts: int = 6,
        timeout: float = 600.0,
        transport: Any = None,
    ) -> None:
        check_address(url)
        self.url = url.rstrip("/").removesuffix("/v1")
        self._vocab_size, self._exact = vocab_size, exact_logprobs
        self._concurrency, self._attempts, self._timeout = concurrency, attempts, timeout
        self._transport = transport
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scaled: bool | None = None
        self._probing: asyncio.Lock | None = None
        self.model, self._max_context = self._find(model)

    @property
    def weight_version(self) -> int:
        """Always 0: the server keeps the weights it was started with."""
        return 0

    @property
    def max_context(self) -> int:
        return self._max_context

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion; see `Engine`.

        Raises:
            EngineError: the server stayed away, or answered something else than it should.
            UserError: a temperature whose log-probs this server does not give (see ``exact_logprobs``), or a token
                that the model here does not have.
            ValueError: a request that no engine takes (`check_request`).
        """
        check_request(request, self._vocab_size, self._max_context)
        if self._exact and request.temperature not in (0.0, 1.0):
            await self._need_scaled(request.prompt_ids)
        found = read_completion(await self._post(body_of(request, self.model, self._max_context)))
        if found.ids and not 0 <= min(found.ids) <= max(found.ids) < self._vocab_size:
            raise UserError(
                f"{self.url} sampled a token outside 0..{self._vocab_size - 1}: it serves another model than this one"
            )
        return found

    def fingerprint(self) -> str:
        """What stands for the weights in an evaluation's settings: a name, for the server gives no checksum."""
        return f"vllm:{self.model}"

    async def close(self) -> None:
        client, self._client = self._client, None
        # What another loop opened ended with it, and cannot be closed in this one.
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()

    def _find(self, wanted: str | None) -> tuple[str, int]:
        """Name and window of the model that is asked."""
        try:
            with httpx.Client(
                base_url=self.url, headers=_key(), timeout=30.0, transport=self._transport
            ) as client:
                answer = client.get("/v1/models")
            models = {str(m["id"]): m.get("max_model_len") for m in answer.json()["data"]}
        except httpx.HTTPError as error:
            raise UserError(f"no vLLM server at {self.url}: {error or type(error).__name__}") from None
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{self.url} does not answer as a vLLM server: {error_message(answer)}") from None
        name = wanted if wanted is not None else (next(iter(models)) if len(models) == 1 else "")
        if name not in models:
            raise UserError(f"{self.url} serves {', '.join(models) or 'no model'}; name one of them")
        if not isinstance(models[name], int):
            raise UserError(
                f"{self.url} does not say how long a context {name!r} takes: is it a vLLM server?"
            )
        return name, int(models[name])

    async def _need_scaled(self, prompt: tuple[int, ...]) -> None:
        if self._probing is None:
            self._probing = asyncio.Lock()
        async with self._probing:
            if self._scaled is None:
                first, hot = [await self._likeliest(prompt, temperature) for temperature in (1.0, _PROBE)]
                self._scaled = abs(first - hot) > 1e-4
        if not self._scaled:
            raise UserError(
                f"{self.url} gives log-probs of temperature 1, whatever is sampled with: start it with "
                "--logprobs-mode processed_logprobs, or sample at temperature 1"
            )

    async def _likeliest(self, prompt: tuple[int, ...], temperature: float) -> float:
        """Log-prob of the likeliest next token, as this server gives it at a temperature."""
        request = GenerationRequest(prompt, seed=0, temperature=temperature, max_new_tokens=1)
        data = await self._post({**body_of(request, self.model, self._max_context), "logprobs": 1})
        try:
            return max(float(value) for value in data["choices"][0]["logprobs"]["top_logprobs"][0].values())
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"an answer without the likeliest token: {error!r}") from error

    async def _post(self, body: dict[str, Any]) -> Any:
        failure = ""
        for attempt in range(self._attempts):
            if attempt:
                await asyncio.sleep(min(20.0, 0.25 * 2**attempt) * (0.75 + random.random() / 2))
            try:
                answer = await self._open().post("/v1/completions", json=body)
            except httpx.HTTPError as error:
                failure = f"{type(error).__name__} {error}".strip()
                continue
            if answer.status_code == 200:
                try:
                    return answer.json()
                except ValueError as error:
                    raise EngineError(f"{self.url} answers something that is no JSON") from error
            failure = f"status {answer.status_code}: {error_message(answer)}"
            if answer.status_code not in _BUSY:
                raise EngineError(f"{self.url} refuses the request, {failure}")
        raise EngineError(f"{self.url} gave no answer in {self._attempts} attempts; the last: {failure}")

    def _open(self) -> httpx.AsyncClient:
        """One client an event loop: connections cannot outlive the loop they were made in."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._probing = None
            self._client = httpx.AsyncClient(
                base_url=self.url,
                headers=_key(),
                timeout=httpx.Timeout(self._timeout, connect=10.0, pool=None),
                limits=httpx.Limits(
                    max_connections=self._concurrency, max_keepalive_connections=self._concurrency
                ),
                transport=self._transport,
            )
            self._loop = loop
        return self._client


def body_of(request: GenerationRequest, model: str, max_context: int) -> dict[str, Any]:
    """The request as JSON: ids in, ids out, sampling by temperature alone, nothing cut or hidden."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(request.prompt_ids),
        "max_tokens": min(request.max_new_tokens, max_context - len(request.prompt_ids)),
        "temperature": request.temperature,
        "seed": request.seed % 2**63,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    if request.stop:
        body["stop"] = list(request.stop)
    if request.stop_token_ids:
        body["stop_token_ids"] = list(request.stop_token_ids)
    return body


def read_completion(data: Any) -> Completion:
    """Ids and log-probs as they came, never from text.

    Raises:
        EngineError: an answer of another form, without ids, or with other log-probs than ids.
    """
    try:
        choice = data["choices"][0]
        ids, finish = choice.get("token_ids"), choice.get("finish_reason")
        logprobs = list((choice.get("logprobs") or {}).get("token_logprobs") or [])
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EngineError(f"an answer of another form than /v1/completions gives: {error!r}") from error
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise EngineError("the answer has no token ids: vLLM 0.10.2 or newer is needed")
    if finish not in _FINISH:
        raise EngineError(f"unknown finish reason {finish!r}")
    if len(logprobs) != len(ids):
        raise EngineError(f"{len(ids)} tokens came with {len(logprobs)} log-probs")
    if not all(isinstance(v, int | float) and math.isfinite(v) and v <= 1e-3 for v in logprobs):
        raise EngineError("a log-prob is no finite number below 0")
    return Completion(tuple(ids), tuple(min(float(v), 0.0) for v in logprobs), _FINISH[finish], 0)


def _key() -> dict[str, str]:
    key = os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}
