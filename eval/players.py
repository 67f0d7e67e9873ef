"""Who can be evaluated: a model behind an engine, or anything that maps an observation to a text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

import gymnasium as gym

from agent.engines.base import Engine
from agent.engines.scripted import RecordingEnded, ScriptedPlayer
from agent.memory_score import MemoryScore
from agent.prompts import PromptBuilder
from agent.rollout import EpisodeError, Limits, Sampling, SeedKey, play_episode
from agent.seeds import derive
from agent.text_ids import text_ids
from agent.trajectory import Trajectory
from envs.grammar import parse_turn
from envs.tasks.task import Task
from eval.episode import Sample, TurnRecord, from_trajectory, task_tags

ScoreMemories = Callable[[Task, Trajectory], Sequence[MemoryScore]]
"""P_mem and P_full of each turn of a trajectory."""


class EnginePlayer:
    """A model behind an engine, prompted by a prompt builder, as in training.

    Args:
        engine: samples turns.
        prompts: builds prompts; its tokenizer counts the environment's replies.
        sampling: temperature and lengths of a turn.
        name: how tables call it.
        identity: what else decides its results, such as a hash of the weights.
        limits: of time.
        score: P_mem and P_full of each turn of a trajectory; None leaves them out.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: PromptBuilder,
        sampling: Sampling,
        name: str = "model",
        identity: Mapping[str, Any] | None = None,
        limits: Limits | None = None,
        score: ScoreMemories | None = None,
    ) -> None:
        self._engine, self._prompts, self._sampling = engine, prompts, sampling
        self._limits, self._score = limits or Limits(), score
        # The same passages come back in many episodes.
        self._count = lru_cache(maxsize=4096)(lambda text: len(text_ids(prompts.tokenizer, text)))
        self._identity = {
            "name": name,
            "kind": "model",
            "sampling": {**asdict(sampling), "stop": list(sampling.stop)},
            "prompt": text_hash(prompts.render("{observation}")),
            **(identity or {}),
        }

    def identity(self) -> dict[str, Any]:
        return dict(self._identity)

    async def play(self, env: gym.Env[str, str], task: Task, sample: int, seed_key: SeedKey) -> Sample:
        trajectory = await play_episode(
            env,
            self._engine,
            self._prompts,
            seed_key=seed_key,
            sampling=self._sampling,
            sample=sample,
            task=task,
            limits=self._limits,
        )
        record = from_trajectory(task, sample, trajectory, self._count)
        if self._score is None or not record.turns:
            return record
        scores = self._score(task, trajectory)
        turns = (
            replace(turn, p_mem=each.p_mem, p_full=each.p_full)
            for turn, each in zip(record.turns, scores, strict=True)
        )
        return replace(record, turns=tuple(turns))


class TextPlayer:
    """A player without token ids (scripted, a person, an API): tokens are counted with ``count_tokens``.

    Args:
        make: makes the player of one episode from its task (privileged: an expert may look at the golds)
            and the seed key.
    """

    def __init__(
        self,
        make: Callable[[Task, SeedKey], ScriptedPlayer],
        name: str,
        count_tokens: Callable[[str], int] = lambda text: len(text.split()),
    ) -> None:
        self._make, self._name, self._count = make, name, count_tokens

    def identity(self) -> dict[str, Any]:
        return {"name": self._name, "kind": "scripted"}

    async def play(self, env: gym.Env[str, str], task: Task, sample: int, seed_key: SeedKey) -> Sample:
        player = self._make(task, seed_key)
        observation, info = env.reset(seed=derive(*seed_key, "reset") % 2**31)
        turns: list[TurnRecord] = []
        answer: str | None = None
        reward, ended, stop = 0.0, False, ""
        while not ended:
            try:
                text = player.act(observation, info)
            except RecordingEnded:  # as where a turn hit the token limit: nobody knows what comes next
                answer, stop = None, "recording"
                break
            prompt_tokens = self._count(observation)
            try:
                observation, paid, terminated, truncated, info = env.step(text)
            except Exception as error:  # an environment may raise anything, and none of it is the player's
                raise EpisodeError("environment", f"{type(error).__name__}: {error}") from error
            ended = bool(terminated or truncated)
            reward += float(paid)
            parsed = parse_turn(text)
            answer = parsed.answer if terminated else None
            span = parsed.memory_span
            information = "" if ended else str(info.get("information") or "")
            turns.append(
                TurnRecord(
                    text=parsed.text,
                    memory=parsed.memory,
                    query=info.get("query"),
                    information=information,
                    invalid=info.get("invalid"),
                    finish="stop",
                    prompt_tokens=prompt_tokens,
                    completion_tokens=self._count(parsed.text),
                    memory_tokens=0 if span is None else self._count(text[span[0] : span[1]]),
                    observation_tokens=self._count(information),
                )
            )
        return Sample(
            task_id=task.id,
            sample=sample,
            questions=task.questions,
            golds=task.golds,
            answer=answer,
            stop_reason=stop or str(info.get("stop_reason") or ""),
            turns=tuple(turns),
            reward=reward,
            tags=task_tags(task),
        )


def recorded_turns(sample: Sample) -> tuple[str, ...]:
    """What a sample's player said, for `RecordedPlayer`."""
    return tuple(turn.text for turn in sample.turns)


def text_hash(text: str) -> str:
    """Short hash of a prompt or a file's text, for `Player.identity`."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
