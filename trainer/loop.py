"""The whole training loop on one page.

One step: draw questions, roll out a group of episodes for each, score the memories with the weights as they are,
turn rewards and scores into one advantage per token, update, hand the new weights to the engine. Everything
else (evaluation before and after, the run folder, the command line) stands around it in `trainer.run`.

Left out on purpose: overlap of generation and update (an episode is scored and trained with the weights that sampled
it), and any state that is not a function of the seed, the step and the weights. A sampler that takes no weights (vLLM)
is the exception to both: its episodes are those of the weights it was started with, however far the policy has moved;
``rollout/weight_gap`` counts the updates between the two.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from agent.engines.base import Engine, TrainableEngine
from agent.memory_score import MemoryScore, MemoryScorer
from agent.prompts import PromptBuilder
from agent.rollout import Limits, RolloutReport, Sampling, collect_groups
from agent.trajectory import Group
from trainer.checkpoint import CheckpointStore, rng_state
from trainer.config import RunConfig
from trainer.learner import Learner
from trainer.monitor import Monitor
from trainer.packing import Row
from trainer.questions import Draw, Questions
from trainer.rollout_metrics import memory_metrics, rollout_metrics
from trainer.rows import GroupAdvantages, rows_from_groups
from trainer.validation import Validation

Scores = list[list[list[MemoryScore]]]


class NothingPlayed(RuntimeError):
    """Engine, tools or time limits failed every group of a step: it is better done again than left empty."""


@dataclass
class Run:
    """What a training run is made of.

    Attributes:
        engine: the policy's own: takes each update's weights, and is what is evaluated.
        sampler: where rollouts come from; ``engine`` itself wherever the server takes weights.
    """

    config: RunConfig
    questions: Questions
    engine: TrainableEngine
    sampler: Engine
    prompts: Sequence[PromptBuilder]  # by environment
    scorers: Sequence[MemoryScorer]  # by environment
    learner: Learner
    monitor: Monitor
    checkpoints: CheckpointStore
    validation: Validation
    steps_done: int = 0


@dataclass
class Experience:
    """The episodes of one step with everything that is learnt from them."""

    groups: list[Group] = field(default_factory=list)
    scores: Scores = field(default_factory=list)
    advantages: list[GroupAdvantages] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)


def train(run: Run) -> None:
    """Train from ``run.steps_done`` to the last step; a checkpoint holds what is needed to go on from there."""
    with run.monitor:
        for step in range(run.steps_done + 1, run.config.steps + 1):
            experience = gather(run, step)
            with run.monitor.phase("update"):
                update = run.learner.update(experience.rows) if experience.rows else {}
                run.engine.load_weights(run.learner.model, step)
            run.steps_done = step
            with run.monitor.phase("validate"):
                validation = run.validation.after(step, run.engine)
            with run.monitor.phase("save"):
                record(run, step, experience, {**update, **validation})
                save(run, step, validation.get("validation/f1"))


def gather(run: Run, step: int) -> Experience:
    """Roll out a step's questions; groups without signal are replaced by others where the algorithm drops them."""
    config, experience = run.config, Experience()
    redraws = config.rollout.max_redraws if config.algorithm.drop_groups_without_signal else 0
    for attempt in range(redraws + 1):
        missing = config.rollout.questions_per_step - len(experience.groups)
        if missing == 0:
            break
        with run.monitor.phase("rollout"):
            draws = run.questions.draw(step, missing, attempt)
            played = roll_out(run, draws, step, experience.dropped, attempt)
        groups = [group for _, group in played]
        with run.monitor.phase("score memories"):
            scores = score(run, played) if config.algorithm.alpha > 0 else None
        _, report = rows_from_groups(groups, scores, config.algorithm)
        experience.dropped.update(report.dropped)
        experience.groups += [groups[index] for index in report.kept]
        experience.scores += [scores[index] for index in report.kept] if scores else []
    experience.rows, report = rows_from_groups(
        experience.groups, experience.scores if config.algorithm.alpha > 0 else None, config.algorithm
    )
    experience.advantages = report.advantages
    return experience


def roll_out(
    run: Run, draws: Sequence[Draw], step: int, dropped: Counter[str], attempt: int = 0
) -> list[tuple[int, Group]]:
    """One group of episodes for each question, with its environment; one whose machinery failed is left out and
    counted.

    Raises:
        NothingPlayed: not one group of a step.
    """
    settings = run.config.rollout
    limits = Limits(settings.step_seconds, settings.request_seconds, settings.episode_seconds)
    environments = sorted({draw.environment for draw in draws})

    async def play() -> list[tuple[list[Group], RolloutReport]]:
        return await asyncio.gather(
            *(
                collect_groups(
                    [draw.task for draw in draws if draw.environment == index],
                    partial(run.questions.environment, index),
                    run.sampler,
                    run.prompts[index],
                    samples=settings.group_size,
                    sampling=Sampling(settings.temperature, settings.max_new_tokens),
                    run_seed=run.config.seed,
                    step=step,
                    draw=attempt,
                    retries=settings.retries,
                    limits=limits,
                )
                for index in environments
            )
        )

    played = asyncio.run(play())
    for _, report in played:
        dropped.update(report.dropped)
    if attempt == 0 and dropped.total() == len(draws):
        why = next(error for _, report in played for error in report.errors)
        raise NothingPlayed(f"step {step}: not one group could be played; the first one: {why}")
    return [
        (index, group) for index, (groups, _) in zip(environments, played, strict=True) for group in groups
    ]


def score(run: Run, played: Sequence[tuple[int, Group]]) -> Scores:
    """P_mem and P_full of each group under the rules that its environment was played by."""
    places: dict[MemoryScorer, list[int]] = {}
    for place, (index, _) in enumerate(played):
        places.setdefault(run.scorers[index], []).append(place)
    scores: Scores = [[] for _ in played]
    for scorer, members in places.items():
        found = scorer.score(run.learner.model, [played[place][1] for place in members])
        for place, of_group in zip(members, found, strict=True):
            scores[place] = of_group
    return scores


def record(run: Run, step: int, experience: Experience, update: dict[str, float]) -> None:
    """Metrics of the step, and now and then its episodes for a person to read."""
    config, monitor = run.config, run.monitor
    memory = [advantages.memory for advantages in experience.advantages]
    memory_rewards = [advantages.memory_rewards for advantages in experience.advantages]
    metrics = {
        **rollout_metrics(experience.groups, step),
        **(memory_metrics(experience.scores, memory, memory_rewards) if experience.scores else {}),
        "dropped/groups": float(experience.dropped.total()),
        **{f"dropped/{cause}": float(count) for cause, count in sorted(experience.dropped.items())},
        **{key if "/" in key else f"update/{key}": value for key, value in update.items()},
    }
    scores = experience.scores or None
    if experience.groups and step in {1, config.steps, *range(0, config.steps, config.output.dump_every)}:
        outcome = [advantages.outcome for advantages in experience.advantages]
        monitor.episodes(step, experience.groups, scores, outcome, memory, config.output.dump_groups)
    if config.output.dump_rollouts:
        monitor.rollouts(step, experience.groups, scores)
    tokens = sum(t.total_tokens for group in experience.groups for t in group.trajectories)
    monitor.step(step, metrics, tokens)


def save(run: Run, step: int, score: float | None) -> None:
    """A checkpoint when one is due, and whenever the policy was validated: the best one can be any of those."""
    output = run.config.output
    if step == run.config.steps or step % output.checkpoint_every == 0 or score is not None:
        run.checkpoints.save(
            step,
            {"learner": run.learner.state_dict(), "rng": rng_state()},
            config=run.config.model_dump(mode="json"),
            data_fingerprint=run.questions.fingerprint(),
            score=score,
        )
