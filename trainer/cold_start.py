"""Supervised start: a small model learns to play like the teacher, habits included.

`python -m trainer.cold_start` rebuilds the model that comes with the package. Left out on purpose: evaluation
during training (the run measures the cold start anyway), early stopping, and any loss on prompt tokens: with the
prompts trained too, small models continued their memory by copying the prompt's format.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import rich.progress
import torch
from torch import Tensor
from torch.nn import functional

from agent.engines.scripted import Habits
from agent.models import save_model
from agent.prompts import PromptBuilder
from agent.tiny import build_model, build_tokenizer
from envs.errors import UserError
from envs.tasks.factbook import build_world
from trainer.algorithm import OptimizerConfig
from trainer.config import ColdStartConfig, RunConfig, load_config
from trainer.optimizers import build_optimizer
from trainer.teacher import Episode, Example, copying_example, rename, scoring_examples, teach, turn_examples

Progress = Callable[[int, int, float], None]
"""Called after each step with its number, the number of steps and the loss."""

SHIPPED = Path(__file__).parent / "assets" / "tiny-cold-start"
"""The model that comes with the package."""


@dataclass(frozen=True)
class TokenRow:
    """One example as tokens; positions ``start`` and later are trained."""

    ids: list[int]
    start: int


class ExampleStream:
    """Endless batches of examples, drawn with a seed.

    Args:
        words: the words that names are replaced with and lists are made of.
    """

    def __init__(
        self,
        episodes: Sequence[Episode],
        words: Sequence[str],
        tokenizer: object,
        prompts: PromptBuilder,
        config: ColdStartConfig,
        seed: int,
        answer_lead: str = "",
    ) -> None:
        self.answer_lead = answer_lead
        self.episodes, self.words, self.tokenizer, self.prompts, self.config = (
            episodes,
            words,
            tokenizer,
            prompts,
            config,
        )
        self.rng = np.random.default_rng([seed, 0xC01D])

    def batches(self) -> Iterator[list[TokenRow]]:
        """One batch of about ``tokens_per_step`` tokens for each step."""
        for step in range(self.config.steps):
            copying = self.config.copying if step < self.config.copying_until * self.config.steps else 0.0
            rows: list[TokenRow] = []
            room = self.config.tokens_per_step
            while room > 0:
                fresh = [self._row(example) for example in self._draw(copying)]
                rows += fresh
                room -= sum(len(row.ids) for row in fresh)
            yield rows

    def _draw(self, copying: float) -> list[Example]:
        if self.rng.random() < copying:
            return [copying_example(self.words, self.rng) for _ in range(4)]
        episode = self.episodes[int(self.rng.integers(len(self.episodes)))]
        last = len(episode.turns)
        turn = int(self.rng.integers(1, last + 1))
        # What the teacher answers by heart cannot be known of things that do not exist: learning it is noise.
        if episode.remembered and self.rng.random() < self.config.renamed:
            episode, turn = rename(episode, self.words, self.rng), last
        if self.rng.random() < self.config.scoring:
            return scoring_examples(episode, turn, self.answer_lead)
        return turn_examples(episode)

    def _row(self, example: Example) -> TokenRow:
        encode = self.tokenizer.encode  # type: ignore[attr-defined]
        prompt = [
            *self.prompts.build(example.prompt),
            *(encode(example.prefix, add_special_tokens=False) if example.prefix else []),
        ]
        return TokenRow(prompt + encode(example.completion, add_special_tokens=False), len(prompt))


def train(
    model: torch.nn.Module,
    stream: ExampleStream,
    config: ColdStartConfig,
    progress: Progress | None = None,
) -> list[float]:
    """Minimise the mean negative log-likelihood of response tokens; returns the loss of each step (nats/token)."""
    optimizer = build_optimizer(
        model,
        OptimizerConfig(
            name="muon",
            lr=config.adam_lr,
            muon_lr=config.muon_lr,
            muon_weight_decay=0.01,
            beta2=0.98,
        ),
    )
    losses: list[float] = []
    model.train()
    for step, rows in enumerate(stream.batches()):
        denominator = sum(len(row.ids) - row.start for row in rows)
        total = 0.0
        for batch in _by_length(rows):
            loss = _summed_loss(model, batch) / denominator
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        optimizer.clip()
        optimizer.step(_schedule(step, config.steps))
        optimizer.zero_grad()
        losses.append(total)
        if progress is not None:
            progress(step + 1, config.steps, total)
    model.eval()
    return losses


def _schedule(step: int, steps: int) -> float:
    """Warm-up over 2 %, constant, then a linear fall to 0 over the last 40 %."""
    warm_up, fall = max(1, steps // 50), max(1, int(steps * 0.4))
    return min(1.0, (step + 1) / warm_up, max(0.02, (steps - step) / fall))


def _by_length(rows: Sequence[TokenRow], rows_per_batch: int = 48) -> Iterator[list[TokenRow]]:
    ordered = sorted(rows, key=lambda row: len(row.ids))
    for start in range(0, len(ordered), rows_per_batch):
        yield ordered[start : start + rows_per_batch]


def _summed_loss(model: torch.nn.Module, rows: Sequence[TokenRow]) -> Tensor:
    width = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    trained = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):  # right padding: causal attention never sees it
        ids[index, : len(row.ids)] = torch.tensor(row.ids)
        trained[index, row.start : len(row.ids)] = True
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state  # type: ignore[operator]
    at = trained[:, 1:]  # the token at t is predicted from t - 1
    logits = model.lm_head(hidden[:, :-1][at])  # type: ignore[operator]
    return functional.cross_entropy(logits, ids[:, 1:][at], reduction="sum")


def embedded_policy(config: RunConfig) -> tuple[Any, Any]:
    """A tokenizer trained on the embedded corpus and a model with random weights, made in seconds."""
    world = build_world("tiny")
    corpus = [f"{passage.title} {passage.text}" for passage in world.passages]
    # The grammar's own words must be whole pieces, too: the corpus hardly has them.
    protocol = ["1) see none 2) unknown 3) Doc 1(Title: No documents found. Question: What is the"] * 50
    questions = [task.question for task in world.train]
    tokenizer = build_tokenizer([*corpus, *questions, *protocol], config.model.vocabulary)
    model = build_model(
        tokenizer,
        hidden=config.model.hidden,
        layers=config.model.layers,
        heads=config.model.heads,
        intermediate=2 * config.model.hidden,
        context=1024,
        seed=config.seed,
    )
    return model, tokenizer


def corpus_words() -> list[str]:
    """What names are replaced with: the words and numbers of the embedded corpus."""
    text = " ".join(f"{passage.title} {passage.text}" for passage in build_world("tiny").passages)
    return sorted(set(re.findall(r"[^\W\d_]{2,}|\d+", text)))


def build(config: RunConfig, progress: Progress | None = None) -> tuple[Any, Any, dict[str, float]]:
    """Teacher episodes, then a model that imitates them.

    Returns:
        Model, tokenizer and figures (share of right episodes, final loss in nats a token).
    """
    source, settings = config.environment[0], config.cold_start
    model, tokenizer = embedded_policy(config)
    episodes, kept = teach(
        source.id,
        source.kwargs,
        Habits(**settings.habits.model_dump()),
        settings.objectives,
        settings.episodes,
        config.model.call_style,
        config.model.answer_lead,
        config.seed,
    )
    stream = ExampleStream(
        episodes,
        corpus_words(),
        tokenizer,
        PromptBuilder(tokenizer),
        settings,
        config.seed,
        config.model.answer_lead,
    )
    losses = train(model, stream, settings, progress)
    tail = losses[-50:]
    return model, tokenizer, {"right_share": kept, "loss": sum(tail) / len(tail)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.cold_start",
        description="Rebuild the cold-start model that the recipe `tiny` starts from (about half an hour on one core).",
    )
    parser.add_argument("--recipe", default="tiny", help="recipe whose [cold_start] is built (default: tiny)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a value"
    )
    parser.add_argument(
        "--out", type=Path, default=SHIPPED, help="folder of the model (default: the package's own)"
    )
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.recipe, options.set)
        torch.set_num_threads(config.threads or 1)
        with _ProgressBar(config.cold_start.steps) as progress:
            model, tokenizer, figures = build(config, progress)
        save_model(model, tokenizer, options.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"saved {options.out}: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))
    return 0


class _ProgressBar:
    """Loss and time left on one line."""

    def __init__(self, steps: int) -> None:
        self.bar = rich.progress.Progress(
            *rich.progress.Progress.get_default_columns(),
            rich.progress.TextColumn("loss {task.fields[loss]:.3f}"),
        )
        self.task = self.bar.add_task("cold start", total=steps, loss=float("nan"))

    def __enter__(self) -> _ProgressBar:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def __call__(self, step: int, steps: int, loss: float) -> None:
        self.bar.update(self.task, completed=step, loss=loss)
        if not self.bar.console.is_terminal and step % 50 == 0:
            print(f"cold start: step {step}/{steps}, loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
