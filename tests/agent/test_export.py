"""What leaves this project: folders that plain transformers loads in a process without it, adapters merged, no code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from agent.export import main, push
from agent.models import load_model, save_model
from agent.tiny import build_model, build_tokenizer
from envs.errors import UserError
from trainer.algorithm import LoraConfig
from trainer.reference import attach_lora

TEXT = "<mem>The capital é of Poland</mem> 漢 12<|im_end|>"
ELSEWHERE = """
import json, sys
import torch, transformers
found = []
text, *folders = sys.argv[1:]
for folder in folders:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(text, add_special_tokens=False)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1].tolist()
    talk = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    found.append([ids, logits, talk, str(model.dtype)])
assert not {"agent", "envs", "trainer", "eval"} & set(sys.modules)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(["The capital of Poland is Warsaw."] * 20, 300)


def tiny(tokenizer: Any, seed: int = 1) -> Any:
    return build_model(tokenizer, hidden=32, layers=2, heads=2, seed=seed)


def adapted(model: Any) -> Any:
    wrapped = attach_lora(model, LoraConfig(rank=4, alpha=8))
    torch.manual_seed(0)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return wrapped


def last_logits(model: Any, tokenizer: Any) -> torch.Tensor:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0, -1]
    return logits


def test_plain_transformers_loads_it_in_another_process(tokenizer: Any, tmp_path: Path) -> None:
    model = tiny(tokenizer)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    save_model(model, tokenizer, tmp_path / "run" / "model")
    assert main([str(tmp_path / "run"), str(tmp_path / "plain")]) == 0

    save_model(model, tokenizer, tmp_path / "base")
    wrapped = adapted(tiny(tokenizer))
    expected = last_logits(wrapped, tokenizer)
    assert (expected - last_logits(model, tokenizer)).abs().max() > 0.1
    wrapped.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    wrapped.save_pretrained(tmp_path / "adapters")
    assert main([str(tmp_path / "adapters"), str(tmp_path / "merged")]) == 0
    assert main([str(tmp_path / "run"), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0

    folders = [tmp_path / name for name in ("plain", "merged", "half")]
    done = subprocess.run(
        [sys.executable, "-I", "-c", ELSEWHERE, TEXT, *map(str, folders)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    plain, merged, half = json.loads(done.stdout)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert plain[0] == merged[0] == half[0] == ids
    torch.testing.assert_close(torch.tensor(plain[1]), last_logits(model, tokenizer))
    torch.testing.assert_close(torch.tensor(merged[1]), expected, rtol=1e-4, atol=1e-4)
    assert plain[2] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert [plain[3], half[3]] == ["torch.float32", "torch.bfloat16"]
    for folder in folders:
        assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors", ".jinja"}
        assert not any("lora" in key for key in load_file(folder / "model.safetensors"))
        assert "auto_map" not in (folder / "config.json").read_text()


def test_adapters_load_as_a_model(tokenizer: Any, tmp_path: Path) -> None:
    base = save_model(tiny(tokenizer), tokenizer, tmp_path / "base")
    wrapped = adapted(tiny(tokenizer))
    expected = last_logits(wrapped, tokenizer)
    wrapped.peft_config["default"].base_model_name_or_path = str(base)
    wrapped.save_pretrained(tmp_path / "adapters")
    loaded = load_model(tmp_path / "adapters")
    assert not isinstance(loaded.model, peft.PeftModel) and loaded.name == "adapters"
    torch.testing.assert_close(last_logits(loaded.model, loaded.tokenizer), expected, rtol=1e-4, atol=1e-4)
    assert all(parameter.requires_grad for parameter in loaded.model.parameters())  # a run can start with it

    (tmp_path / "adapters" / "adapter_model.safetensors").rename(tmp_path / "adapters" / "adapter_model.bin")
    with pytest.raises(UserError, match="pickle"):
        load_model(tmp_path / "adapters")


class NoConnection(Exception):
    """As the transport errors of HTTP clients: neither an OSError nor an error of the hub's."""


class Hub:
    """In place of the hub's client; remembers what was done."""

    endpoint = "https://hub.test"
    done: list[tuple[Any, ...]] = []
    refusal: Exception | None = None

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.done.append(("create", name, private, exist_ok))

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        files = sorted(path.name for path in Path(folder_path).iterdir())
        self.done.append(("upload", repo_id, files))


def test_push_to_hub_is_an_option(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(Hub, "done", [])
    model = save_model(tiny(tokenizer), tokenizer, tmp_path / "model")
    assert main([str(model), str(tmp_path / "a")]) == 0 and not Hub.done
    assert main([str(model), str(tmp_path / "b"), "--push-to-hub", "me/mine", "--private"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "https://hub.test/me/mine"
    (created, uploaded) = Hub.done
    assert created == ("create", "me/mine", True, True)
    assert uploaded[:2] == ("upload", "me/mine") and {"config.json", "model.safetensors"} <= set(uploaded[2])

    monkeypatch.setattr(Hub, "refusal", OSError("401 Unauthorized\nmore"))
    assert main([str(model), str(tmp_path / "c"), "--push-to-hub", "me/mine"]) == 2
    assert "error: the hub did not take 'me/mine': 401 Unauthorized\n" in capsys.readouterr().err
    monkeypatch.setattr(Hub, "refusal", NoConnection("[Errno 111] Connection refused"))
    assert main([str(model), str(tmp_path / "d"), "--push-to-hub", "me/mine"]) == 2
    assert "error: the hub did not take 'me/mine': [Errno 111]" in capsys.readouterr().err
    for name in ("mine", "a/b/c", "/mine"):
        with pytest.raises(UserError, match="owner/name"):
            push(model, name)


def test_mistakes_are_one_line(tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_model(tiny(tokenizer), tokenizer, tmp_path / "model")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.toml").write_text("")
    for source, out, said in (
        (str(model), tmp_path, "is there already"),
        (str(tmp_path / "begun"), tmp_path / "x", "is not complete"),
        (str(tmp_path / "nowhere"), tmp_path / "x", "does not exist"),
    ):
        assert main([source, str(out)]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("known", [False, True])
def test_code_in_a_folder_is_never_run(tokenizer: Any, tmp_path: Path, known: bool) -> None:
    folder = save_model(tiny(tokenizer), tokenizer, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    if not known:
        config["model_type"] = "evil"
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: ...\n")
    if known:  # its own class is used
        assert type(load_model(folder).model).__module__.startswith("transformers.")
    else:
        with pytest.raises(UserError, match="cannot be loaded"):
            load_model(folder)
    assert not (tmp_path / "ran").exists()


def test_devices(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tiny(tokenizer), tokenizer, tmp_path / "model")
    moved: list[str] = []
    real = PreTrainedModel.to

    def to(self: Any, *places: Any, **more: Any) -> Any:
        moved.extend(str(place) for place in places)
        return real(self, "cpu")

    monkeypatch.setattr(PreTrainedModel, "to", to)
    for device in ("mps", "cuda:1"):
        monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        with pytest.raises(UserError, match=f"device '{device}': this machine"):
            load_model(folder, device=device)
        monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        load_model(folder, device=device)
    assert moved == ["mps", "cuda:1"]
    with pytest.raises(UserError, match="none of cpu, cuda"):
        load_model(folder, device="gpu")
