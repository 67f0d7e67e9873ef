"""The one protocol of generation: token ids in; token ids, log-probs and the weight version out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

FinishReason = Literal["stop", "length", "abort"]


class EngineError(RuntimeError):
    """The engine could not serve a request (not the policy's fault): retried, then reported, never scored."""


@dataclass(frozen=True)
class GenerationRequest:
    """One completion to sample.

    Attributes:
        prompt_ids: non-empty.
        seed: decides the sampled tokens, whatever else is in the batch.
        temperature: > 0 samples from softmax(logits / temperature); 0 is greedy.
        max_new_tokens: at least 1.
        stop: strings; generation ends with the token that completes the first of them.
        stop_token_ids: ids that end generation beside the tokenizer's eos; kept in the completion.
        group: requests of one name share prompts; engines with several servers keep them on one.
    """

    prompt_ids: tuple[int, ...]
    seed: int
    temperature: float = 1.0
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    group: str = ""


@dataclass(frozen=True)
class Completion:
    """What was sampled: the stop token or the token that closed the stop string is the last id.

    ``logprobs`` belong to the temperature-scaled distribution (temperature 1 when greedy).
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason
    weight_version: int


class Engine(Protocol):
    """Serves many requests at once; each is a coroutine of its own, so nobody waits for the slowest."""

    @property
    def weight_version(self) -> int: ...

    @property
    def max_context(self) -> int:
        """Tokens of prompt and completion together that the model can take."""
        ...

    async def generate(self, request: GenerationRequest) -> Completion:
        """Raises EngineError when the request could not be served."""
        ...

    async def close(self) -> None: ...


class TrainableEngine(Engine, Protocol):
    """An engine that takes over new weights between two steps."""

    def load_weights(self, source: Any, version: int) -> None:
        """Serve ``source``'s weights (a module or its state dict) as ``version`` from now on."""
        ...


def check_request(request: GenerationRequest, vocab_size: int, max_context: int) -> None:
    """Refuse what would break an engine, before it is sent.

    Raises:
        ValueError: empty prompt, an id outside the vocabulary, or a prompt that leaves no room for a token.
    """
    ids: Sequence[int] = request.prompt_ids
    if not ids:
        raise ValueError("empty prompt: at least one token is needed")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise ValueError(f"prompt holds a token id outside 0..{vocab_size - 1}")
    if len(ids) >= max_context:
        raise ValueError(f"prompt of {len(ids)} tokens leaves no room in a window of {max_context}")
    if request.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {request.max_new_tokens}; at least 1 is needed")
    if request.temperature < 0:
        raise ValueError(f"temperature is {request.temperature}; 0 (greedy) or more is needed")
