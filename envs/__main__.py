"""``python -m envs``: list, show, play, check and start environments from the command line."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from envs.base import MemoryEnv
from envs.check import CheckFailed, check_env
from envs.errors import UserError
from envs.registry import list_ids, make, spec
from envs.retrieval.base import RetrievalError
from envs.rewards import RewardError
from envs.skeleton import write_skeleton


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0, 1 when a check failed or a server is down, 2 for bad input.
    """
    options = _parser().parse_args(arguments)
    # Modules of the user's own (`check module:ns/Name-v0`) lie where the command is given.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        if getattr(options, "seed", 0) < 0:
            raise UserError(f"--seed is {options.seed}; a whole number of at least 0 is needed")
        return int(options.run(options))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RetrievalError, RewardError) as error:  # a search or a judge that is down
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, EOFError):
        print()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m envs", description="Environments for agents with a memory."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help)
        added.set_defaults(run=run)
        return added

    command("list", _list, "ids, each with the first line of its description")
    for name, run, help in (
        ("show", _show, "what an environment is, its tools, settings and a first observation"),
        ("play", _play, "play an episode by hand"),
        ("check", _check, "check an environment; exit code 1 when it breaks a rule"),
    ):
        added = command(name, run, help)
        added.add_argument("id", help="such as mempo/SearchQA-v0, or module:my/Name-v0")
        added.add_argument("--seed", type=int, default=0, help="of the episode, from 0 (default 0)")
        if name != "check":
            added.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting")
    new = command("new", _new, "write the skeleton of a new environment, which passes the check as it stands")
    new.add_argument("name", help="a class name, such as MyMaze")
    new.add_argument("--out", type=Path, default=Path(), help="folder to write to (default: here)")
    return parser


def _settings(pairs: Sequence[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key.isidentifier():
            raise UserError(f"--set {pair!r}: the form KEY=VALUE is needed")
        try:
            settings[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            settings[key] = None if value == "none" else value
    return settings


def _environment(options: argparse.Namespace) -> MemoryEnv:
    env = make(options.id, **_settings(options.set)).unwrapped
    if not isinstance(env, MemoryEnv):
        raise UserError(f"{options.id} is no MemoryEnv and cannot be shown or played here")
    return env


def _summary(env_class: Any) -> str:
    return str(env_class.__doc__ or "").strip().split("\n")[0]


def _list(options: argparse.Namespace) -> int:
    ids = list_ids()
    width = max(map(len, ids))
    for id in ids:
        module, _, name = str(spec(id).entry_point).partition(":")
        try:
            summary = _summary(getattr(__import__(module, fromlist=[name]), name))
        except (ImportError, AttributeError) as error:
            summary = f"(cannot be imported: {error})"
        print(f"{id:{width}}  {summary}")
    return 0


def _show(options: argparse.Namespace) -> int:
    env = _environment(options)
    print(f"{options.id}\n\n{inspect.getdoc(type(env)) or ''}\n\nTools\n{env.tool_help}\n")
    observation, info = env.reset(seed=options.seed)
    print(f"First observation with seed {options.seed} (task {info['task_id']}, {info['turns_left']} turns)")
    print(observation)
    return 0


def _play(options: argparse.Namespace) -> int:
    env = _environment(options)
    print(
        f"{env.tool_help}\n\nWrite a memory (a line, or none), then an action: 'answer TEXT', a tool's name"
    )
    print("with its argument (several as KEY=VALUE, separated by ';'), or a whole turn. Ctrl-D ends.\n")
    observation, info = env.reset(seed=options.seed)
    while info["stop_reason"] is None:
        print(observation.rstrip("\n"))
        memory = input("memory> ")
        action = input("action> ")
        observation, _, _, _, info = env.step(_turn(memory, action, env))
        print()
    scores = " ".join(f"{name}={value:.3g}" for name, value in info["scores"].items())
    print(f"{info['stop_reason']} after {info['turn']} turns: {scores}")
    print(f"right: {env.task.gold_answer}")
    return 0


def _turn(memory: str, action: str, env: MemoryEnv) -> str:
    """What a person typed as a turn of the policy."""
    written = f"<mem>{memory}</mem>" if memory.strip() else ""
    word, _, rest = action.strip().partition(" ")
    tool = next((tool for tool in env.tools if tool.name == word), None)
    if word == "answer":
        return f"{written}<answer>{rest}</answer>"
    if tool is None:
        return written + action
    given = {
        key.strip(): value.strip() for key, _, value in (part.partition("=") for part in rest.split(";"))
    }
    names = list(tool.arguments)
    arguments = {names[0]: rest} if len(names) == 1 else {name: given.get(name, "") for name in names}
    return f"{written}<tool_call>{json.dumps({'name': word, 'arguments': arguments})}</tool_call>"


def _check(options: argparse.Namespace) -> int:
    try:
        passed = check_env(options.id, seed=options.seed)
    except CheckFailed as error:
        print(f"{options.id} fails: {error}")
        return 1
    for phrase in passed:
        print(f"ok  {phrase}")
    return 0


def _new(options: argparse.Namespace) -> int:
    path, id = write_skeleton(options.name, options.out)
    print(f"{path} is written; check it there with: python -m envs check {id}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
