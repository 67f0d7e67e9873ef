"""Two-hop questions over four facts, and a recipe small enough to imitate on them in a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agent.models import save_model
from agent.tiny import build_model, build_tokenizer
from trainer.config import RunConfig, load_config
from trainer.imitate import main
from trainer.teacher import Episode

FACTS = {
    "Poland": ("Warsaw", "Vistula"),
    "Peru": ("Lima", "Rimac"),
    "Mali": ("Bamako", "Niger"),
    "Oman": ("Muscat", "Darsait"),
}


def make_world(folder: Path) -> Path:
    """Two-hop questions with decompositions, one question nobody knows the way to, passages, a tiny model."""
    passages, rows = [], []
    for number, (country, (capital, river)) in enumerate(FACTS.items()):
        passages += [
            f'"{country}"\nThe capital of {country} is {capital}.',
            f'"{capital}"\n{capital} is on {river}.',
        ]
        steps = [
            {"question": f"capital of {country}", "answer": capital},
            {"question": "river of #1", "answer": river},
        ]
        rows.append(
            {
                "id": f"q{number}",
                "question": f"Which river is the capital of {country} on?",
                "golden_answers": [river],
                "metadata": {"decomposition": steps} if country != "Oman" else {},
            }
        )
    write_rows(folder / "train.jsonl", rows)
    write_rows(folder / "corpus.jsonl", [{"id": str(i), "contents": text} for i, text in enumerate(passages)])
    tokenizer = build_tokenizer([*passages, *(str(row["question"]) for row in rows)] * 5, 400)
    save_model(
        build_model(tokenizer, hidden=32, layers=2, heads=2, context=512, seed=3), tokenizer, folder / "model"
    )
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def settings(world: Path, *more: str) -> list[str]:
    small = [
        "threads=1",
        "model.prompt=compact",
        "environment.0.kwargs.topk=1",
        "cold_start.think=false",
        "cold_start.steps=40",
        "cold_start.tokens_per_step=600",
        "cold_start.lora.targets=all-linear",
        "cold_start.optimizer.lr=2e-2",
        "cold_start.optimizer.total_steps=40",
        "rollout.max_new_tokens=32",
        "evaluation.questions=1",
        "evaluation.validation_questions=3",
        "evaluation.every=20",
        f"environment.0.kwargs.tasks={world / 'train.jsonl'}",
        f"environment.0.kwargs.retriever={world / 'corpus.jsonl'}",
        f"evaluation.tasks={world / 'train.jsonl'}",
        f"model.path={world / 'model'}",
    ]
    return [*small, *more]


def configured(world: Path, *more: str) -> RunConfig:
    return load_config("gemma3-270m-imitate", settings(world, *more))


def command(world: Path, out: Path, *more: str) -> int:
    given = [part for value in settings(world, *more) for part in ("--set", value)]
    return main(["gemma3-270m-imitate", "--out", str(out), *given])


EPISODE = Episode(
    question="Who?",
    gold_answer="Ann",
    turns=(
        ("Question: Who?", "<mem>none</mem><search>who</search>"),
        ("Seen: Ann", "<mem>Ann</mem><answer>Ann</answer>"),
    ),
    information=("<information>Ann</information>", ""),
    memories=("none", "Ann"),
    names=(),
)
