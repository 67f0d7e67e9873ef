"""Questions of a step: decided by seed, step and place; mixtures keep their shares; data has a fingerprint."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.models import LoadedModel
from agent.tiny import build_model, build_tokenizer
from eval.subjects import Manner, ModelSubject, training_manner
from tests.agent.test_chat_templates import QWEN3, tokenizer_for
from trainer.config import EnvironmentConfig, load_config, write_config
from trainer.loop import score
from trainer.questions import Questions, prompt_builders

TRAIN = EnvironmentConfig(kwargs=dict(tasks="factbook-tiny:train", retriever="factbook-tiny", objectives=2))
ONE = EnvironmentConfig(
    kwargs=dict(tasks="factbook-tiny:train", retriever="factbook-tiny", objectives=1), weight=3.0
)


def ids(questions: Questions, step: int, count: int = 8, attempt: int = 0) -> list[str]:
    return [draw.task.id for draw in questions.draw(step, count, attempt)]


def test_a_step_is_drawn_alike_whatever_was_drawn_before() -> None:
    first, second = Questions([TRAIN], 0), Questions([TRAIN], 0)
    for step in range(1, 4):
        ids(first, step)
    assert ids(first, 4) == ids(second, 4)
    assert ids(first, 4)[:3] == ids(second, 4, 3)


def test_steps_attempts_and_seeds_differ() -> None:
    questions = Questions([TRAIN], 0)
    draws = [
        ids(questions, 1),
        ids(questions, 2),
        ids(questions, 1, attempt=1),
        ids(Questions([TRAIN], 1), 1),
    ]
    assert len({tuple(draw) for draw in draws}) == 4


def test_a_mixture_keeps_its_shares_and_plays_the_drawn_task() -> None:
    questions = Questions([TRAIN, ONE], 0)
    draws = questions.draw(1, 400)
    assert abs(sum(draw.environment == 1 for draw in draws) / 400 - 0.75) < 0.07
    for draw in draws[:10]:
        assert len(draw.task.questions) == (1 if draw.environment == 1 else 2)
        env = questions.environment(draw.environment, draw.task)
        env.reset(seed=123)
        assert env.unwrapped.task is draw.task  # type: ignore[attr-defined]


def test_the_fingerprint_tells_data_apart() -> None:
    heldout = EnvironmentConfig(kwargs={**TRAIN.kwargs, "tasks": "factbook-tiny:heldout"})
    prints = [Questions([TRAIN], 0).fingerprint(), Questions([heldout], 0).fingerprint()]
    assert prints[0] != prints[1] and Questions([TRAIN], 0).fingerprint() == prints[0]


def test_the_recipe_of_a_mixture_is_drawn_by_its_weights_and_repeats() -> None:
    """1 : 2 : 1, so 1000 draws hold 250, 500 and 250, give or take 4 standard deviations (55 and 63)."""
    config = load_config("mixture")
    draws = Questions(config.environment, 0).draw(1, 1000)
    shares = Counter(draw.environment for draw in draws)
    assert abs(shares[0] - 250) < 55 and abs(shares[1] - 500) < 63 and abs(shares[2] - 250) < 55
    assert all(len(draw.task.questions) == draw.environment + 1 for draw in draws)
    again = Questions(config.environment, 0).draw(1, 1000)
    assert [(d.environment, d.task.id) for d in again] == [(d.environment, d.task.id) for d in draws]
    other = Questions(config.environment, 1).draw(1, 1000)
    assert [d.environment for d in other] != [d.environment for d in draws]


def test_every_environment_of_a_mixture_tells_its_own_rules() -> None:
    errands = EnvironmentConfig(id="mempo/Errands-v0", kwargs={"rooms": 4, "max_turns": 9})
    config = load_config("tiny", ["model.prompt=paper"]).model_copy(
        update={"environment": (ONE, errands, TRAIN)}
    )
    tokenizer = build_tokenizer(["What is the capital of Peru? Lima."], vocab_size=330)
    search, house, again = prompt_builders(config, tokenizer)
    assert search is again and search is not house
    texts = [builder.render("Question: Q?\n") for builder in (search, house)]
    assert "finds the passages" in texts[0] and "finds the passages" not in texts[1]
    assert "direction" in texts[1] and "direction" not in texts[0]


def test_memories_are_scored_under_the_rules_of_their_environment() -> None:
    class Marks:
        def __init__(self, name: str) -> None:
            self.name, self.calls = name, 0

        def score(self, model: Any, groups: list[str]) -> list[Any]:
            self.calls += 1
            return [f"{self.name} {group}" for group in groups]

    one, two = Marks("one"), Marks("two")
    run: Any = SimpleNamespace(scorers=[one, two, one], learner=SimpleNamespace(model=None))
    played: Any = [(0, "a"), (1, "b"), (2, "c"), (1, "d")]
    assert score(run, played) == ["one a", "two b", "one c", "two d"]
    assert (one.calls, two.calls) == (1, 1)


def test_a_lone_weight_must_be_above_zero() -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        EnvironmentConfig(weight=0.0)


def test_template_options_of_the_recipe_reach_training_and_evaluation(tmp_path: Path) -> None:
    tokenizer = tokenizer_for(QWEN3)
    config = load_config("tiny", ["model.template_options.enable_thinking=false"])
    (builder,) = prompt_builders(config, tokenizer)
    assert builder.render("x").endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    write_config(config, tmp_path / "config.toml")
    manner = training_manner(tmp_path)
    assert manner is not None and manner.template == {"enable_thinking": False}
    loaded = LoadedModel(build_model(tokenizer, hidden=16, layers=1, heads=1), tokenizer, "m")
    kwargs = {"tasks": "factbook-tiny:train", "retriever": "factbook-tiny"}
    prompts = [
        ModelSubject.local(loaded, Manner(template=template))
        .player("mempo/SearchQA-v0", kwargs, 0.0)
        .identity()
        for template in ({}, {"enable_thinking": False})
    ]
    assert prompts[0]["prompt"] != prompts[1]["prompt"]
