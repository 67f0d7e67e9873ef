"""Gradients of whole updates against a reference that was written from the formulas alone, for every
recipe."""

import copy
import math
from typing import Any

import pytest
import torch

from tests.trainer import reference_loss, toy
from trainer.algorithm import AlgorithmConfig, CriticConfig, LearnerConfig, LoraConfig, OptimizerConfig
from trainer.config import load_config, recipe_names
from trainer.learner import Learner
from trainer.optimizers import OptimizerSet
from trainer.rows import rows_from_groups

Settings = tuple[AlgorithmConfig, LearnerConfig]

OF_THE_LOSS = {
    "temperature",
    "clip_low",
    "clip_high",
    "ratio",
    "aggregation",
    "constant_length",
    "kl_coef",
} | {
    "kl_kind",
    "entropy_coef",
    "old_logprobs",
    "importance_cap",
}
"""Settings of the learner that a recipe keeps in these tests; the others are how it computes, not what."""


def recipe(name: str) -> Settings:
    """A recipe as it is shipped. (Pools too small for a turn index of its own: `test_advantages` has them.)"""
    config = load_config(name, ["model.path=some/model"])
    algorithm = config.algorithm.model_copy(update={"memory_min_pool": 1})
    return algorithm, LearnerConfig(**{key: getattr(config.learner, key) for key in OF_THE_LOSS})


def more(algorithm: dict[str, Any] | None = None, **learner: Any) -> Settings:
    return AlgorithmConfig(**(algorithm or {})), LearnerConfig(**learner)


SHIPPED = {
    name: recipe(name) for name in ["tiny", *recipe_names()] if name != "ppo"
}  # which has a test of its own
RECIPES: dict[str, Settings] = {
    # Of several with one loss the first stands for all.
    **{name: own for name, own in SHIPPED.items() if own is next(s for s in SHIPPED.values() if s == own)},
    "alpha": more({"alpha": 0.7}),
    "dr-grpo-without-kl": more(
        {"alpha": 0.0, "outcome_scale": "none"}, aggregation="constant", constant_length=11, kl_coef=0.0
    ),
    "k1": more(kl_coef=0.2, kl_kind="k1"),
    "k2": more(kl_coef=0.2, kl_kind="k2"),
    "k3": more(kl_coef=0.2),
    "temperature": more(temperature=0.7),
    "entropy-bonus": more(entropy_coef=0.05),
    "importance": more(old_logprobs="recomputed", importance_cap=1.1),
}


def words(algorithm: AlgorithmConfig, learner: LearnerConfig) -> dict[str, Any]:
    """What the settings mean, for the reference."""
    return {
        "alpha": algorithm.alpha,
        "scale": algorithm.outcome_scale == "std",
        "less": algorithm.outcome_baseline,
        "memory_less": algorithm.memory_baseline,
        "by_turn": algorithm.memory_pool == "turn",
        "two_losses": algorithm.separate_memory_loss,
        "T": learner.temperature,
        "low": learner.clip_low,
        "high": learner.clip_high,
        "sequence_ratio": learner.ratio == "sequence",
        "mean": learner.aggregation,
        "constant": learner.constant_length,
        "kl": learner.kl_coef,
        "kl_kind": learner.kl_kind,
        "entropy": learner.entropy_coef,
        "recomputed": learner.old_logprobs == "recomputed",
        "cap": learner.importance_cap,
    }


LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"share_prompts": False, "tokens_per_micro_batch": 60},
    "shared": {"share_prompts": True, "tokens_per_micro_batch": 60},
    "packed": {"forward": "packed", "tokens_per_micro_batch": 40},
}


class Recorder:
    """Gradients and weights at every optimizer step of a learner, before clipping."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, learner: Learner) -> None:
        self.steps: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []
        original = OptimizerSet.clip

        def clip(optimizer: OptimizerSet) -> torch.Tensor:
            if optimizer is learner.optimizer:
                weights = {name: p.detach().double().clone() for name, p in optimizer.parameters.items()}
                gradients = {
                    name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                    for name, p in optimizer.parameters.items()
                }
                self.steps.append((weights, gradients))
            return original(optimizer)

        monkeypatch.setattr(OptimizerSet, "clip", clip)


def relative_error(gradients: dict[str, torch.Tensor], model: Any) -> float:
    names = {name: p.grad for name, p in model.named_parameters() if name in gradients}
    assert len(names) == len(gradients)
    expected = torch.cat([gradient.flatten() for gradient in names.values()])
    found = torch.cat([gradients[name].double().flatten() for name in names])
    assert expected.norm() > 1e-4, "a gradient of nothing proves nothing"
    return float((found - expected).norm() / expected.norm())


def mini_batches(questions: list[Any], seed: int, epochs: int, size: int) -> list[list[Any]]:
    """The documented order: a seeded torch generator, one permutation of the questions an epoch."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(epochs):
        order = torch.randperm(len(questions), generator=generator).tolist()
        batches += [[questions[i] for i in order[s : s + size]] for s in range(0, len(order), size)]
    return batches


def check(
    monkeypatch: pytest.MonkeyPatch,
    model: Any,
    recipe: str,
    tolerance: float,
    layout: str = "padded",
    noise: float = 0.3,
    lora: LoraConfig | None = None,
) -> None:
    algorithm, settings = RECIPES[recipe]
    start = copy.deepcopy(model).double()
    questions = toy.play(start, seed=5, questions=4, noise=noise)
    groups, scores = toy.as_groups(questions)
    rows, report = rows_from_groups(groups, scores, algorithm)
    config = LearnerConfig(
        **(settings.model_dump(include=OF_THE_LOSS) | LAYOUTS[layout]),
        epochs=2,
        mini_batch_questions=2,
        optimizer=OptimizerConfig(lr=0.02, max_grad_norm=0.5),
        lora=lora,
    )
    frozen = start if lora else toy.qwen(9)  # under adapters the reference is what lies below them
    learner = Learner(model, config, reference=toy.qwen(9) if config.kl_coef and not lora else None, seed=3)
    recorder = Recorder(monkeypatch, learner)
    metrics = learner.update(rows)
    if layout == "shared":  # and did not fall back
        alone = sum(row.length for row in rows) * 2
        assert learner._policy.agrees("branches") and metrics["computed_tokens"] < alone

    kept = [questions[index] for index in report.kept]
    batches = mini_batches(kept, seed=3, epochs=2, size=2)
    assert len(recorder.steps) == len(batches) == 4
    for (weights, gradients), batch in zip(recorder.steps, batches, strict=True):
        twin = toy.same_weights(learner.model if lora else start, weights)
        reference_loss.loss(twin, frozen, start, batch, words(algorithm, settings)).backward()
        assert relative_error(gradients, twin) < tolerance
    # The comparison means something only if the clip held, the weights moved, and both kinds of advantage
    # came with both signs.
    assert 0.02 < metrics["clip_fraction"] < 0.9
    first, last = recorder.steps[0][0], recorder.steps[-1][0]
    assert max(float((last[name] - value).abs().max()) for name, value in first.items()) > 0.01
    outcome = [a for group in report.advantages for a in group.outcome]
    memory = [a for group in report.advantages for turns in group.memory for a in turns]
    assert min(memory) < -0.3 and max(memory) > 0.3 and max(outcome) > 0.3
    assert min(outcome) < -0.3 or algorithm.outcome_baseline == "none"  # imitation has no bad rollouts
    assert metrics["micro_batches"] > 4


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_in_float64(monkeypatch, recipe):
    check(monkeypatch, toy.qwen(), recipe, tolerance=1e-10)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", ["tiny", "gspo", "two-loss"])
def test_every_layout_in_float64(monkeypatch, recipe, layout):
    check(monkeypatch, toy.qwen(), recipe, tolerance=1e-10, layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_learned_positions_in_float64(monkeypatch, layout):
    check(monkeypatch, toy.gpt2(), "tiny", tolerance=1e-10, layout=layout)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_in_float32(monkeypatch, recipe):
    check(monkeypatch, toy.qwen(dtype=torch.float32, exact=False), recipe, tolerance=1e-5, layout="shared")


def test_adapters_with_the_base_as_reference_in_float64(monkeypatch):
    check(monkeypatch, toy.qwen(), "k3", tolerance=1e-10, lora=LoraConfig(rank=2, alpha=4))


def test_every_recipe_that_ships_is_among_them():
    assert all(settings in RECIPES.values() for settings in SHIPPED.values())
    assert {"tiny", "grpo", "dr-grpo", "dapo", "gspo", "rloo", "two-loss", "qwen2.5-7b-mempo"} <= set(RECIPES)
    assert RECIPES["two-loss"][0].separate_memory_loss and RECIPES["gspo"][1].ratio == "sequence"


@pytest.mark.parametrize(
    ("alpha", "settings"),
    [
        (0.5, CriticConfig(lr=0.02, gamma=0.9, gae_lambda=0.8, value_clip=0.1)),
        (0.0, load_config("ppo").learner.critic),
    ],
    ids=["by hand", "recipe"],
)
def test_ppo_with_a_critic_in_float64(monkeypatch, alpha, settings):
    """Values, GAE over all turns of a trajectory, whitening and both losses, each by its definition."""
    model = toy.qwen()
    start = copy.deepcopy(model)
    questions = toy.play(start, seed=5, questions=4)
    groups, scores = toy.as_groups(questions)
    rows, _ = rows_from_groups(groups, scores, AlgorithmConfig(advantage="critic", alpha=alpha))
    gamma, lam, clip = settings.gamma, settings.gae_lambda, settings.value_clip
    config = LearnerConfig(
        critic=settings,
        epochs=2,
        mini_batch_questions=2,
        tokens_per_micro_batch=60,
        optimizer=OptimizerConfig(lr=0.02),
    )
    learner = Learner(model, config, reference=toy.qwen(9), seed=3)
    assert learner.critic is not None
    with torch.no_grad():
        learner.critic.head.weight.normal_(generator=torch.Generator().manual_seed(1))
    value_network = copy.deepcopy(learner.critic)
    recorder = Recorder(monkeypatch, learner)
    value_steps: list[tuple[dict[str, torch.Tensor], torch.Tensor]] = []
    step = type(learner.critic).step

    def record(critic: Any, finite: bool) -> bool:
        weights = {name: p.detach().clone() for name, p in critic.named_parameters()}
        value_steps.append((weights, torch.cat([p.grad.flatten() for p in critic.parameters()])))
        return step(critic, finite)

    monkeypatch.setattr(type(learner.critic), "step", record)
    metrics = learner.update(rows)
    assert metrics["clip_fraction"] > 0.02

    def values_of(network: Any, turn: toy.PlainTurn) -> torch.Tensor:
        hidden = network.decoder(torch.tensor([turn.prompt + turn.completion])).last_hidden_state[0]
        return network.head(hidden[len(turn.prompt) - 1 : -1])[:, 0]

    advantages: dict[int, dict[int, float]] = {}
    returns: dict[int, dict[int, float]] = {}
    old: dict[int, torch.Tensor] = {}
    everything: list[tuple[int, int]] = []
    for question in questions:
        for reward, turns in zip(question.rewards, question.trajectories, strict=True):
            line = []  # (turn, token, value, reward) along the whole trajectory
            for turn in turns:
                old[id(turn)] = values_of(value_network, turn).detach()
                trained = [i for i, sampled in enumerate(turn.sampled) if sampled]
                inside = [i for i in trained if turn.span and i < turn.span[1]]
                for i in trained:
                    bonus = 0.0
                    if turn.p_mem is not None and i == inside[-1]:
                        bonus = alpha * (turn.p_mem - turn.p_full)
                    line.append([id(turn), i, float(old[id(turn)][i]), bonus])
            line[-1][3] += reward
            for place, (turn_id, i, value, _) in enumerate(line):
                estimate = 0.0
                for later in range(place, len(line)):
                    after = line[later + 1][2] if later + 1 < len(line) else 0.0
                    delta = line[later][3] + gamma * after - line[later][2]
                    estimate += (gamma * lam) ** (later - place) * delta
                advantages.setdefault(turn_id, {})[i] = estimate
                returns.setdefault(turn_id, {})[i] = estimate + value
                everything.append((turn_id, i))
    flat = torch.tensor([advantages[t][i] for t, i in everything], dtype=torch.float64)
    for (t, i), value in zip(everything, (flat - flat.mean()) / (flat.std() + 1e-8), strict=True):
        advantages[t][i] = float(value)

    batches = mini_batches(questions, seed=3, epochs=2, size=2)
    for (weights, gradients), (value_weights, value_gradient), batch in zip(
        recorder.steps, value_steps, batches, strict=True
    ):
        twin = toy.same_weights(start, weights)
        reference_loss.loss(twin, toy.qwen(9), start, batch, words(*more()), advantages).backward()
        assert relative_error(gradients, twin) < 1e-10

        network = copy.deepcopy(value_network)
        network.load_state_dict(value_weights)
        terms = []
        for turn in (turn for question in batch for turns in question.trajectories for turn in turns):
            new = values_of(network, turn)
            for i, target in returns[id(turn)].items():
                before = old[id(turn)][i]
                bounded = before + (new[i] - before).clamp(-clip, clip)
                terms.append(torch.maximum((new[i] - target) ** 2, (bounded - target) ** 2) / 2)
        network.zero_grad()
        torch.stack(terms).mean().backward()
        expected = torch.cat([p.grad.flatten() for p in network.parameters()])
        assert float((value_gradient - expected).norm() / expected.norm()) < 1e-10
    assert not math.isclose(float(value_steps[0][1].norm()), float(value_steps[-1][1].norm()))
