"""Rows of published data sets in their own columns, written by hand after their documentation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from envs.document_stream import DocumentStream
from envs.errors import UserError
from envs.multi_objective import MultiObjectiveQA
from envs.retrieval import Passage
from envs.tasks import Task, load_tasks
from tests.envs.conftest import FixedRetriever

HOTPOT_FILE = {
    "_id": "5a8b",
    "question": "Were A and B of one nationality?",
    "answer": "yes",
    "type": "comparison",
    "level": "hard",
    "supporting_facts": [["A", 0], ["B", 1]],
    "context": [["A", ["A is Polish.", " He wrote."]], ["C", ["Other."]], ["B", ["One.", "B is Polish."]]],
}
HOTPOT_HUB = {
    **{key: HOTPOT_FILE[key] for key in ("question", "answer", "type", "level")},
    "id": "5a8b",
    "supporting_facts": {"title": ["A", "B"], "sent_id": [0, 1]},
    "context": {
        "title": ["A", "C", "B"],
        "sentences": [["A is Polish.", " He wrote."], ["Other."], ["One.", "B is Polish."]],
    },
}
HOTPOT_TASK = Task(
    "5a8b",
    ("Were A and B of one nationality?",),
    (("yes",),),
    "rows",
    {
        "passages": (
            Passage("5a8b#0", "A", "A is Polish. He wrote."),
            Passage("5a8b#1", "C", "Other."),
            Passage("5a8b#2", "B", "One. B is Polish."),
        ),
        "supporting": ("5a8b#0", "5a8b#2"),
        "type": "comparison",
        "level": "hard",
    },
)
MUSIQUE = {
    "id": "2hop__1_2",
    "paragraphs": [
        {"idx": 0, "title": "T", "paragraph_text": "No.", "is_supporting": False},
        {"idx": 1, "title": "U", "paragraph_text": "Yes.", "is_supporting": True},
    ],
    "question": "When?",
    "question_decomposition": [{"id": 1, "question": "a", "answer": "b", "paragraph_support_idx": 1}],
    "answer": "1995",
    "answer_aliases": ["in 1995", "1995"],
    "answerable": True,
}


def tasks_of(tmp_path: Path, rows: list[Any], name: str = "rows.jsonl", form: str = "") -> list[Task]:
    path = tmp_path / name
    if name.endswith(".json"):
        path.write_text(json.dumps(rows))
    elif name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows))
    return load_tasks(f"{form}:{path}" if form else str(path))


@pytest.mark.parametrize(
    ("rows", "name"),
    [([HOTPOT_FILE], "rows.json"), ([HOTPOT_HUB], "rows.jsonl"), ([HOTPOT_HUB], "rows.parquet")],
)
def test_hotpotqa_as_released_and_as_on_the_hub(tmp_path: Path, rows: list[Any], name: str) -> None:
    assert tasks_of(tmp_path, rows, name) == [HOTPOT_TASK]


def test_2wiki_with_columns_as_json_texts(tmp_path: Path) -> None:
    row = {**HOTPOT_FILE, "evidences": [["A", "country", "Poland"]]}
    row["context"] = json.dumps(row["context"])
    row["supporting_facts"] = json.dumps(row["supporting_facts"])
    assert tasks_of(tmp_path, [row]) == [HOTPOT_TASK]


def test_musique(tmp_path: Path) -> None:
    unanswerable = {**MUSIQUE, "id": "x", "answerable": False}
    (task,) = tasks_of(tmp_path, [MUSIQUE, unanswerable])
    assert task.golds == (("1995", "in 1995"),) and task.metadata["supporting"] == ("2hop__1_2#1",)
    assert task.metadata["passages"][1] == Passage("2hop__1_2#1", "U", "Yes.")
    assert task.metadata["decomposition"] == MUSIQUE["question_decomposition"]


def test_value_and_aliases_are_golds_together(tmp_path: Path) -> None:
    trivia = {
        "question": "Q?",
        "question_id": "tc_1",
        "answer": {"value": "Sinclair Lewis", "aliases": ["Lewis", "Sinclair Lewis"], "type": "W"},
    }
    assert tasks_of(tmp_path, [trivia]) == [Task("tc_1", ("Q?",), (("Sinclair Lewis", "Lewis"),), "rows")]
    pop = {
        "id": 4222362,
        "subj": "x",
        "question": "Q?",
        "possible_answers": '["politician", "political leader"]',
    }
    assert tasks_of(tmp_path, [pop]) == [
        Task("4222362", ("Q?",), (("politician", "political leader"),), "rows")
    ]


def test_rows_without_an_id_are_numbered(tmp_path: Path) -> None:
    nq = [{"question": "who", "answer": ["A", "B"]}, {"question": "when", "answer": ["C"]}]
    assert tasks_of(tmp_path, nq, "nq.jsonl") == [
        Task("nq/1", ("who",), (("A", "B"),), "nq"),
        Task("nq/2", ("when",), (("C",),), "nq"),
    ]
    bamboogle = [{"Question": "Who?", "Answer": "Ann"}]
    assert tasks_of(tmp_path, bamboogle, "b.jsonl") == [Task("b/1", ("Who?",), (("Ann",),), "b")]


def mem1_row(prompt: Any, target: Any, **more: Any) -> dict[str, Any]:
    return {
        "data_source": "nq",
        "prompt": prompt,
        "reward_model": {"style": "rule", "ground_truth": {"target": target}},
        "extra_info": {"split": "train", "index": 0},
        **more,
    }


def test_mem1_rows_are_episodes_of_several_questions(tmp_path: Path) -> None:
    chat = [
        {
            "role": "user",
            "content": "Answer complex questions. Question: wrong. \nQuestion: who wrote it?; when?; where\n",
        }
    ]
    rows = [mem1_row(chat, [["Ann", "A."], ["1969"], ["Rome; Italy", "Rome"]])]
    for name in ("rows.jsonl", "rows.parquet"):
        (task,) = tasks_of(tmp_path, rows, name)
        assert task.questions == ("who wrote it?", "when?", "where")
        assert task.golds == (("Ann", "A."), ("1969",), ("Rome; Italy", "Rome"))
    env = MultiObjectiveQA([task], FixedRetriever([]), objectives=None, reward="mem1")
    observation, _ = env.reset(options={"index": 0})
    assert observation == "Question: who wrote it?; when?; where\n" and env.num_tasks == 1
    assert env.task.golds[2] == ("Rome",), "a gold with the separator is left out"
    assert env.step("<answer>ann; 1969; Rome</answer>")[1] == 3.0
    with pytest.raises(UserError, match="objectives=None is needed"):
        MultiObjectiveQA([task], FixedRetriever([]))


@pytest.mark.parametrize(
    ("prompt", "target", "questions", "golds"),
    [
        ("Question: one?", ["Ann", "A."], ("one?",), (("Ann", "A."),)),
        ("Question: one?", "Ann", ("one?",), (("Ann",),)),
        ("questions: a; b?;c?", [["x"], ["y"]], ("a; b?", "c?"), (("x",), ("y",))),
        ("a;b", [["x"], ["y"]], ("a", "b"), (("x",), ("y",))),
    ],
)
def test_mem1_forms(tmp_path: Path, prompt: str, target: Any, questions: Any, golds: Any) -> None:
    (task,) = tasks_of(tmp_path, [mem1_row(prompt, target)])
    assert (task.questions, task.golds) == (questions, golds)


def test_ruler_and_long_contexts_can_be_streamed(tmp_path: Path) -> None:
    row = {
        "context": "Document 1:\nA\nfirst\n\nDocument 2:\nB\nsecond",
        "input": "Who?",
        "answers": ["B"],
        "index": 3,
    }
    (task,) = tasks_of(tmp_path, [row])
    assert (task.id, task.questions, task.golds) == ("3", ("Who?",), (("B",),))
    env = DocumentStream([task], chunk_size=25)
    env.reset(seed=0)
    call = '<tool_call>{"name": "next", "arguments": {}}</tool_call>'
    assert [env.step(call)[-1]["information"] for _ in range(2)] == [
        "Part 1 of 2:\nDocument 1:\nA\nfirst",
        "Part 2 of 2, the last:\nDocument 2:\nB\nsecond",
    ]
    (with_context,) = tasks_of(tmp_path, [mem1_row("Question: q", [["g"]], context="long text")])
    assert with_context.metadata["text"] == "long text"


def test_longmemeval(tmp_path: Path) -> None:
    row = {
        "question_id": "e47b",
        "question_type": "single-session-user",
        "question": "How many?",
        "answer": 3,
        "question_date": "2023/05/30 (Tue) 23:40",
        "haystack_dates": ["2023/05/20 (Sat) 02:21", "2023/05/21 (Sun) 10:00"],
        "haystack_session_ids": ["a", "b"],
        "haystack_sessions": [
            [
                {"role": "user", "content": "I have\n3 cats", "has_answer": True},
                {"role": "assistant", "content": "Nice"},
            ],
            [{"role": "user", "content": "Bye"}],
        ],
        "answer_session_ids": ["a"],
    }
    (task,) = tasks_of(tmp_path, [row], "longmemeval_s.json")
    assert task.id == "e47b" and task.golds == (("3",),)
    assert task.questions == ("How many? (Asked on 2023/05/30 (Tue) 23:40.)",)
    assert task.metadata["chunks"] == (
        "Session 1 (2023/05/20 (Sat) 02:21).\nuser: I have 3 cats\nassistant: Nice",
        "Session 2 (2023/05/21 (Sun) 10:00).\nuser: Bye",
    )


LOCOMO = {
    "sample_id": "conv-26",
    "conversation": {
        "speaker_a": "Caroline",
        "speaker_b": "Melanie",
        "session_10": [{"speaker": "Melanie", "dia_id": "D10:1", "text": "Last."}],
        "session_1_date_time": "1:56 pm on 8 May, 2023",
        "session_1": [
            {"speaker": "Caroline", "dia_id": "D1:1", "text": "Hey!"},
            {"speaker": "Melanie", "dia_id": "D1:2", "text": "Look", "blip_caption": "a cat"},
        ],
    },
    "qa": [
        {"question": "When?", "answer": 2022, "evidence": ["D1:1"], "category": 2},
        {"question": "What did he say?", "adversarial_answer": "nonsense", "evidence": [], "category": 5},
    ],
}


def test_locomo(tmp_path: Path) -> None:
    first, second = tasks_of(tmp_path, [LOCOMO], "locomo10.json")
    assert (first.id, first.golds) == ("conv-26/1", (("2022",),))
    assert first.metadata["chunks"] == (
        "Session 1 (1:56 pm on 8 May, 2023).\nCaroline: Hey!\nMelanie: Look [shares a picture: a cat]",
        "Session 10.\nMelanie: Last.",
    )
    assert first.metadata["chunks"] is second.metadata["chunks"]
    assert second.golds[0][0] == "not mentioned" and second.metadata["adversarial_answer"] == "nonsense"


def without(row: dict[str, Any], column: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != column}


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        (HOTPOT_FILE, {**HOTPOT_FILE, "_id": "2", "answer": None}, "line 2: answer holds missing"),
        (HOTPOT_FILE, {**HOTPOT_FILE, "_id": "2", "context": [["A"]]}, "line 2: context has neither pairs"),
        (
            HOTPOT_FILE,
            {**HOTPOT_FILE, "_id": "2", "context": "["},
            "line 2: context is a text that is not JSON",
        ),
        (
            HOTPOT_FILE,
            {**HOTPOT_FILE, "_id": "2", "context": [["A", [3]]]},
            "line 2: context of 'A' is no list",
        ),
        (HOTPOT_FILE, {**HOTPOT_FILE, "_id": True}, "line 2: _id is True"),
        (HOTPOT_FILE, HOTPOT_FILE, "line 2: id '5a8b' stands already in .*line 1"),
        (MUSIQUE, {**MUSIQUE, "id": "2", "paragraphs": [{}]}, "line 2, paragraph 1: title is missing"),
        (MUSIQUE, {**MUSIQUE, "id": "2", "paragraphs": 3}, "line 2: paragraphs is no list"),
        (
            {"question": "q", "question_id": "1", "answer": {"value": "v"}},
            {"question": "q", "question_id": "2", "answer": "v"},
            "line 2: answer is no object",
        ),
        (
            {"question": "q", "possible_answers": '["a"]'},
            {"question": "q", "possible_answers": "a"},
            "line 2: possible_answers is a text that is not JSON",
        ),
        ({"question": "q", "answer": ["a"]}, {"question": "q", "answer": []}, "line 2: answer is empty"),
        (
            mem1_row("Question: a", [["x"]]),
            mem1_row("Question: a", [["x"], ["y"]]),
            "line 2: the prompt does not split",
        ),
        (mem1_row("Question: a", [["x"]]), mem1_row("Question: a", []), "line 2: reward_model.* is missing"),
        (
            mem1_row("Question: a", [["x"]]),
            mem1_row("a; b", [["x"], []]),
            "line 2, objective 2: target is empty",
        ),
        (mem1_row("Question: a", [["x"]]), mem1_row([], [["x"]]), "line 2: prompt is neither"),
        (
            LOCOMO,
            {**LOCOMO, "sample_id": "2", "qa": [{"question": "q", "category": 1}]},
            "line 2, question 1: answer",
        ),
        (LOCOMO, {**LOCOMO, "sample_id": "2", "conversation": {}}, "line 2: conversation has no session_1"),
    ],
)
def test_malformed_rows_are_named(tmp_path: Path, good: Any, bad: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tasks_of(tmp_path, [good, bad])


def test_unknown_columns_say_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"line 1: columns text, label are of no known form.*flashrag.*locomo"
    ):
        tasks_of(tmp_path, [{"text": "x", "label": 1}])
    with pytest.raises(UserError, match=r"line 1: columns none are of no known form"):
        tasks_of(tmp_path, [{}])


def test_a_form_can_be_named(tmp_path: Path) -> None:
    row = {"question": "q", "answer": "a", "context": "c", "supporting_facts": []}
    with pytest.raises(UserError, match="context is a text that is not JSON"):
        tasks_of(tmp_path, [row])
    assert tasks_of(tmp_path, [row], form="nq-open")[0].golds == (("a",),)
    with pytest.raises(UserError, match="line 1: id is missing"):
        tasks_of(tmp_path, [row], form="flashrag")
    with pytest.raises(UserError, match="question file none does not exist"):
        load_tasks("musique:none")
