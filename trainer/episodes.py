"""Episodes as a person reads them: asked, remembered, thought, searched, found, and what it earned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from agent.memory_score import MemoryScore
from agent.trajectory import Group, Trajectory, Turn
from envs.grammar import parse_turn
from envs.neutral import clip

INFORMATION_LIMIT = 1200
"""Characters of a tool's reply that are shown; the rollout files have all of it."""


def write_episodes(
    path: str | Path,
    step: int,
    groups: Sequence[Group],
    scores: Sequence[Sequence[Sequence[MemoryScore]]] | None = None,
    outcome_advantages: Sequence[Sequence[float]] | None = None,
    memory_advantages: Sequence[Sequence[Sequence[float]]] | None = None,
) -> None:
    """Write groups as Markdown.

    Args:
        scores, outcome_advantages, memory_advantages: by group, trajectory (and turn); left out where None.
    """
    lines = [f"# Episodes of step {step}", ""]
    for index, group in enumerate(groups):
        lines += _group(
            group,
            None if scores is None else scores[index],
            None if outcome_advantages is None else outcome_advantages[index],
            None if memory_advantages is None else memory_advantages[index],
        )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines), encoding="utf-8", errors="backslashreplace")


def _group(
    group: Group,
    scores: Sequence[Sequence[MemoryScore]] | None,
    outcome: Sequence[float] | None,
    memory: Sequence[Sequence[float]] | None,
) -> list[str]:
    task = group.task
    lines = [f"## Task {task.id}" + (f" ({task.source})" if task.source else ""), ""]
    for number, (question, golds) in enumerate(zip(task.questions, task.golds, strict=True), 1):
        label = f"{number}. " if len(task.questions) > 1 else ""
        lines += [f"{label}**Question:** {question}  ", f"   **Gold:** {' | '.join(golds)}", ""]
    for index, trajectory in enumerate(group.trajectories):
        lines += _episode(
            trajectory,
            None if scores is None else scores[index],
            None if outcome is None else outcome[index],
            None if memory is None else memory[index],
        )
    return lines


def _episode(
    trajectory: Trajectory,
    scores: Sequence[MemoryScore] | None,
    outcome: float | None,
    memory: Sequence[float] | None,
) -> list[str]:
    reward = "not scored" if math.isnan(trajectory.reward) else f"{trajectory.reward:g}"
    facts = [f"reward {reward}", f"ended by {trajectory.stop_reason}"]
    facts += [f"{name} {value:.2f}" for name, value in trajectory.scores.items() if name != "reward"]
    facts.append(f"{trajectory.total_tokens} tokens, peak {trajectory.peak_tokens}")
    if outcome is not None:
        facts.append(f"A_T {outcome:+.2f}")
    lines = [f"### Rollout {trajectory.sample}: {', '.join(facts)}", ""]
    for index, turn in enumerate(trajectory.turns):
        score = None if scores is None else scores[index]
        lines += _turn(index + 1, turn, score, None if memory is None else memory[index])
    answer = "none" if trajectory.answer is None else trajectory.answer
    return [*lines, f"**Answer:** {answer}", ""]


def _turn(number: int, turn: Turn, score: MemoryScore | None, advantage: float | None) -> list[str]:
    facts = [f"{len(turn.prompt_ids)} + {len(turn.completion_ids)} tokens"]
    if score is not None and score.p_mem is not None:
        facts += [
            f"P_mem {score.p_mem:.3f}",
            f"P_full {score.p_full:.3f}" + (" (transcript cut)" if score.cut else ""),
            f"R_M {score.p_mem - score.p_full:+.3f}",
        ]
        facts += [] if advantage is None else [f"A_M {advantage:+.2f}"]
    parsed = parse_turn(turn.text)
    lines = [f"**Turn {number}** ({', '.join(facts)})", ""]
    memory = "(none)" if turn.memory is None else turn.memory
    lines += [f"- memory: {_indented(memory)}"]
    if parsed.think is not None:
        lines += [f"- thought: {_indented(parsed.think)}"]
    if turn.query is not None:
        lines += [f"- search: {_indented(turn.query)}"]
    elif parsed.answer is not None:
        lines += [f"- answer: {_indented(parsed.answer)}"]
    elif parsed.call is not None:
        lines += [f"- call: {parsed.call.name} {dict(parsed.call.arguments)}"]
    if turn.invalid is not None:
        lines += [f"- invalid: {turn.invalid}", f"- as written: {_indented(turn.text)}"]
    if turn.finish != "stop":
        lines += [f"- generation ended by: {turn.finish}"]
    if turn.information:
        lines += ["", *(f"> {line}" for line in clip(turn.information, INFORMATION_LIMIT).splitlines())]
    return [*lines, ""]


def _indented(text: str) -> str:
    return text.strip().replace("\n", "\n  ")
