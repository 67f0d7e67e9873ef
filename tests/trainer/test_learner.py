"""The learner: what may not change a gradient, what is counted, what is skipped, what is constant."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch

from tests.trainer import toy
from tests.trainer.test_forward import soft_capped
from tests.trainer.toy import row
from trainer.algorithm import AlgorithmConfig, CriticConfig, LearnerConfig, OptimizerConfig
from trainer.learner import Learner, NonFiniteError
from trainer.metrics import UpdateMetrics
from trainer.optimizers import OptimizerSet
from trainer.packing import shard
from trainer.row import Row
from trainer.rows import rows_from_groups


def rows_of(model: Any, noise: float = 0.3, questions: int = 4, **algorithm: Any) -> list[Row]:
    groups, scores = toy.as_groups(toy.play(model, seed=5, questions=questions, noise=noise))
    return rows_from_groups(groups, scores, AlgorithmConfig(**algorithm))[0]


def config(lr: float = 0.01, **settings: Any) -> LearnerConfig:
    return LearnerConfig(optimizer=OptimizerConfig(lr=lr), **settings)


def gradient(learner: Learner, rows: list[Row], chosen: list[int] | None = None) -> torch.Tensor:
    """Of one optimizer step over all rows."""
    experience = learner.experience(rows)
    everything = list(range(len(rows)))
    learner.accumulate(
        experience,
        everything if chosen is None else chosen,
        experience.denominators(everything),
        UpdateMetrics(),
    )
    found = torch.cat([p.grad.flatten() for p in learner.optimizer.parameters.values() if p.grad is not None])
    learner.optimizer.zero_grad()
    return found


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in learner.optimizer.parameters.values()])


@pytest.mark.parametrize("aggregation", [{}, {"aggregation": "trajectory"}])
@pytest.mark.parametrize(
    "layout",
    [
        {"tokens_per_micro_batch": 1, "share_prompts": False},
        {"tokens_per_micro_batch": 50, "share_prompts": False},
        {"tokens_per_micro_batch": 50},
        {"tokens_per_micro_batch": 10_000},
        {"tokens_per_micro_batch": 50, "forward": "packed"},
        {"tokens_per_micro_batch": 50, "gradient_checkpointing": True},
    ],
)
def test_no_partition_changes_the_gradient(layout, aggregation):
    model = toy.qwen()
    rows = rows_of(model)
    plain = gradient(Learner(copy.deepcopy(model), config(**aggregation), toy.qwen(9)), rows)
    other = gradient(Learner(copy.deepcopy(model), config(**aggregation, **layout), toy.qwen(9)), rows)
    assert plain.norm() > 0.01
    torch.testing.assert_close(other, plain, rtol=1e-10, atol=1e-12)


def test_order_of_rows_changes_nothing():
    model = toy.qwen()
    rows = rows_of(model)
    plain = gradient(Learner(copy.deepcopy(model), config(), toy.qwen(9)), rows)
    other = gradient(Learner(model, config(), toy.qwen(9)), rows[::-1])
    torch.testing.assert_close(other, plain, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_sum_to_the_single_process(ranks):
    """Each rank: its share of the rows, the denominators of all, empty micro-batches where it has fewer."""
    model = toy.qwen()
    rows = rows_of(model)
    learner = Learner(model, config(tokens_per_micro_batch=60), toy.qwen(9))
    total = torch.zeros_like(plain := gradient(learner, rows))
    experience = learner.experience(rows)
    everything = list(range(len(rows)))
    shares = shard(rows, ranks)
    assert sorted(index for share in shares for index in share) == everything
    for share in shares:
        metrics = UpdateMetrics()
        learner.accumulate(experience, share, experience.denominators(everything), metrics, least=20)
        total += torch.cat([p.grad.flatten() for p in learner.optimizer.parameters.values()])
        learner.optimizer.zero_grad()
        metrics.step(norm=0.0, lr=0.0, finite=True)
        assert metrics.summary()["micro_batches"] == 20
    torch.testing.assert_close(total, plain, rtol=1e-10, atol=1e-12)
    loads = [sum(rows[index].length for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(r.length for r in rows)


def test_a_rank_with_nothing_but_padding_adds_exactly_zero():
    learner = Learner(toy.qwen(), config(), toy.qwen(9))
    rows = rows_of(learner.model)
    experience = learner.experience(rows)
    metrics = UpdateMetrics()
    learner.accumulate(experience, [], experience.denominators(range(len(rows))), metrics, least=2)
    for parameter in learner.optimizer.parameters.values():
        assert parameter.grad is not None and not parameter.grad.any()
    metrics.step(norm=0.0, lr=0.0, finite=True)
    assert metrics.summary()["loss"] == 0.0


@pytest.mark.parametrize("aggregation", ["token", "trajectory"])
def test_rows_without_a_trained_token_count_nowhere(aggregation):
    model = toy.qwen()
    rows = rows_of(model)
    hollow = [
        row([1, 2], [], question=0, trajectory=900),
        row([1, 2], [3], sampled=(False,), question=1, trajectory=901),
    ]
    plain = gradient(Learner(copy.deepcopy(model), config(aggregation=aggregation), toy.qwen(9)), rows)
    other = gradient(Learner(model, config(aggregation=aggregation), toy.qwen(9)), rows + hollow)
    torch.testing.assert_close(other, plain, rtol=1e-10, atol=1e-12)


def test_rows_without_signal_are_counted_but_not_computed():
    """Without a KL term they cannot move anything; leaving their tokens out of the mean would."""
    model = toy.qwen()
    questions = toy.play(model, seed=5)
    questions[1].rewards = [1.0] * 4
    rows, _ = rows_from_groups(toy.as_groups(questions)[0], None, AlgorithmConfig(alpha=0.0))
    silent = [r for r in rows if not r.has_signal]
    assert 0 < len(silent) < len(rows)
    quick = Learner(copy.deepcopy(model), config(kl_coef=0.0))
    # A KL of weight 1e-30 computes every row and adds nothing that float64 can hold.
    slow = Learner(copy.deepcopy(model), config(kl_coef=1e-30), toy.qwen(9))
    torch.testing.assert_close(gradient(quick, rows), gradient(slow, rows), rtol=1e-10, atol=1e-12)
    one, other = (learner.update(rows) for learner in (quick, slow))
    assert one["trained_tokens"] == other["trained_tokens"] - sum(r.trained_tokens for r in silent)
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-9)


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_first_step_on_fresh_data_has_ratio_one(epochs, temperature):
    """Against log-probs that the model's own full logits gave, one row at a time, in float32."""
    model = toy.qwen(dtype=torch.float32, exact=False)
    made = rows_of(model)
    rows = []
    with torch.no_grad():
        for r in made:
            logits = model(torch.tensor([[*r.prompt_ids, *r.completion_ids]])).logits[0] / temperature
            own = logits.log_softmax(-1)
            start = len(r.prompt_ids) - 1
            engine = tuple(own[start + i, token].item() for i, token in enumerate(r.completion_ids))
            rows.append(Row(**{**r.__dict__, "old_logprobs": engine}))
    learner = Learner(
        model, config(lr=0.03, epochs=epochs, temperature=temperature, share_prompts=False), seed=1
    )
    ratios: list[torch.Tensor] = []
    original = UpdateMetrics.surrogate

    def record(metrics: UpdateMetrics, surrogate: Any) -> None:
        ratios.append(surrogate.ratio)
        original(metrics, surrogate)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UpdateMetrics, "surrogate", record)
        metrics = learner.update(rows)
    assert len(ratios) == epochs
    assert (ratios[0] - 1).abs().max() < 1e-5
    assert (ratios[0] - 1).abs().mean() < 1e-6
    assert metrics["engine_diff_max"] < 1e-5 and metrics["engine_diff_mean"] < 1e-6
    if epochs == 1:
        assert metrics["clip_fraction"] == 0.0
    else:
        assert (ratios[1] - 1).abs().max() > 0.1 and metrics["clip_fraction"] > 0.02


def steps_of(learner: Learner, rows: list[Row]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Ratios of each micro-batch and gradients of each optimizer step of an update."""
    ratios: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    plain_surrogate, plain_clip = UpdateMetrics.surrogate, OptimizerSet.clip

    def surrogate(metrics: UpdateMetrics, of_batch: Any) -> None:
        ratios.append(of_batch.ratio)
        plain_surrogate(metrics, of_batch)

    def clip(optimizer: OptimizerSet) -> torch.Tensor:
        gradients.append(torch.cat([p.grad.flatten() for p in optimizer.parameters.values()]))
        return plain_clip(optimizer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UpdateMetrics, "surrogate", surrogate)
        patch.setattr(OptimizerSet, "clip", clip)
        learner.update(rows)
    return ratios, gradients


def test_the_first_of_several_epochs_is_the_step_of_one_with_ratio_exactly_one():
    model = toy.qwen()
    rows = rows_of(model)

    def steps(epochs: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        settings = config(epochs=epochs, old_logprobs="recomputed", share_prompts=False)
        return steps_of(Learner(copy.deepcopy(model), settings, toy.qwen(9)), rows)

    (ratios, gradients), (more_ratios, more_gradients) = steps(1), steps(3)
    assert (len(gradients), len(more_gradients)) == (1, 3)
    assert torch.equal(ratios[0], torch.ones_like(ratios[0])) and torch.equal(more_ratios[0], ratios[0])
    assert torch.equal(gradients[0], more_gradients[0]) and gradients[0].norm() > 0.01
    assert (more_ratios[1] - 1).abs().max() > 1e-3


@pytest.mark.parametrize("aggregation", ["token", "trajectory", "constant"])
def test_splitting_turns_changes_no_gradient(aggregation):
    """A completion as one row, and as two of which the second reads the first: the same tokens after the same."""
    model = toy.qwen()
    settings = config(
        aggregation=aggregation, constant_length=7 if aggregation == "constant" else None, share_prompts=False
    )
    whole, split = rows_of(model), []
    for r in whole:
        cut = len(r.completion_ids) // 2
        for turn, (start, end) in enumerate(((0, cut), (cut, len(r.completion_ids)))):
            fields = ("completion_ids", "sampled", "advantages", "old_logprobs")
            part = {name: getattr(r, name)[start:end] for name in fields}
            prompt = r.prompt_ids + r.completion_ids[:start]
            split.append(Row(**{**r.__dict__, **part, "prompt_ids": prompt, "turn": 2 * r.turn + turn}))
    plain = gradient(Learner(copy.deepcopy(model), settings, toy.qwen(9)), whole)
    other = gradient(Learner(model, settings, toy.qwen(9)), split)
    assert len(split) == 2 * len(whole) and plain.norm() > 0.01
    torch.testing.assert_close(other, plain, rtol=1e-10, atol=1e-12)


def test_a_wrong_temperature_shows_in_the_first_step():
    model = toy.qwen()
    rows = rows_of(model, noise=0.0)
    assert Learner(copy.deepcopy(model), config()).update(rows)["engine_diff_max"] < 1e-9
    assert Learner(model, config(temperature=0.5)).update(rows)["engine_diff_mean"] > 0.1


def test_steps_are_counted_in_questions():
    """5 questions by 2 in 2 epochs: 6 optimizer steps, however many turns the episodes have."""
    model = toy.qwen()
    rows = rows_of(model, questions=5)
    split = rows + [Row(**{**r.__dict__, "turn": r.turn + 10}) for r in rows]
    falling = OptimizerConfig(lr=0.01, schedule="linear", total_steps=10)
    settings = LearnerConfig(optimizer=falling, epochs=2, mini_batch_questions=2)
    for some in (rows, split):
        learner = Learner(copy.deepcopy(model), settings, toy.qwen(9))
        metrics = learner.update(some)
        assert metrics["optimizer_steps"] == learner.optimizer.steps == 6
        assert metrics["lr"] == pytest.approx(0.005)  # of the sixth step, which is the fifth after the first


def test_mini_batches_are_shuffled_by_the_seed_and_never_split_a_question():
    model = toy.qwen()
    rows = rows_of(model, questions=6)

    def order(seed: int, times: int = 2) -> list[list[int]]:
        learner = Learner(copy.deepcopy(model), config(mini_batch_questions=4), toy.qwen(9), seed=seed)
        return [
            [rows[i].question for i in chosen] for _ in range(times) for chosen in learner.mini_batches(rows)
        ]

    assert order(0) == order(0) != order(1)
    first, second, third, fourth = order(0)
    assert set(first) | set(second) == set(range(6)) and not set(first) & set(second)
    assert (first, second) != (third, fourth)


@pytest.mark.parametrize("separate", [False, True])
def test_a_micro_batch_costs_one_forward_and_one_backward(separate):
    model = toy.qwen()
    rows = rows_of(model, separate_memory_loss=separate)
    learner = Learner(model, config(tokens_per_micro_batch=60, epochs=2), toy.qwen(9))
    learner.logprobs(rows)  # layouts are found out once, before anything is counted
    count = {"forward": 0, "backward": 0, "reference": 0}
    layer, frozen = model.model.layers[0], learner.reference.model.layers[0]

    def bump(name: str) -> Any:
        return lambda *_: count.__setitem__(name, count[name] + 1)

    layer.register_forward_hook(bump("forward"))
    layer.register_full_backward_hook(bump("backward"))
    frozen.register_forward_hook(bump("reference"))
    metrics = learner.update(rows)
    assert metrics["micro_batches"] > 4
    assert count["forward"] == count["backward"] == metrics["micro_batches"]
    assert count["reference"] <= metrics["micro_batches"] / 2 + 2  # once, not once an epoch


def test_constants_carry_no_gradient():
    learner = Learner(toy.qwen(), config(old_logprobs="recomputed"), toy.qwen(9))
    experience = learner.experience(rows_of(learner.model))
    for constant in (
        experience.advantages,
        experience.old,
        experience.reference,
        experience.flat.engine_logprobs,
    ):
        assert isinstance(constant, torch.Tensor) and not constant.requires_grad
    assert all(not p.requires_grad for p in Learner(toy.qwen(), config()).reference.parameters())


def test_there_is_no_value_head_without_a_critic():
    learner = Learner(toy.qwen(), config(), toy.qwen(9))
    assert learner.critic is None
    assert set(learner.optimizer.parameters) == {name for name, _ in toy.qwen().named_parameters()}
    assert not any("critic" in name for name in learner.state_dict()["tensors"])
    with_critic = Learner(toy.qwen(), config(critic=CriticConfig()), toy.qwen(9))
    assert any(name.startswith("critic.") for name in with_critic.state_dict()["tensors"])


def test_the_default_reference_is_the_model_as_it_was():
    model = toy.qwen()
    rows = rows_of(model)
    learner = Learner(model, config())
    before = learner.reference_logprobs(rows)
    assert before == learner.logprobs(rows)
    first = learner.update(rows)
    assert first["kl_reference"] == pytest.approx(0.0, abs=1e-12)
    assert learner.reference_logprobs(rows) == before != learner.logprobs(rows)
    assert learner.update(rows)["kl_reference"] > 1e-5


def test_without_kl_there_is_no_reference():
    learner = Learner(toy.qwen(), config(kl_coef=0.0))
    rows = rows_of(learner.model)
    assert learner.reference is None
    assert "kl_reference" not in learner.update(rows)
    with pytest.raises(ValueError, match="no reference policy"):
        learner.reference_logprobs(rows)


def test_dropout_is_silent():
    model = toy.gpt2().train()
    learner = Learner(model, config(gradient_checkpointing=True))
    rows = rows_of(model)
    assert learner.logprobs(rows) == learner.logprobs(rows)


def test_skipped_steps_are_counted_and_leave_no_trace():
    learner = Learner(toy.qwen(), config(max_nonfinite_steps=2), toy.qwen(9))
    rows = rows_of(learner.model)
    broken = [
        Row(**{**r.__dict__, "advantages": (math.nan,) * len(r.advantages)}) if i == 3 else r
        for i, r in enumerate(rows)
    ]
    before = weights(learner)
    metrics = learner.update(broken)
    assert (metrics["skipped_steps"], metrics["optimizer_steps"], learner.skipped_steps) == (1, 0, 1)
    assert all(math.isfinite(value) for value in metrics.values())
    assert torch.equal(weights(learner), before) and learner.optimizer.steps == 0
    assert not learner.optimizer.state_tensors()
    # A good step in between starts the count again.
    learner.update(broken)
    assert learner.update(rows)["optimizer_steps"] == 1
    assert not torch.equal(weights(learner), before)
    after = weights(learner)
    learner.update(broken)
    learner.update(broken)
    with pytest.raises(NonFiniteError, match=r"3 optimizer steps in a row .*limit 2"):
        learner.update(broken)
    assert torch.equal(weights(learner), after) and learner.skipped_steps == 5


def test_an_infinite_gradient_of_a_finite_loss_is_skipped():
    learner = Learner(toy.qwen(), config(), toy.qwen(9))
    rows = rows_of(learner.model)
    parameter = learner.model.model.norm.weight
    parameter.register_hook(lambda gradient: gradient * math.inf)
    before = weights(learner)
    assert learner.update(rows)["skipped_steps"] == 1
    assert torch.equal(weights(learner), before)


def test_garbage_where_nothing_is_trained_has_no_influence():
    model = toy.qwen()
    rows = rows_of(model)
    dirty = [
        Row(
            **{
                **r.__dict__,
                **{
                    name: tuple(
                        value if sampled else math.nan
                        for value, sampled in zip(getattr(r, name), r.sampled, strict=True)
                    )
                    for name in ("advantages", "old_logprobs")
                },
            }
        )
        for r in rows
    ]
    assert any(math.isnan(value) for r in dirty for value in r.advantages)
    plain = gradient(Learner(copy.deepcopy(model), config(), toy.qwen(9)), rows)
    assert torch.equal(gradient(Learner(model, config(), toy.qwen(9)), dirty), plain)


def test_prompts_that_cannot_be_shared_are_named_once():
    def learner(model: Any, **settings: Any) -> Learner:
        return Learner(model, config(kl_coef=0.0, **settings))

    windowed = learner(soft_capped())
    rows = rows_of(windowed.model)
    with pytest.warns(RuntimeWarning, match=r"Gemma2ForCausalLM computes a prompt again.*sliding") as caught:
        first = windowed.update(rows)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        windowed.update(rows)
        asked = learner(soft_capped(), share_prompts=False).update(rows)  # nobody expects it then
        shared = learner(toy.qwen()).update(rows)
    assert first["computed_tokens"] == asked["computed_tokens"] > shared["computed_tokens"]


def test_an_update_of_nothing_is_refused():
    learner = Learner(toy.qwen(), config(kl_coef=0.0))
    with pytest.raises(ValueError, match="at least one row with a trained token"):
        learner.update([row([1], [])])


def test_given_reference_log_probs_are_used_as_they_are():
    model = toy.qwen()
    rows = rows_of(model)
    frozen = Learner(copy.deepcopy(model), config(), toy.qwen(9))
    flat = frozen.reference_logprobs(rows)
    given = []
    for r, values in zip(rows, flat, strict=True):
        queue = iter(values)
        given.append(
            Row(**{**r.__dict__, "ref_logprobs": tuple(next(queue) if s else 0.0 for s in r.sampled)})
        )
    other = gradient(Learner(model, config()), given)  # its own reference would be another
    torch.testing.assert_close(other, gradient(frozen, rows), rtol=1e-12, atol=1e-14)


def test_metrics_are_what_they_say():
    """One trained token, by hand: old -1, its own log-prob x, advantage 2."""
    model = toy.qwen()
    learner = Learner(model, config(kl_coef=0.0, lr=0.001))
    [[logprob]] = learner.logprobs([row([1, 2], [3])])
    rows = [
        row([1, 2], [3], old_logprobs=(logprob - 0.1,), advantages=(2.0,)),
        row([1, 2], [3], old_logprobs=(logprob - 1.0,), advantages=(2.0,), trajectory=1),
    ]
    metrics = learner.update(rows)
    assert metrics["loss"] == pytest.approx(-(math.exp(0.1) * 2 + 1.2 * 2) / 2)
    assert metrics["clip_fraction"] == 0.5
    assert metrics["ratio_max"] == pytest.approx(math.e)
    assert metrics["ratio_min"] == pytest.approx(math.exp(0.1))
    assert metrics["engine_diff_max"] == pytest.approx(1.0)
    assert metrics["engine_diff_mean"] == pytest.approx(0.55)
    # k3 of the engine to the trainer: exp(d) - 1 - d at d = 0.1 and 1.
    assert metrics["engine_kl_max"] == pytest.approx(math.e - 2)
    assert metrics["engine_kl_mean"] == pytest.approx((math.e - 2 + math.exp(0.1) - 1.1) / 2)
    assert metrics["trained_tokens"] == 2 and metrics["lr"] == 0.001
    assert metrics["computed_tokens"] == 3  # the prompt and the completion once, both rows
    assert 0 < metrics["entropy"] < math.log(toy.VOCABULARY)
