"""What `/generate` is asked, and what its answer means; pure functions on plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from agent.engines.base import EngineError, FinishReason, GenerationRequest

_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_EXACT = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling by temperature alone, whatever a model folder's generation config or the server prefers."""


@dataclass(frozen=True)
class Reply:
    """One completion as a server gave it.

    Attributes:
        versions: labels of the weights that sampled its tokens; more than one when they changed under way.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason
    versions: frozenset[str]


def body_of(request: GenerationRequest, rid: str, max_context: int) -> dict[str, Any]:
    """The request as JSON; its length is cut to the window, so that the server has nothing to cut.

    The seed goes along, but a server obeys it only when it was started with deterministic inference.
    """
    sampling: dict[str, Any] = {
        "max_new_tokens": min(request.max_new_tokens, max_context - len(request.prompt_ids)),
        "temperature": request.temperature,
        "sampling_seed": request.seed % 2**31,
        **_EXACT,
    }
    if request.stop:
        sampling["stop"] = list(request.stop)
    if request.stop_token_ids:
        sampling["stop_token_ids"] = list(request.stop_token_ids)
    return {
        "rid": rid,
        "input_ids": list(request.prompt_ids),
        "sampling_params": sampling,
        "return_logprob": True,
    }


def read_reply(data: Any) -> Reply:
    """Ids and log-probs as they came, never from text: a stop string is trimmed from the text, not from the ids.

    Output log-probs belong to the temperature-scaled distribution, and to temperature 1 when greedy, which is what
    `Completion` means by them.

    Raises:
        EngineError: an answer of another form, counts that disagree, or a log-prob that is no number.
    """
    try:
        meta = data["meta_info"]
        ids = tuple(int(index) for index in data["output_ids"])
        scored = meta.get("output_token_logprobs") or []
        kind = str((meta.get("finish_reason") or {}).get("type"))
        logprobs = [
            (float("nan") if entry[0] is None else float(entry[0]), int(entry[1])) for entry in scored
        ]
        # The spans say what sampled each token; the other label is the one at the time of the answer.
        spans = [str(span["version"]) for span in meta.get("weight_versions") or []]
        versions = frozenset(spans or [str(meta["weight_version"])])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise EngineError(f"an answer of another form than /generate gives: {error!r}") from error
    if kind not in _FINISH:
        raise EngineError(f"unknown finish reason {kind!r}")
    if [index for _, index in logprobs] != list(ids):
        raise EngineError(f"{len(ids)} tokens came with the log-probs of {len(logprobs)}, or of others")
    if not all(math.isfinite(value) and value <= 1e-3 for value, _ in logprobs):
        raise EngineError("a log-prob is no finite number below 0")
    return Reply(ids, tuple(min(value, 0.0) for value, _ in logprobs), _FINISH[kind], versions)
