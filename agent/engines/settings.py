"""What an engine on a server can be told: a table of a recipe, or options of an evaluation."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

from envs.errors import UserError

ENGINES = ("local", "sglang", "vllm")
"""Where a training run's rollouts can come from, by name."""


class SGLangSettings(BaseModel):
    """Generation on SGLang servers."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    urls: tuple[str, ...] = ()
    """Addresses of running servers (`http://host:port`); groups of episodes are spread over them."""
    launch: bool = False
    """Start a server on this machine for the run, and end it with the run."""
    python: str = ".venv-sglang/bin/python"
    """Interpreter of the environment that SGLang is installed in (`make sglang-env`), for `launch`."""
    arguments: tuple[str, ...] = ()
    """Further flags of a launched server, as `sglang.launch_server` takes them."""
    weights: Literal["disk", "distributed"] = "disk"
    """How new weights go over: a folder that servers can read too, or a broadcast (NCCL, gloo on a CPU)."""
    weights_folder: str = ""
    """Where those folders are written; empty: inside the run's folder."""
    host: str = "127.0.0.1"
    """Address of this machine as the servers see it, for the broadcast."""
    verify: bool = True
    """Compare checksums of the servers' weights with the trainer's after each update."""
    start_timeout: float = Field(default=600.0, gt=0)
    """Seconds a server may take to start, or to come back after it died."""
    request_timeout: float = Field(default=600.0, gt=0)
    """Seconds one request may take on a server."""
    update_timeout: float = Field(default=600.0, gt=0)
    """Seconds each stage of a weight update may take."""
    retries: int = Field(default=8, ge=0)
    """Further attempts of a request at a server whose queue is full, with growing pauses."""
    moves: int = Field(default=3, ge=0)
    """How often a request whose server died is sent again, to another one or to the one that came back."""

    @model_validator(mode="after")
    def _addresses(self) -> SGLangSettings:
        for url in self.urls:
            check_address(url)
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ValueError("the same address twice")
        if self.launch and self.urls:
            raise ValueError("launch starts a server of its own: give no urls with it")
        return self

    def changed(self, **values: Any) -> SGLangSettings:
        """A checked copy with other values."""
        return SGLangSettings.model_validate({**self.model_dump(), **values})


class VLLMSettings(BaseModel):
    """Rollouts from a vLLM server, which keeps the weights it was started with."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    url: str = ""
    """Address of the running server (`http://host:port`)."""
    model: str = ""
    """Name of the model there; empty: the only one it serves."""
    request_timeout: float = Field(default=600.0, gt=0)
    """Seconds one request may take."""
    attempts: int = Field(default=6, ge=1)
    """Attempts of a request while the server is busy or away, with growing pauses."""

    @model_validator(mode="after")
    def _address(self) -> VLLMSettings:
        if self.url:
            check_address(self.url)
        return self


def check_address(url: str) -> None:
    """
    Raises:
        UserError: no ``http://host:port``.
    """
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, a bracket that is not closed
        fits = False
    if not fits:
        raise UserError(f"{url!r} is no address; http://host:port is needed")
