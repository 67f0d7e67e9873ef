"""Episodes with a model: one coroutine each, in groups of one task, nobody waiting for the slowest.

What a policy samples is decided by a seed for each (run, step, task, sample, turn), so concurrency and
retries change nothing. Failures of the machinery and wrong answers are different things: an engine or an
environment that fails is tried again with a fresh environment, then the whole group is dropped, counted and
reported; it is never a reward of 0.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import gymnasium as gym

from agent.engines.base import Completion, Engine, EngineError, GenerationRequest
from agent.prompts import PromptBuilder, WindowExceeded
from agent.seeds import derive
from agent.spans import token_bytes
from agent.trajectory import Group, Trajectory, Turn
from envs.errors import UserError
from envs.grammar import ACTION_STOPS, ParsedTurn, parse_turn
from envs.tasks.task import Task

SeedKey = tuple[int | str, ...]
T = TypeVar("T")


class EpisodeError(RuntimeError):
    """An episode could not be played to its end for a reason that is not the policy's.

    Attributes:
        cause: ``engine``, ``environment`` or ``timeout``.
    """

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True)
class Sampling:
    """How turns are sampled. Temperature is the only knob: top-p and top-k would change the distribution.

    Attributes:
        temperature: 0 is greedy.
        max_new_tokens: tokens of one turn; a turn that needs more ends the episode as truncated.
        stop: strings after which an action may have ended.
    """

    temperature: float = 1.0
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ACTION_STOPS


@dataclass(frozen=True)
class Limits:
    """Time limits in seconds; None for none. Whatever comes late is ignored with the attempt it belonged to.

    Attributes:
        step: one reset or step of the environment, which then runs in a thread (for tools that wait for a
            network).
        request: one request to the engine.
        episode: one attempt at an episode.
    """

    step: float | None = None
    request: float | None = None
    episode: float | None = None


@dataclass
class RolloutReport:
    """What happened while groups were collected.

    Attributes:
        groups, episodes, turns: that were kept.
        prompt_tokens, completion_tokens: of the kept episodes.
        retried: attempts that failed and were tried again, by cause.
        dropped: groups that were dropped, by cause of the first failure in them.
        errors: one line for each dropped group.
    """

    groups: int = 0
    episodes: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    retried: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    def add(self, group: Group) -> None:
        self.groups += 1
        for trajectory in group.trajectories:
            self.episodes += 1
            self.turns += len(trajectory.turns)
            self.completion_tokens += trajectory.completion_tokens
            self.prompt_tokens += trajectory.total_tokens - trajectory.completion_tokens


async def play_episode(
    env: gym.Env[str, str],
    engine: Engine,
    prompts: PromptBuilder,
    *,
    seed_key: SeedKey,
    sampling: Sampling,
    sample: int = 0,
    task: Task | None = None,
    reset_seed: int | None = None,
    limits: Limits = Limits(),
    on_turn: Callable[[Turn], None] | None = None,
) -> Trajectory:
    """Reset the environment and play one episode to its end.

    Args:
        seed_key: what identifies the episode, the sample's index last; turn t samples with
            ``derive(*seed_key, t)``.
        task: the one that the environment must have drawn; not checked when None.
        reset_seed: the environment's; ``derive(*seed_key, "reset") % 2**31`` when None.
        on_turn: called with each finished turn.

    Raises:
        EpisodeError: the engine, the environment or a time limit failed.
        UserError: the environment refuses to start with its settings, or plays another task.
    """
    seed = derive(*seed_key, "reset") % 2**31 if reset_seed is None else reset_seed
    try:
        async with asyncio.timeout(limits.episode):
            return await _play(env, engine, prompts, seed_key, sampling, sample, task, seed, limits, on_turn)
    except TimeoutError as error:
        raise EpisodeError("timeout", f"episode took longer than {limits.episode} s") from error


async def _play(
    env: gym.Env[str, str],
    engine: Engine,
    prompts: PromptBuilder,
    seed_key: SeedKey,
    sampling: Sampling,
    sample: int,
    task: Task | None,
    seed: int,
    limits: Limits,
    on_turn: Callable[[Turn], None] | None,
) -> Trajectory:
    observation, info = await _environment(lambda: env.reset(seed=seed), limits.step, starting=True)
    drawn = getattr(env.unwrapped, "task", None)
    if task is not None and drawn is not None and drawn.id != task.id:
        raise UserError(f"the environment plays task {drawn.id!r} where {task.id!r} was asked for")
    table = token_bytes(prompts.tokenizer)
    turns: list[Turn] = []
    reward = 0.0
    terminated = truncated = False
    stop = ""
    while not (terminated or truncated):
        budget = engine.max_context - sampling.max_new_tokens
        try:
            prompt = prompts.prompt(observation, info.get("parts"), limit=max(budget, 1))
        except WindowExceeded:
            truncated, stop = True, "window"
            break
        turn_key = (*seed_key, len(turns))
        completion, text, parsed = await _complete(
            engine, prompts, prompt.ids, turn_key, sampling, limits.request
        )
        if not completion.ids:
            truncated, stop = True, "empty"
            break
        information, invalid, query = "", None, None
        if completion.finish == "length":
            truncated, stop = True, "length"
            invalid = f"no end after {len(completion.ids)} tokens"
        else:
            observation, paid, terminated, truncated, info = await _environment(
                partial(env.step, text), limits.step
            )
            reward += float(paid)
            stop = str(info.get("stop_reason") or ("answer" if terminated else "truncated"))
            information = str(info.get("information") or "")
            invalid, query = info.get("invalid"), info.get("query")
        turn = Turn(
            prompt_ids=prompt.ids,
            completion_ids=completion.ids,
            logprobs=completion.logprobs,
            sampled=(True,) * len(completion.ids),
            memory_span=parsed.memory_span and table.token_span(completion.ids, parsed.memory_span),
            memory=parsed.memory,
            text=text,
            observation=prompt.observation,
            information=information,
            finish=completion.finish,
            invalid=invalid,
            weight_version=completion.weight_version,
            query=query,
        )
        turns.append(turn)
        if on_turn is not None:
            on_turn(turn)
    scores = info.get("scores")
    if scores is None:  # the episode ended here, and not in the environment
        scores = _no_scores(env)
        reward += scores.get("reward", 0.0)
    return Trajectory(
        sample=sample,
        turns=tuple(turns),
        reward=reward,
        stop_reason=stop,
        terminated=bool(terminated),
        truncated=bool(truncated) and not terminated,
        answer=(info.get("parse") or {}).get("answer") if terminated else None,
        scores=dict(scores),
    )


async def _complete(
    engine: Engine,
    prompts: PromptBuilder,
    prompt_ids: tuple[int, ...],
    turn_key: SeedKey,
    sampling: Sampling,
    limit: float | None,
) -> tuple[Completion, str, ParsedTurn]:
    """One turn, its text, and what it says. A stop string inside a memory or a thought ends no action: sampling goes on
    behind it."""
    done: Completion | None = None
    while True:
        ids = done.ids if done else ()
        part = () if done is None else (len(ids),)
        request = GenerationRequest(
            prompt_ids=(*prompt_ids, *ids),
            seed=derive(*turn_key, *part),
            temperature=sampling.temperature,
            max_new_tokens=sampling.max_new_tokens - len(ids),
            stop=sampling.stop,
            group="/".join(map(str, turn_key[:-2])),
        )
        try:
            async with asyncio.timeout(limit):
                more = await engine.generate(request)
        except TimeoutError as error:
            raise EpisodeError("timeout", f"the engine took longer than {limit} s for a request") from error
        except EngineError as error:
            raise EpisodeError("engine", str(error)) from error
        if more.finish == "abort":
            raise EpisodeError("engine", "the engine aborted the request")
        before = done.logprobs if done else ()
        done = replace(more, ids=(*ids, *more.ids), logprobs=(*before, *more.logprobs)) if done else more
        text = _text(prompts, done, sampling.stop)
        parsed = parse_turn(text)
        ended = more.finish != "stop" or not more.ids or parsed.closed
        if ended or not _at_stop(prompts, done, sampling.stop):
            return done, text, parsed
        if len(done.ids) >= sampling.max_new_tokens:
            return replace(done, finish="length"), text, parsed


def _text(prompts: PromptBuilder, completion: Completion, stops: Sequence[str]) -> str:
    """The completion's text without the special token that ended it."""
    table, ids = token_bytes(prompts.tokenizer), completion.ids
    if completion.finish == "stop" and ids and ids[-1] in table.special:
        # The tags may have been made special tokens: one that closes an action is part of the text.
        ids = ids if table.text(ids[-1:]) in stops else ids[:-1]
    return table.text(ids)


def _at_stop(prompts: PromptBuilder, completion: Completion, stops: Sequence[str]) -> bool:
    """Whether the last token completes a stop string."""
    table = token_bytes(prompts.tokenizer)
    last = len(table.piece(completion.ids[-1]))
    tail = b"".join(table.pieces(completion.ids[-max(map(len, stops), default=1) :]))
    # A window for each: in that of the longest a shorter one would also be found before the last token.
    return last > 0 and any(s in tail[-(len(s) + last - 1) :] for s in (stop.encode() for stop in stops))


async def _environment(call: Callable[[], T], limit: float | None, starting: bool = False) -> T:
    """Run a call of the environment: in the loop, or in a thread under a time limit.

    Any exception of an environment is its failure, not the step's; only settings that it refuses at the
    start are the user's to mend.
    """
    try:
        if limit is None:
            return call()
        async with asyncio.timeout(limit) as deadline:
            return await asyncio.to_thread(call)
    except Exception as error:
        if limit is not None and deadline.expired():
            raise EpisodeError("timeout", f"the environment took longer than {limit} s") from error
        if starting and isinstance(error, UserError):
            raise
        raise EpisodeError("environment", f"{type(error).__name__}: {error}") from error


def _no_scores(env: gym.Env[str, str]) -> Mapping[str, float]:
    """What an episode without an answer scores: the environment says so, or 0 under every name that it has."""
    base: Any = env.unwrapped
    scores: Mapping[str, float] | None = getattr(base, "scores_without_answer", None)
    if scores is not None:
        return scores
    score, task = getattr(base, "score", None), getattr(base, "task", None)
    return dict.fromkeys(score("", task), 0.0) if callable(score) and task is not None else {}


async def collect_groups(
    tasks: Sequence[Task],
    make_env: Callable[[Task], gym.Env[str, str]],
    engine: Engine,
    prompts: PromptBuilder,
    *,
    samples: int,
    sampling: Sampling,
    run_seed: int,
    step: int,
    draw: int = 0,
    retries: int = 2,
    concurrency: int | None = None,
    limits: Limits = Limits(),
    on_turn: Callable[[Turn], None] | None = None,
) -> tuple[list[Group], RolloutReport]:
    """Play `samples` episodes of each task, all at once.

    Args:
        make_env: a fresh environment whose reset draws the given task.
        run_seed, step: with task id, sample and turn they decide every sampled token.
        draw: counts further calls for the same step, which may ask a task again: it is sampled apart.
        retries: further attempts of an episode, each with a fresh environment, before its group is dropped.
        concurrency: episodes under way at once; None for all (the local engine batches them).

    Returns:
        The complete groups in the order of `tasks`, and what happened.

    Raises:
        UserError: an environment refuses to start with its settings.
    """
    report = RolloutReport()
    gate = asyncio.Semaphore(concurrency) if concurrency is not None else contextlib.nullcontext()

    async def episode(task: Task, key: SeedKey, sample: int) -> Trajectory:
        for attempt in range(retries + 1):
            async with gate:
                env = make_env(task)
                try:
                    return await play_episode(
                        env,
                        engine,
                        prompts,
                        seed_key=(*key, sample),
                        sampling=sampling,
                        sample=sample,
                        task=task,
                        reset_seed=derive(*key, "reset") % 2**31,
                        limits=limits,
                        on_turn=on_turn,
                    )
                except EpisodeError as error:
                    if attempt == retries:
                        raise
                    report.retried[error.cause] += 1
                finally:
                    with contextlib.suppress(Exception):  # a broken environment may fail to close, too
                        env.close()
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def group(task: Task, occurrence: int) -> Group | EpisodeError:
        again = (occurrence, draw) if draw else (occurrence,) if occurrence else ()
        key: SeedKey = (run_seed, step, task.id, *again)
        results = await asyncio.gather(
            *(episode(task, key, sample) for sample in range(samples)), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, EpisodeError):
                raise result
        failures = [result for result in results if isinstance(result, EpisodeError)]
        if failures:
            return failures[0]
        return Group(task, tuple(result for result in results if isinstance(result, Trajectory)))

    seen: Counter[str] = Counter()
    jobs = []
    for task in tasks:
        jobs.append(group(task, seen[task.id]))
        seen[task.id] += 1
    groups: list[Group] = []
    for task, result in zip(tasks, await asyncio.gather(*jobs), strict=True):
        if isinstance(result, EpisodeError):
            report.dropped[result.cause] += 1
            report.errors.append(f"group of task {task.id!r} dropped after {retries + 1} attempts: {result}")
        else:
            groups.append(result)
            report.add(result)
    return groups, report
