"""What a run trains on: questions drawn from one or several environments, the same for the same seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from agent.prompts import PromptBuilder, system_prompt
from agent.seeds import derive
from envs.registry import make
from envs.tasks.task import Task
from eval.environments import drawn_task, pin
from trainer.config import EnvironmentConfig, RunConfig

_FINGERPRINTED = 64
"""Drawn questions that stand for the data in its fingerprint."""


@dataclass(frozen=True)
class Draw:
    """A question and the index of the environment that it is played in."""

    environment: int
    task: Task


class Questions:
    """Draws questions; what step and place a question is drawn for decides it, not what was drawn before.

    Raises:
        UserError: an unknown environment, or one that refuses its settings.
    """

    def __init__(self, environments: Sequence[EnvironmentConfig], seed: int) -> None:
        self._configs = tuple(environments)
        self._seed = seed
        self._drawing = [make(config.id, **config.kwargs) for config in self._configs]
        weights = np.array([config.weight for config in self._configs])
        self._shares = weights / weights.sum()

    def draw(self, step: int, count: int, attempt: int = 0) -> list[Draw]:
        """``count`` questions for a step.

        Args:
            attempt: further draws for the same step give other questions.
        """
        draws = []
        for place in range(count):
            key = derive(self._seed, "question", step, attempt, place)
            environment = int(np.random.default_rng(key).choice(len(self._configs), p=self._shares))
            env = self._drawing[environment]
            draws.append(Draw(environment, drawn_task(env, key % 2**31)))
        return draws

    def environment(self, index: int, task: Task) -> gym.Env[str, str]:
        """A fresh environment whose reset plays ``task``."""
        config = self._configs[index]
        return pin(make(config.id, **config.kwargs), task)

    def fingerprint(self) -> str:
        """Hash of the first questions that this data gives: another data set on resume is refused by it."""
        tasks = [draw.task for draw in self.draw(0, _FINGERPRINTED)]
        text = json.dumps([[task.id, task.questions, task.golds] for task in tasks])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def prompt_builders(config: RunConfig, tokenizer: Any) -> list[PromptBuilder]:
    """One for each environment, with its own tools and turns in the rules; one object where the rules are equal."""
    known: dict[str, PromptBuilder] = {}
    builders = []
    for source in config.environment:
        env: Any = make(source.id, **source.kwargs).unwrapped
        rules = system_prompt(env.tool_help, config.model.prompt, env.max_turns, config.model.call_style)
        if rules not in known:
            known[rules] = PromptBuilder(
                tokenizer,
                rules,
                max_prompt_tokens=config.rollout.max_prompt_tokens,
                template_options=config.model.template_options,
            )
        builders.append(known[rules])
    return builders
