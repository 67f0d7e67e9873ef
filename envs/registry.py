"""Ids of environments: register, make, list. Plug-ins come through the entry-point group ``mempo.envs``.

A plug-in's entry point is either named by an environment id and points to its class (``ns/Name-v0 =
package.module:Class``; nothing is imported until it is made), or has any other name and points to a module
that registers its environments when imported, which happens the first time someone lists or makes an
environment.
"""

from __future__ import annotations

import inspect
import re
import warnings
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator, parse_env_id

from envs.errors import UserError, did_you_mean

GROUP = "mempo.envs"

_pending: list[EntryPoint] = []
_ours: set[str] = set()


def register(id: str, entry_point: str, **kwargs: Any) -> None:
    """Make an environment known by its id, here and to `gymnasium.make`.

    Args:
        id: ``namespace/Name-v0``.
        entry_point: ``package.module:Class`` as text, so that its spec can be written as JSON.
        kwargs: default keyword arguments of the environment.

    Raises:
        UserError: a malformed id or entry point, or an id that means something else already.
    """
    if not isinstance(entry_point, str) or entry_point.count(":") != 1:
        raise UserError(f"entry point {entry_point!r} of {id!r}: a text 'package.module:Class' is needed")
    try:
        namespace, _, version = parse_env_id(id)
    except gymnasium.error.Error:
        namespace = version = None
    if namespace is None or version is None:
        raise UserError(f"environment id {id!r}: the form 'namespace/Name-v0' is needed")
    known = gymnasium.registry.get(id)
    if known is not None:
        if (known.entry_point, known.kwargs) != (entry_point, kwargs):
            raise UserError(
                f"environment id {id!r} is taken by {known.entry_point}; use another name or version"
            )
        _ours.add(id)
        return
    # Episodes end by themselves (max_turns), and our own check is stricter than the passive one on every
    # step.
    gymnasium.register(id, entry_point=entry_point, kwargs=kwargs, disable_env_checker=True)
    _ours.add(id)


def make(id: str, **kwargs: Any) -> gymnasium.Env[str, str]:
    """An environment by id; ``package:namespace/Name-v0`` imports the package first.

    Raises:
        UserError: unknown id, with the closest one, or a keyword that the environment does not take.
    """
    load_plugins()
    package, _, name = id.rpartition(":")
    if package:
        try:
            import_module(package)
        except ModuleNotFoundError as error:
            raise UserError(f"environment {id!r}: no package {error.name!r}") from None
        except Exception as error:  # a stranger's module may raise anything
            said = (str(error).strip() or "no message").splitlines()[0]
            raise UserError(
                f"environment {id!r}: {package} cannot be imported, {type(error).__name__}: {said}"
            ) from error
    if name not in gymnasium.registry:
        known = list_ids()
        raise UserError(
            f"unknown environment {name!r}{did_you_mean(name, known)} (known: {', '.join(known)})"
        )
    try:
        return gymnasium.make(name, **kwargs)
    except TypeError as error:
        unexpected = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unexpected is None or unexpected[1] not in kwargs:
            raise
        known = _keywords(gymnasium.spec(name).entry_point)
        raise UserError(
            f"environment {name} has no setting {unexpected[1]!r}{did_you_mean(unexpected[1], known)} "
            f"(settings: {', '.join(known)})"
        ) from None


def _keywords(entry_point: Any) -> list[str]:
    """Keyword arguments of a class and of what it hands on to its bases."""
    creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    names: dict[str, None] = {}
    for owner in getattr(creator, "__mro__", (creator,)):
        initialise = vars(owner).get("__init__")
        if initialise is not None and owner is not object:
            for parameter in list(inspect.signature(initialise).parameters.values())[1:]:
                if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                    names[parameter.name] = None
    return list(names)


def list_ids() -> list[str]:
    """Ids that were registered with `register`, sorted, plug-ins included."""
    load_plugins()
    return sorted(_ours)


def spec(id: str) -> EnvSpec:
    """What is registered under an id; see `make` for errors."""
    load_plugins()
    if id not in gymnasium.registry:
        raise UserError(
            f"unknown environment {id!r}{did_you_mean(id, list_ids())} (known: {', '.join(list_ids())})"
        )
    return gymnasium.spec(id)


def find_plugins() -> None:
    """Register what entry points name by id, and remember the others; imports nothing of a plug-in."""
    for point in entry_points(group=GROUP):
        if "/" in point.name:
            try:
                register(point.name, point.value)
            except UserError as error:
                warnings.warn(f"environment plug-in {point.name!r} is left out: {error}", stacklevel=2)
        elif point not in _pending:
            _pending.append(point)


def load_plugins() -> None:
    """Import the plug-ins that register by themselves; one that fails is named in a warning and left out."""
    while _pending:
        point = _pending.pop()
        try:
            point.load()
        except Exception as error:  # a stranger's module may raise anything, and must break nothing else
            warnings.warn(
                f"environment plug-in {point.name!r} ({point.value}) is left out: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )
