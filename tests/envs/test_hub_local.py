"""Every public form through the real library ``datasets``, from folders that stand where the hub's sets would.

The rows have the columns of the published sets, written by hand. Nothing is fetched.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from envs.document_stream import DocumentStream
from envs.errors import UserError
from envs.tasks import Task, load_tasks
from envs.tasks.hub import recorded_revision
from tests.envs.test_forms import HOTPOT_HUB, HOTPOT_TASK, LOCOMO, MUSIQUE

# FlashRAG (configs of RUC-NLPIR/FlashRAG_datasets).
FLASHRAG = [
    {"id": "test_0", "question": "q0", "golden_answers": ["a", "b"], "metadata": {"type": "x"}},
    {"id": "test_1", "question": "q1", "golden_answers": ["c"], "metadata": {"type": None}},
]
# xanhho/2WikiMultihopQA: lists as JSON texts.
TWO_WIKI = {
    "_id": "w1",
    "type": "comparison",
    "question": "Who was older?",
    "context": json.dumps([["Ann", ["Ann, 1950."]], ["Bob", ["Bob, ", "1960."]]]),
    "supporting_facts": json.dumps([["Ann", 0]]),
    "evidences": json.dumps([["Ann", "born", "1950"]]),
    "answer": "Ann",
}
NQ = {"question": "who wrote it", "answer": ["Ann", "Ann B"]}
# mandarjoshi/trivia_qa, rc.nocontext.
TRIVIA = {
    "question": "Q?",
    "question_id": "tc_1",
    "question_source": "http://www.triviacountry.com/",
    "entity_pages": {"doc_source": [], "filename": [], "title": [], "wiki_context": []},
    "search_results": {
        "description": [],
        "filename": [],
        "rank": [],
        "title": [],
        "url": [],
        "search_context": [],
    },
    "answer": {
        "aliases": ["Lewis"],
        "normalized_aliases": ["lewis"],
        "matched_wiki_entity_name": "",
        "normalized_matched_wiki_entity_name": "",
        "normalized_value": "sinclair lewis",
        "type": "WikipediaEntity",
        "value": "Sinclair Lewis",
    },
}
# akariasai/PopQA.
POPQA = {
    **{name: 7 for name in ("id", "subj_id", "prop_id", "obj_id", "s_pop", "o_pop")},
    **{name: "x" for name in ("subj", "prop", "obj", "s_uri", "o_uri", "s_wiki_title", "o_wiki_title")},
    "s_aliases": "[]",
    "o_aliases": "[]",
    "question": "What is his occupation?",
    "possible_answers": '["politician", "pol"]',
}
BAMBOOGLE = {"Question": "Who?", "Answer": "Ann"}
# MEM1's rows, which MemPO's follow: made from Search-R1's, whose columns stay beside the new ones.
MEM1 = {
    "id": "train_0",
    "question": "who wrote it?; when was it",
    "golden_answers": [["Ann", "A."], ["1969"]],
    "data_source": "nq_multi",
    "prompt": [{"role": "user", "content": "Answer them. Question: who wrote it?; when was it\n"}],
    "ability": "fact-reasoning",
    "reward_model": {"ground_truth": {"target": [["Ann", "A."], ["1969"]]}, "style": "rule"},
    "extra_info": {"index": 0, "split": "train"},
}
# BytedTsinghua-SIA/hotpotqa: the training rows, and RULER-HQA's files.
MEMAGENT = {
    "data_source": "hotpotqa",
    "prompt": [{"role": "user", "content": "Who came?"}],
    "context": "Document 1:\nAnn came.",
    "ability": "memory",
    "reward_model": {"ground_truth": ["Ann"], "style": "rule"},
    "extra_info": {"index": 4, "num_docs": 1, "question": "Who came?"},
}
RULER = {
    "index": 5,
    "input": "Who came?",
    "context": "Document 1:\nAnn came.",
    "answers": ["Ann"],
    "num_docs": 1,
}
LONGMEMEVAL = [
    {
        "question_id": str(answer),
        "question_type": "multi-session",
        "question": "How many?",
        "answer": answer,
        "question_date": "2023/05/30",
        "haystack_dates": ["2023/05/20"],
        "haystack_session_ids": ["a"],
        "haystack_sessions": [
            [
                {"role": "user", "content": "3 cats", "has_answer": True},
                {"role": "assistant", "content": "Nice"},
            ]
        ],
        "answer_session_ids": ["a"],
    }
    for answer in (3, "three cats")
]
SHORT_LOCOMO = {
    "sample_id": "conv-30",
    "conversation": {
        "speaker_a": "A",
        "speaker_b": "B",
        "session_1": [{"speaker": "A", "dia_id": "D1:1", "text": "Hi"}],
    },
    "qa": [{"question": "Who?", "answer": "A", "evidence": [], "category": 1}],
}


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where sets of the owner ``o`` are; caches and the record of revisions are in it too."""
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return tmp_path


def write(folder: Path, rows: list[dict[str, Any]], name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return path


FORMS: dict[str, tuple[list[dict[str, Any]], str, list[tuple[Any, Any]]]] = {
    "flashrag": (FLASHRAG, "test.jsonl", [(("q0",), (("a", "b"),)), (("q1",), (("c",),))]),
    "flashrag parquet": (FLASHRAG, "test.parquet", [(("q0",), (("a", "b"),)), (("q1",), (("c",),))]),
    "hotpotqa": ([HOTPOT_HUB], "validation.parquet", [(HOTPOT_TASK.questions, (("yes",),))]),
    "2wiki": ([TWO_WIKI], "dev.parquet", [(("Who was older?",), (("Ann",),))]),
    "musique": ([MUSIQUE], "validation.jsonl", [(("When?",), (("1995", "in 1995"),))]),
    "nq": ([NQ], "validation.parquet", [(("who wrote it",), (("Ann", "Ann B"),))]),
    "triviaqa": ([TRIVIA], "validation.parquet", [(("Q?",), (("Sinclair Lewis", "Lewis"),))]),
    "popqa": ([POPQA], "test.parquet", [(("What is his occupation?",), (("politician", "pol"),))]),
    "bamboogle": ([BAMBOOGLE], "test.parquet", [(("Who?",), (("Ann",),))]),
    "mem1": ([MEM1], "train.parquet", [(("who wrote it?", "when was it"), (("Ann", "A."), ("1969",)))]),
    "memagent": ([MEMAGENT], "train.parquet", [(("Who came?",), (("Ann",),))]),
    "ruler": ([RULER], "test.json", [(("Who came?",), (("Ann",),))]),
    "longmemeval": (
        LONGMEMEVAL,
        "test.json",
        [(("How many? (Asked on 2023/05/30.)",), ((answer,),)) for answer in ("3", "three cats")],
    ),
    "locomo": ([LOCOMO, SHORT_LOCOMO], "train.json", [
        (("When?",), (("2022",),)),
        (("What did he say?",), (("not mentioned", "not mentioned in the conversation", "no information available"),)),
        (("Who?",), (("A",),)),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_public_form(form: str, folders: Path) -> None:
    rows, name, expected = FORMS[form]
    label = form.replace(" ", "-")
    path = write(folders / "o" / label, rows, name)
    tasks = load_tasks(f"hub:o/{label}@v1")
    assert [(task.questions, task.golds) for task in tasks] == expected
    # The file itself gives the same, but for the names of what has no id.
    local = load_tasks(str(path))
    for task, other in zip(tasks, local, strict=True):
        assert (task.questions, task.golds) == (other.questions, other.golds)
        assert {
            key: task.metadata.get(key) for key in ("text", "chunks", "supporting", "adversarial_answer")
        } == {key: other.metadata.get(key) for key in ("text", "chunks", "supporting", "adversarial_answer")}
    assert {task.source for task in tasks} == {label}
    if any(key in tasks[0].metadata for key in ("text", "chunks")):
        env = DocumentStream(tasks)
        env.reset(options={"index": 0})
        *_, info = env.step('<tool_call>{"name": "next", "arguments": {}}</tool_call>')
        assert info["information"].startswith("Part 1 of ")


def test_locomo_as_a_table_has_empty_sessions(folders: Path) -> None:
    """A short conversation has None for the sessions, and a question for the columns, that only others have."""
    long = {
        **LOCOMO,
        "qa": [{**item, "answer": str(item.get("answer", "")) or None} for item in LOCOMO["qa"]],
    }
    write(folders / "o" / "locomo", [long, SHORT_LOCOMO], "train.parquet")
    tasks = load_tasks("hub:o/locomo@v1")
    assert [task.id for task in tasks] == ["conv-26/1", "conv-26/2", "conv-30/1"]
    assert tasks[1].metadata["adversarial_answer"] == "nonsense"
    assert tasks[2].metadata["chunks"] == ("Session 1.\nA: Hi",)


def test_configs_splits_and_the_revision(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[str] = []

    def dataset_info(self: Any, name: str) -> Any:
        asked.append(name)
        return SimpleNamespace(sha=f"sha-{len(asked)}")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    home = folders / "o" / "many"
    for config, split in (
        ("nq", "train"),
        ("nq", "dev"),
        ("nq", "test"),
        ("musique", "train"),
        ("musique", "dev"),
    ):
        row = {"id": "1", "question": f"{config} {split}", "golden_answers": ["x"]}
        write(home / config, [row], f"{split}.jsonl")
    blocks = "".join(f"- config_name: {name}\n  data_dir: {name}\n" for name in ("nq", "musique"))
    (home / "README.md").write_text(f"---\nconfigs:\n{blocks}---\n")
    found = {
        source: load_tasks(f"hub:o/many/{source}")
        for source in ("nq", "nq:train", "nq:dev", "musique", "musique@old:train")
    }
    assert {source: (tasks[0].question, tasks[0].source) for source, tasks in found.items()} == {
        "nq": ("nq test", "nq"),
        "nq:train": ("nq train", "nq"),
        "nq:dev": ("nq dev", "nq"),
        "musique": ("musique dev", "musique"),
        "musique@old:train": ("musique train", "musique"),
    }
    assert asked == ["o/many"] and recorded_revision("hub:o/many/nq") == "sha-1"
    with pytest.raises(UserError, match=r"no such split; there are .*train"):
        load_tasks("hub:o/many/nq:tset")
    with pytest.raises(UserError, match=r"cannot be loaded .*triviaqa"):
        load_tasks("hub:o/many/triviaqa")


def test_no_code_of_a_set_runs_and_what_is_wrong_is_one_line(folders: Path) -> None:
    ran = folders / "ran"
    script = folders / "o" / "script" / "script.py"
    script.parent.mkdir(parents=True)
    script.write_text(f"open({str(ran)!r}, 'w').close()")
    bad = folders / "o" / "bad" / "test.jsonl"
    bad.parent.mkdir()
    bad.write_text('{"question": "q", "answer": ["a"]}\n{"question"\n')
    write(folders / "o" / "odd", [NQ, {**NQ, "answer": []}], "test.parquet")
    for name, message in (
        ("script", "scripts are no longer supported"),
        ("bad", r"cannot be loaded \(JSON parse error"),
        ("odd", "^hub:o/odd@v1, row 2: answer is empty"),
        ("nothing", "cannot be loaded"),
    ):
        with pytest.raises(UserError, match=message) as raised:
            load_tasks(f"hub:o/{name}@v1")
        assert "\n" not in str(raised.value)
    assert not ran.exists()


def test_a_row_is_named_by_the_file_and_line_it_stands_in(folders: Path) -> None:
    path = write(folders, [NQ, NQ, {**NQ, "question": " "}], "rows.jsonl")
    with pytest.raises(UserError, match=rf"^{path}, line 3: question is ' '; a text is needed$"):
        load_tasks(str(path))
    path = write(folders, [NQ, {**NQ, "answer": None}], "rows.parquet")
    with pytest.raises(UserError, match=rf"^{path}, row 2: answer holds missing; a list of texts is needed$"):
        load_tasks(str(path))


def test_mem1_rows_beside_search_r1s_columns_are_several_questions(folders: Path) -> None:
    path = write(folders, [MEM1], "rows.jsonl")
    (task,) = load_tasks(str(path))
    assert task == Task("train_0", ("who wrote it?", "when was it"), (("Ann", "A."), ("1969",)), "rows")
