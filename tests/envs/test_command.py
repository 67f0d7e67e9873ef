"""`python -m envs`: what it prints, and one clear line with exit code 2 for bad input."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import envs
from envs.__main__ import main
from envs.skeleton import TEMPLATE

ROOT = Path(__file__).resolve().parents[2]


def test_list_names_every_id_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == envs.list_ids()
    assert "mempo/SearchQA-v0          Questions over a corpus." in "\n".join(lines)


def test_show_has_tools_settings_and_an_observation(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["show", "mempo/Errands-v0", "--seed", "3", "--set", "rooms=4", "--set", "turn_hint=true"]) == 0
    )
    out = capsys.readouterr().out
    expected, info = envs.make("mempo/Errands-v0", rooms=4, turn_hint=True).reset(seed=3)
    assert out.rstrip().endswith(expected) and info["task_id"] in out
    assert "take: takes a thing" in out and "errands: of an episode, from 1 to 6." in out


def test_a_person_can_play(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    env = envs.make("mempo/Errands-v0", rooms=3, errands=1)
    env.reset(seed=1)
    word = env.unwrapped.house.errands[0].word  # type: ignore[attr-defined]
    typed = iter(["my note", "read", "", "go up", "", f"<mem>m</mem><answer>{word}</answer>"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    assert main(["play", "mempo/Errands-v0", "--seed", "1", "--set", "rooms=3", "--set", "errands=1"]) == 0
    out = capsys.readouterr().out
    assert "<mem>my note</mem>" in out and "Plan of the house." in out
    assert "Invalid action: a direction is north, east, south or west." in out
    assert "answer after 3 turns: reward=1 em=1" in out and out.endswith(f"right: {word}\n")


@pytest.mark.parametrize(
    ("setting", "action"),
    [
        ("retriever=http://127.0.0.1:9/retrieve", "search x"),
        ("reward={judge={url='http://127.0.0.1:9',form='json',attempts=1}}", "answer x"),
    ],
)
def test_a_server_that_is_down_is_one_line(
    setting: str, action: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter(["", action])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    assert main(["play", "mempo/SearchQA-v0", "--set", setting]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "127.0.0.1:9" in error and error.count("\n") == 1


def test_several_arguments_and_the_end_of_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter(["", "search capital; of = Poland", "", "answer nothing"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    assert main(["play", "mempo/SearchQA-v0"]) == 0
    assert '"query": "capital; of = Poland"' in capsys.readouterr().out

    def end(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    assert main(["play", "mempo/SearchQA-v0"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "mempo/SerchQA-v0"], "did you mean 'mempo/SearchQA-v0'?"),
        (["play", "mempo/Errands-v0", "--set", "roms=3"], "no setting 'roms'; did you mean 'rooms'?"),
        (["show", "mempo/Errands-v0", "--set", "rooms=two"], "rooms is 'two'"),
        (["show", "mempo/Errands-v0", "--set", "rooms"], "--set 'rooms': the form KEY=VALUE is needed"),
        (
            ["show", "mempo/SearchQA-v0", "--set", "tasks=none.jsonl"],
            "question file none.jsonl does not exist",
        ),
        (["show", "CartPole-v1"], "is no MemoryEnv"),
        (["check", "no_module_of_mine:my/X-v0"], "no package 'no_module_of_mine'"),
        (["check", "module_that_fails:my/X-v0"], "module_that_fails cannot be imported, RuntimeError: boom"),
        (["show", "mempo/Errands-v0", "--seed", "-1"], "--seed is -1; a whole number of at least 0"),
        (["show", "mempo/SearchQA-v0", "--set", "tasks=3"], "tasks '3': the name of a source"),
        (["show", "mempo/SearchQA-v0", "--set", "tasks=[1]"], "tasks '[1]': the name of a source"),
        (["show", "mempo/SearchQA-v0", "--set", "retriever=3"], "retriever 3 has no search"),
        (["show", "mempo/SearchQA-v0", "--set", "counter=3"], "counter 3 is no function"),
        (["new", "not-a-name"], "'not-a-name' is no class name"),
        (["new", "Json"], "'Json' would be the module json"),
        (["new", "Envs"], "'Envs' would be the module envs"),
        (["new", "Fine", "--out", "no/such/folder"], "folder no/such/folder does not exist"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "module_that_fails.py").write_text("raise RuntimeError('boom\\nand more')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and message in captured.err


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "envs", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_a_new_environment_passes_the_check_as_it_stands(tmp_path: Path) -> None:
    made = run(tmp_path, "new", "MyMaze")
    assert made.returncode == 0 and made.stdout.endswith("python -m envs check my_maze:my/MyMaze-v0\n")
    assert len((tmp_path / "my_maze.py").read_text().splitlines()) <= 40
    checked = run(tmp_path, "check", "my_maze:my/MyMaze-v0")
    assert (checked.returncode, checked.stderr) == (0, "") and checked.stdout.count("ok  ") == 11
    again = run(tmp_path, "new", "MyMaze")
    assert (
        again.returncode == 2 and again.stderr == "error: my_maze.py is there already; it is left as it is\n"
    )
    text = (tmp_path / "my_maze.py").read_text()
    (tmp_path / "my_maze.py").write_text(
        text.replace("there is {", "there is not {self.task.golds[0][0]} but {")
    )
    failed = run(tmp_path, "check", "my_maze:my/MyMaze-v0")
    assert failed.returncode == 1 and "my/MyMaze-v0 fails: a gold answer of the task is in" in failed.stdout


def test_the_template_can_be_won() -> None:
    namespace: dict[str, object] = {}
    text = TEMPLATE.format(name="Vault", slug="vault", namespace="test", module="vault_of_a_test")
    exec(compile(text.rsplit("envs.register", 1)[0], "vault", "exec"), namespace)
    env = namespace["Vault"]()  # type: ignore[operator]
    for index in range(30):
        observation, _ = env.reset(options={"index": index})
        drawer = observation.split("drawer ")[1][0]
        call = f'<tool_call>{{"name": "open", "arguments": {{"number": "{drawer}"}}}}</tool_call>'
        *_, info = env.step(call)
        metal = info["information"].rsplit(" ", 1)[1].rstrip(".")
        assert env.step(f"<answer>{metal}</answer>")[1] == 1.0
