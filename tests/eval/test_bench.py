"""The command line: what a person types, reads and gets wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from agent.models import save_model
from agent.tiny import build_model, build_tokenizer
from eval.bench import main
from eval.benchmarks import Benchmark, get, load_file, names, register
from eval.compare import compare_samples
from eval.subjects import newest_run, training_manner
from eval.suites import load_suite
from tests.eval.test_store import sample

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
