"""The searches that lead to a task's answer, from whatever its source knows about them.

A chain is a list of hops ``{"question", "query", "answer", "title"}``: search the query, find the answer in what
comes back, go on. The embedded worlds come with chains; MuSiQue's decompositions and the supporting paragraphs of
HotpotQA and 2WikiMultihopQA are turned into them here. They are privileged, like golds: for teachers, never for
an observation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from envs.scoring import normalise_squad
from envs.tasks.task import Task

Hop = Mapping[str, Any]

_REFERENCE = re.compile(r"#(\d+)")


def search_chain(task: Task) -> Sequence[Hop] | None:
    """The hops of a task with one question; None when its metadata has none that end at a gold answer."""
    known = task.metadata.get("chain")
    if known:
        return list(known)
    if len(task.questions) != 1:
        return None
    chain = _decomposed(task.metadata.get("decomposition")) or _supported(task)
    if not chain:
        return None
    golds = {normalise_squad(gold): gold for gold in reversed(task.golds[0])}
    end = golds.get(normalise_squad(str(chain[-1]["answer"])))
    return None if end is None else chain


def search_chains(task: Task) -> list[Sequence[Hop]] | None:
    """One chain for each question of a task; None when one is missing."""
    known = task.metadata.get("chains")
    chains = list(known) if known else [search_chain(task)]
    complete = [chain for chain in chains if chain]
    return complete if len(complete) == len(task.questions) else None


def _decomposed(steps: Any) -> list[dict[str, Any]]:
    """MuSiQue: single-hop questions in which ``#1`` stands for the first answer and ``>>`` before a relation."""
    if not isinstance(steps, list | tuple):
        return []
    hops: list[dict[str, Any]] = []
    for step in steps:
        if not isinstance(step, Mapping) or not all(
            isinstance(step.get(k), str) and step[k].strip() for k in ("question", "answer")
        ):
            return []
        answers = [str(hop["answer"]) for hop in hops]

        def named(match: re.Match[str], answers: list[str] = answers) -> str:
            number = int(match.group(1))
            return answers[number - 1] if 1 <= number <= len(answers) else match.group(0)

        question = " ".join(_REFERENCE.sub(named, step["question"].replace(">>", " ")).split())
        hops.append({"question": question, "query": question, "answer": step["answer"].strip(), "title": ""})
    return hops


def _supported(task: Task) -> list[dict[str, Any]]:
    """Two supporting paragraphs, the first of which names the second: search the one, then the other."""
    needed = set(task.metadata.get("supporting") or ())
    passages = [passage for passage in task.metadata.get("passages") or () if passage.id in needed]
    if len(passages) != 2:
        return []
    gold = task.golds[0][0]
    for first, second in (passages, reversed(passages)):
        if second.title in first.text and gold in second.text:
            return [
                {"question": first.title, "query": first.title, "answer": second.title, "title": first.title},
                {"question": second.title, "query": second.title, "answer": gold, "title": second.title},
            ]
    return []
