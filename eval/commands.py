"""From the options of `python -m eval.bench` to subjects, benchmarks and settings."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from envs.errors import UserError
from eval import benchmarks as registry
from eval.benchmarks import OBJECTIVES, Benchmark
from eval.chat import Endpoint
from eval.session import Settings
from eval.subjects import (
    EndpointSubject,
    Manner,
    ScriptedSubject,
    Subject,
    local_model,
    newest_run,
    served_model,
)


def add_subject_options(parser: argparse.ArgumentParser) -> None:
    """Who is evaluated, and how it is asked."""
    who = parser.add_argument_group(
        "who is evaluated (default: the newest training run, beside its cold start)"
    )
    who.add_argument("--model", metavar="PATH", help="Hugging Face folder, .gguf file or hub id")
    who.add_argument(
        "--run", type=Path, metavar="FOLDER", help="a training run: its model and its cold start"
    )
    who.add_argument("--player", metavar="NAME", help="a scripted player: expert, random or recorded:RUN")
    who.add_argument(
        "--endpoint",
        metavar="URL",
        help="OpenAI-compatible address (http://host:port/v1; key: OPENAI_API_KEY)",
    )
    who.add_argument(
        "--server",
        action="append",
        metavar="URL",
        help="a running server (http://host:port) that serves --model; may be repeated for SGLang",
    )
    who.add_argument("--engine", choices=("sglang", "vllm"), help="what runs at --server (sglang)")
    who.add_argument("--endpoint-model", metavar="NAME", help="the model's name at the endpoint")
    who.add_argument("--name", help="how tables call the model (default: the folder's name)")
    who.add_argument("--device", default="cpu", help="cpu, cuda, ... (default: cpu)")
    how = parser.add_argument_group("how it is asked (default: as in its training run, else as stated)")
    how.add_argument("--prompt", choices=("paper", "compact", "few-shot"), help="system prompt")
    how.add_argument("--call-style", choices=("tool_call", "search"), help="form of a call in the prompt")
    how.add_argument("--max-new-tokens", type=int, metavar="N", help="tokens of one turn (512)")
    how.add_argument(
        "--max-prompt-tokens", type=int, metavar="N", help="longer prompts are shortened (window)"
    )
    how.add_argument("--context", metavar="C", help="what is carried: previous, full, or a number of steps")
    how.add_argument(
        "--template-arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="argument of the chat template, such as enable_thinking=false",
    )
    how.add_argument("--no-tools", action="store_true", help="one turn, from what the model knows")
    how.add_argument(
        "--memory", default="keep", help="keep, blank, or swap with another episode's (default: keep)"
    )
    how.add_argument(
        "--memory-scores", action="store_true", help="score each memory (P_mem, P_full) with the model itself"
    )
    how.add_argument(
        "--env-arg", action="append", default=[], metavar="KEY=VALUE", help="argument of the environment"
    )


def add_task_options(parser: argparse.ArgumentParser) -> None:
    """What is asked, how often, and where it is written."""
    what = parser.add_argument_group("what is asked (default: the embedded held-out benchmarks)")
    what.add_argument(
        "--benchmark", action="append", metavar="NAME", help="of `list`, or a .toml file; may be repeated"
    )
    what.add_argument("--data", metavar="FILE", help="questions: .jsonl or .parquet in FlashRAG form")
    what.add_argument("--corpus", metavar="FILE", help="what is searched: a corpus file or an http address")
    what.add_argument("--objectives", type=int, metavar="K", help="questions of --data in one episode (1)")
    what.add_argument("--env", metavar="ID", help="any registered environment, with its own tasks")
    add_sampling_options(parser)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """How often, how sampled, under which rule, into which folder."""
    often = parser.add_argument_group("sampling and output")
    often.add_argument("--questions", type=int, metavar="N", help="at most this many episodes a benchmark")
    often.add_argument("--samples", type=int, metavar="K", help="attempts at each question")
    often.add_argument(
        "--temperature", type=float, metavar="T", help="0 is greedy (default: the benchmark's)"
    )
    often.add_argument(
        "--scorer", metavar="RULE", help="squad, hotpotqa, robust, objectives, mem1, mem1_train"
    )
    often.add_argument("--seed", type=int, default=0, help="decides every sampled token (default: 0)")
    often.add_argument("--concurrency", type=int, default=128, metavar="N", help="episodes at once (128)")
    often.add_argument(
        "--out", type=_folder, metavar="FOLDER", help="run folder (default: found by its settings)"
    )
    often.add_argument("--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="all runs (runs)")


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("an empty text names no folder")
    return Path(text)


def subjects(options: argparse.Namespace) -> list[tuple[Subject, Path]]:
    """Who is evaluated, each with the folder that its runs go under.

    Raises:
        UserError: options that exclude each other, no run, no model.
    """
    if options.name is not None and (not options.name.strip() or not _encodes(options.name)):
        raise UserError(f"--name is {options.name!r}; a text that can be printed is needed")
    chosen = [flag for flag in ("model", "run", "player", "endpoint") if getattr(options, flag) is not None]
    if len(chosen) > 1:
        raise UserError(f"--{chosen[0]} and --{chosen[1]} name two different things to evaluate; give one")
    _check_server(options)
    if options.player is not None:
        return [(ScriptedSubject(options.player), options.runs / "eval")]
    manner: dict[str, Any] = {
        "style": options.prompt,
        "call_style": options.call_style,
        "max_new_tokens": options.max_new_tokens,
        "max_prompt_tokens": options.max_prompt_tokens,
        "tools": False if options.no_tools else None,
        "template": parse_arguments(options.template_arg, "--template-arg") or None,
    }
    if options.endpoint is not None:
        if options.endpoint_model is None:
            raise UserError("--endpoint needs --endpoint-model: the model's name there")
        endpoint = Endpoint(options.endpoint, options.endpoint_model, concurrency=options.concurrency)
        given = Manner(**{key: value for key, value in manner.items() if value is not None})
        return [(EndpointSubject(endpoint, given, options.name), options.runs / "eval")]
    if options.server is not None:
        manner |= {"engine": options.engine or "sglang", "name": options.name}
        return [(served_model(options.model, options.server, **manner), options.runs / "eval")]
    manner |= {"device": options.device, "memory_scores": options.memory_scores}
    if options.model is not None:
        return [(local_model(options.model, name=options.name, **manner), options.runs / "eval")]
    run = training_run(options)
    if options.out is not None:
        raise UserError(
            "--out names one run folder, but a training run has two models; name one with --model"
        )
    return [
        (local_model(str(run / folder), name=name, **manner), run / "eval")
        for folder, name in (("cold_start", "cold start"), ("model", "trained"))
        if (run / folder).is_dir()
    ]


def _check_server(options: argparse.Namespace) -> None:
    if options.server is None:
        if options.engine is not None:
            raise UserError("--engine says what runs at --server; name a server")
        return
    if options.model is None:
        raise UserError("--server needs --model: the folder of the model that it serves, for its tokenizer")
    if options.memory_scores:
        raise UserError("--memory-scores needs the model in this process: leave out --server")


def training_run(options: argparse.Namespace) -> Path:
    """The training run that was named, else the newest one."""
    run: Path | None = options.run
    if run is None:
        return newest_run(options.runs)
    if not (run / "model").is_dir():
        raise UserError(f"{run} is no complete training run: it has no folder 'model'")
    return run


def chosen_benchmarks(options: argparse.Namespace) -> list[Benchmark]:
    """What is asked.

    Raises:
        UserError: unknown names, options that need another one.
    """
    if options.data is not None:
        found = [_from_data(options)]
    elif options.env is not None:
        found = [Benchmark(options.env.split("/")[-1], (), options.env, questions=options.questions or 100)]
    elif options.benchmark:
        found = [registry.get(name) for name in options.benchmark]
    else:
        found = default_benchmarks(options)
    if options.data is None and (options.corpus is not None or options.objectives is not None):
        raise UserError("--corpus and --objectives go with --data")
    changes = {
        key: value
        for key in ("questions", "samples", "temperature", "scorer")
        if (value := getattr(options, key)) is not None
    }
    return [replace(benchmark, **changes) for benchmark in found]


def default_benchmarks(options: argparse.Namespace) -> list[Benchmark]:
    """The embedded held-out benchmarks: those of the world that the model was trained in."""
    _check_server(options)
    world = "factbook"
    folder = Path(options.model).parent if options.model is not None else None
    if options.endpoint is not None:
        return [registry.get(f"{world}-{k}") for k in OBJECTIVES]
    if options.model is None and options.player is None:
        folder = training_run(options)
    if options.player is not None:
        world = "factbook-tiny"
    elif folder is not None and (folder / "config.toml").is_file():
        evaluation, kwargs = _training_sources(folder / "config.toml")
        source = evaluation or "factbook-tiny:heldout"
        if source not in ("factbook:heldout", "factbook-tiny:heldout"):
            return [
                Benchmark(
                    f"{Path(source).stem}-{k}" if k > 1 else Path(source).stem,
                    (source,),
                    "mempo/MultiObjectiveQA-v0",
                    {"retriever": kwargs.get("retriever", "factbook"), "objectives": k},
                    questions=300,
                )
                for k in (2, 4)
            ]
        world = source.split(":")[0]
    return [registry.get(f"{world}-{k}") for k in OBJECTIVES]


def settings(options: argparse.Namespace) -> Settings:
    """Seed, memory, concurrency and arguments of the environment."""
    env_kwargs = parse_arguments(options.env_arg)
    if options.context is not None:
        env_kwargs["context"] = int(options.context) if options.context.isdecimal() else options.context
    return Settings(options.seed, options.memory, options.concurrency, env_kwargs=env_kwargs)


def parse_arguments(pairs: Sequence[str], flag: str = "--env-arg") -> dict[str, Any]:
    """``key=value`` with the value read as TOML, else as text.

    Raises:
        UserError: another form.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, separator, raw = pair.partition("=")
        if not separator or not key:
            raise UserError(f"{flag} {pair!r}: key=value is needed")
        try:
            found[key] = tomllib.loads(f"value = {raw}")["value"]
        except tomllib.TOMLDecodeError:
            found[key] = raw
    return found


def _from_data(options: argparse.Namespace) -> Benchmark:
    if options.benchmark or options.env:
        raise UserError("--data is a benchmark of its own; it excludes --benchmark and --env")
    if options.corpus is None:
        raise UserError("--data needs --corpus: the passages that the agent searches, or an http address")
    objectives = options.objectives or 1
    kwargs: dict[str, Any] = {"retriever": options.corpus}
    env = "mempo/SearchQA-v0"
    if objectives > 1:
        env = "mempo/MultiObjectiveQA-v0"
        kwargs |= {"objectives": objectives, "max_turns": max(16, 3 * objectives)}
    name = Path(options.data).stem
    return Benchmark(name if objectives == 1 else f"{name}-{objectives}", (options.data,), env, kwargs)


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _training_sources(file: Path) -> tuple[str, Mapping[str, Any]]:
    try:
        config = tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file}: not valid TOML ({error})") from None
    environments = config.get("environment") or [{}]
    return str(config.get("evaluation", {}).get("tasks", "")), environments[0].get("kwargs", {})
