"""Scoring rules against the published tables, a public package and rules written out again, on 10,000
pairs.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from fractions import Fraction

import pytest
from torchmetrics.functional.text import squad as public_squad

from envs.errors import UserError
from eval.scorers import robust_tokens, score, score_answer, score_objectives

# Prediction, gold, EM, cover-EM, F1 of the SQuAD rule.
SQUAD_TABLE = [
    ("The Beatles", "Beatles", 1, 1, 1),
    ("U.S.A.", "USA", 1, 1, 1),
    ("May 18, 2018", "18 May 2018", 0, 0, 1),
    ("3.14", "314", 1, 1, 1),
    ("well-known", "well known", 0, 0, 0),
    ("A", "A", 1, 1, 0),
    ("Yes, it is", "yes", 0, 1, 0),
    ("not Mark Twain", "Mark Twain", 0, 1, 0.8),
    ("New York City New York City", "New York City", 0, 1, 2 / 3),
]


@pytest.mark.parametrize(("prediction", "gold", "em", "cover", "f1"), SQUAD_TABLE)
def test_squad_table(prediction: str, gold: str, em: float, cover: float, f1: float) -> None:
    expected = {"em": em, "cover_em": cover, "f1": pytest.approx(f1, abs=1e-12)}
    assert score("squad", prediction, [gold]) == expected
    assert score("hotpotqa", prediction, [gold]) == expected


@pytest.mark.parametrize(
    ("prediction", "gold", "f1"),
    [
        ("no", "No.", 1),
        ("no", "no way", 0),
        ("noanswer", "no answer", 0),
        ("the yes", "yes", 1),
        ("", "x", 0),
    ],
)
def test_squad_closed_answers(prediction: str, gold: str, f1: float) -> None:
    assert score("squad", prediction, [gold])["f1"] == f1


def test_best_gold_counts_and_hotpotqa_takes_the_first() -> None:
    golds = ["Rome", "the Eternal City"]
    assert score("squad", "eternal city", golds) == {"em": 1, "f1": 1, "cover_em": 1}
    assert score("hotpotqa", "eternal city", golds) == {"em": 0, "f1": 0, "cover_em": 0}


def test_cover_of_a_gold_that_normalises_to_nothing() -> None:
    assert score("squad", "Paris", ["A"])["cover_em"] == 0


WORDS = ["the", "a", "an", "The", "AN", "yes", "no", "noanswer", "Paris", "paris", "New", "York", "City"]
WORDS += [
    "U.S.A.",
    "USA",
    "3.14",
    "314",
    "don't",
    "well-known",
    "well",
    "known",
    "é",
    "Ångström",
    "18",
    "May",
]
WORDS += [
    "2018,",
    "(1990)",
    "--",
    ";",
    "!",
    "York.",
    "'quoted'",
    "_x_",
    "tab\tbed",
    "theatre",
    "another",
    "–",
]
WORDS += ["non\u00a0breaking", "a–an"]


def _random_text(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.05:
        return ""
    if kind < 0.15:
        return "".join(rng.choice(string.printable + "ßé–’") for _ in range(rng.randint(1, 12)))
    return rng.choice([" ", "  ", " "]).join(rng.choice(WORDS) for _ in range(rng.randint(1, 5)))


def _random_pairs(count: int, seed: int) -> list[tuple[str, list[str]]]:
    rng = random.Random(seed)
    pairs = []
    for _ in range(count):
        golds = [_random_text(rng) for _ in range(rng.randint(1, 3))]
        prediction = rng.choice(golds).upper() if rng.random() < 0.2 else _random_text(rng)
        pairs.append((prediction, golds))
    return pairs


def _published_normal(text: str) -> str:
    """The rule of the SQuAD script in words of our own: letters one by one, then words one by one."""
    kept = "".join(c for c in text.lower() if c not in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
    words, word = [], ""
    # An article is dropped wherever it is a whole word: between characters that are no word's.
    for c in kept + " ":
        if c.isalnum():
            word += c
        else:
            words.append(" " if word in ("a", "an", "the") else word)
            words.append(c)
            word = ""
    return " ".join("".join(words).split())


def _published_scores(prediction: str, golds: Sequence[str]) -> tuple[float, float]:
    exact, best = 0.0, 0.0
    got = _published_normal(prediction)
    for gold in golds:
        want = _published_normal(gold)
        exact = max(exact, float(got == want))
        if got != want and {got, want} & {"yes", "no", "noanswer"}:
            continue
        left, same = want.split(), 0
        for word in got.split():
            if word in left:
                left.remove(word)
                same += 1
        if same:
            precision, recall = same / len(got.split()), same / len(want.split())
            best = max(best, (2 * precision * recall) / (precision + recall))
    return exact, best


def test_squad_equals_the_rule_written_out_again_on_10000_pairs() -> None:
    seen: dict[tuple[float, bool], int] = {}
    for prediction, golds in _random_pairs(10_000, seed=1):
        found = score("squad", prediction, golds)
        assert (found["em"], found["f1"]) == _published_scores(prediction, golds), (prediction, golds)
        kind = (found["em"], 0 < found["f1"] < 1)
        seen[kind] = seen.get(kind, 0) + 1
    assert min(seen.get(kind, 0) for kind in [(0.0, False), (0.0, True), (1.0, False)]) > 500


def _exactly(f1: float) -> Fraction:
    """The ratio 2 * common / (words + words) that a rounded F1 of two short texts stands for."""
    found = Fraction(f1).limit_denominator(100)
    assert abs(found - Fraction(f1)) < 2e-7, "no ratio of small numbers"
    return found


def test_squad_equals_the_public_package_on_10000_pairs() -> None:
    """torchmetrics follows SQuAD 1.1: no rule for closed answers. Its F1 is float32, so exact ratios are compared."""
    compared = 0
    for prediction, golds in _random_pairs(10_000, seed=2):
        if any(_published_normal(text) in ("", "yes", "no", "noanswer") for text in (prediction, *golds)):
            continue  # there the packages differ; the tables above decide
        theirs = public_squad(
            [{"prediction_text": prediction, "id": "0"}],
            [{"answers": {"answer_start": [0] * len(golds), "text": golds}, "id": "0"}],
        )
        ours = score("squad", prediction, golds)
        assert ours["em"] * 100 == float(theirs["exact_match"]), (prediction, golds)
        assert _exactly(ours["f1"]) == _exactly(float(theirs["f1"]) / 100), (prediction, golds)
        compared += 1
    assert compared > 5000


# The rules for several objectives.

MEM1_TABLE = [
    ("Paris; Berlin", 2, 2),
    ("Paris", 0, 1),
    ("Berlin; Paris", 0, 0),
    ("Paris; Berlin; Rome", 0, 2),
    ("Paris; Berlin;", 0, 2),
]
TWO = [["Paris"], ["Berlin"]]


@pytest.mark.parametrize(("answer", "mem1", "train"), MEM1_TABLE)
def test_mem1_table(answer: str, mem1: float, train: float) -> None:
    assert score_objectives("mem1", answer, TWO)["em"] == mem1
    assert score_objectives("mem1_train", answer, TWO)["em"] == train


def test_mem1_keeps_articles_and_counts_distinct_words() -> None:
    assert score_objectives("mem1", "The Beatles; x", [["Beatles"], ["x"]])["em"] == 1
    assert score_objectives("mem1", "well-known", [["well known"]])["em"] == 1
    # distinct words {new, york, city} against {new, york}: precision 2/3, recall 1, F1 0.8
    assert score_objectives("mem1", "New York City New York", [["New York"]])["f1"] == pytest.approx(0.8)
    assert score_objectives("mem1_train", "The Beatles", [["Beatles"]]) == {"em": 1, "f1": 1}


@pytest.mark.parametrize(
    ("answer", "mean", "everything", "f1"),
    [
        ("Paris; Berlin", 1, 1, 1),
        ("Paris; Berlin; Rome", 1, 0, 1),
        ("Paris", 0.5, 0, 0.5),
        ("Berlin; Paris", 0, 0, 0),
        ("Paris; West Berlin", 0.5, 0, 0.5 + 0.5 * 2 / 3),
        ("", 0, 0, 0),
    ],
)
def test_objectives(answer: str, mean: float, everything: float, f1: float) -> None:
    found = score_objectives("objectives", answer, TWO)
    assert found == {"mean": mean, "all": everything, "f1": pytest.approx(f1)}


def _mem1_again(answer: str, golds: Sequence[Sequence[str]]) -> tuple[float, float]:
    def normal(text: str) -> str:
        for mark in string.punctuation:
            text = text.replace(mark, " ")
        return " ".join(text.lower().split())

    if answer.count(";") + 1 != len(golds):
        return 0.0, 0.0
    exact = total = 0.0
    for part, accepted in zip(answer.split(";"), golds, strict=True):
        exact += max(float(normal(part) == normal(gold)) for gold in accepted)
        best = 0.0
        for gold in accepted:
            got, want = set(normal(part).split()), set(normal(gold).split())
            if got & want:
                precision, recall = len(got & want) / len(got), len(got & want) / len(want)
                best = max(best, 2 * precision * recall / (precision + recall))
        total += best
    return exact, total


def test_objective_rules_equal_rules_written_out_again() -> None:
    rng = random.Random(3)
    hits = 0
    for _ in range(10_000):
        golds = [[_random_text(rng) for _ in range(rng.randint(1, 2))] for _ in range(rng.randint(2, 4))]
        parts = [rng.choice(g) if rng.random() < 0.6 else _random_text(rng) for g in golds]
        if rng.random() < 0.2:
            parts = parts[: rng.randint(0, len(parts))] + ["extra"] * rng.randint(0, 2)
        answer = "; ".join(parts)
        mem1 = score_objectives("mem1", answer, golds)
        assert (mem1["em"], mem1["f1"]) == _mem1_again(answer, golds), (answer, golds)
        each = [_published_scores(p, g) for p, g in zip(answer.split(";"), golds, strict=False)]
        train = score_objectives("mem1_train", answer, golds)
        assert train["em"] == sum(e for e, _ in each)
        assert train["f1"] == sum(f for _, f in each)
        hits += mem1["em"] > 0
    assert hits > 1000


# The robust rule.


@pytest.mark.parametrize(
    ("prediction", "gold", "em"),
    [
        ("1,000", "1000", 1),
        ("1000.0", "1,000", 1),
        ("3.14", "314", 0),
        ("3.140", "3.14", 1),
        ("-5", "5", 0),
        ("−5", "-5", 1),
        ("3,14", "314", 0),
        ("1.2.3", "123", 0),
        ("$3.5", "3.50", 1),
        ("in 1990.", "In 1990", 1),
        ("1990–1991", "1990-1991", 1),
        ("F-16", "F16", 1),
        ("A", "A", 1),
        ("the", "A", 0),
        ("Paris", "A", 0),
        ("C++", "C++", 1),
        ("STRASSE", "straße", 1),
        ("Beyonce\u0301", "Beyoncé", 1),
        ("ﬁve", "five", 1),
        ("O’Neill", "O'Neill", 1),
        ("“Heroes”", '"Heroes"', 1),
        ("the Beatles", "Beatles", 1),
        ("---", "—", 1),
        ("0", "-0", 1),
        ("007", "7", 1),
        ("10", "1", 0),
        ("Beatles", "Stones", 0),
    ],
)
def test_robust_em(prediction: str, gold: str, em: float) -> None:
    if (prediction, gold) == ("---", "—"):
        # Both are nothing but dashes: compared raw, three are not one.
        assert score("robust", prediction, [gold])["em"] == 0
        return
    assert score("robust", prediction, [gold])["em"] == em


def test_robust_partial_scores() -> None:
    found = score("robust", "about 1,500 km", ["1500 km"])
    assert found == {"em": 0, "cover_em": 1, "f1": pytest.approx(0.8)}
    assert score("robust", "15000 km", ["1500 km"])["cover_em"] == 0
    assert score("robust", "yes indeed", ["yes"])["f1"] == 0
    assert robust_tokens("The 1,000th F-16 cost $3.50 (1990–91)") == [
        "1000th",
        "f16",
        "cost",
        "3.5",
        "1990",
        "91",
    ]


# What a sample as a whole gets.


def test_no_answer_scores_nothing() -> None:
    """Under the SQuAD rule an empty answer equals a gold "A"; a sample without an answer is wrong all the
    same.
    """
    assert score("squad", "", ["A"])["em"] == 1
    assert score_answer("squad", None, [["A"]]) == {"em": 0, "f1": 0, "cover_em": 0, "all": 0}
    assert score_answer("squad", "  ", [["A"]])["em"] == 0
    assert set(score_answer("mem1", None, TWO).values()) == {0}


def test_score_answer_keys() -> None:
    assert score_answer("squad", "Paris", [["Paris"]]) == {"em": 1, "f1": 1, "cover_em": 1, "all": 1}
    assert score_answer("objectives", "Paris; x", TWO) == {"em": 0.5, "f1": 0.5, "cover_em": 0.5, "all": 0}
    assert score_answer("mem1", "Paris; Berlin", TWO) == {"em": 2, "f1": 2, "all": 1}
    assert score_answer("mem1_train", "Paris", TWO) == {"em": 1, "f1": 1, "all": 0}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: score("sqaud", "x", ["x"]), "did you mean 'squad'"),
        (lambda: score("mem1", "x", ["x"]), "several questions at once"),
        (lambda: score("squad", "x", []), "non-empty list"),
        (lambda: score("squad", "x", "x"), "non-empty list"),
        (lambda: score_objectives("squad", "x", [["x"]]), "known: objectives, mem1, mem1_train"),
        (lambda: score_objectives("mem1", "x", []), "at least one question"),
        (lambda: score_objectives("mem1", "x", ["x"]), "at least one question"),
        (lambda: score_answer("squad", "x", TWO), "the sample has 2"),
    ],
)
def test_mistakes_are_named(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=message):
        call()
