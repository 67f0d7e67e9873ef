"""What the cold start imitates: a teacher's right episodes, and exercises that make copying easy.

The teacher is scripted (`agent.engines.scripted.Expert`). Like the large model that taught the paper's agents it
plays well, knows many answers by heart and keeps its memory imperfectly: it forgets, hoards, repeats itself.
Episodes that end in a right answer are kept, so its bad habits survive the filter; a student that copies them
without knowing the answers by heart fails, and that is what reinforcement learning has to mend.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import envs
from agent.engines.scripted import CallStyle, Expert, Habits, Record, play
from agent.memory_score import memory_context, step_text, transcript_context
from envs.tasks.searches import search_chains


@dataclass(frozen=True)
class Episode:
    """One teacher episode: what it read and wrote at each turn, and the names that may be renamed in it.

    ``environment`` is the index of the training environment whose rules it was played under.
    """

    question: str
    gold_answer: str
    turns: tuple[tuple[str, str], ...]
    information: tuple[str, ...]
    memories: tuple[str | None, ...]
    names: tuple[str, ...]
    environment: int = 0

    @property
    def remembered(self) -> bool:
        """Whether the last memory holds every answer, so that nothing was answered by heart."""
        memory = self.memories[-1] or ""
        return all(answer in memory for answer in self.gold_answer.split("; "))


@dataclass(frozen=True)
class Example:
    """A prompt and the text to be learnt after it; ``prompt`` is an observation, ``prefix`` opens the reply.

    Only ``completion`` is trained; the prefix (``<answer>`` in scoring contexts) is context.
    """

    prompt: str
    completion: str
    prefix: str = ""


def teach(
    environment: str,
    kwargs: Mapping[str, Any],
    habits: Habits,
    objectives: Mapping[str, float],
    episodes: int,
    call_style: CallStyle,
    answer_lead: str,
    seed: int,
) -> tuple[list[Episode], float]:
    """Play the teacher and keep its right episodes.

    Args:
        objectives: weight of each number of objectives.

    Returns:
        The kept episodes and their share of all that were played.
    """
    rng = np.random.default_rng([seed, 0x7EAC4])
    counts = [int(count) for count in objectives]
    weights = np.array([objectives[str(count)] for count in counts], dtype=float)
    players = {count: envs.make(environment, **{**kwargs, "objectives": count}) for count in counts}
    kept: list[Episode] = []
    for _ in range(episodes):
        env = players[int(rng.choice(counts, p=weights / weights.sum()))]
        record = play(
            env,
            lambda task: Expert(task, rng, habits, call_style=call_style, answer_lead=answer_lead),
            seed=int(rng.integers(2**31)),
        )
        if is_right(record):
            kept.append(episode_of(record))
    return kept, len(kept) / episodes


def is_right(record: Record, reward: float = 1.0) -> bool:
    """Whether the environment paid at least ``reward`` for the answer."""
    return record.scores.get("reward", -math.inf) >= reward


def episode_of(record: Record, environment: int = 0) -> Episode:
    """What is learnt from a played episode; names are those that the task's searches tell."""
    task = record.task
    chains = search_chains(task) or []
    names = {hop["answer"] for chain in chains for hop in chain} | {
        hop["title"] for chain in chains for hop in chain if hop.get("title")
    }
    return Episode(
        question=record.question,
        gold_answer=task.gold_answer,
        turns=tuple(record.turns),
        information=tuple(record.information),
        memories=tuple(record.memories),
        names=tuple(sorted(names, key=lambda name: (-len(name), name))),
        environment=environment,
    )


def rename(episode: Episode, words: Sequence[str], rng: np.random.Generator) -> Episode:
    """The same episode about things that do not exist: every name becomes one to three random words.

    A student can still learn where to look and what to copy from it, but no fact.
    """
    new = {
        name: " ".join(words[int(i)] for i in rng.integers(len(words), size=int(rng.integers(1, 4))))
        for name in episode.names
    }
    if not new:
        return episode
    pattern = re.compile(r"(?<!\w)(?:" + "|".join(map(re.escape, episode.names)) + r")(?!\w)")

    def renamed(text: str) -> str:
        return pattern.sub(lambda match: new[match.group(0)], text)

    return replace(
        episode,
        question=renamed(episode.question),
        gold_answer=renamed(episode.gold_answer),
        turns=tuple((renamed(seen), renamed(said)) for seen, said in episode.turns),
        information=tuple(map(renamed, episode.information)),
        memories=tuple(None if memory is None else renamed(memory) for memory in episode.memories),
    )


def turn_examples(episode: Episode) -> list[Example]:
    return [Example(seen, said) for seen, said in episode.turns]


def scoring_examples(episode: Episode, turn: int, answer_lead: str = "") -> list[Example]:
    """The two contexts in which a turn's memory is scored: answer from it alone, and from the transcript so far.

    Without them a small model's P_mem and P_full are noise.

    Args:
        turn: counted from 1.
    """
    answer = f"{answer_lead}{episode.gold_answer}</answer>"
    steps = [
        step_text(said, information)
        for (_, said), information in zip(
            episode.turns[: turn - 1], episode.information[: turn - 1], strict=True
        )
    ]
    contexts = [transcript_context(episode.question, steps)]
    memory = episode.memories[turn - 1]
    if memory is not None:
        contexts.append(memory_context(episode.question, memory))
    return [Example(context, answer, prefix="<answer>") for context in contexts]


def copying_example(words: Sequence[str], rng: np.random.Generator) -> Example:
    """A numbered list of random words and one number: say what stands there, and go on to the end of the list.

    Teaches looking up and copying, which a small model otherwise takes most of its training to find.
    """
    count = int(rng.integers(2, 9))
    values = [
        " ".join(words[int(i)] for i in rng.integers(len(words), size=int(rng.integers(1, 4))))
        for _ in range(count)
    ]
    items = [f"{number}) {value}" for number, value in enumerate(values, 1)]
    start = int(rng.integers(count))
    return Example(
        f"{' '.join(items)}\n{start + 1})", " ".join(items[start:]).removeprefix(f"{start + 1})") + "</mem>"
    )
