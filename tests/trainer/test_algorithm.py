"""Settings: the documented defaults, and contradictions refused in one line."""

import pytest
from pydantic import BaseModel, ValidationError

from trainer.algorithm import (
    AlgorithmConfig,
    CriticConfig,
    LearnerConfig,
    LoraConfig,
    OptimizerConfig,
    check_together,
)


def test_defaults_are_mempos():
    algorithm, learner = AlgorithmConfig(), LearnerConfig()
    assert (algorithm.alpha, algorithm.std, algorithm.eps) == (1.0, "sample", 1e-6)
    assert (algorithm.memory_baseline, algorithm.memory_pool) == ("full", "group")
    assert (learner.clip_low, learner.clip_high, learner.kl_coef, learner.kl_kind) == (0.2, 0.2, 0.001, "k3")
    assert (learner.aggregation, learner.temperature, learner.epochs) == ("token", 1.0, 1)
    assert (learner.entropy_coef, learner.critic, learner.optimizer.lr) == (0.0, None, 1e-6)


@pytest.mark.parametrize(
    ("table", "values", "message"),
    [
        (AlgorithmConfig, {"memory_min_pool": 4}, "memory_pool = 'turn'"),
        (AlgorithmConfig, {"advantage": "critic", "separate_memory_loss": True}, "advantage = 'group'"),
        (AlgorithmConfig, {"advantage": "critic", "drop_groups_without_signal": True}, "advantage = 'group'"),
        (AlgorithmConfig, {"separate_memory_loss": True, "alpha": 0.0}, "no memory loss left"),
        (AlgorithmConfig, {"outcome_baseline": "none"}, "needs outcome_scale = 'none'"),
        (AlgorithmConfig, {"alhpa": 1.0}, "Extra inputs"),
        (AlgorithmConfig, {"alpha": -1.0}, "greater than or equal to 0"),
        (OptimizerConfig, {"schedule": "cosine"}, "needs total_steps"),
        (OptimizerConfig, {"total_steps": 5, "warmup_steps": 5}, "must exceed warmup_steps"),
        (LearnerConfig, {"aggregation": "constant"}, "constant_length"),
        (LearnerConfig, {"constant_length": 5}, "constant_length"),
        (LearnerConfig, {"importance_cap": 2.0}, "old_logprobs = 'recomputed'"),
        (LearnerConfig, {"temperature": 0.0}, "greater than 0"),
    ],
)
def test_what_does_not_fit_is_refused(table, values, message):
    with pytest.raises(ValidationError, match=message):
        table(**values)


def test_a_critic_needs_both_tables():
    with pytest.raises(ValueError, match=r"learner\.critic go together"):
        check_together(AlgorithmConfig(advantage="critic"), LearnerConfig())
    with pytest.raises(ValueError, match=r"learner\.critic go together"):
        check_together(AlgorithmConfig(), LearnerConfig(critic=CriticConfig()))
    check_together(AlgorithmConfig(), LearnerConfig())
    check_together(AlgorithmConfig(advantage="critic"), LearnerConfig(critic=CriticConfig()))


@pytest.mark.parametrize("table", [AlgorithmConfig, LearnerConfig, OptimizerConfig, CriticConfig, LoraConfig])
def test_every_field_says_what_it_is(table: type[BaseModel]):
    assert all(field.description for field in table.model_fields.values())
