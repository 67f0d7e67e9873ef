"""P_mem and P_full: how likely the policy finds the gold answer given a memory alone, or a whole transcript.

For turn t of a trajectory, with the weights that sampled it (MemPO, arXiv 2603.00680):

    P_mem(t)  = exp(mean over answer tokens of log pi(a_l | question, mem_t, a_<l))
    P_full(t) = the same with the transcript of the steps before t instead of the memory

and at turn 1, which has no transcript, P_full reads the question alone.

What no source states, and is decided here:

- The policy reads the context as it reads an observation: the user's message of the chat template, then the
  beginning of a reply, ``<answer>``. The gold stands there in the form it has inside ``<answer>`` (several
  objectives joined with "; "). Neither ``<answer>`` nor the closing tag is scored.
- Temperature 1, whatever the rollouts were sampled with: P is a probability under the model.
- Of several aliases the most likely one counts, for each context on its own. With several objectives one
  objective at a time takes its aliases while the others keep their first (`score_context.answer_forms`).
- The question is the one the policy read, a memory stands as the environment carries it (tags inside it made
  harmless), a step is the completion's text as the policy wrote it and the information it got. Chat control
  tokens are left out: they would end the user's message.
- A transcript over the window loses its oldest steps, a memory over it the end of its text; both are counted.

All turns of a trajectory are scored in one pass over a token tree (`agent.score_tree`), so the tokens
computed grow linearly with the number of turns; equal contexts of a group are computed once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from agent.prompts import PromptBuilder
from agent.score_context import (
    ANSWER_PREFIX,
    Frame,
    Segment,
    Segments,
    answer_forms,
    frame,
    memory_block,
    memory_context,
    opening,
    question_line,
    step_text,
    transcript_context,
)
from agent.score_forward import (
    REFUSALS,
    LogProbs,
    disagreement,
    score_sequences,
    score_trees,
    text_config,
    tree_refusal,
    why_no_trees,
)
from agent.score_tree import Ids, Query, build_row, plan_rows
from agent.trajectory import Group, Trajectory
from envs.errors import UserError
from envs.neutral import neutralise

__all__ = ["MemoryScore", "MemoryScorer", "ScoreReport", "memory_context", "step_text", "transcript_context"]


@dataclass(frozen=True)
class MemoryScore:
    """Scores of one turn, both in [0, 1].

    Attributes:
        p_mem: None when the turn has no memory.
        p_full: of the transcript before the turn.
        cut: the transcript did not fit into the window and lost its oldest steps.
    """

    p_mem: float | None
    p_full: float
    cut: bool = False


@dataclass
class ScoreReport:
    """What one call of `MemoryScorer.score` did.

    Attributes:
        transcripts, transcripts_cut, steps_lost: contexts of P_full; those over the window; steps they lost.
        memories, memories_cut: contexts of P_mem; those over the window.
        contexts: contexts computed, after equal ones of a group were joined.
        tokens: tokens computed (padding not counted).
        tokens_apart: what the same contexts take as separate sequences.
        fallback: why no tree was used, or None.
    """

    transcripts: int = 0
    transcripts_cut: int = 0
    steps_lost: int = 0
    memories: int = 0
    memories_cut: int = 0
    contexts: int = 0
    tokens: int = 0
    tokens_apart: int = 0
    fallback: str | None = None


@dataclass(frozen=True)
class _TurnKeys:
    """Where to look a turn's scores up."""

    mem: Hashable | None
    full: Hashable
    cut: bool


@dataclass(frozen=True)
class _Plan:
    """Segments of one trajectory; a step has two: as the end of a context, and with more after it.

    The first ``initial`` steps were there before turn 1.
    """

    question: Segment
    initial: int
    steps: list[tuple[Segment, Segment]]
    memories: list[Segment | None]


@dataclass
class _Verdict:
    """Whether a model takes trees (why not), and up to which depth that was checked."""

    refusal: str | None
    checked: int = 0


class MemoryScorer:
    """Scores all turns of all trajectories of groups.

    Args:
        tokenizer: a Hugging Face tokenizer; its chat template makes the prompt.
        system: system prompt of the rollouts; empty for none.
        prompts: the rollouts' prompt builder, in place of ``system``.
        token_budget: padded tokens of one forward pass (a longer row has a pass of its own).
        row_tokens: tokens of one tree at most; what a larger one shares is computed again for each part.
        window: longest context with its answer, in tokens; None: as the model's configuration says.
        answer_lead: what the policy writes between ``<answer>`` and the answer; it is scored with the answer.
        trees: False scores one context at a time, as models that take no tree are scored (to compare).
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        system: str = "",
        prompts: PromptBuilder | None = None,
        token_budget: int = 4096,
        row_tokens: int = 16384,
        window: int | None = None,
        trees: bool = True,
        answer_lead: str = "",
    ) -> None:
        for name, value in (("token_budget", token_budget), ("row_tokens", row_tokens)):
            if value < 1:
                raise UserError(f"{name} is {value}; at least 1 token is needed")
        self.token_budget, self.row_tokens, self.window, self.trees = token_budget, row_tokens, window, trees
        self.report = ScoreReport()
        self._tokenizer, self._answer_lead = tokenizer, answer_lead
        self._frame = frame(prompts or PromptBuilder(tokenizer, system))
        self._verdicts: WeakKeyDictionary[torch.nn.Module, _Verdict] = WeakKeyDictionary()

    def score(self, model: torch.nn.Module, groups: Sequence[Group]) -> list[list[list[MemoryScore]]]:
        """P_mem and P_full by group, trajectory and turn.

        Args:
            model: a causal model of transformers, with the weights that sampled the groups. Dropout is off
                while it scores, its mode is left as it was, and nothing carries a gradient.

        Raises:
            UserError: a question that does not fit into the window with its answer, or a blank gold.
        """
        self.report = ScoreReport()
        segments = Segments(self._tokenizer)
        contexts = [
            _GroupContexts(index, group, self._frame, segments, self._answer_lead)
            for index, group in enumerate(groups)
        ]
        segments.encode()
        window = _window(model, self.window)
        units = [unit for group in contexts for unit in group.build(window, self.report)]
        best = {
            key: math.exp(max(float(answer.mean()) for answer in answers))
            for key, answers in self._logprobs(model, units).items()
        }
        return [
            [
                [
                    MemoryScore(None if turn.mem is None else best[turn.mem], best[turn.full], turn.cut)
                    for turn in turns
                ]
                for turns in group.keys
            ]
            for group in contexts
        ]

    def _logprobs(self, model: torch.nn.Module, units: Sequence[Sequence[Query]]) -> LogProbs:
        queries = [query for unit in units for query in unit]
        if not queries:
            return {}
        self.report.contexts = len(queries)
        self.report.tokens_apart = sum(query.tokens for query in queries)
        with _evaluating(model):
            found = self._from_trees(model, units, queries)
            if found is None:
                self.report.tokens = self.report.tokens_apart
                found = score_sequences(model, queries, self.token_budget)
        return found

    def _from_trees(
        self, model: torch.nn.Module, units: Sequence[Sequence[Query]], queries: Sequence[Query]
    ) -> LogProbs | None:
        """None when the model takes no trees; ``report.fallback`` says why then."""
        if not self.trees:
            self.report.fallback = "trees are switched off"
            return None
        verdict = self._verdicts.get(model)
        if verdict is None:
            verdict = self._verdicts[model] = _Verdict(why_no_trees(model))
            self._warn(model, verdict)
        self.report.fallback = verdict.refusal
        if verdict.refusal is not None:
            return None
        # Per layer and token, weights take about 24 d^2 operations and attention over n tokens 4 n d.
        width = getattr(text_config(model), "hidden_size", None)
        quadratic = 1 / (6 * width) if width else 0.0
        rows = [build_row(row) for row in plan_rows(units, self.row_tokens, quadratic)]
        deepest = max(queries, key=lambda query: query.depth)
        try:
            found = score_trees(model, rows, self.token_budget)
            if deepest.depth > 2 * verdict.checked:
                verdict.refusal = disagreement(model, deepest, found)
                verdict.checked = deepest.depth
        except torch.OutOfMemoryError:
            raise
        except REFUSALS as error:
            verdict.refusal = tree_refusal(error)
        self.report.fallback = verdict.refusal
        self._warn(model, verdict)
        self.report.tokens = sum(map(len, rows))
        return None if verdict.refusal is not None else found

    @staticmethod
    def _warn(model: torch.nn.Module, verdict: _Verdict) -> None:
        if verdict.refusal is not None:
            warnings.warn(
                f"memory scores of {type(model).__name__} are computed one context at a time, slower: "
                f"{verdict.refusal}",
                RuntimeWarning,
                stacklevel=5,
            )


class _GroupContexts:
    """All contexts of one group: texts are asked for at construction, queries built when they are encoded."""

    def __init__(self, index: int, group: Group, frame: Frame, segments: Segments, lead: str) -> None:
        self._index, self._segments, self._task = index, segments, group.task
        forms = answer_forms(group.task.golds)
        if not forms:
            raise UserError(f"task {group.task.id!r}: its gold answers are blank; nothing can be scored")
        add, inside = segments.add, segments.inside
        self._leading = np.array(frame.leading, dtype=np.int64)
        self._end = (add(frame.after, inside), add(ANSWER_PREFIX, inside))
        self._close = add("</mem>", inside)
        self._forms = [add(lead + form, ANSWER_PREFIX) for form in forms]
        self._plans = [self._plan(trajectory, frame.before) for trajectory in group.trajectories]
        self.keys: list[list[_TurnKeys]] = []
        self._done: set[Hashable] = set()

    def _plan(self, trajectory: Trajectory, before: str) -> _Plan:
        add, inside, clean = self._segments.add, self._segments.inside, self._segments.clean
        question, initial = opening(self._task, trajectory)
        steps = [step_text(turn.text, turn.information) for turn in trajectory.turns[:-1]]
        memories = [turn.memory for turn in trajectory.turns]
        return _Plan(
            question=add(before + question_line(question), ""),
            initial=len(initial),
            steps=[(add(text, inside), add(text + "\n", inside)) for text in map(clean, [*initial, *steps])],
            memories=[
                None if text is None else add(memory_block(clean(neutralise(text))), inside)
                for text in memories
            ],
        )

    def build(self, window: int | None, report: ScoreReport) -> list[list[Query]]:
        """Queries of each trajectory that no earlier trajectory of the group has asked."""
        return [self._build(plan, window, report) for plan in self._plans]

    def _build(self, plan: _Plan, window: int | None, report: ScoreReport) -> list[Query]:
        ids = self._segments
        start, end = [self._leading, ids[plan.question]], [ids[segment] for segment in self._end]
        answers = tuple(ids[form] for form in self._forms)
        fixed = sum(map(len, [*start, *end])) + max(map(len, answers)) - 1
        if window is not None and fixed > window:
            raise UserError(
                f"task {self._task.id!r}: question and answer need {fixed} tokens, the window has {window}"
            )
        room = math.inf if window is None else window - fixed
        queries: list[Query] = []

        def ask(kind: str, told: tuple[Segment, ...], parts: Sequence[Ids]) -> Hashable:
            key = (self._index, kind, plan.question, told)
            if key not in self._done:
                self._done.add(key)
                queries.append(Query(key, np.concatenate([*start, *parts, *end]), answers))
            return key

        mem = [
            None if memory is None else ask("mem", (memory,), [self._fit_memory(memory, room, report)])
            for memory in plan.memories
        ]
        turns: list[_TurnKeys] = []
        for turn, memory_key in enumerate(mem):
            before = plan.steps[: plan.initial + turn]
            shown = self._fit_steps(before, room, report)
            parts = [ids[more] for _, more in shown[:-1]] + [ids[last] for last, _ in shown[-1:]]
            full = ask("full", tuple(last for last, _ in shown), parts)
            turns.append(_TurnKeys(memory_key, full, cut=len(shown) < len(before)))
        self.keys.append(turns)
        return queries

    def _fit_memory(self, memory: Segment, room: float, report: ScoreReport) -> Ids:
        ids, close = self._segments[memory], self._segments[self._close]
        report.memories += 1
        if len(ids) <= room:
            return ids
        report.memories_cut += 1
        return np.concatenate([ids[: max(0, int(room) - len(close))], close[: int(room)]])

    def _fit_steps(
        self, steps: list[tuple[Segment, Segment]], room: float, report: ScoreReport
    ) -> list[tuple[Segment, Segment]]:
        """The newest steps that fit into ``room`` tokens."""
        report.transcripts += 1
        taken = 0
        for count, (last, more) in enumerate(reversed(steps)):
            taken += len(self._segments[last if count == 0 else more])
            if taken > room:
                report.transcripts_cut += 1
                report.steps_lost += len(steps) - count
                return steps[len(steps) - count :]
        return steps


def _window(model: torch.nn.Module, given: int | None) -> int | None:
    limits = [given, getattr(text_config(model), "max_position_embeddings", None)]
    return min((limit for limit in limits if limit is not None), default=None)


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        if training:
            model.train()
