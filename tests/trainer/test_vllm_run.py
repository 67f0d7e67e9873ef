"""Training on a vLLM server: the server's tokens and log-probs are learnt from, its weights stay, and the run tells."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from agent.engines.base import GenerationRequest
from agent.engines.local import LocalEngine
from agent.engines.vllm import VLLMEngine
from agent.models import load_model
from agent.trajectory import Turn
from trainer import run
from trainer.cold_start import SHIPPED
from trainer.config import load_config
from trainer.questions import prompt_builders
from trainer.trajectory_io import read_rollouts
from trainer.validation import Validation

SMALL = [
    "steps=3",
    "threads=1",
    "rollout.questions_per_step=3",
    "rollout.group_size=4",
    "evaluation.questions=16",
    "evaluation.objectives=[2]",
    "evaluation.interventions=false",
    "output.checkpoint_every=1",
    "output.keep=5",
    "output.dump_rollouts=true",
    "learner.optimizer.warmup_steps=0",
    "learner.optimizer.lr=1e-3",
]


def arguments(*overrides: str) -> list[str]:
    return ["tiny", "--engine", "vllm", "--server", "http://a:1"] + [
        part for override in (*SMALL, *overrides) for part in ("--set", override)
    ]


class Server:
    """vLLM's answers, sampled by the local engine from the weights of the shipped cold start."""

    def __init__(self) -> None:
        policy = load_model(SHIPPED)
        self.engine = LocalEngine(policy.model, policy.tokenizer)
        self.asked: list[tuple[str, float]] = []
        self.given: set[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = set()
        self.away = False

    def __call__(self, request: httpx.Request) -> httpx.Response | Coroutine[None, None, httpx.Response]:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "max_model_len": 1024}]})
        return self.complete(request.url.host, json.loads(request.content))

    async def complete(self, host: str, body: dict[str, Any]) -> httpx.Response:
        if self.away:
            raise httpx.ConnectError("refused")
        prompt = tuple(body["prompt"])
        self.asked.append((host, body["temperature"]))
        found = await self.engine.generate(
            GenerationRequest(
                prompt, body["seed"], body["temperature"], body["max_tokens"], tuple(body.get("stop", ()))
            )
        )
        self.given.add((prompt, found.ids, found.logprobs))
        # As a server started without --logprobs-mode: the likeliest token's are the same at any temperature.
        logprobs = {"token_logprobs": found.logprobs, "top_logprobs": [{"x": -0.5}]}
        choice = {"token_ids": found.ids, "logprobs": logprobs, "finish_reason": found.finish}
        return httpx.Response(200, json={"choices": [choice]})


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found, real = Server(), VLLMEngine.__init__

    def faked(self: Any, *places: Any, **named: Any) -> None:
        real(self, *places, **named, transport=httpx.MockTransport(found))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VLLMEngine, "__init__", faked)
        yield found


@pytest.fixture(scope="module")
def three_steps(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "three"
    assert run.main([*arguments(), "--out", str(folder)]) == 0
    return folder


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def turns(folder: Path) -> list[Turn]:
    dumps = [read_rollouts(path)[0] for path in sorted((folder / "rollouts").iterdir())]
    return [
        turn for groups in dumps for group in groups for each in group.trajectories for turn in each.turns
    ]


def test_what_is_learnt_from_are_the_servers_tokens_and_log_probs(server: Server, three_steps: Path) -> None:
    played = turns(three_steps)
    assert len(played) > 60 and len(server.asked) == len(played)  # and nothing else was asked of it
    assert all((turn.prompt_ids, turn.completion_ids, turn.logprobs) in server.given for turn in played)
    assert {turn.weight_version for turn in played} == {0}


def test_the_policy_moves_away_from_the_weights_that_sample(three_steps: Path) -> None:
    found = rows(three_steps)
    assert [row["rollout/weight_gap"] for row in found] == [0, 1, 2]
    assert found[0]["update/engine_diff_max"] < 1e-5
    assert found[0]["update/ratio_max"] == pytest.approx(1, abs=1e-5)
    assert found[0]["update/ratio_min"] == pytest.approx(1, abs=1e-5)
    for row in found[1:]:
        assert row["update/optimizer_steps"] == 1 and row["update/engine_diff_mean"] > 1e-3
        assert row["update/ratio_max"] > 1.05 and row["update/ratio_min"] < 0.95
    start, end = (load_file(three_steps / name / "model.safetensors") for name in ("cold_start", "model"))
    assert all(not end[key].equal(value) for key, value in start.items())


def test_the_tables_are_those_of_the_trained_weights(server: Server, three_steps: Path) -> None:
    config = load_config(str(three_steps / "config.toml"))

    def table(folder: Path) -> dict[str, Any]:
        policy = load_model(folder)
        validation = Validation(config, prompt_builders(config, policy.tokenizer)[0])
        return validation.table("policy", LocalEngine(policy.model, policy.tokenizer))

    summary = json.loads((three_steps / "summary.json").read_text())
    before, after = table(SHIPPED), table(three_steps / "model")
    assert summary["cold_start"] == before and summary["trained"] == after != before


def test_a_resumed_run_goes_on_where_it_was_on_another_server(
    server: Server, three_steps: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "resumed"
    shutil.copytree(three_steps, folder)
    shutil.rmtree(folder / "checkpoints" / "step-000003")
    (folder / "checkpoints" / "latest").unlink()
    asked = len(server.asked)
    assert run.main(["--resume", str(folder), "--server", "http://b:1"]) == 0
    assert {host for host, _ in server.asked[asked:]} == {"b"}
    assert (folder / "metrics.jsonl").read_text() == (three_steps / "metrics.jsonl").read_text()
    assert rows(folder)[2]["rollout/weight_gap"] == 2
    first, second = (load_file(path / "model" / "model.safetensors") for path in (three_steps, folder))
    assert all(second[key].equal(value) for key, value in first.items())


def test_the_model_may_be_named(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([*arguments("rollout.vllm.model=other"), "--out", str(tmp_path / "run")]) == 2
    assert "http://a:1 serves m; name one of them" in capsys.readouterr().err


def test_log_probs_of_another_distribution_end_the_run(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hot = arguments("rollout.temperature=0.5", "learner.temperature=0.5", "evaluation.tasks=''")
    assert run.main([*hot, "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and said[0].startswith("error: http://a:1 gives log-probs of temperature 1")


def test_a_server_that_goes_away_ends_the_run_and_no_step_is_empty(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = asyncio.sleep
    monkeypatch.setattr("agent.engines.vllm.asyncio.sleep", lambda seconds: real(0))
    monkeypatch.setattr(server, "away", True)
    folder = tmp_path / "run"
    options = arguments("evaluation.tasks=''", "rollout.vllm.attempts=2")
    assert run.main([*options, "--out", str(folder)]) == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and "gave no answer in 2 attempts" in said[0] and f"--resume {folder}" in said[0]
    assert rows(folder) == []
    monkeypatch.setattr(server, "away", False)
    assert run.main(["--resume", str(folder)]) == 0
    assert [row["rollout/weight_gap"] for row in rows(folder)] == [0, 1, 2]
