"""Where questions come from: a `Task` and the sources that make them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from envs.errors import UserError, did_you_mean
from envs.tasks.task import Task

__all__ = ["Task", "load_tasks"]

_WORLDS = ("factbook", "factbook-tiny", "haystack", "haystack-tiny", "shakespeare")
EMBEDDED = tuple(f"{world}:{split}" for world in _WORLDS for split in ("train", "heldout"))
"""Question sets that come with the package; ``haystack`` and ``shakespeare`` are texts to read."""


def load_tasks(source: str) -> list[Task]:
    """The tasks that a text names, read once in this process.

    Args:
        source: one of `EMBEDDED` (``factbook:train``), the path of a ``.jsonl``, ``.json`` or ``.parquet``
            file of one of the forms in `envs.tasks.forms.FORMS`, ``FORM:PATH`` to say which, or a set on the
            hub (``hub:OWNER/NAME[/CONFIG][@REVISION][:SPLIT]``).

    Raises:
        UserError: none of these, or a malformed row, named by file and line.
    """
    if source in EMBEDDED:
        return list(_embedded(source))
    if source.startswith("hub:"):
        return list(_from_hub(source))
    from envs.tasks.forms import FORMS

    form, separator, rest = source.partition(":")
    if not separator or form not in FORMS:
        form, rest = "", source
    path = Path(rest)
    if not path.is_file():
        if form or path.suffix in (".jsonl", ".parquet", ".json"):
            raise UserError(f"question file {path} does not exist")
        raise UserError(
            f"unknown tasks {source!r}{did_you_mean(source, EMBEDDED)} (embedded: {', '.join(EMBEDDED)}; "
            "or the path of a .jsonl, .json or .parquet file)"
        )
    state = path.stat()
    return list(_from_file(str(path), form or None, state.st_mtime_ns, state.st_size))


@lru_cache(maxsize=16)
def _embedded(source: str) -> tuple[Task, ...]:
    world, split = source.split(":")
    if world == "shakespeare":
        from envs.tasks.shakespeare import build_plays

        plays = build_plays()
        return plays.train if split == "train" else plays.heldout
    if world.startswith("haystack"):
        from envs.tasks.haystack import build_haystack

        return build_haystack(world.replace("haystack", "factbook"), split)
    from envs.tasks.factbook import build_world

    built = build_world("tiny" if world == "factbook-tiny" else "full")
    return built.train if split == "train" else built.heldout


@lru_cache(maxsize=16)
def _from_file(source: str, form: str | None, mtime_ns: int, size: int) -> tuple[Task, ...]:
    from envs.tasks.forms import tasks_of_rows
    from envs.tasks.rows import iterate_rows

    path = Path(source)
    return tuple(tasks_of_rows(iterate_rows(path), path.stem, source, form))


@lru_cache(maxsize=16)
def _from_hub(source: str) -> tuple[Task, ...]:
    from envs.tasks.hub import load_hub_tasks

    return tuple(load_hub_tasks(source))
