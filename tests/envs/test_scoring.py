"""Scores against the published tables, value by value."""

from __future__ import annotations

import pytest

from envs.scoring import cover_em, em, f1, mem1, mem1_train, normalise_squad, score_objectives, split_answer


@pytest.mark.parametrize(
    ("prediction", "gold", "exact", "cover", "overlap"),
    [
        ("The Beatles", "Beatles", 1, 1, 1),
        ("U.S.A.", "USA", 1, 1, 1),
        ("May 18, 2018", "18 May 2018", 0, 0, 1),
        ("3.14", "314", 1, 1, 1),
        ("well-known", "well known", 0, 0, 0),
        ("A", "A", 1, 1, 0),
        ("Yes, it is", "yes", 0, 1, 0),
        ("Berlin", "A", 0, 0, 0),
        ("not Mark Twain", "Mark Twain", 0, 1, 0.8),
        ("New York City New York City", "New York City", 0, 1, 2 / 3),
        ("no", "yes", 0, 0, 0),
        ("yes", "yes", 1, 1, 1),
        ("", "x", 0, 0, 0),
    ],
)
def test_squad_table(prediction: str, gold: str, exact: float, cover: float, overlap: float) -> None:
    assert em(prediction, [gold]) == exact
    assert cover_em(prediction, [gold]) == cover
    assert f1(prediction, [gold]) == pytest.approx(overlap)


def test_the_best_gold_counts() -> None:
    assert em("Warszawa", ["Warsaw", "Warszawa"]) == 1
    assert f1("city of Warsaw", ["Berlin", "Warsaw", "Warsaw city"]) == pytest.approx(
        2 * (2 / 3) / (2 / 3 + 1)
    )
    assert normalise_squad("  The   cat, an A. ") == "cat"


@pytest.mark.parametrize(
    ("answer", "evaluator", "reward"),
    [
        ("Paris; Berlin", 2, 2),
        ("Paris", 0, 1),
        ("Berlin; Paris", 0, 0),
        ("Paris; Berlin; Rome", 0, 2),
        ("Paris; Berlin;", 0, 2),
    ],
)
def test_mem1_table(answer: str, evaluator: float, reward: float) -> None:
    golds = [["Paris"], ["Berlin"]]
    assert mem1(answer, golds)["em"] == evaluator
    assert mem1_train(answer, golds) == reward


def test_mem1_keeps_articles_and_counts_sets() -> None:
    assert mem1("the Paris; Berlin", [["Paris"], ["Berlin"]])["em"] == 1
    assert mem1("well-known", [["well known"]])["em"] == 1
    # {new, york} against {new, york, city}: precision 1, recall 2/3.
    assert mem1("New York New York", [["New York City"]])["f1"] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("answer", "mean", "every"),
    [
        ("Paris; Berlin", 1, 1),
        ("the paris;BERLIN.", 1, 1),
        ("Paris; Berlin;", 1, 1),
        ("Paris", 0.5, 0),
        ("Berlin; Paris", 0, 0),
        ("; Berlin", 0.5, 0),
        ("Paris; Berlin; Rome", 1, 0),
        ("Paris; Berlin; ; Rome", 1, 0),
        ("", 0, 0),
    ],
)
def test_our_objectives(answer: str, mean: float, every: float) -> None:
    scores = score_objectives(answer, [["Paris"], ["Berlin"]])
    assert (scores["em"], scores["em_all"]) == (mean, every)


def test_one_objective_may_hold_the_separator() -> None:
    assert score_objectives("a; b", [["a; b"]]) == {"em": 1, "f1": 1, "cover_em": 1, "em_all": 1}
    assert split_answer(" a ;b; ;") == ["a", "b"] and split_answer("") == [""]


def test_missing_parts_count_in_every_mean() -> None:
    scores = score_objectives("Mark Twain", [["Mark Twain"], ["x"], ["y"], ["z"]])
    assert scores == {"em": 0.25, "f1": 0.25, "cover_em": 0.25, "em_all": 0.0}
