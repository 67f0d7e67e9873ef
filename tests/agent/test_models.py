"""Folders in and out: equal logits and encodings, no pickles, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from agent.models import load_model, save_model, weights_fingerprint
from agent.tiny import build_model, build_tokenizer
from envs.errors import UserError

TEXTS = ["The capital of Poland is Warsaw.", "l'été 12345  x\n\n y"] * 20


@pytest.mark.parametrize("split_spaces", [False, True])
def test_round_trip(tmp_path: Path, split_spaces: bool) -> None:
    tokenizer = build_tokenizer(TEXTS, 300, split_spaces=split_spaces)
    model = build_model(tokenizer, hidden=32, layers=2, heads=2, seed=1)
    folder = save_model(model, tokenizer, tmp_path / "deep" / "model")
    loaded = load_model(folder)
    ids = torch.arange(40)[None] * 7 % len(tokenizer)
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, model(ids).logits)
    texts = [
        *TEXTS[:2],
        "<mem>a</mem> b<|im_end|>",
        " lead",
        "e\u0301 é 🙂 漢字",
        "don't   stop\r\n",
        "3.14",
        "",
    ]
    for text in texts:
        assert loaded.tokenizer.encode(text, add_special_tokens=False) == tokenizer.encode(
            text, add_special_tokens=False
        )
    talk = [{"role": "user", "content": "hi"}]
    options = {"tokenize": False, "add_generation_prompt": True}
    assert loaded.tokenizer.apply_chat_template(talk, **options) == tokenizer.apply_chat_template(
        talk, **options
    )
    assert loaded.name == "model"
    assert loaded.fingerprint == weights_fingerprint(model)
    assert not loaded.model.training
    assert loaded.tokenizer.eos_token == "<|im_end|>" and loaded.tokenizer.pad_token == "<|pad|>"


def test_a_folder_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(TEXTS, 300)
    one, two = (build_model(tokenizer, hidden=16, layers=1, heads=1, seed=seed) for seed in (1, 2))
    save_model(one, tokenizer, tmp_path / "model")
    (tmp_path / "model" / "leftover.txt").write_text("old")
    save_model(two, tokenizer, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert not (tmp_path / "model" / "leftover.txt").exists()
    assert load_model(tmp_path / "model").fingerprint == weights_fingerprint(two) != weights_fingerprint(one)
    assert not [
        path.name for path in (tmp_path / "model").iterdir() if path.suffix in (".bin", ".pt", ".pkl")
    ]


def test_one_changed_weight_changes_the_fingerprint() -> None:
    model = build_model(build_tokenizer(TEXTS, 300), hidden=16, layers=1, heads=1)
    before = weights_fingerprint(model)
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-6
    assert weights_fingerprint(model) != before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_are_refused_unread(tmp_path: Path, name: str) -> None:
    tokenizer = build_tokenizer(TEXTS, 300)
    folder = save_model(build_model(tokenizer, hidden=16, layers=1, heads=1), tokenizer, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"c__builtin__\nexit\n(I3\ntR.")  # would end the process if it were unpickled
    with pytest.raises(UserError, match=name):
        load_model(folder)


def test_what_is_not_there_is_a_user_error(tmp_path: Path) -> None:
    for missing in (tmp_path / "nowhere", "./nowhere", "nowhere", "a/b/c"):
        with pytest.raises(UserError, match="does not exist"):
            load_model(missing)
    with pytest.raises(UserError, match=r"absent\.gguf"):
        load_model(tmp_path / "absent.gguf")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"config\.json"):
        load_model(tmp_path / "empty")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        load_model(tmp_path / "file")


def test_a_broken_folder_is_a_user_error(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(TEXTS, 300)
    folder = save_model(build_model(tokenizer, hidden=16, layers=1, heads=1), tokenizer, tmp_path / "model")
    layout = json.loads((folder / "config.json").read_text())
    layout["model_type"] = "no-such-architecture"
    layout.pop("architectures")
    (folder / "config.json").write_text(json.dumps(layout))
    with pytest.raises(UserError, match="model 'model' cannot be loaded"):
        load_model(folder)
    (folder / "config.json").unlink()
    for number in (1, 2):
        (folder / f"{number}.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="2 GGUF files"):
        load_model(folder)
