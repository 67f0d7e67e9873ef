"""One real SGLang server for all tests that need one, on a CPU, with the shipped cold-start model."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from agent.engines.sglang_launch import LocalServer
from agent.models import load_model, save_model
from trainer.cold_start import SHIPPED

PYTHON = Path(os.environ.get("SGLANG_PYTHON", Path(__file__).parents[2] / ".venv-sglang" / "bin" / "python"))


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the server starts with: the cold-start model with every number changed a little."""
    loaded = load_model(SHIPPED)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter *= 1.02
    return save_model(loaded.model, loaded.tokenizer, tmp_path_factory.mktemp("sglang") / "start")


@pytest.fixture(scope="session")
def server(start: Path) -> Iterator[LocalServer]:
    if not PYTHON.exists():
        if os.environ.get("CI"):
            pytest.fail(f"SGLang's environment is missing ({PYTHON}), and CI must have it: `make sglang-env`")
        pytest.skip("SGLang's environment is missing: `make sglang-env`")
    torch.set_num_threads(1)
    running = LocalServer(str(PYTHON), start, "float32", start.parent / "server.log", device="cpu")
    running.start()
    running.wait(600)
    yield running
    group = running.group
    assert len(_alive(group)) > 1  # the server has children
    running.stop()
    deadline = time.monotonic() + 10
    while left := _alive(group):
        assert time.monotonic() < deadline, f"these outlived the server: {left}"
        time.sleep(0.05)


def _alive(group: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
