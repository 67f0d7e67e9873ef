"""An OpenAI-compatible endpoint as a player: any provider, a vLLM or an SGLang server (``http://host:port/v1``).

Each turn is one request with the rules as system message and the observation as user message. Busy and broken
servers are tried again, after as long as their ``Retry-After`` says; what stays broken is a failure of the
infrastructure. Token counts are the provider's; without them they are estimated (a token is four bytes), which the
run's configuration cannot know in advance, so each turn's ``finish`` says ``estimated``.
"""

from __future__ import annotations

import asyncio
import email.utils
import os
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import gymnasium as gym
import httpx

from agent.engines.replies import error_message
from agent.rollout import EpisodeError, SeedKey
from agent.seeds import derive
from envs.errors import UserError
from envs.grammar import parse_turn
from envs.tasks.task import Task
from eval.episode import Sample, TurnRecord, task_tags
from eval.players import text_hash

STOPS = ("</answer>", "</tool_call>", "</search>")
_BUSY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
_REFUSED = frozenset({401, 402, 403, 404, 405})
_TOO_LONG = (
    "context length",
    "context_length",
    "context size",
    "context window",
    "maximum context",
    "maximum number of tokens",
    "too many tokens",
    "too long",
    "reduce the length",
)
_DELAY = re.compile(r'"retryDelay":\s*"(\d+(?:\.\d+)?)s"')
# A quota that is used up comes as "busy" (429), a filtered prompt as a malformed request (400).
_USED_UP = "insufficient_quota"
_FILTERED = ("content_filter", "content management policy", "content_policy_violation")


@dataclass(frozen=True)
class Endpoint:
    """Where and how to ask.

    Attributes:
        url: up to and including ``/v1``.
        model: as the provider calls it.
        key_variable: environment variable that holds the key; no key is sent when it is not set.
        concurrency: connections at once; the pool is as large.
        attempts: for one request.
        timeout: seconds for one request.
        longest_wait: seconds that a ``Retry-After`` is honoured for at most.
    """

    url: str
    model: str
    key_variable: str = "OPENAI_API_KEY"
    concurrency: int = 32
    attempts: int = 6
    timeout: float = 300.0
    longest_wait: float = 120.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise UserError(f"endpoint {self.url!r} is no address; http://host:port/v1 is needed")
        try:
            parts = urlsplit(self.url)
            usable = bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise UserError(f"endpoint {self.url!r}: no such host and port")


@dataclass(frozen=True)
class Reply:
    """One completion. Token counts are None when the provider gave none."""

    text: str
    finish: str
    prompt_tokens: int | None
    completion_tokens: int | None


class EpisodeOver(Exception):
    """The provider will not go on with this prompt, however often it is asked: the episode ends there.

    It is no failure of the infrastructure. ``reason`` is the episode's stop reason: ``window`` (the prompt does not
    fit) or ``filtered``.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ChatPlayer:
    """Plays through an endpoint.

    Args:
        rules: the system message; none is sent when empty.
        transport: for tests.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        rules: str,
        temperature: float,
        max_new_tokens: int,
        name: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._endpoint, self._rules = endpoint, rules
        self._temperature, self._max_new_tokens = temperature, max_new_tokens
        self._name, self._transport = name or endpoint.model, transport
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def identity(self) -> dict[str, Any]:
        sampling = {
            "temperature": self._temperature,
            "max_new_tokens": self._max_new_tokens,
            "stop": list(STOPS),
        }
        return {
            "name": self._name,
            "kind": "endpoint",
            "url": self._endpoint.url,
            "model": self._endpoint.model,
            "sampling": sampling,
            "prompt": text_hash(self._rules),
        }

    async def play(self, env: gym.Env[str, str], task: Task, sample: int, seed_key: SeedKey) -> Sample:
        reset_seed = derive(*seed_key, "reset") % 2**31
        observation, info = await _environment(lambda: env.reset(seed=reset_seed))
        turns: list[TurnRecord] = []
        answer, stop, reward = None, "", 0.0
        while not stop:
            seed = derive(*seed_key, len(turns)) % 2**31
            try:
                reply = await self.complete(observation, seed)
            except EpisodeOver as over:
                stop = over.reason
                break
            asked = self._rules + observation
            text = close_action(reply.text) if reply.finish != "length" else reply.text
            parsed = parse_turn(text)
            information, invalid, query = "", None, None
            if reply.finish == "length" and parsed.action is None:
                stop, invalid = "length", "no end within the token limit"
            else:
                observation, paid, ended, cut, info = await _environment(lambda text=text: env.step(text))
                reward += float(paid)
                invalid, query = info.get("invalid"), info.get("query")
                if ended or cut:
                    stop = str(info.get("stop_reason") or "truncated")
                    answer = parsed.answer if ended else None
                else:
                    information = str(info.get("information") or "")
            span = parsed.memory_span
            estimated = reply.prompt_tokens is None or reply.completion_tokens is None
            turns.append(
                TurnRecord(
                    text=text,
                    memory=parsed.memory,
                    query=query,
                    information=information,
                    invalid=invalid,
                    finish="estimated" if estimated else reply.finish,
                    prompt_tokens=_count(asked, reply.prompt_tokens),
                    completion_tokens=_count(text, reply.completion_tokens),
                    memory_tokens=0 if span is None else _count(text[span[0] : span[1]]),
                    observation_tokens=_count(information) if information else 0,
                )
            )
        return Sample(
            task_id=task.id,
            sample=sample,
            questions=task.questions,
            golds=task.golds,
            answer=answer,
            stop_reason=stop,
            turns=tuple(turns),
            reward=reward,
            tags=task_tags(task),
        )

    async def complete(self, observation: str, seed: int) -> Reply:
        """One request, tried again while the server is busy or away.

        Raises:
            EpisodeError: it stayed so, or answered nonsense.
            UserError: it refuses (key, address, model, parameters).
            EpisodeOver: the prompt is too long for it, or filtered.
        """
        messages = [{"role": "user", "content": observation}]
        if self._rules:
            messages.insert(0, {"role": "system", "content": self._rules})
        body = {
            "model": self._endpoint.model,
            "messages": messages,
            "temperature": self._temperature,
            "max_tokens": self._max_new_tokens,
            "stop": list(STOPS),
            "seed": seed,
        }
        failure = ""
        for attempt in range(self._endpoint.attempts):
            pause = min(30.0, 0.5 * 2**attempt) * (0.75 + random.random() / 2)
            try:
                answer = await self._open().post("chat/completions", json=body)
            except httpx.HTTPError as error:
                failure = f"{type(error).__name__}: {error}"
            else:
                if answer.status_code == 200:
                    return read_reply(answer)
                failure = f"status {answer.status_code}: {error_message(answer)}"
                said = f"{failure} {answer.text}".lower()
                if answer.status_code in _REFUSED or _USED_UP in said:
                    raise UserError(f"endpoint {self._endpoint.url} refuses: {failure}")
                if answer.status_code not in _BUSY:
                    for reason, signs in (("filtered", _FILTERED), ("window", _TOO_LONG)):
                        if any(words in said for words in signs):
                            raise EpisodeOver(reason)
                    raise UserError(f"endpoint {self._endpoint.url} does not take the request: {failure}")
                asked = retry_after(answer.headers, time.time(), answer.text)
                if asked is not None:
                    if asked > self._endpoint.longest_wait:
                        raise EpisodeError("engine", f"{failure}; it asks for {asked:.0f} s of patience")
                    pause = asked
            if attempt + 1 < self._endpoint.attempts:
                await asyncio.sleep(pause)
        raise EpisodeError(
            "engine", f"no reply after {self._endpoint.attempts} attempts; the last: {failure}"
        )

    def _open(self) -> httpx.AsyncClient:
        """One client an event loop: connections cannot outlive the loop they were made in."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            key = os.environ.get(self._endpoint.key_variable)
            size = self._endpoint.concurrency
            self._client = httpx.AsyncClient(
                base_url=self._endpoint.url.rstrip("/") + "/",
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx.Timeout(self._endpoint.timeout, pool=None),
                limits=httpx.Limits(max_connections=size, max_keepalive_connections=size),
                transport=self._transport,
            )
            self._loop = loop
        return self._client


def read_reply(answer: httpx.Response) -> Reply:
    """The completion in a 200.

    Raises:
        EpisodeError: no JSON, or JSON of another form (some proxies answer 200 with an error in it).
    """
    try:
        data = answer.json()
        choice = data["choices"][0]
        text = choice["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError):
        raise EpisodeError("engine", f"a reply of another form: {error_message(answer)}") from None
    usage = data.get("usage") if isinstance(data.get("usage"), Mapping) else {}
    return Reply(
        text=text if isinstance(text, str) else "",
        finish=str(choice.get("finish_reason") or "stop"),
        prompt_tokens=_whole(usage.get("prompt_tokens")),
        completion_tokens=_whole(usage.get("completion_tokens")),
    )


def retry_after(headers: Mapping[str, str], now: float, body: str = "") -> float | None:
    """Seconds to wait: ``Retry-After`` as seconds or as a date, ``retry-after-ms``, or Google's ``retryDelay`` in the
    body; None when not said.
    """
    if (milliseconds := headers.get("retry-after-ms")) is not None:
        try:
            return max(0.0, float(milliseconds) / 1000)
        except ValueError:
            pass
    value = headers.get("retry-after")
    if value is None:
        delay = _DELAY.search(body)
        return float(delay[1]) if delay else None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - now)
    except (ValueError, TypeError):
        return None


def close_action(text: str) -> str:
    """Put back the closing tag that providers cut off with the stop string."""
    if parse_turn(text).action is not None:
        return text
    closed = [text + stop for stop in STOPS if parse_turn(text + stop).action is not None]
    return closed[0] if closed else text


async def _environment(call: Any) -> Any:
    """A reset or step in a thread: its search may wait for a network."""
    try:
        return await asyncio.to_thread(call)
    except UserError:
        raise
    except Exception as error:  # an environment may raise anything, and none of it is the player's
        raise EpisodeError("environment", f"{type(error).__name__}: {error}") from error


def _count(text: str, known: int | None = None) -> int:
    return known if known is not None else (len(text.encode("utf-8", "surrogatepass")) + 3) // 4


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
