"""Who is evaluated: a model, an endpoint or a scripted player, ready to make a player for each benchmark."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from agent.engines.base import Engine
from agent.engines.choose import serving_engine
from agent.engines.local import LocalEngine
from agent.engines.scripted import Expert, Habits, RandomPlayer, RecordedPlayer, ScriptedPlayer
from agent.memory_score import MemoryScore, MemoryScorer
from agent.models import LoadedModel, load_model, load_tokenizer
from agent.prompts import PromptBuilder, system_prompt
from agent.rollout import Limits, Sampling, SeedKey
from agent.seeds import derive
from agent.trajectory import Group, Trajectory
from envs.errors import UserError, did_you_mean
from envs.registry import make
from envs.tasks import Task
from eval.chat import ChatPlayer, Endpoint
from eval.episode import sample_id
from eval.players import EnginePlayer, ScoreMemories, TextPlayer, recorded_turns, text_hash
from eval.runner import Player
from eval.store import read_run

_OF_THE_BENCHMARK = ("tasks", "retriever", "objectives", "reward", "max_turns")
SCRIPTED = ("expert", "random", "recorded")
SEARCH_SECONDS = 120.0
"""How long a search over a network may take before the attempt counts as failed."""

DIRECT = """\
Answer the question from what you know, as short as possible:
<answer>the answer</answer>
When there are several questions, answer all of them in their order, separated by "; "."""


class Subject(Protocol):
    """Makes players; `interface` are the arguments of the environment that belong to the player, such as
    ``numbered`` or ``context``.
    """

    @property
    def name(self) -> str: ...

    @property
    def interface(self) -> Mapping[str, Any]: ...

    def identity(self) -> dict[str, Any]: ...

    def player(self, env_id: str, env_kwargs: Mapping[str, Any], temperature: float) -> Player: ...


@dataclass(frozen=True)
class Manner:
    """How a model is asked.

    Attributes:
        style: of `agent.prompts.system_prompt`.
        call_style: how the prompt's examples call a tool.
        max_new_tokens: of one turn.
        max_prompt_tokens: longer prompts are shortened; None for the model's window.
        interface: arguments of the environment that the model is used to.
        tools: without them the model answers in one turn from what it knows.
        template: handed to the chat template, such as ``{"enable_thinking": False}``.
    """

    style: str = "paper"
    call_style: str = "tool_call"
    max_new_tokens: int = 512
    max_prompt_tokens: int | None = None
    interface: Mapping[str, Any] = field(default_factory=dict)
    tools: bool = True
    template: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}; at least 1 is needed")


class ModelSubject:
    """A model behind an engine.

    Args:
        model: in this process, for the scores of its memories; None leaves them out.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        tokenizer: Any,
        fingerprint: str,
        manner: Manner,
        model: torch.nn.Module | None = None,
    ) -> None:
        self.name, self._engine, self._tokenizer = name, engine, tokenizer
        self._fingerprint, self._manner, self._model = fingerprint, manner, model
        self.interface: Mapping[str, Any] = _interface(manner)

    @classmethod
    def local(
        cls, loaded: LoadedModel, manner: Manner, name: str | None = None, memory_scores: bool = False
    ) -> ModelSubject:
        """A model in this process; with ``memory_scores`` each memory gets its P_mem and P_full."""
        engine = LocalEngine(loaded.model, loaded.tokenizer)
        model = loaded.model if memory_scores else None
        return cls(name or loaded.name, engine, loaded.tokenizer, loaded.fingerprint, manner, model)

    def identity(self) -> dict[str, Any]:
        found = {
            "name": self.name,
            "kind": "model",
            "weights": self._fingerprint,
            "tools": self._manner.tools,
        }
        return found if self._model is None else {**found, "memory_scores": True}

    def player(self, env_id: str, env_kwargs: Mapping[str, Any], temperature: float) -> Player:
        manner = self._manner
        rules = rules_for(manner, env_id, env_kwargs)
        prompts = PromptBuilder(
            self._tokenizer,
            rules,
            max_prompt_tokens=manner.max_prompt_tokens,
            template_options=manner.template,
        )
        sampling = Sampling(temperature, manner.max_new_tokens)
        identity = {"weights": self._fingerprint}
        # A search over a network waits: in a thread it holds up nobody else.
        waits = str(env_kwargs.get("retriever", "")).startswith(("http://", "https://"))
        limits = Limits(step=SEARCH_SECONDS if waits else None)
        score: ScoreMemories | None = None
        if self._model is not None:
            model, scorer = self._model, MemoryScorer(self._tokenizer, prompts=prompts)

            def score(task: Task, trajectory: Trajectory) -> list[MemoryScore]:
                return scorer.score(model, [Group(task, (trajectory,))])[0][0]

        return EnginePlayer(self._engine, prompts, sampling, self.name, identity, limits, score)


class EndpointSubject:
    """A model behind an OpenAI-compatible endpoint."""

    def __init__(self, endpoint: Endpoint, manner: Manner, name: str | None = None) -> None:
        self.name = name or endpoint.model
        self._endpoint, self._manner = endpoint, manner
        self.interface: Mapping[str, Any] = _interface(manner)

    def identity(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": "endpoint",
            "url": self._endpoint.url,
            "model": self._endpoint.model,
            "tools": self._manner.tools,
        }

    def player(self, env_id: str, env_kwargs: Mapping[str, Any], temperature: float) -> Player:
        rules = rules_for(self._manner, env_id, env_kwargs)
        return ChatPlayer(self._endpoint, rules, temperature, self._manner.max_new_tokens, self.name)


def rules_for(manner: Manner, env_id: str, env_kwargs: Mapping[str, Any]) -> str:
    """The system prompt for an environment."""
    if not manner.tools:
        return "" if manner.style == "compact" else DIRECT
    base: Any = make(env_id, **env_kwargs).unwrapped
    return system_prompt(base.tool_help, manner.style, base.max_turns, manner.call_style)  # type: ignore[arg-type]


def _interface(manner: Manner) -> dict[str, Any]:
    return dict(manner.interface) if manner.tools else {**manner.interface, "max_turns": 1}


class ScriptedSubject:
    """A player without a model, by name.

    ``expert`` knows where to search; ``random`` does anything; ``recorded:RUN`` says again what the samples of
    an evaluation run said, sample by sample, in whatever environment it is put.

    Raises:
        UserError: another name, or no run where the recording should be.
    """

    def __init__(self, name: str, interface: Mapping[str, Any] | None = None) -> None:
        kind, _, source = name.partition(":")
        if kind not in SCRIPTED:
            raise UserError(f"unknown player {kind!r}{did_you_mean(kind, SCRIPTED)} ({', '.join(SCRIPTED)})")
        if (kind == "recorded") != bool(source):
            raise UserError(
                f"player {name!r}: 'recorded' alone takes a run folder, as in recorded:runs/eval/a-run"
            )
        self.name = name
        self.interface: Mapping[str, Any] = dict(interface or {})
        self._kind, self._texts = kind, _recording(source) if source else {}

    def identity(self) -> dict[str, Any]:
        if self._kind != "recorded":
            return {"name": self.name, "kind": "scripted"}
        said = json.dumps(sorted(self._texts.items()))
        return {"name": self.name, "kind": "scripted", "recording": text_hash(said)}

    def player(self, env_id: str, env_kwargs: Mapping[str, Any], temperature: float) -> Player:
        return TextPlayer(self._make, self.name)

    def _make(self, task: Task, key: SeedKey) -> ScriptedPlayer:
        if self._kind == "expert":
            return Expert(task, _rng(*key), Habits())
        if self._kind == "random":
            return RandomPlayer(_rng(*key))
        texts = self._texts.get(sample_id(task.id, int(key[-1])))
        if texts is None:
            raise UserError(f"{self.name} has no sample {int(key[-1])} of task {task.id!r}")
        return RecordedPlayer(texts)


def _recording(folder: str) -> dict[str, tuple[str, ...]]:
    """What was said in each sample of a run that did not fail."""
    return {
        sample.id: recorded_turns(sample)
        for samples in read_run(folder).samples.values()
        for sample in samples
        if sample.error is None
    }


def _rng(*key: int | str) -> np.random.Generator:
    return np.random.default_rng(derive(*key, "player"))


def local_model(
    path: str,
    *,
    name: str | None = None,
    device: str = "cpu",
    memory_scores: bool = False,
    **overrides: Any,
) -> ModelSubject:
    """A model from a folder, GGUF file or hub id; asked as in its training run when it lies in one.

    Args:
        overrides: fields of `Manner` that are not None replace what the run or the default says.

    Raises:
        UserError: no model there.
    """
    loaded = load_model(path, device=device)
    manner = _manner(path, loaded.tokenizer, overrides)
    return ModelSubject.local(loaded, manner, name, memory_scores)


def served_model(
    path: str, urls: Sequence[str], *, engine: str = "sglang", name: str | None = None, **overrides: Any
) -> ModelSubject:
    """A model that running servers serve, asked with token ids; its folder gives the tokenizer.

    Args:
        path: the folder or hub id that the servers serve; weights are not read from it.
        engine: ``sglang`` or ``vllm``.
        overrides: as in `local_model`.

    Raises:
        UserError: no tokenizer there, no server, or servers with different weights.
    """
    tokenizer, config = load_tokenizer(path)
    serving = serving_engine(urls, config, engine)
    manner = _manner(path, tokenizer, overrides)
    return ModelSubject(name or Path(path).resolve().name, serving, tokenizer, serving.fingerprint(), manner)


def _manner(path: str, tokenizer: Any, overrides: dict[str, Any]) -> Manner:
    manner = training_manner(Path(path).parent) or Manner(
        style="paper" if getattr(tokenizer, "chat_template", None) else "few-shot"
    )
    interface = {**manner.interface, **(overrides.pop("interface", None) or {})}
    changed = {key: value for key, value in overrides.items() if value is not None}
    return Manner(**{**vars(manner), **changed, "interface": interface})


def training_manner(run: Path) -> Manner | None:
    """How the models of a training run were asked; None when the folder is no training run.

    Raises:
        UserError: a configuration that cannot be read.
    """
    file = run / "config.toml"
    if not file.is_file():
        return None
    try:
        config = tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file}: not valid TOML ({error})") from None
    environments = config.get("environment") or [{}]
    kwargs = environments[0].get("kwargs", {})
    model, rollout = config.get("model", {}), config.get("rollout", {})
    return Manner(
        style=model.get("prompt", "paper"),
        call_style=model.get("call_style", "tool_call"),
        max_new_tokens=int(rollout.get("max_new_tokens", 512)),
        max_prompt_tokens=rollout.get("max_prompt_tokens"),
        template=model.get("template_options", {}),
        interface={key: value for key, value in kwargs.items() if key not in _OF_THE_BENCHMARK},
    )


def newest_run(root: Path) -> Path:
    """The newest complete training run, which ``latest`` in the folder of runs names.

    Raises:
        UserError: there is none.
    """
    pointer = root / "latest"
    target = pointer
    if pointer.is_file():
        target = root / pointer.read_text(encoding="utf-8").strip()
    if not (target / "model").is_dir():
        raise UserError(
            f"no complete training run under {root}: run `make train` first, or name a model with --model"
        )
    return target.resolve() if pointer.is_symlink() else target
