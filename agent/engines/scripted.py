"""Players without a model: the expert that teaches and calibrates, a random one, one that replays turns.

The expert knows each task's chain of single-hop questions (privileged, as a teacher may), but takes nothing
from it that the search did not show: it finds each answer in what it reads, writes it into its memory, and
answers from that memory. `Habits` make it the imperfect teacher of the cold start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from envs.errors import UserError
from envs.grammar import render_call
from envs.tasks.searches import search_chains
from envs.tasks.task import Task

CallStyle = Literal["search", "tool_call"]

NOTHING = "none"
UNKNOWN = "unknown"
_DOC = re.compile(r"Doc \d+\s*\(Title: (?P<title>.*?)\)\s(?P<text>.*)")


@runtime_checkable
class ScriptedPlayer(Protocol):
    """Plays one episode: reads what a policy reads, writes what a policy writes."""

    def act(self, observation: str, info: Mapping[str, Any]) -> str: ...


@dataclass(frozen=True)
class Habits:
    """Probabilities of the teacher's bad habits; all 0 is perfect play.

    The teacher knows the answers by heart, as a large language model does, so what it lost from its memory it
    still answers right at the end: such episodes survive a filter on right answers.

    Attributes:
        forget: for each turn and each finished item in memory, that it is left out from then on.
        skip: for each objective, that it is never searched.
        hoard: for each new item, that the whole passage is written down in place of the answer, and stays.
        repeat: for each finished hop, that the same search is made once more.
        careful: for each episode, that none of the above happens in it.
    """

    forget: float = 0.0
    skip: float = 0.0
    hoard: float = 0.0
    repeat: float = 0.0
    careful: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0.0 <= value <= 1.0:
                raise UserError(f"habit {name} is {value}; a probability between 0 and 1 is needed")


@dataclass
class _Objective:
    """Where the expert stands with one objective."""

    chain: Sequence[Mapping[str, Any]]
    by_heart: str
    skipped: bool = False
    hop: int = 0
    item: str | None = None
    forgotten: bool = False
    repeating: bool = False
    tried: bool = False

    @property
    def done(self) -> bool:
        return self.skipped or self.hop >= len(self.chain)


class Expert:
    """Plays one episode of a question-answering environment with a search tool, objective by objective.

    Memory holds items by objective number: ``1) Warsaw 2) zlotych``; while a chain is under way its item is
    the bridge, ``2) see Poland``; ``none`` when nothing is known. An answer that the search does not show is
    not remembered, and answered with ``unknown``.

    Args:
        task: one whose metadata tells the searches to each answer, see `envs.tasks.searches`.
        rng: draws the habits.
        think: write a short thought before each action.
        answer_lead: written before the answer; a space spells its first word as it is spelt inside a text.

    Raises:
        UserError: the task carries no chain.
    """

    def __init__(
        self,
        task: Task,
        rng: np.random.Generator,
        habits: Habits = Habits(),
        call_style: CallStyle = "search",
        think: bool = False,
        answer_lead: str = "",
    ) -> None:
        self._answer_lead = answer_lead
        chains = search_chains(task)
        if chains is None:
            raise UserError(
                f"task {task.id!r} carries no chain of searches for each question; the expert needs one"
            )
        careful = rng.random() < habits.careful
        self._rng = rng
        self._habits = Habits() if careful else habits
        self._style = call_style
        self._think = think
        self._objectives = [
            _Objective(chain, golds[0], skipped=rng.random() < self._habits.skip)
            for chain, golds in zip(chains, task.golds, strict=True)
        ]

    def act(self, observation: str, info: Mapping[str, Any]) -> str:
        """The whole text of one turn."""
        self._recall(info.get("memory"))
        self._forget()
        current = self._current()
        if current is not None and current.tried:
            self._read(current, str(info.get("information") or ""))
            current = self._current()
        memory = f"<mem>{self._memory()}</mem>"
        turns_left = info.get("turns_left")
        if current is None or (turns_left is not None and turns_left <= 1):
            thought = "<think>everything is found</think>" if self._think else ""
            answers = "; ".join(map(self._answer, self._objectives))
            return f"{memory}{thought}<answer>{self._answer_lead}{answers}</answer>"
        current.tried = True
        query = str(current.chain[current.hop]["query"])
        thought = f"<think>next: {query}</think>" if self._think else ""
        return f"{memory}{thought}{render_call(query, self._style)}"

    def _current(self) -> _Objective | None:
        return next((objective for objective in self._objectives if not objective.done), None)

    def _recall(self, memory: str | None) -> None:
        """Keep only what the carried memory still holds (it may have been cut)."""
        for objective in self._objectives:
            if objective.item is not None and objective.item not in (memory or ""):
                objective.item = None

    def _forget(self) -> None:
        for objective in self._objectives:
            finished = objective.done and objective.item is not None
            if finished and self._rng.random() < self._habits.forget:
                objective.item, objective.forgotten = None, True

    def _read(self, objective: _Objective, information: str) -> None:
        """Look for the hop's answer in what came back, note it down, and decide what to search next."""
        hop = objective.chain[objective.hop]
        answer = str(hop["answer"])
        if objective.repeating:
            objective.repeating = False
            self._advance(objective)
            return
        passage = next((line for line in information.splitlines() if _holds(line, answer)), None)
        if passage is None:
            objective.hop = len(objective.chain)
            objective.item = None
            return
        last = objective.hop == len(objective.chain) - 1
        objective.item = answer if last else f"see {answer}"
        if self._rng.random() < self._habits.hoard:
            objective.item = _whole(passage)
        if self._rng.random() < self._habits.repeat:
            objective.repeating = True
        else:
            self._advance(objective)

    @staticmethod
    def _advance(objective: _Objective) -> None:
        objective.hop += 1
        objective.tried = False

    def _memory(self) -> str:
        items = [
            f"{n}) {objective.item}" for n, objective in enumerate(self._objectives, 1) if objective.item
        ]
        return " ".join(items) or NOTHING

    def _answer(self, objective: _Objective) -> str:
        if objective.skipped or objective.forgotten:
            return objective.by_heart
        answer = str(objective.chain[-1]["answer"])
        return answer if objective.done and objective.item and _holds(objective.item, answer) else UNKNOWN


def _holds(text: str, answer: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None


def _whole(line: str) -> str:
    """Title and text of a document as it was shown."""
    match = _DOC.match(line)
    return f"{match['title']} {match['text']}" if match else line


class RandomPlayer:
    """Well-formed turns of random content: searches and remembers words it has seen, answers sometime."""

    def __init__(
        self, rng: np.random.Generator, answer_rate: float = 0.25, call_style: CallStyle = "search"
    ) -> None:
        self._rng, self._answer_rate, self._style = rng, answer_rate, call_style

    def act(self, observation: str, info: Mapping[str, Any]) -> str:
        seen = re.findall(r"\w+", observation) or ["nothing"]
        memory, said = (
            " ".join(self._rng.choice(seen, size=int(self._rng.integers(1, 6)))) for _ in range(2)
        )
        action = (
            f"<answer>{said}</answer>"
            if self._rng.random() < self._answer_rate
            else render_call(said, self._style)
        )
        return f"<mem>{memory}</mem>{action}"


class RecordingEnded(UserError):
    """The episode asks for a turn that the recording does not have."""


class RecordedPlayer:
    """Says what it was given, turn by turn.

    Raises:
        RecordingEnded: the episode goes on after the last recorded turn.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts, self._next = tuple(texts), 0

    def act(self, observation: str, info: Mapping[str, Any]) -> str:
        if self._next >= len(self._texts):
            raise RecordingEnded(
                f"the recording has {len(self._texts)} turns, but the episode asks for one more"
            )
        self._next += 1
        return self._texts[self._next - 1]


@dataclass
class Record:
    """One played episode.

    Attributes:
        turns: for each turn the observation and the text that answered it.
        information: for each turn the ``<information>`` block that its action brought, empty when none.
        memories: for each turn what it wrote into memory, None when missing.
        scores: the environment's scores, empty when the episode ended without an answer.
        info: of the last step.
    """

    task: Task
    question: str
    turns: list[tuple[str, str]] = field(default_factory=list)
    information: list[str] = field(default_factory=list)
    memories: list[str | None] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    stop_reason: str | None = None


def play(
    env: Any,
    player: ScriptedPlayer | Callable[[Task], ScriptedPlayer],
    *,
    task: Task | None = None,
    seed: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Record:
    """Reset the environment and run a player through one episode.

    Args:
        player: a player, or what makes one from the task that the reset drew, e.g.
            ``lambda task: Expert(task, rng)``.
        task: the episode to play, by its id; as ``options={"task_id": …}``.
        seed, options: handed to ``reset``.
    """
    if task is not None:
        options = {**(options or {}), "task_id": task.id}
    observation, info = env.reset(seed=seed, options=None if options is None else dict(options))
    drawn: Task = env.unwrapped.task
    chosen = player if isinstance(player, ScriptedPlayer) else player(drawn)
    record = Record(drawn, str(info["question"]))
    ended = False
    while not ended:
        text = chosen.act(observation, info)
        record.turns.append((observation, text))
        observation, _, terminated, truncated, info = env.step(text)
        ended = bool(terminated or truncated)
        record.information.append(_block(str(info.get("information") or "")))
        record.memories.append(info.get("memory"))
    record.scores = dict(info.get("scores") or {})
    record.info, record.stop_reason = dict(info), info.get("stop_reason")
    return record


def _block(information: str) -> str:
    if not information or information.startswith("<information>"):
        return information
    return f"<information>{information}</information>"
