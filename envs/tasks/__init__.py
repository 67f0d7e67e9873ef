"""Where questions come from: a `Task` and the sources that make them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from envs.errors import UserError, did_you_mean
from envs.tasks.task import Task

__all__ = ["Task", "load_tasks"]

EMBEDDED = tuple(
    f"{world}:{split}" for world in ("factbook", "factbook-tiny") for split in ("train", "heldout")
)
"""Question sets that come with the package."""


def load_tasks(source: str) -> list[Task]:
    """The tasks that a text names, read once in this process.

    Args:
        source: ``factbook:train``, ``factbook:heldout``, ``factbook-tiny:train``, ``factbook-tiny:heldout``
            (embedded), or the path of a file of questions in FlashRAG form (``.jsonl`` or ``.parquet``).

    Raises:
        UserError: none of these, or a malformed row, named by file and line.
    """
    if source in EMBEDDED:
        return list(_embedded(source))
    path = Path(source)
    if not path.is_file():
        if path.suffix in (".jsonl", ".parquet", ".json"):
            raise UserError(f"question file {source} does not exist")
        raise UserError(
            f"unknown tasks {source!r}{did_you_mean(source, EMBEDDED)} "
            f"(embedded: {', '.join(EMBEDDED)}; or the path of a .jsonl or .parquet file)"
        )
    state = path.stat()
    return list(_from_file(str(path), state.st_mtime_ns, state.st_size))


@lru_cache(maxsize=16)
def _embedded(source: str) -> tuple[Task, ...]:
    from envs.tasks.factbook import build_world

    world, split = source.split(":")
    built = build_world("tiny" if world == "factbook-tiny" else "full")
    return built.train if split == "train" else built.heldout


@lru_cache(maxsize=16)
def _from_file(source: str, mtime_ns: int, size: int) -> tuple[Task, ...]:
    from envs.tasks.flashrag import read_tasks

    return tuple(read_tasks(Path(source)))
