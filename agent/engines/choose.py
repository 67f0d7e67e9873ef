"""From an engine's name to an engine that a training run can use; the one place that knows them all."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent.engines.base import TrainableEngine
from agent.engines.settings import SGLangSettings


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
