"""The registry of benchmarks: ours, a person's own from a file or a decorator, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envs.errors import UserError
from eval.bench import main
from eval.benchmarks import Benchmark, get, load_file, names, register
from tests.eval.test_bench import lines_of


def test_registry(tmp_path: Path) -> None:
    assert {f"factbook-tiny-{k}" for k in (2, 4, 6, 8, 10)} | {"nq", "bamboogle", "mempo-10"} <= set(names())
    file = tmp_path / "more.toml"
    (tmp_path / "questions.jsonl").write_text('{"id": "1", "question": "q?", "golden_answers": ["a"]}\n')
    file.write_text(
        '[[benchmark]]\nname = "mine"\ntasks = "questions.jsonl"\nenv_kwargs = {retriever = "factbook-tiny"}\n'
    )
    mine = get(str(file))
    assert mine.tasks == (str(tmp_path / "questions.jsonl"),)
    assert [task.id for task in mine.load()] == ["1"]

    @register
    def added() -> Benchmark:
        return Benchmark("test-added", ("factbook-tiny:heldout",), env_kwargs={"retriever": "factbook-tiny"})

    assert get("test-added") == added
    file.write_text('[[benchmark]]\nname = "mine"\ntask = "questions.jsonl"\n')
    with pytest.raises(ValueError, match="unknown key 'task'; did you mean 'tasks'"):
        load_file(file)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("name = 3", "a text under 'name' is needed"),
        ('name = ""', "a name, and texts as tasks, are needed"),
        ('name = "x"\ntasks = 3', "tasks is 3; a text or a list of texts is needed"),
        ('name = "x"\ntasks = [3]', "a name, and texts as tasks, are needed"),
        ('name = "x"\nenv_kwargs = 3', "env_kwargs is 3; a table is needed"),
        ('name = "x"\nenv = 3', "env is 3; a text is needed"),
        ('name = "x"\nscorer = 3', "scorer is 3; a text is needed"),
        ('name = "x"\nscorer = "squda"', "did you mean 'squad'"),
        ('name = "x"\nquestions = 1.5', "questions is 1.5; a whole number is needed"),
        ('name = "x"\nquestions = true', "questions is True; a whole number is needed"),
        ('name = "x"\nsamples = "2"', "samples is '2'; a whole number is needed"),
        ('name = "x"\ntemperature = "hot"', "temperature is 'hot'; a number is needed"),
        ('name = "x"\ntemperature = inf', "temperature is inf; 0 or more is needed"),
        ('name = "x"\nversion = "1"', "version is '1'; a whole number is needed"),
    ],
)
def test_wrong_kinds_in_a_benchmark_file(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f"[[benchmark]]\n{line}\n")
    with pytest.raises(UserError) as caught:
        load_file(file)
    assert str(caught.value).startswith(f"{file}, benchmark 1: ") and message in str(caught.value)


def test_own_benchmarks_from_a_file_and_a_decorator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both run through the command line, with what they say in the run's configuration."""
    file = tmp_path / "mine.toml"
    file.write_text(
        '[[benchmark]]\nname = "from-file"\ntasks = "factbook-tiny:heldout"\nenv = "mempo/MultiObjectiveQA-v0"\n'
        'env_kwargs = { retriever = "factbook-tiny", objectives = 3 }\nscorer = "mem1"\nquestions = 4\nversion = 7\n'
    )

    @register
    def decorated() -> Benchmark:
        return Benchmark("decorated", ("factbook-tiny:heldout",), env_kwargs={"retriever": "factbook-tiny"})

    command = ["--player", "expert", "--benchmark", str(file), "--benchmark", "decorated", "--questions", "4"]
    assert main([*command, "--out", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert "| mem1 | 4 | 3.000" in lines_of(printed, "from-file |")[0]
    assert "| squad | 4 | 1.000" in lines_of(printed, "decorated |")[0]
    entries = json.loads((tmp_path / "run/run.json").read_text())["config"]["benchmarks"]
    assert entries["from-file"]["version"] == 7 and entries["from-file"]["env_kwargs"]["objectives"] == 3
    with pytest.raises(UserError, match="'decorated' exists already"):
        register(Benchmark("decorated", ("factbook:heldout",)))


def test_several_sources_keep_their_questions_apart(tmp_path: Path) -> None:
    for name in ("hotpot", "nq"):
        rows = [{"id": f"dev_{i}", "question": f"{name} {i}?", "golden_answers": [f"a{i}"]} for i in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = (str(tmp_path / "hotpot.jsonl"), str(tmp_path / "nq.jsonl"))
    both = Benchmark(
        "both",
        sources,
        "mempo/MultiObjectiveQA-v0",
        {"retriever": "factbook-tiny", "objectives": 2},
        questions=9,
    )
    tasks = both.load()
    assert len(tasks) == 3
    parts = {part for task in tasks for part in task.id.split(" + ")}
    assert parts == {f"{name}/dev_{i}" for name in ("hotpot", "nq") for i in range(3)}
