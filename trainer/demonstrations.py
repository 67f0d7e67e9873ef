"""Right episodes of a teacher, whoever it is: the data of a supervised start.

- ``expert``: the scripted one, on tasks whose source tells the searches that lead to the answer.
- an address: a large model behind an OpenAI-compatible endpoint plays every question, as GPT-4.1 did for the paper.
- ``random``: the scripted player that does anything; what it gets right is luck (a floor to compare with).
- ``recorded:RUN``: what an evaluation run of any player left behind.
- a ``.jsonl`` file that `write_demonstrations` made.

Episodes that were played elsewhere are played once more in the student's own environment: what the student reads is
what its environment shows, and an episode that does not come out right there teaches nothing.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from agent.engines.scripted import (
    Expert,
    Habits,
    RandomPlayer,
    RecordedPlayer,
    RecordingEnded,
    ScriptedPlayer,
    play,
)
from agent.prompts import system_prompt
from agent.seeds import derive
from envs.errors import UserError
from envs.registry import make
from envs.tasks.rows import iterate_rows
from envs.tasks.searches import search_chains
from envs.tasks.task import Task
from eval.benchmarks import Benchmark
from eval.chat import ChatPlayer, Endpoint
from eval.environments import draw_tasks, pin
from eval.episode import Sample
from eval.players import recorded_turns
from eval.runner import Player
from eval.session import Settings, run_session
from eval.store import read_run
from trainer.config import EnvironmentConfig, RunConfig
from trainer.teacher import Episode, episode_of, is_right

FILE = "demonstrations.jsonl"


def demonstrate(config: RunConfig, folder: Path | None = None) -> tuple[list[Episode], Counter[str]]:
    """Let the teacher of ``config.cold_start`` play the training questions and keep what is right.

    Args:
        folder: where an endpoint's episodes are written as they finish (an evaluation run; a second call goes on
            with it). Needed for an endpoint only.

    Returns:
        Right episodes, and how many were ``played``, ``right``, and left out because nobody knows the
        searches (``unknown``), because the episode went another way here (``different``), because a
        right one has no memory at all (``without_memory``; the expert always has) or because the environment
        broke (``failed``: a search or a judge that is down).

    Raises:
        UserError: an unknown teacher, a source that is not there, not one right episode.
    """
    teacher, counts = config.cold_start.teacher, Counter[str]()
    failures: list[str] = []
    if teacher.endswith(".jsonl"):
        episodes = read_demonstrations(Path(teacher))
        foreign = next((e for e in episodes if not 0 <= e.environment < len(config.environment)), None)
        if foreign is not None:
            raise UserError(
                f"{teacher}: an episode of environment {foreign.environment}, and there are {len(config.environment)}"
            )
        counts.update(played=len(episodes), right=len(episodes))
    elif teacher in ("expert", "random"):
        episodes = _scripted(config, teacher, counts, failures)
    elif teacher.startswith("recorded:"):
        samples = read_run(teacher.removeprefix("recorded:")).samples
        episodes = _replayed(config, samples, counts, failures)
    elif teacher.startswith(("http://", "https://")):
        if folder is None:
            raise UserError("a teacher behind an endpoint needs a folder for its episodes")
        episodes = _replayed(config, _ask_endpoint(config, folder), counts, failures)
    else:
        raise UserError(
            f"teacher {teacher!r} is none of: expert, random, recorded:RUN, a .jsonl file, the address of an endpoint"
        )
    if not episodes:
        why = f"; the first failure: {failures[0]}" if failures else ""
        raise UserError(
            f"teacher {teacher!r} gave no right episode ({_told(counts)}), none of at least "
            f"{config.cold_start.right_reward:g} reward (cold_start.right_reward){why}"
        )
    return episodes, counts


def write_demonstrations(path: Path, episodes: Iterable[Episode]) -> None:
    """One episode a line; whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.new")
    with aside.open("w", encoding="utf-8") as file:
        for episode in episodes:
            file.write(json.dumps(asdict(episode), ensure_ascii=True) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def read_demonstrations(path: Path) -> list[Episode]:
    """Inverse of `write_demonstrations`.

    Raises:
        UserError: no such file, or a row of another form, named by its line.
    """
    return [_episode(row, where) for where, row in iterate_rows(path)]


def _episode(row: Mapping[str, Any], where: str) -> Episode:
    missing = [field.name for field in fields(Episode) if field.name not in row]
    try:
        if missing:
            raise ValueError(f"{missing[0]} is missing")
        episode = Episode(
            question=str(row["question"]),
            gold_answer=str(row["gold_answer"]),
            turns=tuple((str(seen), str(said)) for seen, said in row["turns"]),
            information=tuple(map(str, row["information"])),
            memories=tuple(None if memory is None else str(memory) for memory in row["memories"]),
            names=tuple(map(str, row["names"])),
            environment=int(row["environment"]),
        )
        if not len(episode.turns) == len(episode.information) == len(episode.memories) > 0:
            raise ValueError("turns, information and memories differ in length")
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: no demonstration ({error})") from None
    return episode


@dataclass(frozen=True)
class _Source:
    """A training environment and the tasks that the teacher plays in it."""

    index: int
    config: EnvironmentConfig
    tasks: list[Task]


def _sources(config: RunConfig) -> list[_Source]:
    """Each training environment with its share of the tasks: every one at most once."""
    weights = sum(source.weight for source in config.environment)
    found = []
    for index, source in enumerate(config.environment):
        share = max(1, round(config.cold_start.episodes * source.weight / weights))
        known = getattr(make(source.id, **source.kwargs).unwrapped, "num_tasks", None)
        count = min(share, known) if isinstance(known, int) else share
        found.append(_Source(index, source, draw_tasks(source.id, source.kwargs, count)))
    return found


def _scripted(config: RunConfig, teacher: str, counts: Counter[str], failures: list[str]) -> list[Episode]:
    settings = config.cold_start
    habits = Habits(**settings.habits.model_dump())

    def player(task: Task) -> ScriptedPlayer | None:
        rng = np.random.default_rng(derive(config.seed, task.id, "teacher"))
        style, lead = config.model.call_style, config.model.answer_lead
        if teacher == "random":
            return RandomPlayer(rng, call_style=style)
        if search_chains(task) is None:
            return None
        return Expert(task, rng, habits, style, settings.think, lead)

    return [
        episode
        for source in _sources(config)
        for episode in _play(
            source, ((task, player) for task in source.tasks), settings.right_reward, counts, failures
        )
    ]


def _replayed(
    config: RunConfig, samples: Mapping[str, Sequence[Sample]], counts: Counter[str], failures: list[str]
) -> list[Episode]:
    """Samples by benchmark. Those of a teacher's run go to the environment that they were played in, others to the
    first one that asks the question and pays for the answer.
    """
    places: dict[str, list[tuple[_Source, Task]]] = defaultdict(list)
    own: dict[str, int] = {}
    for source in _sources(config):
        own[_benchmark_name(source)] = source.index
        for task in source.tasks:
            places[task.id].append((source, task))
    episodes: list[Episode] = []
    for name, sample in ((name, sample) for name, each in samples.items() for sample in each):
        if sample.error is not None or sample.reward < config.cold_start.right_reward:
            counts["played"] += 1
            continue
        known = [
            (source, task)
            for source, task in places[sample.task_id]
            if own.get(name, source.index) == source.index
        ]
        if not known:
            raise UserError(
                f"the recorded episodes answer {sample.task_id!r}, which is no training question here"
            )
        for source, task in known:
            outcome = Counter[str]()
            kept = _play(
                source,
                [(task, partial(_recording, sample))],
                config.cold_start.right_reward,
                outcome,
                failures,
            )
            if kept:
                break
        counts.update(outcome)
        # A right answer without a memory shows the student the one habit that it is here to lose.
        remembered = [episode for episode in kept if any(memory is not None for memory in episode.memories)]
        if len(remembered) < len(kept):
            counts["without_memory"] += len(kept) - len(remembered)
        episodes += remembered
    return episodes


def _benchmark_name(source: _Source) -> str:
    return f"teacher-{source.index}"


def _recording(sample: Sample, task: Task) -> RecordedPlayer:
    return RecordedPlayer(recorded_turns(sample))


def _play(
    source: _Source,
    jobs: Iterable[tuple[Task, Callable[[Task], ScriptedPlayer | None]]],
    right_reward: float,
    counts: Counter[str],
    failures: list[str],
) -> list[Episode]:
    env = make(source.config.id, **source.config.kwargs)
    kept: list[Episode] = []
    for task, choose in jobs:
        player = choose(task)
        if player is None:
            counts["unknown"] += 1
            continue
        counts["played"] += 1
        try:
            record = play(pin(env, task), player, seed=0)
        except RecordingEnded:
            counts["different"] += 1
            continue
        except UserError:
            raise
        except Exception as error:  # an environment may raise anything, and none of it is the teacher's
            counts["failed"] += 1
            failures.append(f"{type(error).__name__}: {error}".splitlines()[0][:300])
            continue
        if is_right(record, right_reward):
            counts["right"] += 1
            kept.append(episode_of(record, source.index))
        elif isinstance(player, RecordedPlayer):
            counts["different"] += 1
    env.close()
    return kept


class _Teacher:
    """The subject of an evaluation run whose samples are a teacher's episodes."""

    def __init__(self, config: RunConfig) -> None:
        settings = config.cold_start
        if not settings.teacher_model:
            raise UserError("a teacher behind an endpoint needs cold_start.teacher_model, its name there")
        self.name = settings.teacher_model
        self.interface: Mapping[str, Any] = {}
        self._config = config

    def identity(self) -> dict[str, Any]:
        settings = self._config.cold_start
        return {
            "name": self.name,
            "kind": "teacher",
            "url": settings.teacher,
            "model": settings.teacher_model,
        }

    def player(self, env_id: str, env_kwargs: Mapping[str, Any], temperature: float) -> Player:
        base: Any = make(env_id, **env_kwargs).unwrapped
        # The rules at least: a teacher was not trained on the grammar, whatever its student reads.
        style = "paper" if self._config.model.prompt == "compact" else self._config.model.prompt
        rules = system_prompt(base.tool_help, style, base.max_turns, self._config.model.call_style)
        endpoint = Endpoint(self._config.cold_start.teacher, self._config.cold_start.teacher_model)
        return ChatPlayer(endpoint, rules, temperature, self._config.rollout.max_new_tokens)


def _ask_endpoint(config: RunConfig, folder: Path) -> Mapping[str, Sequence[Sample]]:
    settings = config.cold_start
    benchmarks = []
    for source in _sources(config):
        kwargs = dict(source.config.kwargs)
        where = kwargs.pop("tasks", None)
        benchmarks.append(
            Benchmark(
                _benchmark_name(source),
                (where,) if isinstance(where, str) else (),
                source.config.id,
                kwargs,
                questions=len(source.tasks),
                samples=settings.teacher_samples,
                temperature=settings.teacher_temperature,
            )
        )
    settings_of_run = Settings(config.seed, concurrency=32)
    return run_session(_Teacher(config), benchmarks, folder, settings_of_run, reports=False).samples


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "nothing played"
