"""Named scoring rules; the number a rule gives depends on nothing but the prediction and the golds.

One question (`score`; keys ``em``, ``f1``, ``cover_em``, each the best over the golds):

- ``squad``: the SQuAD rule of `envs.scoring`; "3.14" and "314" become equal, a gold "A" normalises to
nothing.
- ``hotpotqa``: the same with one gold, the first.
- ``robust``: Unicode NFKC and case folding, dashes and quotes of all kinds folded, numbers compared as
  numbers, golds that normalise to nothing compared as they stand.

Several questions in one answer, "a1; a2" (`score_objectives`):

- ``objectives`` (ours): squad at each position. ``mean`` and ``f1`` are means over objectives, ``all`` is 1
  when every objective is right and there is no extra part.
- ``mem1``: the rule of MEM1's evaluator. Punctuation becomes space, articles stay, F1 counts distinct
  words; another number of parts than of questions makes the sample 0; ``em`` and ``f1`` are sums over
  objectives.
- ``mem1_train``: the rule of MEM1's reward. Squad EM and F1 at each position, summed; missing parts 0,
  extra parts ignored.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal

from envs.errors import UserError, did_you_mean
from envs.scoring import cover_em, em, f1, mem1, mem1_train, normalise_squad
from envs.scoring import score_objectives as objectives

Scores = dict[str, float]

_SPECIAL = frozenset({"yes", "no", "noanswer"})
_ARTICLES = frozenset({"a", "an", "the"})
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?")
_RANGE = re.compile(r"(\d[\d.,]*)-(\d[\d.,]*)")
_DIGITS_ONLY = re.compile(r"[-+]?[\d.,]*\d[\d.,]*")
_DASHES = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63\uff0d"), "-")
_QUOTES = dict.fromkeys(map(ord, "\u2018\u2019\u201a\u201b\u2032\u00b4`"), "'") | dict.fromkeys(
    map(ord, "\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb"), '"'
)


def score(name: str, prediction: str, golds: Sequence[str]) -> Scores:
    """Scores of one answer to one question.

    Raises:
        UserError: an unknown rule, or one for several questions; no gold.
    """
    rule = _SINGLE.get(name)
    if rule is None:
        hint = "; it scores several questions at once" if name in _OBJECTIVES else ""
        options = ", ".join(_SINGLE)
        raise UserError(
            f"unknown scorer {name!r} for one question{hint}; known: {options}{did_you_mean(name, _SINGLE)}"
        )
    if isinstance(golds, str) or not golds:
        raise UserError(f"golds are {golds!r}; a non-empty list of accepted answers is needed")
    return rule(prediction, golds)


def score_objectives(name: str, prediction: str, golds: Sequence[Sequence[str]]) -> Scores:
    """Scores of one answer "a1; a2; …" to several questions, by position.

    Raises:
        UserError: an unknown rule; no objective; an objective without a gold.
    """
    rule = _OBJECTIVES.get(name)
    if rule is None:
        options = ", ".join(_OBJECTIVES)
        raise UserError(
            f"unknown scorer {name!r} for several questions; known: {options}"
            f"{did_you_mean(name, _OBJECTIVES)}"
        )
    if not golds or any(isinstance(each, str) or not each for each in golds):
        raise UserError("golds must be a list of accepted answers for each of at least one question")
    return rule(prediction, golds)


def scorer_names() -> tuple[str, ...]:
    return (*_SINGLE, *_OBJECTIVES)


def default_scorer(objectives: int) -> str:
    return "squad" if objectives == 1 else "objectives"


def score_answer(name: str, answer: str | None, golds: Sequence[Sequence[str]]) -> Scores:
    """Scores of a sample under any rule, with ``em``, ``f1`` and ``all`` always among them.

    No answer scores 0 everywhere (also where the rule would call two empty strings equal). ``em`` is the
    mean over objectives under ``objectives`` and the sum under the rules of MEM1.

    Raises:
        UserError: as `score` and `score_objectives`; a rule for one question on a sample with several.
    """
    if name == "objectives":
        found = objectives(answer or "", golds)
        scores = {key: found[key] for key in ("em", "f1", "cover_em")} | {"all": found["em_all"]}
    elif name in _OBJECTIVES:
        found = score_objectives(name, answer or "", golds)
        scores = {**found, "all": float(found["em"] == len(golds))}
    else:
        if len(golds) != 1:
            raise UserError(
                f"scorer {name!r} scores one question but the sample has {len(golds)}; "
                f"use one of {', '.join(_OBJECTIVES)}"
            )
        scores = score(name, answer or "", golds[0])
        scores = {**scores, "all": scores["em"]}
    if answer is None or not answer.strip():
        return dict.fromkeys(scores, 0.0)
    return scores


def _squad(prediction: str, golds: Sequence[str]) -> Scores:
    exact = em(prediction, golds)
    # A gold that normalises to nothing stands inside every text: only equality can count for it.
    solid = [gold for gold in golds if normalise_squad(gold)]
    return {
        "em": exact,
        "f1": f1(prediction, golds),
        "cover_em": max(exact, cover_em(prediction, solid)),
    }


def _hotpotqa(prediction: str, golds: Sequence[str]) -> Scores:
    return _squad(prediction, golds[:1])


def _robust(prediction: str, golds: Sequence[str]) -> Scores:
    each = [_robust_one(prediction, gold) for gold in golds]
    return {key: max(scores[key] for scores in each) for key in ("em", "f1", "cover_em")}


def _robust_one(prediction: str, gold: str) -> Scores:
    wanted = robust_tokens(gold)
    if not wanted:
        same = float(_fold(prediction).split() == _fold(gold).split())
        return {"em": same, "f1": same, "cover_em": same}
    got = robust_tokens(prediction)
    inside = any(got[i : i + len(wanted)] == wanted for i in range(len(got) - len(wanted) + 1))
    return {"em": float(got == wanted), "f1": _multiset_f1(got, wanted), "cover_em": float(inside)}


def _multiset_f1(got: Sequence[str], wanted: Sequence[str]) -> float:
    got_text, wanted_text = " ".join(got), " ".join(wanted)
    if got_text != wanted_text and (got_text in _SPECIAL or wanted_text in _SPECIAL):
        return 0.0
    return _harmonic(sum((Counter(got) & Counter(wanted)).values()), len(got), len(wanted))


def _harmonic(common: int, got: int, wanted: int) -> float:
    """F1 in the order of operations of the published scripts, so that the last digit agrees with theirs."""
    if not common:
        return 0.0
    precision, recall = common / got, common / wanted
    return 2 * precision * recall / (precision + recall)


def _fold(text: str) -> str:
    folded = unicodedata.normalize("NFKC", text.translate(_QUOTES)).casefold()
    return unicodedata.normalize("NFKC", folded).translate(_DASHES).translate(_QUOTES)


def robust_tokens(text: str) -> list[str]:
    """Words and numbers of a text under the robust rule; a number in one canonical form ("1,000.0" is
    "1000").
    """
    tokens: list[str] = []
    for raw in _fold(text).split():
        word = _strip_edges(raw)
        span = _RANGE.fullmatch(word)
        for part in span.groups() if span else (word,):
            token = _number(part) or _bare(part)
            if token and token not in _ARTICLES:
                tokens.append(token)
    return tokens


def _strip_edges(word: str) -> str:
    """Without punctuation around it, but with the sign or point that belongs to a number."""
    word = word.rstrip("".join(c for c in word if not c.isalnum()))
    start = 0
    while start < len(word) and not word[start].isalnum():
        if word[start] in "+-." and _NUMBER.fullmatch(word[start:]):
            break
        start += 1
    return word[start:]


def _number(word: str) -> str | None:
    if not word.isascii() or not _NUMBER.fullmatch(word) or not any(c.isdigit() for c in word):
        return None
    value = Decimal(word.replace(",", "")).normalize()
    return f"{value + 0:f}"


def _bare(word: str) -> str:
    if _DIGITS_ONLY.fullmatch(word):
        # "1.2.3", "3,14": neither a number we can read nor a word; without its marks it would equal others.
        return word
    return "".join(
        c for c in word if c not in string.punctuation and not unicodedata.category(c).startswith("P")
    )


def _objectives(prediction: str, golds: Sequence[Sequence[str]]) -> Scores:
    found = objectives(prediction, golds)
    return {"mean": found["em"], "all": found["em_all"], "f1": found["f1"]}


def _mem1_train(prediction: str, golds: Sequence[Sequence[str]]) -> Scores:
    pairs = zip(prediction.split(";"), golds, strict=False)
    overlap = sum(f1(part, accepted) for part, accepted in pairs)
    return {"em": float(mem1_train(prediction, golds)), "f1": float(overlap)}


_SINGLE: Mapping[str, Callable[[str, Sequence[str]], Scores]] = {
    "squad": _squad,
    "hotpotqa": _hotpotqa,
    "robust": _robust,
}
_OBJECTIVES: Mapping[str, Callable[[str, Sequence[Sequence[str]]], Scores]] = {
    "objectives": _objectives,
    "mem1": mem1,
    "mem1_train": _mem1_train,
}

__all__ = [
    "default_scorer",
    "normalise_squad",
    "robust_tokens",
    "score",
    "score_answer",
    "score_objectives",
    "scorer_names",
]
