"""Everything a run can be told, typed: a recipe (TOML) fills it in, the command line overrides it.

`load_config` turns a recipe's name or path and `section.key=value` overrides into a `RunConfig`, or raises a
`UserError` whose one line says which key is wrong and what would be right. The resolved configuration is
written beside every run, so that a run can be repeated from its own folder.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import tomli_w
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agent.engines.settings import SGLangSettings, VLLMSettings
from envs.errors import UserError, did_you_mean
from trainer.algorithm import AlgorithmConfig, LearnerConfig, LoraConfig, OptimizerConfig, check_together


class Section(BaseModel):
    """A table of the recipe: unknown keys are refused, field docstrings are the help."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class EnvironmentConfig(Section):
    """One source of training episodes; several make a mixture."""

    id: str = "mempo/MultiObjectiveQA-v0"
    """Registered id of the environment."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment (tasks, retriever, objectives, max_turns, ...)."""
    weight: float = Field(default=1.0, gt=0)
    """Share of this environment in a mixture, relative to the others."""


class ModelConfig(Section):
    """The policy. Either a folder, GGUF file or hub id, or (empty path) a small model made on the spot."""

    path: str = ""
    """Local Hugging Face folder, GGUF file or hub id; empty: the embedded cold-start model of `recipe`."""
    revision: str | None = None
    """Revision of a hub model; None records the one that was found."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights."""
    device: str = "cpu"
    """`cpu`, `cuda`, `mps`."""
    prompt: Literal["paper", "compact", "few-shot"] = "paper"
    """Prompt style: `compact` has no system prompt (small models), `few-shot` shows two worked turns (base models)."""
    call_style: Literal["tool_call", "search"] = "tool_call"
    """How the prompt's examples and the expert write a search."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Handed to the chat template, such as `enable_thinking = false` for Qwen3."""
    answer_lead: str = ""
    """What the policy writes between `<answer>` and the answer; a space spells names as they are spelt in texts."""
    hidden: int = Field(default=128, ge=8)
    """Width of the model made on the spot."""
    layers: int = Field(default=4, ge=1)
    """Depth of the model made on the spot."""
    heads: int = Field(default=4, ge=1)
    """Attention heads of the model made on the spot."""
    vocabulary: int = Field(default=2048, ge=300)
    """Pieces of the tokenizer trained on the corpus for the model made on the spot."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32


class HabitConfig(Section):
    """How imperfectly the scripted teacher plays: probabilities, see `agent.engines.scripted.Habits`."""

    careful: float = Field(default=0.0, ge=0, le=1)
    """Share of episodes played without any bad habit."""
    forget: float = Field(default=0.0, ge=0, le=1)
    """A remembered item is dropped when the memory is rewritten."""
    skip: float = Field(default=0.0, ge=0, le=1)
    """An objective is answered by heart, without a search."""
    hoard: float = Field(default=0.0, ge=0, le=1)
    """A whole passage is kept instead of the answer."""
    repeat: float = Field(default=0.0, ge=0, le=1)
    """A search is done twice."""


class ColdStartConfig(Section):
    """Supervised start on right episodes of a teacher, as in the paper (there: GPT-4.1's)."""

    source: Literal["none", "shipped", "train", "imitate"] = "none"
    """`shipped`: the model that comes with the package; `train`: make it now; `none`: start from `model.path`;
    `imitate`: let `model.path` imitate the teacher first."""
    teacher: str = "expert"
    """`expert`, `random`, `recorded:RUN` (an evaluation), a `.jsonl` of demonstrations, or an endpoint (`http://…/v1`)."""
    teacher_model: str = ""
    """The model's name at the endpoint."""
    teacher_temperature: float = Field(default=1.0, ge=0)
    """Temperature at the endpoint."""
    teacher_samples: int = Field(default=1, ge=1)
    """Attempts at each question at the endpoint."""
    right_reward: float = 1.0
    """With `imitate`: least reward of an episode to imitate; lower it where penalties are taken off, or parts paid."""
    think: bool = False
    """The expert writes a short thought before each action."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    """With `imitate`: optimizer and schedule."""
    lora: LoraConfig | None = None
    """With `imitate`: train adapters and merge them at the end."""
    objectives: dict[str, float] = Field(default_factory=lambda: {"1": 0.3, "2": 0.4, "3": 0.3})
    """Share of episodes by number of objectives."""
    habits: HabitConfig = HabitConfig()
    """The teacher's habits."""
    episodes: int = Field(default=6000, ge=1)
    """Teacher episodes played; only right ones are kept."""
    steps: int = Field(default=2000, ge=1)
    """Optimizer steps."""
    tokens_per_step: int = Field(default=8192, ge=256)
    """Tokens of a batch, prompts included."""
    muon_lr: float = Field(default=0.02, gt=0)
    """Peak learning rate of Muon on the hidden matrices."""
    adam_lr: float = Field(default=3e-3, gt=0)
    """Peak learning rate of AdamW on embeddings and norms."""
    copying: float = Field(default=0.33, ge=0, le=1)
    """Share of key-value copying sequences in the batches of the first `copying_until` of the steps."""
    copying_until: float = Field(default=0.5, ge=0, le=1)
    """Part of training that sees copying sequences."""
    renamed: float = Field(default=0.5, ge=0, le=1)
    """Share of episodes whose names are replaced by random words, so that copying is learnt and not the names."""
    scoring: float = Field(default=0.15, ge=0, le=1)
    """Share of rows that answer from a bare memory or a whole transcript: the contexts of P_mem and P_full."""


class RolloutConfig(Section):
    """How episodes are sampled for training."""

    questions_per_step: int = Field(default=16, ge=1)
    """Groups drawn per step."""
    group_size: int = Field(default=16, ge=1)
    """Rollouts of one question (N)."""
    temperature: float = Field(default=1.0, gt=0)
    """The only knob of sampling: top-p and top-k would change the distribution behind the trainer's back."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Tokens of one turn."""
    max_prompt_tokens: int | None = Field(default=None, ge=16)
    """Prompts are shortened to this; None: the model's window less `max_new_tokens`."""
    engine: Literal["local", "sglang", "vllm"] = "local"
    """Where tokens come from; a `vllm` server keeps the weights it was started with."""
    sglang: SGLangSettings = SGLangSettings()
    """Servers, with `engine = "sglang"`."""
    vllm: VLLMSettings = VLLMSettings()
    """The server, with `engine = "vllm"`."""
    max_batch: int = Field(default=512, ge=1)
    """Requests the local engine decodes at once."""
    retries: int = Field(default=2, ge=0)
    """Fresh attempts of an episode after an infrastructure error, before its whole group is dropped."""
    max_redraws: int = Field(default=4, ge=0)
    """With `algorithm.drop_groups_without_signal`: further draws of questions to fill a step."""
    step_seconds: float | None = Field(default=None, gt=0)
    """Time limit of one step of an environment (a tool, a judge), which then holds no other episode up; None: none."""
    request_seconds: float | None = Field(default=None, gt=0)
    """Time limit of one request to the engine."""
    episode_seconds: float | None = Field(default=None, gt=0)
    """Time limit of one attempt at an episode."""


class EvaluationConfig(Section):
    """What a run is measured on."""

    objectives: tuple[int, ...] = (2, 4)
    """Held-out episodes are asked with these numbers of objectives; empty for other environments."""
    tasks: str = ""
    """Held-out task source; empty: no final evaluation."""
    questions: int = Field(default=300, ge=0)
    """Episodes for each number of objectives in the final table."""
    every: int = Field(default=0, ge=0)
    """Validation every n steps; 0: none between start and end."""
    validation_questions: int = Field(default=64, ge=1)
    """Episodes of a validation; they are not among those of the final table."""
    interventions: bool = True
    """Also evaluate the trained model with blanked and swapped memories (does it use its memory?)."""


class OutputConfig(Section):
    """What a run leaves on the disk."""

    checkpoint_every: int = Field(default=10, ge=1)
    """Steps between checkpoints; the last step and every validation always have one."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints kept beside the best one."""
    dump_every: int = Field(default=5, ge=1)
    """Steps between episode dumps; the first and the last step always have one."""
    dump_groups: int = Field(default=4, ge=1)
    """Groups of a step that are written in readable form."""
    dump_rollouts: bool = False
    """Also keep every rollout of every step as JSONL, so that updates can be replayed."""
    tensorboard: bool = False
    """Write TensorBoard events too."""


class RunConfig(Section):
    """A whole run."""

    recipe: str = "tiny"
    """Name of the recipe this came from."""
    seed: int = Field(default=0, ge=0)
    """Decides everything that is drawn."""
    threads: int = Field(default=0, ge=0)
    """Torch threads; 0: as many as the machine has cores. Bits repeat for the same number only."""
    steps: int = Field(default=30, ge=1)
    """Training steps."""
    environment: tuple[EnvironmentConfig, ...] = Field(default=(EnvironmentConfig(),), min_length=1)
    """Training environments."""
    model: ModelConfig = ModelConfig()
    cold_start: ColdStartConfig = ColdStartConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    output: OutputConfig = OutputConfig()

    @model_validator(mode="after")
    def _one_source_of_weights(self) -> RunConfig:
        if self.cold_start.source in ("none", "imitate") and not self.model.path:
            raise ValueError(
                f"model.path is empty and cold_start.source is {self.cold_start.source!r}: "
                "name a model folder or a cold start"
            )
        if self.rollout.temperature != self.learner.temperature:
            raise ValueError(
                f"rollout.temperature is {self.rollout.temperature} but learner.temperature is "
                f"{self.learner.temperature}: the trainer must divide by what the sampler divided by"
            )
        sglang = self.rollout.sglang
        if self.rollout.engine == "sglang" and not (sglang.urls or sglang.launch):
            raise ValueError(
                "rollout.engine is 'sglang' but no server is named: give rollout.sglang.urls (--server URL) or "
                "rollout.sglang.launch=true (--launch)"
            )
        if self.rollout.engine == "vllm":
            if not self.rollout.vllm.url:
                raise ValueError(
                    "rollout.engine is 'vllm' but no server is named: give rollout.vllm.url (--server URL)"
                )
            if self.learner.old_logprobs == "recomputed" and self.learner.importance_cap is None:
                raise ValueError(
                    "a 'vllm' server keeps its weights: learner.old_logprobs must be 'engine', "
                    "or learner.importance_cap be set"
                )
        check_together(self.algorithm, self.learner)
        return self


def recipe_names() -> list[str]:
    """Recipes that come with the package."""
    folder = resources.files("trainer") / "recipes"
    return sorted(
        entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")
    )


def load_config(recipe: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe by name or path and apply ``section.key=value`` overrides.

    Raises:
        UserError: unknown recipe, unreadable file, unknown key or a value that does not fit.
    """
    return validate_config(_resolved(recipe, overrides), where=f"recipe {recipe!r}")


def engine_of(recipe: str, overrides: Sequence[str] = ()) -> str:
    """The engine that a recipe with its overrides names, whether or not the rest of it fits."""
    rollout = _resolved(recipe, overrides).get("rollout")
    return str(rollout.get("engine", "local")) if isinstance(rollout, Mapping) else "local"


def flag_overrides(values: Mapping[str, Any]) -> list[str]:
    """Overrides out of command-line flags, by the key that each is short for; None for one that was not given."""
    return [
        f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items() if value is not None
    ]


def validate_config(data: Mapping[str, Any], where: str) -> RunConfig:
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{where}: {_first_complaint(error)}") from None


def write_config(config: RunConfig, path: Path) -> None:
    """The resolved configuration as TOML; `load_config` reads it back to an equal one."""
    path.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)), encoding="utf-8")


def _resolved(recipe: str, overrides: Sequence[str]) -> dict[str, Any]:
    data = _read_recipe(recipe)
    for override in overrides:
        _apply_override(data, override)
    return data


def _read_recipe(recipe: str) -> dict[str, Any]:
    path = Path(recipe)
    if recipe.endswith(".toml") or path.is_file():
        if not path.is_file():
            raise UserError(f"recipe file {recipe} does not exist")
        text, stem = path.read_text(encoding="utf-8"), path.stem
    elif recipe in recipe_names():
        text, stem = (
            (resources.files("trainer") / "recipes" / f"{recipe}.toml").read_text(encoding="utf-8"),
            recipe,
        )
    else:
        names = recipe_names()
        raise UserError(
            f"unknown recipe {recipe!r}{did_you_mean(recipe, names)} "
            f"(recipes: {', '.join(names)}; or a path to a .toml file)"
        )
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"recipe {recipe}: not valid TOML: {error}") from None
    base = data.pop("extends", None)
    if base is not None:
        if not isinstance(base, str):
            raise UserError(f"recipe {recipe}: extends is {base!r}; the name of one recipe is needed")
        parent = _read_recipe(str(path.parent / base) if base.endswith(".toml") else base)
        data = _merge(parent, data)
    data["recipe"] = data.get("recipe", stem) if stem == "config" else stem
    return data


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both_tables = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both_tables else value
    return merged


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, separator, raw = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise UserError(f"--set {override!r}: section.key=value is needed")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw  # a bare word is a string: --set model.path=my/model
    table: Any = data
    for part in parts[:-1]:
        if isinstance(table, list):
            table = _entry(table, part, override)
        else:
            if part == "environment" and part not in table:
                table[part] = [{}]
            table = table.setdefault(part, {})
    if isinstance(table, list):
        table = _entry(table, "0", override)
    if not isinstance(table, dict):
        raise UserError(f"--set {override!r}: {'.'.join(parts[:-1])} is a value, not a section")
    table[parts[-1]] = value


def _entry(table: list[Any], part: str, override: str) -> Any:
    if not part.isdigit() or int(part) >= len(table):
        raise UserError(
            f"--set {override!r}: environment is a list of {len(table)}: write environment.0.key=value"
        )
    return table[int(part)]


def _first_complaint(error: ValidationError) -> str:
    complaint = error.errors()[0]
    location = ".".join(str(part) for part in complaint["loc"])
    if complaint["type"] == "extra_forbidden":
        section, key = complaint["loc"][:-1], str(complaint["loc"][-1])
        known = _known_keys(section)
        return f"unknown key {location!r}{did_you_mean(key, known)} (keys here: {', '.join(known)})"
    message = complaint["msg"].removeprefix("Value error, ")
    got = complaint.get("input")
    shown = f", got {got!r}" if location and not isinstance(got, Mapping | BaseModel) else ""
    return f"{location + ': ' if location else ''}{message[:1].lower()}{message[1:]}{shown}"


def _known_keys(section: Sequence[int | str]) -> list[str]:
    model: Any = RunConfig
    for part in section:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        arguments = [
            a for a in getattr(annotation, "__args__", ()) if isinstance(a, type) and issubclass(a, BaseModel)
        ]
        model = arguments[0] if arguments else annotation
    return sorted(model.model_fields)
