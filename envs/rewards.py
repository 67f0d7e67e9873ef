"""What an episode is paid: scores of the environment by name, functions by import, a judge, or a weighted sum.

The ``reward`` setting of an environment is a name (``"em"``), an import (``"package.module:function"``) or a table of
terms with their weights, whose weighted values are added up::

    reward = { em = 1.0, format = 0.1, memory_length = { weight = -0.2, limit = 60 } }

Terms besides the environment's own scores: those of `TERMS`, and any function of an `Episode` by import. Every
setting of a term but ``weight`` is its keyword argument (a class is made with them once). Values lie in [0, 1] by
convention. A term that fails raises `RewardError`: the machinery failed, and nobody's answer was wrong.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from envs.errors import UserError, did_you_mean
from envs.tasks.task import Task

RewardSetting = str | Mapping[str, float | Mapping[str, Any]]


class RewardError(RuntimeError):
    """A reward could not be worked out (a judge that is down, a function that raised): not a reward of 0."""


@dataclass(frozen=True)
class Episode:
    """An answered episode, as its reward sees it.

    Attributes:
        task: with the golds.
        answer: the final answer's text.
        scores: of the answer, by name.
        memories: as carried, by turn; None where a turn wrote none.
        memory_sizes: of the turns that wrote one, as the environment's ``counter`` counts.
        invalid: turns whose action was not valid.
    """

    task: Task
    answer: str
    scores: Mapping[str, float]
    memories: tuple[str | None, ...]
    memory_sizes: tuple[int, ...]
    invalid: int


def format_valid(episode: Episode) -> float:
    """1 when every turn had a valid action and a memory, else 0."""
    return float(episode.invalid == 0 and None not in episode.memories)


def memory_length(episode: Episode, limit: int = 60) -> float:
    """What part of a memory lies over ``limit``, 0 to 1, mean over the memories: give it a negative weight."""
    over = [max(0, size - limit) / size for size in episode.memory_sizes if size]
    return sum(over) / len(over) if over else 0.0


TERMS: Mapping[str, str] = {
    "format": "envs.rewards:format_valid",
    "memory_length": "envs.rewards:memory_length",
    "judge": "envs.judge:Judge",
}
"""Terms that every environment knows by name."""


@dataclass(frozen=True)
class Term:
    """One summand: ``weight * function(episode)``."""

    name: str
    weight: float
    function: Callable[[Episode], float]

    def __call__(self, episode: Episode) -> float:
        """Its value, without the weight.

        Raises:
            RewardError: the function raised, or gave no finite number.
        """
        try:
            value = float(self.function(episode))
        except RewardError:
            raise
        except Exception as error:  # a stranger's function may raise anything
            raise RewardError(f"reward {self.name}: {type(error).__name__}: {error}") from error
        if not math.isfinite(value):
            raise RewardError(f"reward {self.name}: {value} is no finite number")
        return value


@dataclass(frozen=True)
class Reward:
    """A reward setting that was read.

    Attributes:
        own: weights of the environment's own scores.
        terms: everything else.
    """

    own: Mapping[str, float]
    terms: tuple[Term, ...]

    def of_answer(self, values: Mapping[str, float]) -> float:
        """The weighted sum of the environment's own scores."""
        return math.fsum(weight * values[name] for name, weight in self.own.items())


def read_reward(setting: RewardSetting, own: Sequence[str]) -> Reward:
    """Read a reward setting.

    Args:
        own: names of scores that the environment pays by itself.

    Raises:
        UserError: an unknown name, an import that fails, a weight or a setting that does not fit.
    """
    entries = {setting: 1.0} if isinstance(setting, str) else setting
    if not isinstance(entries, Mapping) or not entries:
        raise UserError(f"reward {setting!r}: a name, or a table of names and weights, is needed")
    weights: dict[str, float] = {}
    terms: list[Term] = []
    for name, entry in entries.items():
        settings = dict(entry) if isinstance(entry, Mapping) else {"weight": entry}
        weight = settings.pop("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise UserError(f"reward {name!r}: weight {weight!r} is no finite number")
        if name in own:
            if settings:
                raise UserError(f"reward {name!r} has no setting {next(iter(settings))!r}")
            weights[name] = float(weight)
            continue
        if name not in TERMS and ":" not in name:
            known = [*own, *TERMS]
            raise UserError(
                f"reward {name!r} is none of {', '.join(known)}{did_you_mean(name, known)} "
                "(or package.module:function)"
            )
        short = name.rpartition(":")[2]
        if short in (*own, "reward", *(term.name for term in terms)):
            raise UserError(f"reward {name!r}: the name {short!r} is taken by another term")
        terms.append(Term(short, float(weight), _function(name, settings)))
    return Reward(weights, tuple(terms))


def _function(name: str, settings: dict[str, Any]) -> Callable[[Episode], float]:
    module, _, attribute = TERMS.get(name, name).rpartition(":")
    try:
        found: Any = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise UserError(f"reward {name!r} cannot be imported: {error}") from None
    try:
        if inspect.isclass(found):
            made: Any = found(**settings)
            return made
        inspect.signature(found).bind(None, **settings)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"reward {name!r}: {error}") from None
    return partial(found, **settings)
