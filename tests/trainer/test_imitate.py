"""A supervised start from any teacher: the loss by hand, the rows, and whole runs on a world of four facts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agent.models import load_model
from agent.prompts import PromptBuilder
from envs.errors import UserError
from tests.trainer.four_facts import EPISODE, command, configured
from tests.trainer.toy import VOCABULARY, qwen
from trainer import run
from trainer.algorithm import OptimizerConfig
from trainer.config import RunConfig
from trainer.demonstrations import read_demonstrations
from trainer.forward import Forward
from trainer.imitate import ImitationRows, imitate, step
from trainer.learner import Learner
from trainer.optimizers import build_optimizer
from trainer.row import Row


def row(prompt: list[int], said: list[int]) -> Row:
    zeros = (0.0,) * len(said)
    return Row(tuple(prompt), tuple(said), (True,) * len(said), zeros, zeros, 0, 0, 0)


@pytest.mark.parametrize("budget", [1, 10, 1000])
def test_the_loss_is_the_mean_over_the_teachers_tokens_and_so_is_its_gradient(budget: int) -> None:
    rows = [row([1, 2, 3], [4, 5]), row([6], [7, 8, 9, 10, 11]), row([1, 2, 3, 4, 5, 6], [0])]
    model, plain = qwen(1), qwen(1)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-3, max_grad_norm=1e9))
    found = step(Forward(model), optimizer, rows, budget)

    losses = []
    for each in rows:
        ids = torch.tensor([[*each.prompt_ids, *each.completion_ids]])
        logprobs = plain(ids).logits.double().log_softmax(-1)[0]
        for place in range(len(each.prompt_ids), ids.shape[1]):
            losses.append(-logprobs[place - 1, ids[0, place]])
    expected = sum(losses) / 8
    assert found == pytest.approx(float(expected.detach()), rel=1e-9)
    assert 1 < found < 3 * math.log(VOCABULARY)
    expected.backward()
    # The first step of AdamW moves every weight by lr against the sign of its gradient (eps aside).
    start = dict(qwen(1).named_parameters())
    for (name, moved), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert reference.grad is not None
        strong = reference.grad.abs() > 1e-5
        assert strong.any(), name
        change = (moved - start[name])[strong]
        torch.testing.assert_close(change, -1e-3 * reference.grad[strong].sign(), rtol=2e-3, atol=0)


def test_a_step_that_is_not_finite_leaves_the_weights(tmp_path: Path) -> None:
    model = qwen(1)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-3))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    norm = model.model.norm.weight
    norm.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(UserError, match=r"gradient of norm (inf|nan)"):
        step(Forward(model), optimizer, [row([1, 2, 3], [4, 5])], 100)
    assert all(parameter.equal(before[name]) for name, parameter in model.named_parameters())


def test_rows_are_the_rollouts_prompts_and_the_teachers_words(four_facts: Path) -> None:
    tokenizer = load_model(four_facts / "model").tokenizer
    prompts = PromptBuilder(tokenizer, "Rules.")
    rows = ImitationRows([EPISODE, EPISODE], [prompts])
    drawn = [each for batch in rows.batches(4, 1) for each in batch]
    assert len(rows) == 4 and sorted((r.question, r.turn) for r in drawn) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    for each in drawn:
        seen, said = EPISODE.turns[each.turn - 1]
        assert tokenizer.decode(each.prompt_ids) == (
            f"<|im_start|>system\nRules.<|im_end|>\n<|im_start|>user\n{seen}<|im_end|>\n<|im_start|>assistant\n"
        )
        assert tokenizer.decode(each.completion_ids) == said and all(each.sampled)
    again = [each for batch in ImitationRows([EPISODE, EPISODE], [prompts]).batches(4, 1) for each in batch]
    assert again == drawn
    assert sum(r.length for r in next(rows.batches(1, 500))) >= 500


def test_rows_that_do_not_fit_are_left_out_and_counted(four_facts: Path) -> None:
    prompts = PromptBuilder(load_model(four_facts / "model").tokenizer)
    lengths = sorted(r.length for batch in ImitationRows([EPISODE], [prompts]).batches(2, 1) for r in batch)
    assert lengths[0] < lengths[1]
    short = ImitationRows([EPISODE], [prompts], limit=lengths[0])
    assert (len(short), short.left_out) == (1, 1)
    with pytest.raises(UserError, match="no turn"):
        ImitationRows([EPISODE], [prompts], limit=5)


def test_a_turn_in_which_nothing_was_said_is_left_out(four_facts: Path) -> None:
    (first, second) = EPISODE.turns
    silent = replace(EPISODE, turns=((first[0], ""), second))
    rows = ImitationRows([silent], [PromptBuilder(load_model(four_facts / "model").tokenizer)])
    assert (len(rows), rows.left_out) == (1, 1)
    assert all(r.trained_tokens for batch in rows.batches(3, 1) for r in batch)


def test_scoring_contexts_take_the_place_of_turns(four_facts: Path) -> None:
    tokenizer = load_model(four_facts / "model").tokenizer
    rows = ImitationRows([EPISODE], [PromptBuilder(tokenizer)], scoring=1.0)
    drawn = [each for batch in rows.batches(2, 1) for each in batch]
    assert len(drawn) == 4  # for both turns: from the transcript, and from the memory alone
    assert {tokenizer.decode(r.completion_ids) for r in drawn} == {"Ann</answer>"}
    assert all(tokenizer.decode(r.prompt_ids).endswith("<|im_start|>assistant\n<answer>") for r in drawn)


def test_a_run_learns_the_teachers_words_and_leaves_what_it_says(four_facts: Path, tmp_path: Path) -> None:
    assert command(four_facts, tmp_path / "out") == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "imitation.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == list(range(41))
    losses = [r["loss"] for r in rows[1:]]
    assert losses[-1] < 0.7 * losses[0]
    measured = {r["step"]: r["validation/valid_turns"] for r in rows if "validation/valid_turns" in r}
    assert set(measured) == {0, 20, 40} and measured[0] == 0.0
    assert (tmp_path / "out" / "imitation.png").read_bytes().startswith(b"\x89PNG")
    assert len(read_demonstrations(tmp_path / "out" / "demonstrations.jsonl")) == 3
    start = load_file(four_facts / "model" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert start.keys() == after.keys()  # adapters are merged
    moved = {key for key in start if not start[key].equal(after[key])}
    assert moved == {key for key in start if key.endswith("_proj.weight")}
    assert command(four_facts, tmp_path / "out") == 2  # it is not overwritten


def test_it_learns_to_play_and_a_training_run_starts_with_it(four_facts: Path, tmp_path: Path) -> None:
    more = ["steps=1", "cold_start.steps=250", "cold_start.optimizer.total_steps=250", "evaluation.every=250"]
    more += ["cold_start.optimizer.lr=3e-3", "rollout.questions_per_step=2", "rollout.group_size=2"]
    config = configured(four_facts, *more).model_dump(exclude_none=True)
    del config["cold_start"]["lora"]  # all weights
    trained = RunConfig.model_validate(config)
    run.run_folder(trained, tmp_path / "run")
    rows = [
        json.loads(s) for s in (tmp_path / "run" / "imitation" / "imitation.jsonl").read_text().splitlines()
    ]
    measured = [r["validation/valid_turns"] for r in rows if "validation/valid_turns" in r]
    assert measured[0] == 0.0 and measured[-1] >= 0.8
    kept = load_model(tmp_path / "run" / "cold_start")
    assert kept.fingerprint != load_model(four_facts / "model").fingerprint
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["step"] == 1


def test_adapters_leave_a_model_that_can_be_trained_as_a_whole(four_facts: Path) -> None:
    """As one that is loaded from the disk, which is what a resumed run starts with."""
    config = configured(four_facts, "cold_start.steps=1", "evaluation.every=0")
    assert config.cold_start.lora is not None and config.learner.lora is None
    trained = imitate(load_model(four_facts / "model"), [EPISODE], config)
    assert all(parameter.requires_grad for parameter in trained.model.parameters())
    learner = Learner(trained.model, config.learner)
    assert learner.optimizer.parameters.keys() == dict(trained.model.named_parameters()).keys()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cold_start.teacher=expret"], "none of"),
        (["cold_start.teacher=http://127.0.0.1:9/v1"], "teacher_model"),
        (["cold_start.teacher=random"], "no right episode (played 4)"),
        (["cold_start.teacher=no/such.jsonl"], "does not exist"),
        (["cold_start.teacher=recorded:no/run"], "no evaluation run"),
        (["rollout.max_prompt_tokens=16"], "no turn of the demonstrations fits"),
        (["environment.0.kwargs.max_turns=1"], "no right episode"),
    ],
)
def test_mistakes_are_one_line(
    four_facts: Path, tmp_path: Path, overrides: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(four_facts, tmp_path / "out", *overrides) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and said in errors[0]


def test_an_interruption_is_one_line(
    four_facts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainer.imitate.imitate", interrupt)
    assert command(four_facts, tmp_path / "out") == 130
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("interrupted; the same command begins the steps anew")
    )
