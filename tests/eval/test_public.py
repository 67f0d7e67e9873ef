"""Public benchmarks on rows of their exact form: local files stand in for the hub, nothing is downloaded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from envs.errors import UserError
from envs.tasks import Task
from eval import benchmarks as registry
from eval.bench import main
from eval.benchmarks import OBJECTIVES, PUBLIC_SPLITS, RULER_DOCUMENTS, STREAMS, Benchmark, get, revisions
from eval.players import TextPlayer
from eval.runner import evaluate
from eval.suites import load_suite
from tests.envs.test_forms import HOTPOT_FILE, HOTPOT_HUB, LOCOMO, MUSIQUE

SHA = "27275ff4fee67ac0"


def flashrag(name: str, number: int) -> dict[str, Any]:
    """A row as FlashRAG publishes it; what is in ``metadata`` differs from set to set."""
    context = {"title": ["A", "B"], "sentences": [["A is a town."], ["B is a river."]]}
    metadata: dict[str, dict[str, Any]] = {
        "nq": {},
        "triviaqa": {},
        "popqa": {"subj": "A", "prop": "occupation", "obj": "B", "s_pop": 142, "o_pop": 25692},
        "hotpotqa": {
            "type": "bridge",
            "level": "hard",
            "context": context,
            "supporting_facts": {"title": ["A"]},
        },
        "2wikimultihopqa": {"type": "compositional", "context": context},
        "musique": {"answerable": True, "question_decomposition": [{"id": 1, "answer": "b"}]},
        "bamboogle": {},
    }
    return {
        "id": f"{PUBLIC_SPLITS[name]}_{number}",
        "question": f"{name} question {number}?",
        "golden_answers": [f"{name} answer {number}", f"alias {number}"],
        "metadata": metadata[name],
    }


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What was asked of the hub, and the files it holds."""
    import datasets
    import huggingface_hub

    from envs.search_qa import _shared_pool
    from envs.tasks import _from_hub

    state: dict[str, Any] = {"loaded": [], "files": {}}

    def load_dataset(name: str, config: str, *, split: str, revision: str) -> list[dict[str, Any]]:
        state["loaded"].append((name, config, split, revision))
        return [flashrag(config, number) for number in range(15)]

    def download(name: str, file: str, *, repo_type: str, revision: str) -> str:
        state["loaded"].append((name, file, repo_type, revision))
        if file not in state["files"]:
            raise OSError(f"404: {file} is not there\nmore")
        path = tmp_path / file
        path.write_text(json.dumps(state["files"][file]))
        return str(path)

    monkeypatch.setenv("MEMPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(
        datasets, "get_dataset_split_names", lambda name, config, revision: ["train", "dev", "test"]
    )
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(
        huggingface_hub.HfApi, "dataset_info", lambda self, name: SimpleNamespace(sha=f"{SHA}-{name[0]}")
    )
    _from_hub.cache_clear()
    _shared_pool.cache_clear()
    return state


@pytest.mark.parametrize("name", PUBLIC_SPLITS)
def test_single_question_sets(name: str, hub: dict[str, Any]) -> None:
    benchmark = get(name)
    source = f"hub:RUC-NLPIR/FlashRAG_datasets/{name}:{PUBLIC_SPLITS[name]}"
    assert (benchmark.tasks, benchmark.env) == ((source,), "mempo/SearchQA-v0")
    assert benchmark.env_kwargs == {"retriever": "http://127.0.0.1:8000/retrieve"}
    assert benchmark.scorer == ("hotpotqa" if name == "hotpotqa" else "squad")
    assert revisions(benchmark) == {source: "unknown"}
    tasks = benchmark.load()
    assert hub["loaded"] == [
        ("RUC-NLPIR/FlashRAG_datasets", name, PUBLIC_SPLITS[name], f"{SHA}-R"),
    ]
    assert revisions(benchmark) == {source: f"{SHA}-R"}
    assert [task.question for task in tasks] == [f"{name} question {i}?" for i in range(15)]
    assert tasks[3].golds == ((f"{name} answer 3", "alias 3"),)


@pytest.mark.parametrize("objectives", OBJECTIVES)
def test_several_objectives(objectives: int, hub: dict[str, Any]) -> None:
    benchmark = get(f"mempo-{objectives}")
    tasks = benchmark.load()
    assert len(tasks) == 30 // objectives and benchmark.env_kwargs["max_turns"] == max(16, 3 * objectives)
    asked = [question for task in tasks for question in task.questions]
    assert len(asked) == len(set(asked)) and {question.split()[0] for question in asked} == {"hotpotqa", "nq"}
    assert len(revisions(benchmark)) == 2 and set(revisions(benchmark).values()) == {f"{SHA}-R"}


RULER = {
    "index": 0,
    "context": "Document 1:\nA\nA is a town.\n\nDocument 2:\nB\nThe river is the Oder.",
    "input": "Which river?",
    "answers": ["Oder"],
    "num_docs": 2,
}
LONGMEMEVAL = [
    {
        "question_id": f"e47b{number}",
        "question_type": kind,
        "question": "How many cats?",
        "answer": answer,
        "question_date": "2023/05/30 (Tue) 23:40",
        "haystack_dates": ["2023/05/20 (Sat) 02:21"],
        "haystack_session_ids": ["a"],
        "haystack_sessions": [[{"role": "user", "content": "I have 3 cats", "has_answer": True}]],
        "answer_session_ids": ["a"],
    }
    for number, (kind, answer) in enumerate([("multi-session", 3), ("knowledge-update", "three")])
]


class Reader:
    """Reads to the end, then gives the first accepted answer."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def act(self, observation: str, info: Mapping[str, Any]) -> str:
        if "the last:" in str(info.get("information") or ""):
            return f"<mem>m</mem><answer>{self._task.golds[0][0]}</answer>"
        return '<mem>m</mem><tool_call>{"name": "next", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("name", STREAMS)
def test_texts_and_conversations(name: str, hub: dict[str, Any], tmp_path: Path) -> None:
    for count in RULER_DOCUMENTS:
        hub["files"][f"eval_{count}.json"] = [RULER]
    hub["files"]["longmemeval_s_cleaned.json"] = hub["files"]["longmemeval_oracle.json"] = LONGMEMEVAL
    (tmp_path / "locomo10.json").write_text(json.dumps([LOCOMO]))
    benchmark = get(name)
    tasks = benchmark.load()
    found = evaluate(
        TextPlayer(lambda task, key: Reader(task), "reader"),
        tasks=tasks,
        env_id=benchmark.env,
        env_kwargs=benchmark.kwargs(),
        scorer=benchmark.scorer,
    )
    summary = found.summary()
    assert (summary["em"], summary["errors"]) == (1.0, 0)
    read = "".join(turn.information for turn in found.samples[0].turns)
    if name == "locomo":
        assert hub["loaded"] == [] and revisions(benchmark) == {}
        assert [task.golds[0][0] for task in tasks] == ["2022", "not mentioned"]
        assert summary["by"]["category"].keys() == {"2", "5"} and "Caroline: Hey!" in read
    elif name.startswith("ruler"):
        file = f"eval_{name.rsplit('-', 1)[1]}.json"
        assert hub["loaded"] == [("BytedTsinghua-SIA/hotpotqa", file, "dataset", f"{SHA}-B")]
        assert revisions(benchmark) == {benchmark.tasks[0]: f"{SHA}-B"}
        assert tasks[0].golds == (("Oder",),) and "The river is the Oder." in read
    else:
        assert hub["loaded"][0][0] == "xiaowu0162/longmemeval-cleaned"
        assert [task.golds for task in tasks] == [(("3",),), (("three",),)]
        assert summary["by"]["type"].keys() == {"multi-session", "knowledge-update"} and "3 cats" in read


def test_every_public_benchmark_is_tested_here() -> None:
    public = {name for name in registry.names() if get(name).description.startswith("public")}
    assert public == {*PUBLIC_SPLITS, *STREAMS, *(f"mempo-{k}" for k in OBJECTIVES)}


def test_a_file_that_is_not_there_is_one_line(hub: dict[str, Any]) -> None:
    with pytest.raises(
        UserError, match=r"eval_50\.json: cannot be loaded \(404: eval_50\.json is not there\)"
    ):
        get("ruler-hqa-50").load()
    with pytest.raises(UserError, match=r"question file locomo10\.json does not exist"):
        get("locomo").load()


NATIVE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "hotpotqa": (HOTPOT_HUB, ("yes",)),
    "hotpotqa-file": (HOTPOT_FILE, ("yes",)),
    "2wiki": ({**HOTPOT_FILE, "evidences": [["A", "country", "Poland"]]}, ("yes",)),
    "musique": (MUSIQUE, ("1995", "in 1995")),
    "nq-open": ({"question": "who", "answer": ["A b", "B"]}, ("A b", "B")),
    "triviaqa": (
        {"question": "Q?", "question_id": "tc_1", "answer": {"value": "Lewis", "aliases": ["S. Lewis"]}},
        ("Lewis", "S. Lewis"),
    ),
    "popqa": (
        {"id": 1, "question": "Q?", "possible_answers": '["politician", "pol"]'},
        ("politician", "pol"),
    ),
    "bamboogle": ({"Question": "Who?", "Answer": "Ann"}, ("Ann",)),
}


@pytest.mark.parametrize("form", NATIVE)
def test_native_columns_as_a_benchmark(form: str, tmp_path: Path) -> None:
    row, golds = NATIVE[form]
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    (tmp_path / "corpus.jsonl").write_text('{"id": "0", "contents": "A\\nA is a town."}\n')
    (tmp_path / "b.toml").write_text(
        f'[[benchmark]]\nname = "{form}-x"\ntasks = "rows.json"\nenv_kwargs = {{ retriever = "corpus.jsonl" }}\n'
    )
    (task,) = get(str(tmp_path / "b.toml")).load()
    assert task.golds == (golds,)


class Knowing:
    """Searches once, then gives the first accepted answers; in place of the scripted expert."""

    def __init__(self, task: Task, rng: object, habits: object) -> None:
        self._task = task

    def act(self, observation: str, info: Mapping[str, Any]) -> str:
        if info["turn"] == 0:
            return "<mem>m</mem><search>town</search>"
        return f"<mem>m</mem><answer>{'; '.join(golds[0] for golds in self._task.golds)}</answer>"


def test_the_suite_of_the_paper(
    hub: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("eval.subjects.Expert", Knowing)
    (tmp_path / "corpus.jsonl").write_text('{"id": "0", "contents": "A\\nA is a town."}\n')
    command = ["suite", "mempo-table", "--player", "expert", "--search", "corpus.jsonl", "--out", "run"]
    assert main([*command, "--questions", "3"]) == 0
    lines = [
        line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line[:1] == "|"
    ]
    head, ours = lines[0], lines[2]
    assert head == ["run", *(f"mempo-{k}" for k in (2, 4, 6, 8, 10)), *PUBLIC_SPLITS]
    assert ours[0] == "[expert](report.html)"
    assert all(cell.startswith("1.000 / 1.000 [") for cell in ours[1:])
    published = {row[0]: dict(zip(head, row, strict=True)) for row in lines[3:]}
    paper = published["MemPO (Qwen2.5-7B) (published, not measured here)"]
    assert {name: cell for name, cell in paper.items() if cell != "–" and name != "run"} == {
        "mempo-2": "F1 0.565", "hotpotqa": "EM 0.429", "musique": "EM 0.221", "popqa": "EM 0.467",
        "triviaqa": "EM 0.571", "2wikimultihopqa": "F1 0.592", "bamboogle": "F1 0.529",
    }  # fmt: skip
    react = published["ReAct (Qwen2.5-7B) (published, not measured here)"]
    assert (react["mempo-2"], react["mempo-10"]) == ("F1 0.337", "F1 0.026")
    entries = json.loads(Path("run/run.json").read_text())["config"]["benchmarks"]
    assert {name: entry["expected"] for name, entry in entries.items()} == dict.fromkeys(head[1:], 3)
    assert all(set(entry["revisions"].values()) == {f"{SHA}-R"} for entry in entries.values())
    assert entries["mempo-8"]["env_kwargs"] == {"retriever": "corpus.jsonl", "objectives": 8, "max_turns": 24}
    turns = [
        turn
        for line in Path("run/samples.jsonl").read_text().splitlines()
        for turn in json.loads(line)["turns"]
    ]
    assert sum("A is a town." in turn["information"] for turn in turns) == 36, (
        "each episode searched the corpus"
    )
    page = Path("run/leaderboard.html").read_text()
    assert page.count('<tr class="reference">') == 2 and '<a href="report.html">expert</a>' in page
    marked = re.findall(r'<tr class="reference">\s*<td>([^<]*)', page)
    assert all(text.endswith("(published, not measured here)") for text in marked)
    assert Path("run/report.html").is_file()


def test_suites_are_package_data_and_name_registered_benchmarks(tmp_path: Path) -> None:
    suite = load_suite("mempo-table")
    assert [name for name in suite.benchmarks if name not in registry.names()] == []
    mine = tmp_path / "mine.toml"
    mine.write_text('benchmarks = ["nq"]\n[[reference]]\nsystem = "s"\nbenchmark = "popqa"\nmetric = "em"\n')
    with pytest.raises(UserError, match=r"mine\.toml: TypeError.*'value' and 'source'"):
        load_suite(str(mine))
    mine.write_text('benchmarks = ["nq"]\ndescription = "d"\n')
    assert load_suite(str(mine)).benchmarks == ("nq",)


def test_a_benchmark_has_no_file_with_a_split() -> None:
    with pytest.raises(UserError, match="a file has no split"):
        Benchmark("x", ("hub:a/b/rows.json:test",), "mempo/DocumentStream-v0").load()
