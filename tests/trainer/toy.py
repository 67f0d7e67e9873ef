"""Small models and hand-made experience for the learner's tests."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from agent.trajectory import Group, Trajectory, Turn
from envs.tasks.task import Task
from trainer.row import Row

VOCABULARY = 23


def qwen(seed: int = 0, dtype: torch.dtype = torch.float64, *, exact: bool = True) -> Any:
    """Two layers, width 16. ``exact``: norms in the model's own type (the stock ones compute in float32)."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    model = Qwen2ForCausalLM(config)
    if exact:
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if type(child).__name__ == "Qwen2RMSNorm":
                    setattr(module, name, nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon))
    return model.to(dtype).eval()


def gpt2(seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """Learned positions, layer norms, dropout in its configuration."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=128, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3
    )
    return GPT2LMHeadModel(config).to(dtype).eval()


@dataclass
class PlainTurn:
    """A turn in numbers; ``span`` is the memory block, ``p_mem`` None where there is none."""

    prompt: list[int]
    completion: list[int]
    sampled: list[bool]
    old: list[float]
    span: tuple[int, int] | None
    p_mem: float | None
    p_full: float


@dataclass
class PlainQuestion:
    rewards: list[float]
    trajectories: list[list[PlainTurn]] = field(default_factory=list)


def play(
    model: Any, seed: int, questions: int = 3, rollouts: int = 4, noise: float = 0.3
) -> list[PlainQuestion]:
    """Random episodes: old log-probs are the model's own plus noise, so that ratios are not 1 and clips
    hold."""
    rng = random.Random(seed)
    played = []
    for number in range(questions):
        question = PlainQuestion([float(rng.random() < 0.5) for _ in range(rollouts)])
        question.rewards[:2] = [0.0, 1.0] if number % 2 == 0 else [1.0, 1.0]
        first = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(3, 8))]
        for _ in range(rollouts):
            turns = []
            for index in range(rng.randrange(1, 4)):
                prompt = (
                    first if index == 0 else [rng.randrange(VOCABULARY) for _ in range(rng.randrange(2, 12))]
                )
                completion = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(2, 9))]
                sampled = [True] * len(completion)
                if rng.random() < 0.3:
                    sampled[-1] = False  # a closing tag that was added after a stop string
                start = rng.randrange(len(completion) - 1)
                has_memory = rng.random() < 0.8
                span = (start, rng.randrange(start + 1, len(completion))) if has_memory else None
                turns.append(
                    PlainTurn(
                        prompt,
                        completion,
                        sampled,
                        [],
                        span,
                        rng.random() if has_memory else None,
                        rng.random(),
                    )
                )
            question.trajectories.append(turns)
        played.append(question)
    with torch.no_grad():
        for question in played:
            for turn in (turn for turns in question.trajectories for turn in turns):
                ids = torch.tensor([turn.prompt + turn.completion])
                logprobs = torch.log_softmax(model(ids).logits[0].double(), -1)
                place = len(turn.prompt) - 1
                turn.old = [
                    min(-1e-3, logprobs[place + i, token].item() + rng.gauss(0, noise))
                    for i, token in enumerate(turn.completion)
                ]
    return played


def as_groups(questions: list[PlainQuestion]) -> tuple[list[Group], list[list[list[Any]]]]:
    """The library's own types, and memory scores in their shape."""

    @dataclass(frozen=True)
    class Score:
        p_mem: float | None
        p_full: float | None

    groups, scores = [], []
    for number, question in enumerate(questions):
        trajectories = []
        for sample, (reward, turns) in enumerate(zip(question.rewards, question.trajectories, strict=True)):
            made = tuple(
                Turn(
                    prompt_ids=tuple(turn.prompt),
                    completion_ids=tuple(turn.completion),
                    logprobs=tuple(turn.old),
                    sampled=tuple(turn.sampled),
                    memory_span=turn.span,
                    memory=None if turn.span is None else "memory",
                    text="text",
                    observation="observation",
                )
                for turn in turns
            )
            trajectories.append(
                Trajectory(
                    sample, made, reward, "answer" if turns else "window", bool(turns), truncated=not turns
                )
            )
        task = Task(id=str(number), questions=("?",), golds=(("gold",),), source="toy")
        groups.append(Group(task, tuple(trajectories)))
        scores.append([[Score(turn.p_mem, turn.p_full) for turn in turns] for turns in question.trajectories])
    return groups, scores


def row(prompt: list[int], completion: list[int], **changes: Any) -> Row:
    """A row of one trajectory of its own, every token trained, advantage 1, old log-probs -1."""
    count = len(completion)
    settings: dict[str, Any] = {
        "sampled": (True,) * count,
        "advantages": (1.0,) * count,
        "old_logprobs": (-1.0,) * count,
        "question": 0,
        "trajectory": 0,
        "turn": 0,
    }
    return Row(tuple(prompt), tuple(completion), **(settings | changes))


def same_weights(model: Any, weights: dict[str, torch.Tensor]) -> Any:
    """A copy of ``model`` in float64 with other weights; those that are not named carry no gradient."""
    twin = copy.deepcopy(model).double()
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.grad = None
            parameter.requires_grad_(name in weights)
            if name in weights:
                parameter.copy_(weights[name])
    return twin
