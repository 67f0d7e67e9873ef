"""From sampled ids to trained ids: whole turns over tokenizers that cut in the worst places.

The reference knows where the memory block lies because it wrote the text around it, and which token owns which byte
because it cut the text itself; nothing of `agent.spans` or `envs.grammar` is asked.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from agent.engines.base import Completion, GenerationRequest
from agent.memory_score import MemoryScore
from agent.prompts import PromptBuilder
from agent.rollout import Sampling, play_episode
from agent.trajectory import Group
from envs.spaces import TextSpace
from envs.tasks.task import Task
from tests.agent.test_spans import byte_fallback, shipped
from trainer.algorithm import AlgorithmConfig
from trainer.packing import micro_batches
from trainer.rows import rows_from_groups

COUNT, GROUP = 10_000, 4
MERGED = [
    "</mem><th", "</mem>\n<", "><mem>", "k><mem>a", "<mem>a", "a</mem>", "</me", "m><answer>", "</answer>.", "ink><me",
    "</think>\n\n<", " <", "> ", "<mem", "mem>", "></", "é<", "漢", "<|im_end|> a",
]  # fmt: skip
PIECES = [
    "a",
    " b ",
    "é",
    "漢字",
    "🙂",
    "<",
    ">",
    "</",
    "\n",
    "x.",
    "<think>",
    "<answer>",
    "<|im_end|>",
    "<s>",
]
RAW = [b"\xe2", b"\xf0\x9f", b"\x80", b"\xff", b"\xe6\xbc"]


def byte_level() -> tuple[PreTrainedTokenizerFast, dict[int, bytes], list[int]]:
    """Byte-level BPE without a token for any tag, but with tokens that hold a tag's end and what follows."""
    letters = bytes_to_unicode()
    contents = [bytes([byte]) for byte in range(256)]
    contents += [text.encode() for text in MERGED] + [b"\xe2\x80", b"\x9f\x99\x82<", b"\xa9</mem>"]
    names = ["".join(letters[byte] for byte in content) for content in contents]
    core = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<s>"]})
    special = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<s>")]
    table = dict(enumerate(contents)) | {special[0]: b"<|im_end|>", special[1]: b"<s>"}
    return tokenizer, table, special


@dataclass(frozen=True)
class Turn:
    """A completion as it was cut, and the tokens that overlap its memory block."""

    ids: tuple[int, ...]
    span: tuple[int, int] | None
    merged: bool
    split: bool


def some(rng: random.Random, pieces: list[str], least: int = 0) -> bytes:
    parts = [rng.choice(pieces).encode() for _ in range(rng.randint(least, 4))]
    if rng.random() < 0.15:
        parts.insert(rng.randint(0, len(parts)), rng.choice(RAW))
    return b"".join(parts)


def turn(rng: random.Random, by_bytes: dict[bytes, list[int]], longest: int) -> Turn:
    """Thought and memory in either order, each perhaps missing, then an action; cut at random."""
    # Only a thought that opens another one would go on behind its end.
    thought = some(rng, [*(piece for piece in PIECES if piece != "<think>"), "<mem>"])
    kind = rng.choice(["none", "written", "opened"])  # opened: by the prompt of a thinking template
    think = {"none": b"", "written": b"<think>" + thought + b"</think>", "opened": thought + b"</think>"}[
        kind
    ]
    remembers = rng.random() < 0.85
    content = (b"m" + some(rng, PIECES)) if remembers else rng.choice([b"", b"  \n"])
    block = b"<mem>" + content + b"</mem>" if remembers or rng.random() < 0.5 else b""
    first, last = (block, think) if kind == "written" and rng.random() < 0.4 else (think, block)
    gap = rng.choice([b"", b"", b"\n", b" "])
    action = rng.choice([b"<answer>a</answer>", b"<search>q</search>"])
    text = first + gap + last + action
    start = 0 if first is block else len(first + gap)
    tail = rng.choice([b"", b"", b"."])

    ids: list[int] = []
    owner: list[int] = []
    rest = text + tail
    while len(owner) < len(text):
        lengths = [n for n in range(1, min(len(rest), longest) + 1) if rest[:n] in by_bytes]
        weights = [1 + 3 * n for n in lengths]
        (length,) = rng.choices(lengths, weights)
        owner += [len(ids)] * length
        ids.append(rng.choice(by_bytes[rest[:length]]))
        rest = rest[length:]
    if not remembers:
        return Turn(tuple(ids), None, False, False)
    inside = owner[start : start + len(block)]
    end = start + len(block)
    merged = owner[end - 1] == owner[end] or (start > 0 and owner[start - 1] == owner[start])
    return Turn(tuple(ids), (inside[0], inside[-1] + 1), merged, len(set(owner[end - 6 : end])) > 1)


class OneTurn(gym.Env[str, str]):
    """Every action ends the episode; what it is worth is drawn beforehand."""

    action_space = observation_space = TextSpace()

    def __init__(self, reward: float) -> None:
        self._reward = reward

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        return "Who?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", self._reward, True, False, {"stop_reason": "answer", "scores": {"em": self._reward}}


class Saying:
    """Samples what it is told to."""

    weight_version, max_context = 0, 10_000

    def __init__(self, ids: tuple[int, ...], logprobs: tuple[float, ...]) -> None:
        self.completion = Completion(ids, logprobs, "stop", 0)

    async def generate(self, request: GenerationRequest) -> Completion:
        return self.completion

    async def close(self) -> None:
        return


@pytest.mark.parametrize("kind", ["byte-level", "shipped", "metaspace", "replace"])
def test_what_was_sampled_is_trained_and_the_memory_is_where_it_was_written(kind: str) -> None:
    if kind == "byte-level":
        tokenizer, table, special = byte_level()
    else:
        tokenizer, table, special = shipped() if kind == "shipped" else byte_fallback(kind == "metaspace")
    by_bytes: dict[bytes, list[int]] = {}
    for index, content in table.items():
        by_bytes.setdefault(content, []).append(index)
    by_bytes.pop(b"", None)
    rng = random.Random(f"exact {kind}")
    longest = max(map(len, by_bytes))
    wanted = [turn(rng, by_bytes, longest) for _ in range(COUNT // 4)]
    drawn = [tuple(-rng.random() * 9 for _ in each.ids) for each in wanted]
    rewards = [float(rng.random() < 0.5) for _ in wanted]
    prompts = PromptBuilder(tokenizer, style="plain")
    task = Task("t", ("Who?",), (("a",),))

    async def play() -> list[Any]:
        return [
            await play_episode(
                OneTurn(reward),
                Saying(each.ids, logprobs),
                prompts,
                seed_key=(0,),
                sampling=Sampling(max_new_tokens=500),
                sample=number % GROUP,
            )
            for number, (each, logprobs, reward) in enumerate(zip(wanted, drawn, rewards, strict=True))
        ]

    played = asyncio.run(play())
    for each, logprobs, trajectory in zip(wanted, drawn, played, strict=True):
        (found,) = trajectory.turns
        assert found.completion_ids == each.ids and found.logprobs == logprobs and all(found.sampled)
        assert found.memory_span == each.span, (found.text, [table[i] for i in each.ids])

    groups = [Group(task, tuple(played[i : i + GROUP])) for i in range(0, len(played), GROUP)]
    scores = [
        [
            [MemoryScore(None if t.memory is None else rng.random(), rng.random()) for t in each.turns]
            for each in group.trajectories
        ]
        for group in groups
    ]
    rows, _ = rows_from_groups(groups, scores, AlgorithmConfig())
    assert [row.completion_ids for row in rows] == [each.ids for each in wanted]
    raised = 0
    for each, row in zip(wanted, rows, strict=True):
        start, end = each.span or (0, 0)
        outside = {a for place, a in enumerate(row.advantages) if not start <= place < end}
        within = set(row.advantages[start:end])
        assert len(outside) <= 1 and len(within) <= 1
        raised += bool(within) and within != outside
    batches = micro_batches(rows, 4096)
    for batch in batches:
        targets = iter(zip(batch.targets.tolist(), batch.sources.tolist(), strict=True))
        flat = batch.input_ids.flatten().tolist()
        for index in batch.rows:
            for token in wanted[index].ids:
                target, source = next(targets)
                assert target == token == flat[source + 1]
    assert sorted(index for batch in batches for index in batch.rows) == list(range(len(wanted)))

    remembered = [each for each in wanted if each.span is not None]
    assert 0.7 < len(remembered) / len(wanted) < 0.98 and raised > 0.6 * len(wanted)
    assert sum(each.split for each in remembered) > 100
    assert np.mean([any(i in special for i in each.ids) for each in wanted]) > 0.1
    if kind != "shipped":  # there tags are tokens of their own, and merged with nothing
        assert sum(each.merged for each in remembered) > 100
