"""Where a run's first policy comes from: the shipped cold start, one made now, or a model the user names."""

from __future__ import annotations

from agent.models import LoadedModel, load_model
from envs.errors import UserError
from trainer import cold_start
from trainer.config import RunConfig


def first_policy(config: RunConfig, progress: cold_start.Progress | None = None) -> LoadedModel:
    """The cold-start model, which is also the reference policy.

    Raises:
        UserError: no model where ``model.path`` points, or no shipped one.
    """
    if config.model.path:
        return load_model(config.model.path, dtype=config.model.torch_dtype, device=config.model.device)
    if config.cold_start.source == "shipped":
        if not cold_start.SHIPPED.is_dir():
            raise UserError(
                f"the cold-start model {cold_start.SHIPPED} is missing: `make cold-start` rebuilds it, "
                "or use --set cold_start.source=train"
            )
        return load_model(cold_start.SHIPPED)
    model, tokenizer, _ = cold_start.build(config, progress)
    return LoadedModel(model, tokenizer, "cold start")
