"""What a policy is worth on held-out questions: during a run, and in the table at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agent.engines.base import Engine
from agent.prompts import PromptBuilder
from agent.rollout import Sampling
from envs.tasks.task import Task
from eval.environments import draw_tasks
from eval.episode import Sample
from eval.interventions import Memory
from eval.players import EnginePlayer
from eval.runner import Evaluation, Progress, evaluate
from trainer.config import RunConfig

Report = Callable[[str, Progress], None]

_CONCURRENCY = 512


class Validation:
    """Evaluates the policy behind an engine on the held-out questions of a run.

    The questions of the final table are indices 0 to ``questions`` - 1 of the held-out environment; those that
    choose the best checkpoint follow, so that the table is not what was selected on.

    Args:
        report: called after each episode with the name of the evaluation and its progress.
    """

    def __init__(self, config: RunConfig, prompts: PromptBuilder, report: Report | None = None) -> None:
        self._config, self._prompts, self._report = config, prompts, report
        self._known: dict[tuple[int, int, int], list[Task]] = {}
        self._kept: dict[str, Evaluation] = {}

    def after(self, step: int, engine: Engine) -> dict[str, float]:
        """Validation metrics when one is due after this step, else nothing."""
        settings = self._config.evaluation
        if not settings.tasks or not settings.every or step % settings.every:
            return {}
        objectives = self.objectives[0]
        tasks = self._tasks(objectives, settings.questions, settings.validation_questions)
        result = self._evaluate(f"validation {step}", engine, objectives, tasks, 1.0)
        scores = result.summary()
        return {"validation/em": float(scores["em"]), "validation/f1": float(scores["f1"])}

    def greedy(self, name: str, engine: Engine) -> dict[str, float]:
        """Greedy scores, and the share of turns with a valid action, on the questions of a validation."""
        settings, objectives = self._config.evaluation, self.objectives[0]
        tasks = self._tasks(objectives, settings.questions, settings.validation_questions)
        scores = self._evaluate(name, engine, objectives, tasks, 0.0).summary()
        return {
            "validation/valid_turns": 1.0 - float(scores["invalid_turns"]),
            "validation/em": float(scores["em"]),
            "validation/f1": float(scores["f1"]),
        }

    @property
    def objectives(self) -> tuple[int, ...]:
        """Numbers of objectives that are evaluated; 0 stands for an environment without any such number."""
        return self._config.evaluation.objectives or (0,)

    def table(self, name: str, engine: Engine) -> dict[str, dict[str, Any]]:
        """Sampled and greedy scores by number of objectives, as they stand in ``summary.json``."""
        rows: dict[str, dict[str, Any]] = {}
        for objectives in self.objectives:
            tasks = self._tasks(objectives, 0, self._config.evaluation.questions)
            kept = self._evaluate(
                f"{name}, {objectives or 'all'} objectives", engine, objectives, tasks, self._temperature
            )
            self._kept.setdefault(name, kept)
            sampled = kept.summary()
            greedy = self._evaluate(
                f"{name}, {objectives or 'all'} objectives, greedy", engine, objectives, tasks, 0.0
            ).summary()
            keys = ("em", "all", "f1", "total_tokens", "peak_tokens", "turns")
            rows[str(objectives or "all")] = {
                **{key: sampled[key] for key in keys if key in sampled},
                "greedy_em": greedy["em"],
                "greedy_f1": greedy["f1"],
                "questions": sampled["questions"],
                "errors": sampled["errors"],
                "intervals": {
                    key: sampled["intervals"][key] for key in ("em", "f1") if key in sampled["intervals"]
                },
                "greedy_intervals": {"f1": greedy["intervals"]["f1"]},
            }
        return rows

    def without_memory(self, name: str, engine: Engine) -> dict[str, dict[str, Any]]:
        """F1 when memories are blanked, and when they are swapped with those of another episode.

        Args:
            name: of the table whose first episodes, with their memories, are the ones to compare with.
        """
        objectives = self.objectives[0]
        tasks = self._tasks(objectives, 0, self._config.evaluation.questions)
        kept = self._kept[name]
        remembered = any(turn.memory for sample in kept.samples for turn in sample.turns)
        modes: tuple[Memory, ...] = ("blank", "swap") if remembered else ("blank",)
        rows: dict[str, dict[str, Any]] = {}
        for memory in modes:
            donors = list(kept.samples) if memory == "swap" else None
            result = self._evaluate(
                f"memory {memory}", engine, objectives, tasks, self._temperature, memory, donors
            ).summary()
            rows[memory] = {"em": result["em"], "f1": result["f1"], "interval": result["intervals"]["f1"]}
        return rows

    @property
    def _temperature(self) -> float:
        return self._config.rollout.temperature

    def _environment(self, objectives: int) -> tuple[str, Mapping[str, Any]]:
        source = self._config.environment[0]
        kwargs = {**source.kwargs, "tasks": self._config.evaluation.tasks}
        return source.id, {**kwargs, "objectives": objectives} if objectives else kwargs

    def _tasks(self, objectives: int, start: int, count: int) -> list[Task]:
        key = (objectives, start, count)
        if key not in self._known:
            env_id, kwargs = self._environment(objectives)
            self._known[key] = draw_tasks(env_id, kwargs, start + count)[start:]
        return self._known[key]

    def _evaluate(
        self,
        name: str,
        engine: Engine,
        objectives: int,
        tasks: list[Task],
        temperature: float,
        memory: Memory = "keep",
        donors: list[Sample] | None = None,
    ) -> Evaluation:
        env_id, kwargs = self._environment(objectives)
        report = self._report

        def on_sample(sample: Sample, seconds: float, progress: Progress) -> None:
            if report is not None:
                report(name, progress)

        return evaluate(
            EnginePlayer(engine, self._prompts, Sampling(temperature, self._config.rollout.max_new_tokens)),
            tasks=tasks,
            env_id=env_id,
            env_kwargs=kwargs,
            seed=self._config.seed,
            memory=memory,
            donors=donors,
            concurrency=_CONCURRENCY,
            on_sample=on_sample,
        )
