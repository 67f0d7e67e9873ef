"""Question files: what is read, what is refused and how that is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from envs.errors import UserError, did_you_mean
from envs.tasks import Task, load_tasks

ROWS: list[dict[str, Any]] = [
    {
        "id": "a",
        "question": " Who? ",
        "golden_answers": ["Ann", " Ann", "", "A. N."],
        "metadata": {"hops": 2},
    },
    {"id": 7, "question": "When?", "golden_answers": "1969"},
    {"id": "c", "question": "How many?", "golden_answers": [3, 3.5], "metadata": None},
]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_rows_become_tasks(tmp_path: Path) -> None:
    tasks = load_tasks(str(write(tmp_path / "dev.jsonl", ROWS)))
    assert tasks == [
        Task("a", ("Who?",), (("Ann", "A. N."),), "dev", {"hops": 2}),
        Task("7", ("When?",), (("1969",),), "dev", {}),
        Task("c", ("How many?",), (("3", "3.5"),), "dev", {}),
    ]


def test_parquet_and_json_give_the_same_tasks(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "question": "Who?", "golden_answers": ["Ann"], "metadata": json.dumps({"hops": 2})},
        {"id": "b", "question": "When?", "golden_answers": ["1969", "69"], "metadata": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    (tmp_path / "x.json").write_text(json.dumps(rows))
    write(tmp_path / "x.jsonl", rows)
    tasks = [load_tasks(str(tmp_path / f"x.{kind}")) for kind in ("parquet", "json", "jsonl")]
    assert tasks[0] == tasks[1] == tasks[2]
    assert tasks[0][0].metadata == {"hops": 2} and tasks[0][1].golds == (("1969", "69"),)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2: not valid JSON"),
        ("[]", "line 2: an object is needed, not list"),
        ({"question": "q", "golden_answers": ["a"]}, "line 2: id is missing"),
        ({"id": "", "question": "q", "golden_answers": ["a"]}, "line 2: id is ''"),
        ({"id": 1, "golden_answers": ["a"]}, "line 2: question is missing"),
        ({"id": 1, "question": " ", "golden_answers": ["a"]}, "line 2: question is ' '"),
        ({"id": 1, "question": ["q"], "golden_answers": ["a"]}, "line 2: question is"),
        ({"id": 1, "question": "q"}, "line 2: golden_answers holds missing"),
        ({"id": 1, "question": "q", "golden_answers": []}, "line 2: golden_answers is empty"),
        ({"id": 1, "question": "q", "golden_answers": [" "]}, "line 2: golden_answers is empty"),
        ({"id": 1, "question": "q", "golden_answers": [["a"]]}, "line 2: golden_answers holds"),
        ({"id": 1, "question": "q", "golden_answers": ["a"], "metadata": 3}, "line 2: metadata is a int"),
        ({"id": "a", "question": "q", "golden_answers": ["a"]}, "line 2: id 'a' stands already in .*line 1"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path: Path, row: Any, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + (row if isinstance(row, str) else json.dumps(row)) + "\n")
    with pytest.raises(UserError, match=f"bad.jsonl, {message}"):
        load_tasks(str(path))


def test_a_parquet_row_is_named_too(tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    pq.write_table(
        pa.table({"id": ["a", "b"], "question": ["q", None], "golden_answers": [["x"], ["y"]]}), path
    )
    with pytest.raises(UserError, match=r"bad\.parquet, row 2: question is missing"):
        load_tasks(str(path))
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(UserError, match=r"bad\.parquet: not a parquet file"):
        load_tasks(str(path))


def test_unknown_sources_say_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown tasks 'factbook:trian'; did you mean 'factbook:train'\?"):
        load_tasks("factbook:trian")
    with pytest.raises(UserError, match=r"question file .*none\.jsonl does not exist"):
        load_tasks(str(tmp_path / "none.jsonl"))
    (tmp_path / "x.csv").write_text("a,b")
    with pytest.raises(UserError, match=r"must end with \.jsonl"):
        load_tasks(str(tmp_path / "x.csv"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="no questions"):
        load_tasks(str(tmp_path / "empty.jsonl"))


def test_a_file_is_read_once_and_again_when_it_changes(tmp_path: Path) -> None:
    path = write(tmp_path / "dev.jsonl", ROWS)
    first = load_tasks(str(path))
    assert load_tasks(str(path))[0] is first[0]
    first.clear()
    assert len(load_tasks(str(path))) == 3, "a caller's list is its own"
    write(path, ROWS[:1])
    assert len(load_tasks(str(path))) == 1


def test_did_you_mean() -> None:
    assert did_you_mean("Recal", ["precision", "recall"]) == "; did you mean 'recall'?"
    assert did_you_mean("xyz", ["precision", "recall"]) == "" == did_you_mean("x", [])
