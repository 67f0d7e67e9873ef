"""The numbers of a run against sums, draws and counts done by hand."""

from __future__ import annotations

import io
import itertools
import math

import numpy as np
import pytest
from rich.console import Console

from eval.benchmarks import Benchmark
from eval.episode import Sample, TurnRecord
from eval.session import run_session
from eval.summary import summarise
from tests.eval.conftest import LOOKUP
from tests.eval.test_store import SlowSubject


def turn(prompt: int, completion: int, invalid: str | None = None, memory: str | None = "m") -> TurnRecord:
    return TurnRecord("t", memory, None, "i", invalid, "stop", prompt, completion, 3, 7)


def sample(
    question: str, index: int, answer: str | None, *turns: TurnRecord, error: str | None = None
) -> Sample:
    stop = "error" if error else "answer" if answer else "max_turns"
    return Sample(question, index, ("q?",), (("yes indeed",),), answer, stop, turns, error=error)


SAMPLES = [
    sample("a", 0, "yes indeed", turn(10, 2), turn(20, 4)),
    sample("a", 1, "indeed", turn(10, 3)),
    sample("a", 2, None, turn(10, 1, "no action"), turn(11, 1, "no action", None)),
    sample("b", 0, "yes indeed", turn(30, 5)),
    sample("b", 1, "yes indeed", turn(30, 6)),
    sample("b", 2, None, error="EngineError: away"),
    sample("c", 0, "no", turn(40, 1)),
    sample("c", 1, "no", turn(40, 1)),
    sample("c", 2, "no", turn(40, 1)),
]
RIGHT = [1, 0, 0, 1, 1, 0, 0, 0, 0]
F1 = [1, 2 / 3, 0, 1, 1, 0, 0, 0, 0]


def test_scores_over_all_and_over_completed() -> None:
    found = summarise(SAMPLES, "squad")
    assert (found["attempted"], found["completed"], found["errors"], found["questions"]) == (9, 8, 1, 3)
    assert found["em"] == found["all"] == 3 / 9 and found["f1"] == pytest.approx(math.fsum(F1) / 9, abs=1e-15)
    assert found["completed_only"]["em"] == 3 / 8
    assert found["completed_only"]["f1"] == pytest.approx(math.fsum(F1) / 8, abs=1e-15)


def test_rates() -> None:
    found = summarise(SAMPLES, "squad")
    assert found["invalid_turns"] == 2 / 10 and found["memory_turns"] == 9 / 10
    assert found["unanswered"] == 1 / 8
    assert found["stop_reasons"] == {"answer": 7, "max_turns": 1}


def test_cost_is_of_completed_samples() -> None:
    found = summarise(SAMPLES, "squad")
    totals = [12 + 24, 13, 11 + 12, 35, 36, 41, 41, 41]
    assert found["total_tokens"] == sum(totals) / 8
    assert found["peak_tokens"] == (24 + 13 + 12 + 35 + 36 + 41 * 3) / 8
    assert (found["memory_tokens"], found["observation_tokens"]) == (3 * 10 / 8, 7 * 10 / 8)
    # Right answers only, without the first prompt: 20 - 10 + 4, 5 and 6.
    assert found["mem1_peak_tokens"] == pytest.approx((14 + 5 + 6) / 3)


def test_several_samples_of_a_question() -> None:
    found = summarise(SAMPLES, "squad")
    right = {"a": [1, 0, 0], "b": [1, 1, 0], "c": [0, 0, 0]}
    for k in (1, 2, 3):
        each = [
            np.mean([any(drawn) for drawn in itertools.combinations(flags, k)]) for flags in right.values()
        ]
        assert found["pass_at"][str(k)] == pytest.approx(np.mean(each), abs=1e-15)
    assert found["pass_at"].keys() == {"1", "2", "3"}, "no k that a question has no samples for"
    assert found["avg_at"] == {"3": pytest.approx((1 / 3 + 2 / 3 + 0) / 3)}


def test_uneven_numbers_of_samples_limit_k() -> None:
    found = summarise(SAMPLES[:4], "squad")
    assert found["pass_at"].keys() == {"1"} and found["avg_at"].keys() == {"1"}


def test_intervals_are_clustered_by_question_when_it_was_asked_several_times() -> None:
    found = summarise(SAMPLES, "squad", seed=4)
    drawn = np.random.default_rng(4).integers(3, size=(2000, 3))
    by_question = [RIGHT[0:3], RIGHT[3:6], RIGHT[6:9]]
    means = [np.mean([flag for index in row for flag in by_question[index]]) for row in drawn]
    assert found["intervals"]["em"] == pytest.approx(list(np.quantile(means, [0.025, 0.975])), abs=1e-12)
    assert (found["methods"]["em"], found["methods"]["f1"]) == ("bootstrap by question",) * 2
    once = summarise([SAMPLES[0], SAMPLES[3], SAMPLES[6]], "squad")
    assert (once["methods"]["em"], once["methods"]["f1"]) == ("wilson", "bootstrap")
    z = 1.959963984540054
    centre, half = (2 + z * z / 2) / (3 + z * z), z / (3 + z * z) * math.sqrt(2 * 1 / 3 + z * z / 4)
    assert once["intervals"]["em"] == pytest.approx([centre - half, centre + half], abs=1e-12)


def test_the_same_samples_in_any_order_give_the_same_numbers() -> None:
    assert summarise(SAMPLES[::-1], "squad") == summarise(SAMPLES, "squad")


def test_nothing_and_only_failures() -> None:
    nothing = summarise([])
    assert (nothing["attempted"], nothing["f1"], nothing["intervals"]["f1"]) == (0, None, [None, None])
    away = summarise([sample("a", 0, None, error="EngineError: away")])
    assert (away["em"], away["errors"], away["completed_only"]["em"], away["turns"]) == (0.0, 1, None, None)


def test_the_progress_bar(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Done, errors, the score so far and the time left, while it runs."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=160)
    run_session(
        SlowSubject(),
        [Benchmark("lookup", (), LOOKUP, samples=120)],
        tmp_path / "run",  # type: ignore[operator]
        console=console,
    )
    shown = screen.getvalue()
    assert "slow on lookup" in shown and "/360" in shown
    assert "errors 0" in shown and "EM 1.000" in shown and "F1 1.000" in shown
    assert "0:00:0" in shown
