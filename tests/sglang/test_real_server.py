"""A real SGLang server: what it samples, whose weights it serves, and what becomes of a step when it is killed."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from agent.engines.base import Completion, GenerationRequest
from agent.engines.settings import SGLangSettings
from agent.engines.sglang import SGLangEngine
from agent.engines.sglang_launch import LocalServer
from agent.engines.sglang_server import Server
from agent.models import LoadedModel, load_model, save_model
from agent.prompts import PromptBuilder
from agent.rollout import Sampling, collect_groups
from agent.trajectory import Turn
from envs.errors import UserError
from eval import bench
from tests.agent.fake_sglang import folder_checksums
from trainer import run
from trainer.cold_start import SHIPPED
from trainer.config import load_config
from trainer.questions import Questions

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

SMALL = [
    "threads=1",
    "steps=2",
    "rollout.questions_per_step=3",
    "rollout.group_size=4",
    "evaluation.tasks=''",
    "output.checkpoint_every=1",
    "output.dump_rollouts=true",
    "learner.optimizer.warmup_steps=1",
    "learner.optimizer.lr=1e-3",
]


@pytest.fixture
def policy() -> LoadedModel:
    return load_model(SHIPPED)


@contextmanager
def engine_of(
    server: LocalServer, policy: LoadedModel, folder: Path, **settings: Any
) -> Iterator[SGLangEngine]:
    chosen = SGLangSettings(urls=(server.url,), **settings)
    engine = SGLangEngine.for_training(policy.model, policy.tokenizer, chosen, folder)
    try:
        yield engine
    finally:
        asyncio.run(engine.close())


def move(model: torch.nn.Module, factor: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= factor


def prompts_of(policy: LoadedModel, count: int) -> list[tuple[int, ...]]:
    texts = [f"Question: What is the capital of country number {n}?" for n in range(count)]
    return [tuple(policy.tokenizer.encode(text, add_special_tokens=False)) for text in texts]


def gaps(
    model: Any, prompt: Sequence[int], found: Completion | Turn, temperature: float = 1.0
) -> torch.Tensor:
    """|log-prob of the server - log-prob of a plain forward pass| of each token."""
    ids = found.ids if isinstance(found, Completion) else found.completion_ids
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    own = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    return (own - torch.tensor(found.logprobs)).abs()


def test_logprobs_are_those_of_a_forward_pass_at_the_temperature(
    server: LocalServer, policy: LoadedModel, tmp_path: Path
) -> None:
    async def play(engine: SGLangEngine) -> list[tuple[GenerationRequest, Completion]]:
        requests = [
            GenerationRequest(prompt, seed=n, temperature=t, max_new_tokens=32, stop=("</search>",))
            for n, prompt in enumerate(prompts_of(policy, 6))
            for t in (1.0, 0.6, 0.0)
        ]
        return list(zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True))

    with engine_of(server, policy, tmp_path) as engine:
        found = asyncio.run(play(engine))
    by_temperature: dict[float, list[torch.Tensor]] = {}
    for request, completion in found:
        by_temperature.setdefault(request.temperature, []).append(
            gaps(policy.model, request.prompt_ids, completion, request.temperature or 1.0)
        )
    for temperature, each in by_temperature.items():
        assert torch.cat(each).mean() < 1e-5 and torch.cat(each).max() < 1e-3, temperature
    close = policy.tokenizer.convert_tokens_to_ids("</search>")
    stopped = [completion for _, completion in found if completion.finish == "stop"]
    assert any(completion.ids[-1] == close for completion in stopped)
    assert all(close not in completion.ids[:-1] for _, completion in found)
    assert len({completion.ids for request, completion in found if request.temperature == 1.0}) > 1


@pytest.fixture(scope="module")
def two_steps(server: LocalServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "two"
    overrides = [part for value in SMALL for part in ("--set", value)]
    arguments = ["tiny", "--engine", "sglang", "--server", server.url, *overrides, "--out", str(folder)]
    assert run.main(arguments) == 0
    return folder


def served_checksums(server: LocalServer) -> dict[str, str]:
    operator = Server(server.url)
    (found,) = operator.checksums()
    operator.close()
    return found


def test_a_step_of_mempo_ends_with_the_trainers_weights_on_the_server(
    server: LocalServer, two_steps: Path
) -> None:
    assert served_checksums(server) == folder_checksums(two_steps / "model")
    before = folder_checksums(two_steps / "cold_start")
    assert all(value != before[name] for name, value in folder_checksums(two_steps / "model").items())
    operator = Server(server.url)
    assert operator.version().startswith("2-")
    operator.close()


def test_versions_and_logprobs_of_a_step(two_steps: Path) -> None:
    rows = [json.loads(line) for line in (two_steps / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert 0 < row["update/engine_diff_mean"] < 1e-4
        assert not any(key.startswith("dropped/engine") for key in row)
    for step in (1, 2):
        text = (two_steps / "rollouts" / f"step-{step:04d}.jsonl").read_text()
        versions = [turn["weight_version"] for turn in _turns(json.loads(line) for line in text.splitlines())]
        assert len(versions) >= 12 and set(versions) == {step - 1}


def _turns(value: Any) -> Iterator[Any]:
    """Every turn in a dump, however deep."""
    if isinstance(value, dict):
        if "weight_version" in value:
            yield value
        value = value.values()
    elif isinstance(value, str) or not hasattr(value, "__iter__"):
        return
    for item in value:
        yield from _turns(item)


def test_nothing_in_flight_is_served_by_old_weights(
    server: LocalServer, policy: LoadedModel, tmp_path: Path
) -> None:
    operator = Server(server.url)

    async def play(engine: SGLangEngine) -> list[Completion]:
        tasks = [
            asyncio.create_task(engine.generate(GenerationRequest(prompt, seed=n, max_new_tokens=24)))
            for n, prompt in enumerate(prompts_of(policy, 8))
        ]
        # In the middle of their completions: a pass takes 0.1 s now.
        await asyncio.sleep(0.8)
        assert not any(task.done() for task in tasks)
        move(policy.model, 1.05)
        await asyncio.to_thread(engine.load_weights, policy.model, 1)
        await asyncio.to_thread(operator.slow_down, 0.0)
        return list(await asyncio.gather(*tasks))

    with engine_of(server, policy, tmp_path) as engine:
        operator.slow_down(0.1)
        try:
            found = asyncio.run(play(engine))
        finally:
            operator.slow_down(0.0)
            operator.close()
    assert [completion.weight_version for completion in found] == [1] * 8
    for prompt, completion in zip(prompts_of(policy, 8), found, strict=True):
        assert gaps(policy.model, prompt, completion).max() < 1e-3
    move(policy.model, 1 / 1.05)  # and the old weights would have given others
    old = [
        gaps(policy.model, prompt, each).mean()
        for prompt, each in zip(prompts_of(policy, 8), found, strict=True)
    ]
    assert sum(old) / len(old) > 1e-2


def test_weights_by_broadcast(server: LocalServer, policy: LoadedModel, tmp_path: Path) -> None:
    operator = Server(server.url)
    operator.pause()
    assert operator.begin_update()  # as a trainer leaves it that is killed in the middle
    operator.close()
    with engine_of(server, policy, tmp_path, weights="distributed") as engine:
        first = served_checksums(server)
        for version in (1, 2):  # the second time over the same group
            move(policy.model, 1.01)
            engine.load_weights(policy.model, version)
            expected = save_model(policy.model, policy.tokenizer, tmp_path / f"expected-{version}")
            assert served_checksums(server) == folder_checksums(expected) != first
        (prompt,) = prompts_of(policy, 1)
        completion = asyncio.run(engine.generate(GenerationRequest(prompt, seed=0, max_new_tokens=16)))
    assert completion.weight_version == 2
    assert gaps(policy.model, prompt, completion).max() < 1e-3


def test_another_model_is_refused_and_the_server_keeps_its_own(
    server: LocalServer, policy: LoadedModel, tmp_path: Path
) -> None:
    before = served_checksums(server)
    config = copy.deepcopy(policy.model.config)
    config.num_hidden_layers, config.layer_types = 3, ["full_attention"] * 3
    other = type(policy.model)(config)
    with (
        pytest.raises(UserError, match="serves another model"),
        engine_of(server, LoadedModel(other, policy.tokenizer, "other"), tmp_path),
    ):
        pass
    assert served_checksums(server) == before


def test_a_benchmark_over_the_server(
    server: LocalServer, two_steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--server", server.url, "--model", str(two_steps / "model"), "--questions", "6"]
    arguments += ["--benchmark", "factbook-tiny-2", "--out", str(tmp_path / "bench")]
    assert bench.main(arguments) == 0
    assert "factbook-tiny-2" in capsys.readouterr().out
    summary = json.loads((tmp_path / "bench" / "summary.json").read_text())
    assert summary["factbook-tiny-2"]["errors"] == 0


def test_killed_and_restarted_in_the_middle_of_a_step(
    server: LocalServer, policy: LoadedModel, tmp_path: Path
) -> None:
    config = load_config("tiny", SMALL)
    questions = Questions(config.environment, seed=0)
    draws = questions.draw(1, 3)
    turns: list[Turn] = []

    def kill() -> None:
        while len(turns) < 4:
            time.sleep(0.01)
        server.kill()
        server.start()

    with engine_of(server, policy, tmp_path) as engine:
        move(policy.model, 1.01)
        engine.load_weights(policy.model, 1)
        operator = Server(server.url)
        operator.slow_down(0.03)
        operator.close()
        killer = threading.Thread(target=kill)
        killer.start()
        groups, report = asyncio.run(
            collect_groups(
                [draw.task for draw in draws],
                partial(questions.environment, 0),
                engine,
                PromptBuilder(policy.tokenizer),
                samples=4,
                sampling=Sampling(1.0, 64),
                run_seed=0,
                step=1,
                retries=0,
                on_turn=turns.append,
            )
        )
        killer.join()
    assert not report.errors and not report.retried and len(groups) == 3
    played = [turn for group in groups for each in group.trajectories for turn in each.turns]
    assert len(played) == len(turns) > 12  # no episode was played twice
    assert {turn.weight_version for turn in played} == {1}
    # The restarted server came back with what it was started with; every token is one of the weights of the step.
    each = torch.cat([gaps(policy.model, turn.prompt_ids, turn) for turn in played])
    assert each.mean() < 1e-5 and each.max() < 1e-3
