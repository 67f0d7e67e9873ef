"""`python -m trainer.imitate`: a supervised start of any model on a teacher's right episodes.

    python -m trainer.imitate gemma3-270m-imitate --model FOLDER --data train.jsonl --corpus corpus.jsonl --out OUT

OUT/
  config.toml             the resolved configuration
  demonstrations.jsonl    the episodes that are imitated; `--teacher OUT/demonstrations.jsonl` uses them again
  teacher/                the teacher's own run, when it is a model behind an endpoint
  imitation.jsonl         a row a step: loss, and now and then greedy scores on held-out questions
  imitation.png           the same as a picture
  model/                  a plain Hugging Face folder

Prompts are those of the rollouts, and only the teacher's words after them are trained. No logits of a whole sequence
are ever held (`trainer.forward`). Left out on purpose: early stopping, and choosing the best step by the held-out
scores, which would then not be held out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from agent.engines.local import LocalEngine
from agent.models import LoadedModel, load_model, merge_adapters, save_model
from agent.prompts import PromptBuilder, WindowExceeded
from envs.errors import UserError
from trainer.config import RunConfig, flag_overrides, load_config, recipe_names, write_config
from trainer.demonstrations import FILE, demonstrate, write_demonstrations
from trainer.forward import Forward, silence_dropout
from trainer.optimizers import OptimizerSet, build_optimizer
from trainer.packing import micro_batches
from trainer.plots import plot_imitation
from trainer.questions import prompt_builders
from trainer.reference import attach_lora
from trainer.row import Row
from trainer.teacher import Episode, Example, scoring_examples, turn_examples
from trainer.validation import Validation

Report = Callable[[dict[str, float]], None]


class ImitationRows:
    """Training rows of episodes, drawn epoch by epoch in an order that the seed decides.

    Args:
        prompts: by environment.
        scoring: share of turns that give, in place of the turn, the contexts in which its memory is scored.
        limit: longest row in tokens; longer ones are left out.

    Attributes:
        left_out: turns that did not fit, or in which nothing was said.
    """

    def __init__(
        self,
        episodes: Sequence[Episode],
        prompts: Sequence[PromptBuilder],
        *,
        scoring: float = 0.0,
        answer_lead: str = "",
        limit: int | None = None,
        seed: int = 0,
    ) -> None:
        self._prompts, self._scoring, self._limit = prompts, scoring, limit
        self._rng = np.random.default_rng([seed, 0x1417A7E])
        self._turns: list[tuple[list[Row], list[Row]]] = []
        self.left_out = 0
        for number, episode in enumerate(episodes):
            for turn, example in enumerate(turn_examples(episode), 1):
                builder = self._prompts[episode.environment]
                rows = self._rows(builder, [example], number, turn)
                if not rows:
                    self.left_out += 1
                    continue
                scored = (
                    self._rows(builder, scoring_examples(episode, turn, answer_lead), number, turn)
                    if scoring
                    else []
                )
                self._turns.append((rows, scored or rows))
        if not self._turns:
            raise UserError(
                "no turn of the demonstrations fits into a prompt: raise rollout.max_prompt_tokens"
            )

    def __len__(self) -> int:
        return len(self._turns)

    def batches(self, steps: int, tokens: int) -> Iterator[list[Row]]:
        """For each step rows of about ``tokens`` tokens, prompts included."""
        source = self._stream()
        for _ in range(steps):
            rows: list[Row] = []
            while sum(row.length for row in rows) < tokens:
                rows += next(source)
            yield rows

    def _stream(self) -> Iterator[list[Row]]:
        while True:
            for index in self._rng.permutation(len(self._turns)):
                turn, scored = self._turns[int(index)]
                yield scored if self._rng.random() < self._scoring else turn

    def _rows(
        self, prompts: PromptBuilder, examples: Sequence[Example], episode: int, turn: int
    ) -> list[Row]:
        rows = []
        encode = prompts.tokenizer.encode
        for example in examples:
            try:
                prompt = prompts.build(example.prompt)
            except WindowExceeded:
                continue
            if example.prefix:
                prompt = (*prompt, *encode(example.prefix, add_special_tokens=False))
            said = tuple(encode(example.completion, add_special_tokens=False))
            if said and (self._limit is None or len(prompt) + len(said) <= self._limit):
                zeros = (0.0,) * len(said)
                rows.append(Row(prompt, said, (True,) * len(said), zeros, zeros, episode, episode, turn))
        return rows


def step(
    forward: Forward, optimizer: OptimizerSet, rows: Sequence[Row], tokens_per_micro_batch: int
) -> float:
    """One optimizer step on the mean negative log-likelihood of the rows' completions; returns it (nats/token).

    Raises:
        UserError: loss or gradient is not finite; the weights stay as they were.
    """
    trained = sum(row.trained_tokens for row in rows)
    total = 0.0
    for batch in micro_batches(rows, tokens_per_micro_batch):
        loss = -forward(batch).logprobs.sum() / trained
        torch.autograd.backward(loss)
        total += loss.item()
    norm = float(optimizer.clip())
    if not (math.isfinite(total) and math.isfinite(norm)):
        raise UserError(
            f"imitation: loss {total:g} with a gradient of norm {norm:g}: lower cold_start.optimizer.lr, or "
            "train in float32"
        )
    optimizer.step()
    optimizer.zero_grad()
    return total


def imitate(
    policy: LoadedModel,
    episodes: Sequence[Episode],
    config: RunConfig,
    report: Report | None = None,
) -> LoadedModel:
    """Train ``policy`` on the episodes, in place or through adapters that are merged at the end.

    Args:
        report: called with a row for each step: ``step``, ``loss`` (nats a token), ``lr``, and every
            ``evaluation.every`` steps (and before the first and after the last) ``validation/…`` scores.
    """
    settings = config.cold_start
    prompts = prompt_builders(config, policy.tokenizer)
    rows = ImitationRows(
        episodes,
        prompts,
        scoring=settings.scoring,
        answer_lead=config.model.answer_lead,
        limit=_window(policy.model),
        seed=config.seed,
    )
    silence_dropout(policy.model)
    model: Any = policy.model
    if settings.lora is not None:
        model = attach_lora(model, settings.lora, config.seed)
    if config.learner.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if settings.lora is not None:
            model.enable_input_require_grads()
    optimizer = build_optimizer(model, settings.optimizer)
    forward = Forward(model, autocast=config.learner.autocast)
    engine = LocalEngine(model, policy.tokenizer, max_batch=config.rollout.max_batch)
    validation = Validation(config, prompts[0])

    def tell(number: int, values: dict[str, float]) -> None:
        every = config.evaluation.every
        if config.evaluation.tasks and every and (number % every == 0 or number == settings.steps):
            model.eval()
            if number:
                engine.load_weights(model, number)
            values = {**values, **validation.greedy(f"imitation {number}", engine)}
        if report is not None and values:
            report({"step": number, **values})

    tell(0, {})
    for number, batch in enumerate(rows.batches(settings.steps, settings.tokens_per_step), 1):
        model.train(config.learner.gradient_checkpointing)  # transformers checkpoints in training mode only
        lr = optimizer.lr
        tell(
            number, {"loss": step(forward, optimizer, batch, config.learner.tokens_per_micro_batch), "lr": lr}
        )
    model.eval()
    if hasattr(model, "merge_and_unload"):
        model = merge_adapters(model)
    return LoadedModel(model, policy.tokenizer, f"{policy.name}-imitation")


def start_by_imitation(config: RunConfig, folder: Path, console: Console) -> LoadedModel:
    """Demonstrations, training and their records in ``folder``; the model is returned, not saved."""
    policy = load_model(config.model.path, dtype=config.model.torch_dtype, device=config.model.device)
    folder.mkdir(parents=True, exist_ok=True)
    episodes, counts = demonstrate(config, folder / "teacher")
    write_demonstrations(folder / FILE, episodes)
    console.print("teacher: " + ", ".join(f"{k} {v}" for k, v in sorted(counts.items())), highlight=False)
    rows: list[dict[str, float]] = []
    started, steps = time.perf_counter(), config.cold_start.steps
    with (folder / "imitation.jsonl").open("w", encoding="utf-8") as file:

        def report(row: dict[str, float]) -> None:
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            shown = {key.removeprefix("validation/"): value for key, value in row.items() if key != "step"}
            if row["step"] % 10 == 0 or row["step"] == steps:
                text = "  ".join(f"{key} {value:.4g}" for key, value in shown.items())
                console.print(
                    f"imitation {row['step']}/{steps}  {text}  {time.perf_counter() - started:.0f} s"
                )

        trained = imitate(policy, episodes, config, report)
    plot_imitation(rows, folder / "imitation.png", f"{config.recipe}, seed {config.seed}")
    return trained


def _window(model: Any) -> int | None:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.imitate",
        description="Supervised start of any model on a teacher's right episodes.",
        epilog=f"recipes: {', '.join(recipe_names())}",
    )
    parser.add_argument(
        "recipe", nargs="?", default="gemma3-270m-imitate", help="name of a recipe or a .toml file"
    )
    parser.add_argument("--model", help="model folder, GGUF file or hub id")
    parser.add_argument("--data", help="training questions")
    parser.add_argument("--corpus", help="passages to search")
    parser.add_argument("--eval-data", help="held-out questions")
    parser.add_argument(
        "--teacher",
        help="expert, random, recorded:RUN, a .jsonl of demonstrations, or http://host:port/v1 (key: OPENAI_API_KEY)",
    )
    parser.add_argument("--teacher-model", metavar="NAME", help="the model's name at the endpoint")
    parser.add_argument(
        "--only-demonstrations", action="store_true", help="write the teacher's episodes and stop"
    )
    parser.add_argument("--seed", type=int)
    parser.add_argument("--out", type=Path, required=True, help="folder that is made")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a value"
    )
    options = parser.parse_args(arguments)
    overrides = ["cold_start.source=imitate", *options.set]
    overrides += flag_overrides(
        {
            "seed": options.seed,
            "model.path": options.model,
            "environment.0.kwargs.tasks": options.data,
            "environment.0.kwargs.retriever": options.corpus,
            "evaluation.tasks": options.eval_data,
            "cold_start.teacher": options.teacher,
            "cold_start.teacher_model": options.teacher_model,
        }
    )
    console = Console(stderr=True)
    try:
        config = load_config(options.recipe, overrides)
        torch.set_num_threads(config.threads or os.cpu_count() or 1)
        torch.manual_seed(config.seed)
        out: Path = options.out
        if (out / "model").exists():
            raise UserError(f"{out} already holds a model: choose another --out")
        out.mkdir(parents=True, exist_ok=True)
        write_config(config, out / "config.toml")
        if options.only_demonstrations:
            episodes, counts = demonstrate(config, out / "teacher")
            write_demonstrations(out / FILE, episodes)
            print(f"{out / FILE}: " + ", ".join(f"{k} {v}" for k, v in sorted(counts.items())))
            return 0
        trained = start_by_imitation(config, out, console)
        save_model(trained.model, trained.tokenizer, out / "model")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "interrupted; the same command begins the steps anew (an endpoint's episodes are kept)",
            file=sys.stderr,
        )
        return 130
    print(f"saved {out / 'model'}; curve: {out / 'imitation.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
