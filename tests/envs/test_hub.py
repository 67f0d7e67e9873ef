"""Sets on the hub, with the two libraries' functions replaced: what they are asked, and what is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from envs.errors import UserError
from envs.tasks import Task, load_tasks
from envs.tasks.hub import HubSource, load_hub_tasks, recorded_revision

ROWS = [{"id": "t0", "question": "Who?", "golden_answers": ["Ann"], "metadata": {}}]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Records the calls; ``splits`` and ``sha`` can be changed."""
    import datasets
    import huggingface_hub

    state: dict[str, Any] = {"splits": ["train", "dev"], "sha": "abc123", "loaded": [], "looked_up": 0}

    def load_dataset(name: str, config: str | None, *, split: str, revision: str) -> list[dict[str, Any]]:
        state["loaded"].append((name, config, split, revision))
        return ROWS

    def dataset_info(self: Any, name: str) -> Any:
        state["looked_up"] += 1
        return SimpleNamespace(sha=state["sha"])

    monkeypatch.setenv("MEMPO_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, config, revision: state["splits"])
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    return state


def test_sources() -> None:
    assert HubSource.parse("hub:a/b") == HubSource("a/b", None, None, None)
    assert HubSource.parse("hub:RUC-NLPIR/FlashRAG_datasets/nq@main:test") == HubSource(
        "RUC-NLPIR/FlashRAG_datasets", "nq", "main", "test"
    )
    for bad in ("hub:", "hub:a", "hub:a/b:", "hub:a/b/c/d", "hub:a b/c"):
        with pytest.raises(UserError, match=r"the form is hub:OWNER/NAME"):
            HubSource.parse(bad)


def test_a_revision_is_recorded_at_first_load_and_pinned(hub: dict[str, Any], tmp_path: Path) -> None:
    assert load_hub_tasks("hub:o/sets/nq") == [Task("t0", ("Who?",), (("Ann",),), "nq")]
    hub["sha"] = "later"
    load_hub_tasks("hub:o/sets/popqa:train")
    load_hub_tasks("hub:o/sets/nq@v1:dev")
    assert hub["loaded"] == [
        ("o/sets", "nq", "dev", "abc123"),
        ("o/sets", "popqa", "train", "abc123"),
        ("o/sets", "nq", "dev", "v1"),
    ]
    assert hub["looked_up"] == 1
    assert recorded_revision("hub:o/sets/nq") == "abc123" and recorded_revision("hub:o/sets@v1") == "v1"
    assert recorded_revision("hub:o/never") is None
    assert json.loads((tmp_path / "hub.json").read_text()) == {"o/sets": "abc123"}


def test_what_another_process_recorded_meanwhile_is_kept(
    hub: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While this one asks for a revision, another one loads two sets for the first time, the same among them."""
    import huggingface_hub

    def slow_answer(self: Any, name: str) -> Any:
        (tmp_path / "hub.json").write_text('{"o/other": "def456", "o/sets": "first"}')
        return SimpleNamespace(sha="second")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", slow_answer)
    load_hub_tasks("hub:o/sets/nq")
    assert hub["loaded"] == [("o/sets", "nq", "dev", "first")]
    assert json.loads((tmp_path / "hub.json").read_text()) == {"o/other": "def456", "o/sets": "first"}


@pytest.mark.parametrize(
    ("splits", "taken"),
    [(["train", "dev", "test"], "test"), (["train", "validation"], "validation"), (["train"], "train")],
)
def test_test_else_dev_else_train(hub: dict[str, Any], splits: list[str], taken: str) -> None:
    hub["splits"] = splits
    load_hub_tasks("hub:o/sets")
    assert hub["loaded"][0][2] == taken


def test_a_damaged_record_is_named(hub: dict[str, Any], tmp_path: Path) -> None:
    for damaged in ("{", "[]"):
        (tmp_path / "hub.json").write_text(damaged)
        with pytest.raises(UserError, match=r"hub\.json: no JSON.*remove it"):
            load_hub_tasks("hub:o/sets")
        with pytest.raises(UserError, match=r"hub\.json: no JSON"):
            recorded_revision("hub:o/sets")


def test_without_a_connection_it_is_one_line(hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    class NoConnection(Exception):
        """As the transport errors of HTTP clients: neither an OSError nor an error of the hub's."""

    def fail(*arguments: Any, **keywords: Any) -> Any:
        raise NoConnection("[Errno 111] Connection refused")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", fail)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(UserError, match=r"hub:o/sets: its revision cannot be looked up \(\[Errno 111\]"):
        load_hub_tasks("hub:o/sets")
    with pytest.raises(UserError, match=r"hub:o/sets/x\.json@v1: cannot be loaded \(\[Errno 111\]"):
        load_hub_tasks("hub:o/sets/x.json@v1")


def test_what_is_not_there_is_one_line(hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="hub:o/sets:tset: no such split; there are train, dev"):
        load_tasks("hub:o/sets:tset")
    import datasets

    def missing(*arguments: Any, **keywords: Any) -> Any:
        raise FileNotFoundError("Dataset 'o/x' doesn't exist on the Hub\nmore lines")

    monkeypatch.setattr(datasets, "get_dataset_split_names", missing)
    with pytest.raises(
        UserError, match=r"hub:o/x: cannot be loaded \(Dataset 'o/x' doesn't exist on the Hub\)$"
    ):
        load_tasks("hub:o/x")
