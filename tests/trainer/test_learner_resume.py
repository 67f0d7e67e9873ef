"""Resume to the bit, through the files a checkpoint is made of; adapters; low precision."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer import toy
from tests.trainer.test_learner import config, rows_of, weights
from trainer.algorithm import CriticConfig, LearnerConfig, LoraConfig, OptimizerConfig
from trainer.learner import Learner


def settings(**more: Any) -> LearnerConfig:
    optimizer = OptimizerConfig(
        lr=0.01, warmup_steps=3, schedule="cosine", total_steps=30, **more.pop("optimizer", {})
    )
    return LearnerConfig(optimizer=optimizer, epochs=2, mini_batch_questions=2, **more)


def through_files(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    tensors = {name: tensor.contiguous().clone() for name, tensor in state["tensors"].items()}
    save_file(tensors, folder / "state.safetensors")
    (folder / "state.json").write_text(json.dumps(state["values"]))
    return {
        "tensors": load_file(folder / "state.safetensors"),
        "values": json.loads((folder / "state.json").read_text()),
    }


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"optimizer": {"name": "muon"}},
        {"critic": CriticConfig(lr=0.01)},
        {"lora": LoraConfig(rank=2, alpha=4)},
    ],
    ids=["adamw", "muon", "critic", "lora"],
)
def test_four_updates_equal_two_a_resume_and_two(tmp_path, more):
    cold_start = toy.qwen(dtype=torch.float32, exact=False)
    algorithm = {"advantage": "critic"} if "critic" in more else {}
    rows = rows_of(cold_start, **algorithm)

    whole = Learner(copy.deepcopy(cold_start), settings(**more), seed=7)
    for _ in range(4):
        last = whole.update(rows)

    first = Learner(copy.deepcopy(cold_start), settings(**more), seed=7)
    for _ in range(2):
        first.update(rows)
    saved = through_files(first.state_dict(), tmp_path)
    moved = weights(first)
    # Another seed and other fresh adapters: everything has to come from the state.
    torch.manual_seed(123)
    second = Learner(copy.deepcopy(cold_start), settings(**more), seed=99)
    second.load_state_dict(saved)
    assert torch.equal(weights(second), moved)
    for _ in range(2):
        resumed = second.update(rows)
    assert torch.equal(weights(second), weights(whole))
    assert resumed == last
    # The reference is the cold start, also after the resume.
    assert second.reference_logprobs(rows) == whole.reference_logprobs(rows)
    assert second.reference_logprobs(rows) == Learner(cold_start, settings()).logprobs(rows)


def test_a_state_of_another_model_is_refused():
    state = Learner(toy.qwen(), config(), toy.qwen(9)).state_dict()
    with pytest.raises(ValueError, match="checkpoint of another model"):
        Learner(toy.gpt2(), config(), toy.qwen(9)).load_state_dict(state)
    with pytest.raises(ValueError, match="checkpoint holds policy, this learner critic and policy"):
        Learner(toy.qwen(), config(critic=CriticConfig()), toy.qwen(9)).load_state_dict(state)
    wrong = {"tensors": dict(state["tensors"]), "values": state["values"]}
    wrong["tensors"]["policy.model.model.norm.weight"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"norm\.weight has shape \(3,\), not \(16,\)"):
        Learner(toy.qwen(), config(), toy.qwen(9)).load_state_dict(wrong)


def test_lora_trains_adapters_and_keeps_the_base():
    model = toy.qwen(dtype=torch.float32, exact=False)
    rows = rows_of(model)
    plain = Learner(copy.deepcopy(model), config()).logprobs(rows)
    base = {name: p.detach().clone() for name, p in model.named_parameters()}
    learner = Learner(model, config(lora=LoraConfig(rank=2, alpha=4)))
    assert all("lora_" in name for name in learner.optimizer.parameters)
    assert learner.reference is None
    assert learner.logprobs(rows) == plain == learner.reference_logprobs(rows)
    for _ in range(3):
        metrics = learner.update(rows)
    assert metrics["kl_reference"] > 1e-6
    assert learner.logprobs(rows) != plain
    assert learner.reference_logprobs(rows) == plain
    for name, p in learner.model.get_base_model().named_parameters():
        if "lora_" not in name:
            assert torch.equal(p, base[name.replace(".base_layer", "")])


def test_a_cold_start_that_is_an_adapter_is_merged_first():
    """Switching the new adapters off must give the cold start, and not the model below it."""
    import peft

    below = toy.qwen(dtype=torch.float32, exact=False)
    rows = rows_of(below)
    untouched = Learner(copy.deepcopy(below), config()).logprobs(rows)

    def cold_start() -> Any:
        model = copy.deepcopy(below)
        torch.manual_seed(5)
        return peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        )

    own = Learner(cold_start().merge_and_unload().requires_grad_(True), config()).logprobs(rows)
    learner = Learner(cold_start(), config(lora=LoraConfig(rank=2, alpha=4)))
    for _ in range(2):
        learner.update(rows)
    for mine, cold in zip(learner.reference_logprobs(rows), own, strict=True):
        assert mine == pytest.approx(cold, abs=1e-5)
    assert (
        max(
            abs(a - b) for one, two in zip(own, untouched, strict=True) for a, b in zip(one, two, strict=True)
        )
        > 1
    )


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, alpha=4)])
def test_gradient_checkpointing_computes_twice_and_changes_nothing(lora):
    def run(checkpointing: bool) -> tuple[torch.Tensor, int]:
        torch.manual_seed(0)
        model = toy.qwen()
        rows = rows_of(model)
        settings = config(
            gradient_checkpointing=checkpointing, lora=lora, epochs=2, tokens_per_micro_batch=100
        )
        learner = Learner(model, settings)
        learner.logprobs(rows)
        calls = [0]
        target = learner.model.get_base_model() if lora else learner.model
        target.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
        learner.update(rows)
        assert not learner.model.training  # the engine generates with this very model
        return weights(learner), calls[0]

    (plain, once), (checkpointed, twice) = run(False), run(True)
    torch.testing.assert_close(checkpointed, plain, rtol=1e-9, atol=1e-11)
    assert twice > 1.5 * once


def test_bfloat16_autocast_keeps_weights_and_loss_in_float32():
    model = toy.qwen(dtype=torch.float32, exact=False)
    rows = rows_of(model)
    exact = Learner(copy.deepcopy(model), config())
    learner = Learner(model, config(autocast="bfloat16"))
    seen: list[torch.dtype] = []
    learner.model.model.layers[0].mlp.up_proj.register_forward_hook(
        lambda _m, _i, out: seen.append(out.dtype)
    )
    learner.model.lm_head.register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    rough, fine = learner.logprobs(rows), exact.logprobs(rows)
    assert {torch.bfloat16, torch.float32} <= set(seen)
    differences = [
        abs(a - b) for one, other in zip(rough, fine, strict=True) for a, b in zip(one, other, strict=True)
    ]
    assert 1e-5 < max(differences) < 0.2
    before = weights(learner)
    metrics = learner.update(rows)
    assert metrics["skipped_steps"] == 0
    assert weights(learner).dtype == torch.float32 and not torch.equal(weights(learner), before)


def test_bfloat16_weights_train():
    model = toy.qwen(dtype=torch.bfloat16, exact=False)
    rows = rows_of(toy.qwen(dtype=torch.float32, exact=False))
    learner = Learner(model, config(lr=0.05))
    before = weights(learner)
    metrics = learner.update(rows)
    assert metrics["skipped_steps"] == 0 and metrics["grad_norm"] > 0
    assert weights(learner).dtype == torch.bfloat16 and not torch.equal(weights(learner), before)


def test_muon_and_adamw_both_move_their_parts():
    model = toy.qwen(dtype=torch.float32, exact=False)
    rows = rows_of(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    learner = Learner(model, settings(optimizer={"name": "muon"}))
    learner.update(rows)
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
