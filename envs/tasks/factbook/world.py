"""The embedded world: what is built, its split by country, its fingerprint."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from envs.errors import UserError, did_you_mean
from envs.retrieval.base import Passage
from envs.tasks.task import Task

TRAIN_SHARE = 0.7
PROFILES = ("tiny", "full")


@dataclass(frozen=True)
class World:
    """A corpus and the questions over it.

    Attributes:
        train, heldout: tasks of disjoint sets of countries, whole chains on one side; over the same corpus.
        report: counts and the share that each filter dropped.
        fingerprint: sha256 over passages and tasks.
    """

    profile: str
    seed: int
    passages: tuple[Passage, ...]
    train: tuple[Task, ...]
    heldout: tuple[Task, ...]
    report: Mapping[str, Any]
    fingerprint: str


@lru_cache(maxsize=4)
def build_world(profile: str = "tiny", seed: int = 0) -> World:
    """The world of a profile; the same for the same seed and package versions; cached in the process.

    Args:
        profile: ``tiny`` (2,500 short passages, one- and two-hop questions that a small model can learn; 1 s)
            or ``full`` (57,000 passages of prose, up to three hops; about 10 s).

    Raises:
        UserError: unknown profile.
    """
    if profile == "tiny":
        from envs.tasks.factbook.tiny import build_tiny

        return build_tiny(seed)
    if profile == "full":
        from envs.tasks.factbook.full import build_full

        return build_full(seed)
    known = ", ".join(PROFILES)
    raise UserError(f"unknown factbook profile {profile!r}; known: {known}{did_you_mean(profile, PROFILES)}")


def split_countries(names: Sequence[str], seed: int) -> tuple[frozenset[str], frozenset[str]]:
    """Countries of the training and of the held-out side: disjoint, shuffled with the seed."""
    shuffled = sorted(names)
    random.Random(f"factbook-split-{seed}").shuffle(shuffled)
    cut = round(len(shuffled) * TRAIN_SHARE)
    return frozenset(shuffled[:cut]), frozenset(shuffled[cut:])


def finish(
    profile: str,
    seed: int,
    passages: tuple[Passage, ...],
    train: tuple[Task, ...],
    heldout: tuple[Task, ...],
    report: dict[str, Any],
) -> World:
    """Add the counts and the fingerprint."""
    for name, tasks in (("train", train), ("heldout", heldout)):
        report[name] = {
            f"{hops}-hop": n for hops, n in sorted(Counter(t.metadata["hops"] for t in tasks).items())
        }
    digest, text_of = hashlib.sha256(), json.JSONEncoder(sort_keys=True).encode
    for passage in passages:
        digest.update(text_of([passage.id, passage.title, passage.text]).encode())
    for task in (*train, *heldout):
        digest.update(text_of([task.id, task.questions, task.golds, task.metadata]).encode())
    return World(profile, seed, passages, train, heldout, report, digest.hexdigest())
