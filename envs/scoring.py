"""Answer normalisation and scores: pure functions, each named after the rule that it follows.

``squad``: lower case, ASCII punctuation deleted, the words a/an/the dropped, spaces collapsed (SQuAD 1.1 and
HotpotQA's evaluation scripts). ``mem1``: MEM1's evaluator and, as ``mem1_train``, its reward. ``objectives``:
ours.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

_DELETE_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SPACE_PUNCTUATION = str.maketrans(string.punctuation, " " * len(string.punctuation))
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CLOSED_ANSWERS = frozenset(("yes", "no", "noanswer"))

Score = Callable[[str, Sequence[str]], float]


@lru_cache(maxsize=4096)
def normalise_squad(text: str) -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_DELETE_PUNCTUATION)).split())


def em(prediction: str, golds: Sequence[str]) -> float:
    """1 when the prediction equals any gold after `normalise_squad`, else 0."""
    normal = normalise_squad(prediction)
    return float(any(normal == normalise_squad(gold) for gold in golds))


def f1(prediction: str, golds: Sequence[str]) -> float:
    """Token multiset overlap with the best gold; 0 where one side is yes/no/noanswer and the other not."""
    return max((_f1(normalise_squad(prediction), normalise_squad(gold)) for gold in golds), default=0.0)


def cover_em(prediction: str, golds: Sequence[str]) -> float:
    """1 when any normalised gold stands inside the normalised prediction. A secondary score only."""
    normal = normalise_squad(prediction)
    wanted = map(normalise_squad, golds)
    # A gold that normalises to nothing stands inside everything: it must be equal.
    return float(any(gold in normal if gold else not normal for gold in wanted))


def _f1(prediction: str, gold: str) -> float:
    if prediction != gold and (prediction in _CLOSED_ANSWERS or gold in _CLOSED_ANSWERS):
        return 0.0
    predicted, wanted = prediction.split(), gold.split()
    common = sum((Counter(predicted) & Counter(wanted)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def normalise_mem1(text: str) -> str:
    """MEM1's: lower case, punctuation to spaces, articles kept, single spaces."""
    return " ".join(text.lower().translate(_SPACE_PUNCTUATION).split())


def mem1(answer: str, golds: Sequence[Sequence[str]]) -> dict[str, float]:
    """MEM1's evaluator: ``em`` and set-based ``f1``, sums over objectives.

    The number of ``;`` parts must equal the number of objectives, else the whole sample is 0.
    """
    parts = answer.split(";")
    if len(parts) != len(golds):
        return {"em": 0.0, "f1": 0.0}
    exact = overlap = 0.0
    for part, accepted in zip(parts, golds, strict=True):
        prediction = normalise_mem1(part)
        wanted = [normalise_mem1(gold) for gold in accepted]
        exact += float(prediction in wanted)
        overlap += max(_set_f1(prediction, gold) for gold in wanted)
    return {"em": exact, "f1": overlap}


def _set_f1(prediction: str, gold: str) -> float:
    predicted, wanted = set(prediction.split()), set(gold.split())
    common = len(predicted & wanted)
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def mem1_train(answer: str, golds: Sequence[Sequence[str]]) -> float:
    """MEM1's reward: squad EM position by position, summed; missing parts count 0, extra ones are ignored."""
    return sum(em(part, accepted) for part, accepted in zip(answer.split(";"), golds, strict=False))


def split_answer(answer: str) -> list[str]:
    """``a1; a2`` as its parts; blank parts at the end (a trailing ``;``) are no answers."""
    parts = [part.strip() for part in answer.split(";")]
    while len(parts) > 1 and not parts[-1]:
        parts.pop()
    return parts


def score_objectives(answer: str, golds: Sequence[Sequence[str]]) -> dict[str, float]:
    """Our rule for several objectives: squad, position by position.

    A single objective is scored on the whole answer, so its gold may hold a ``;``.

    Returns:
        ``em``, ``f1``, ``cover_em``: means over objectives, missing parts 0; ``em_all``: 1 when every
            objective is
        right and there is no extra part, else 0.
    """
    parts = split_answer(answer) if len(golds) > 1 else [answer]
    scores: Mapping[str, Score] = {"em": em, "f1": f1, "cover_em": cover_em}
    result = {
        name: sum(score(part, accepted) for part, accepted in zip(parts, golds, strict=False)) / len(golds)
        for name, score in scores.items()
    }
    result["em_all"] = float(len(parts) == len(golds) and result["em"] == 1.0)
    return result
