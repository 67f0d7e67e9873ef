"""Questions of a step: decided by seed, step and place; mixtures keep their shares; data has a fingerprint."""

from __future__ import annotations

from trainer.config import EnvironmentConfig
from trainer.questions import Questions

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
