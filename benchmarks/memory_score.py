"""Seconds to score the memories of a training step: token trees against one sequence for each context.

Both score the same contexts (equal ones of a group once), in the same process, in turns, each with the best
of several batch sizes; the sequences are batched by length, so that padding costs them next to nothing. Every
trajectory has memories and documents of its own, the worst case: rollouts of a real group repeat each other,
and what repeats is computed once.

Run: ``python -m benchmarks.memory_score --threads 1 --turns 3``
"""

from __future__ import annotations

import argparse
import random
import time

import torch

from agent.memory_score import MemoryScorer
from agent.tiny import build_model, build_tokenizer
from agent.trajectory import Group, Trajectory, Turn
from envs.tasks.task import Task


def workload(rng: random.Random, words: list[str], groups: int, samples: int, turns: int) -> list[Group]:
    """Two objectives, three documents of 12 words a search, memories that grow by two words a turn."""

    def text(count: int) -> str:
        return " ".join(rng.choices(words, k=count))

    def turn(index: int) -> Turn:
        memory, query = text(4 + 2 * index), text(4)
        documents = "\n".join(f"Doc {number}(Title: {text(1)}) {text(12)}" for number in (1, 2, 3))
        return Turn(
            prompt_ids=(0,),
            completion_ids=(0,),
            logprobs=(0.0,),
            sampled=(True,),
            memory_span=(0, 1),
            memory=memory,
            text=f"<mem>{memory}</mem><search>{query}</search>",
            observation="",
            information=documents,
            query=query,
        )

    def trajectory(sample: int) -> Trajectory:
        return Trajectory(sample, tuple(turn(i) for i in range(turns)), 0.0, "max_turns", False, True)

    return [
        Group(
            Task(f"task {group}", (text(7), text(7)), ((text(1),), (text(1),))),
            tuple(trajectory(sample) for sample in range(samples)),
        )
        for group in range(groups)
    ]


def seconds(scorer: MemoryScorer, model: torch.nn.Module, groups: list[Group]) -> float:
    start = time.perf_counter()
    scorer.score(model, groups)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budgets", type=int, nargs="+", default=[2048, 4096, 8192], help="tokens a batch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randrange(3, 8))) for _ in range(900)]
    tokenizer = build_tokenizer([" ".join(words)] * 3, 2048)
    model = build_model(tokenizer, hidden=128, layers=4, heads=4)
    groups = workload(rng, words, options.groups, options.samples, options.turns)
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {options.groups * options.samples} "
        f"trajectories of {options.turns} turns, {options.threads} thread(s)"
    )
    best: dict[bool, float] = {}
    for budget in options.budgets:
        scorers = {
            trees: MemoryScorer(tokenizer, token_budget=budget, trees=trees) for trees in (True, False)
        }
        for scorer in scorers.values():
            scorer.score(model, groups[:1])
        took = {trees: float("inf") for trees in scorers}
        for _ in range(options.repeats):
            for trees, scorer in scorers.items():
                took[trees] = min(took[trees], seconds(scorer, model, groups))
        for trees, scorer in scorers.items():
            best[trees] = min(best.get(trees, float("inf")), took[trees])
            name = "trees" if trees else "sequences"
            print(
                f"{name:>9}, batches of {budget:>5}: {took[trees]:6.2f} s, {scorer.report.tokens:>7,} tokens"
            )
    print(f"trees are {best[False] / best[True]:.2f} times as fast")


if __name__ == "__main__":
    main()
