"""From an engine's name to the engines of a training run or an evaluation; the one place that knows them all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from agent.engines.base import Engine, TrainableEngine
from agent.engines.settings import SGLangSettings, VLLMSettings
from envs.errors import UserError

if TYPE_CHECKING:
    from agent.engines.sglang import SGLangEngine
    from agent.engines.vllm import VLLMEngine


def training_engines(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    folder: Path,
    max_batch: int = 256,
    sglang: SGLangSettings | None = None,
    vllm: VLLMSettings | None = None,
) -> tuple[TrainableEngine, Engine]:
    """The policy's own engine, which serves ``model``'s weights as version 0, and the one that rollouts come from:
    the same, unless these come from a server that takes no weights.

    Args:
        name: of `agent.engines.settings.ENGINES`.
        folder: of the run; engines outside of this process exchange files below it.
        max_batch: requests the local engine decodes at once.
        sglang, vllm: where the servers are.

    Raises:
        UserError: the engine cannot serve this model, or its servers are not there.
    """
    if name == "sglang":
        from agent.engines.sglang import SGLangEngine

        engine = SGLangEngine.for_training(model, tokenizer, sglang or SGLangSettings(), folder)
        return engine, engine
    if name not in ("local", "vllm"):
        raise ValueError(f"unknown engine {name!r}")
    from agent.engines.local import LocalEngine

    local = LocalEngine(model, tokenizer, max_batch=max_batch)
    if name == "local":
        return local, local
    from agent.engines.vllm import VLLMEngine

    there = vllm or VLLMSettings()
    vocabulary = int(model.config.get_text_config().vocab_size)
    return local, VLLMEngine(
        there.url,
        vocabulary,
        model=there.model or None,
        attempts=there.attempts,
        timeout=there.request_timeout,
    )


def serving_engine(
    urls: Sequence[str], config: PretrainedConfig, kind: str = "sglang"
) -> SGLangEngine | VLLMEngine:
    """An engine over running servers, for a model that is only evaluated.

    Args:
        config: of the model that they serve.
        kind: ``sglang``, or ``vllm`` (one server).

    Raises:
        UserError: no server there, servers with different weights, or of another model.
    """
    if kind == "vllm":
        from agent.engines.vllm import VLLMEngine

        # An evaluation reads no log-probs, so it does not matter whose they are.
        return VLLMEngine(only_vllm(urls), int(config.vocab_size), exact_logprobs=False)
    from agent.engines.sglang import SGLangEngine
    from agent.engines.sglang_weights import refuse_other_model

    try:
        settings = SGLangSettings(urls=tuple(urls))
    except ValidationError as error:
        raise UserError(f"server: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    engine = SGLangEngine.for_evaluation(
        settings, int(config.vocab_size), int(config.max_position_embeddings)
    )
    for member in engine.pool.members:
        assert member.info is not None
        refuse_other_model(config, member.info, member.url)
    return engine


def only_vllm(urls: Sequence[str]) -> str:
    """The one server that the engine `vllm` can ask.

    Raises:
        UserError: none, or several.
    """
    if len(urls) != 1:
        raise UserError(f"{len(urls)} vLLM servers; one is needed (put a balancer before several)")
    return urls[0]
