"""Suites: lists of benchmarks with published figures to put beside, shipped as ``eval/suites/*.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from envs.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Reference:
    """A published figure; not measured here.

    Attributes:
        system: whose figure, as the source calls it.
        benchmark: of the registry.
        metric: ``em`` or ``f1``, between 0 and 1.
        source: where it was published.
    """

    system: str
    benchmark: str
    metric: str
    value: float
    source: str


@dataclass(frozen=True)
class Suite:
    """Names of benchmarks in order, and reference figures."""

    name: str
    description: str
    benchmarks: tuple[str, ...]
    references: tuple[Reference, ...]

    def systems(self) -> list[str]:
        return list(dict.fromkeys(reference.system for reference in self.references))

    def reference(self, system: str, benchmark: str) -> Reference | None:
        found = (r for r in self.references if (r.system, r.benchmark) == (system, benchmark))
        return next(found, None)


def suite_names() -> list[str]:
    folder = resources.files("eval") / "suites"
    return sorted(
        entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")
    )


def load_suite(name: str) -> Suite:
    """A shipped suite by name, or one in a TOML file.

    Raises:
        UserError: unknown name, or a file of another form.
    """
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise UserError(f"suite file {path} does not exist")
        text = path.read_text(encoding="utf-8")
    elif name in suite_names():
        text = (resources.files("eval") / "suites" / f"{name}.toml").read_text(encoding="utf-8")
    else:
        known = suite_names()
        raise UserError(f"unknown suite {name!r}{did_you_mean(name, known)} (suites: {', '.join(known)})")
    try:
        data = tomllib.loads(text)
        return _suite(data, name)
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise UserError(f"suite {name}: {type(error).__name__}: {error}") from None


def _suite(data: Mapping[str, Any], name: str) -> Suite:
    listed = data["benchmarks"]
    if not isinstance(listed, list) or not listed or not all(isinstance(each, str) for each in listed):
        raise UserError(f"suite {name}: benchmarks is {listed!r}; a list of names is needed")
    benchmarks = tuple(listed)
    references = tuple(Reference(**each) for each in data.get("reference", ()))
    for reference in references:
        if isinstance(reference.value, bool) or not isinstance(reference.value, int | float):
            raise UserError(
                f"suite {name}: the value of a reference is {reference.value!r}; a number is needed"
            )
        if reference.benchmark not in benchmarks or reference.metric not in ("em", "f1"):
            raise UserError(f"suite {name}: a reference names {reference.benchmark!r}, {reference.metric!r}")
    return Suite(Path(name).stem, str(data.get("description", "")), benchmarks, references)
