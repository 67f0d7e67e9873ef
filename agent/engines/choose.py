"""From an engine's name to an engine that a training run can use; the one place that knows them all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from agent.engines.base import TrainableEngine
from agent.engines.settings import SGLangSettings
from envs.errors import UserError

if TYPE_CHECKING:
    from agent.engines.sglang import SGLangEngine
    from agent.engines.vllm import VLLMEngine


def trainable_engine(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    folder: Path,
    max_batch: int = 256,
    sglang: SGLangSettings | None = None,
) -> TrainableEngine:
    """An engine that serves ``model``'s weights as version 0.

    Args:
        name: of `agent.engines.settings.TRAINABLE`.
        folder: of the run; engines outside of this process exchange files below it.
        max_batch: requests the local engine decodes at once.
        sglang: where its servers are.

    Raises:
        UserError: the engine cannot serve this model, or its servers are not there.
    """
    if name == "sglang":
        from agent.engines.sglang import SGLangEngine

        return SGLangEngine.for_training(model, tokenizer, sglang or SGLangSettings(), folder)
    if name == "local":
        from agent.engines.local import LocalEngine

        return LocalEngine(model, tokenizer, max_batch=max_batch)
    raise ValueError(f"unknown engine {name!r}")


def serving_engine(
    urls: Sequence[str], config: PretrainedConfig, kind: str = "sglang"
) -> SGLangEngine | VLLMEngine:
    """An engine over running servers, for a model that is only evaluated.

    Args:
        config: of the model that they serve.
        kind: ``sglang``, or ``vllm`` (one server).

    Raises:
        UserError: no server there, or servers with different weights.
    """
    if kind == "vllm":
        from agent.engines.vllm import VLLMEngine

        if len(urls) != 1:
            raise UserError(f"{len(urls)} vLLM servers; one is needed (put a balancer before several)")
        # An evaluation reads no log-probs, so it does not matter whose they are.
        return VLLMEngine(urls[0], int(config.vocab_size), exact_logprobs=False)
    from agent.engines.sglang import SGLangEngine

    try:
        settings = SGLangSettings(urls=tuple(urls))
    except ValidationError as error:
        raise UserError(f"server: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    return SGLangEngine.for_evaluation(settings, int(config.vocab_size), int(config.max_position_embeddings))
