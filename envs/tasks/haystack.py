"""Multi-hop questions with the passages that answer them, hidden among others: texts for `DocumentStream`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from envs.errors import UserError
from envs.retrieval.base import Passage
from envs.tasks.task import Task


def hide(tasks: Sequence[Task], passages: Sequence[Passage], distractors: int, seed: int = 0) -> list[Task]:
    """Each task with ``passages`` in its metadata: those of its chain and ``distractors`` others, shuffled.

    Half of the distractors, as far as there are any, have a title of the chain's passages, so that a title
    alone tells nothing. ``metadata["supporting"]`` names the ids that matter.

    Raises:
        UserError: a task without a chain, or a corpus too small.
    """
    by_id = {passage.id: place for place, passage in enumerate(passages)}
    by_title: dict[str, list[int]] = {}
    for place, passage in enumerate(passages):
        by_title.setdefault(passage.title, []).append(place)
    hidden = []
    for task in tasks:
        chain = task.metadata.get("chain")
        needed = list(dict.fromkeys(by_id[hop["passage"]] for hop in chain)) if chain else []
        if not needed:
            raise UserError(f"task {task.id!r} has no chain of passages to hide")
        if len(passages) < len(needed) + distractors:
            raise UserError(f"{distractors} distractors cannot be drawn from {len(passages)} passages")
        rng = random.Random(f"haystack/{seed}/{task.id}")
        titles = {passages[place].title for place in needed}
        near = [place for title in sorted(titles) for place in by_title[title] if place not in needed]
        chosen = set(needed) | set(rng.sample(near, min(len(near), distractors // 2)))
        while len(chosen) < len(needed) + distractors:
            chosen.add(rng.randrange(len(passages)))
        order = sorted(chosen)
        rng.shuffle(order)
        metadata = {
            **task.metadata,
            "passages": tuple(passages[place] for place in order),
            "supporting": tuple(passages[place].id for place in needed),
        }
        hidden.append(replace(task, id=f"haystack/{task.id}", source="haystack", metadata=metadata))
    return hidden


@lru_cache(maxsize=4)
def build_haystack(world: str, split: str, distractors: int = 60) -> tuple[Task, ...]:
    """The multi-hop questions of an embedded world (``factbook``, ``factbook-tiny``) as texts to read."""
    from envs.tasks.factbook import build_world

    built = build_world("tiny" if world == "factbook-tiny" else "full")
    tasks = built.train if split == "train" else built.heldout
    return tuple(hide([task for task in tasks if task.metadata["hops"] > 1], built.passages, distractors))
