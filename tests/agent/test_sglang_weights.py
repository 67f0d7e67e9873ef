"""New weights on their way to servers: the order of things, what is compared, and what happens when it goes wrong."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from agent.engines.base import EngineError, GenerationRequest
from agent.engines.choose import serving_engine
from agent.engines.sglang_server import Server, ServerInfo
from agent.engines.sglang_weights import check_weights, plain_model, refuse_other_model
from agent.models import load_model, save_model
from envs.errors import UserError
from tests.agent.fake_sglang import FakeSGLang, completion, folder_checksums
from tests.agent.test_sglang_engine import (
    TOKENIZER,
    ask,
    evaluating,
    eventually,
    fake,
    fakes,
    folder,
    make_model,
    move,
    run,
    training,
)

__all__ = ["fake", "fakes", "folder"]


def test_pause_update_flush_version_checksum_continue(fake: FakeSGLang, tmp_path: Path) -> None:
    model = make_model()
    with training([fake], tmp_path, model) as engine:
        assert (engine.weight_version, ask(engine).weight_version) == (0, 0)
        move(model)
        fake.calls.clear()
        engine.load_weights(model, 4)
        assert fake.paths == [
            "/pause_generation",
            "/update_weights_from_disk",
            "/flush_cache",
            "/model_info",
            "/weights_checker",
            "/continue_generation",
        ]
        assert fake.calls[0][1] == {"mode": "abort"}
        assert fake.calls[1][1]["weight_version"] == fake.label and fake.label.startswith("4-")
        sent = load_model(Path(fake.calls[1][1]["model_path"])).model.state_dict()
        assert all(torch.equal(sent[name], tensor) for name, tensor in model.state_dict().items())
        assert (engine.weight_version, ask(engine).weight_version) == (4, 4)
        # The folder of the version before is gone, the current one stays for a server that comes back.
        versions = [path.name for path in fake.folder.parent.iterdir()]
        assert versions == ["version-000004"]
    assert not (tmp_path / "sglang").exists()


def test_a_version_must_grow_and_the_model_must_be_the_same(fake: FakeSGLang, tmp_path: Path) -> None:
    model = make_model()
    with training([fake], tmp_path, model) as engine:
        engine.load_weights(model, 2)
        fake.calls.clear()
        with pytest.raises(ValueError, match="weight version 2 does not follow 2"):
            engine.load_weights(model, 2)
        with pytest.raises(ValueError, match="weights of another model: intermediate_size is 48 here and 24"):
            engine.load_weights(make_model(intermediate_size=48), 3)
        with pytest.raises(ValueError, match="do not fit"):
            engine.load_weights({"x": torch.zeros(1)}, 3)
        assert fake.calls == [] and ask(engine).weight_version == 2
    with evaluating([fake]) as engine, pytest.raises(ValueError, match="not ours to change"):
        engine.load_weights(model, 9)


def test_a_state_dict_and_adapters_are_sent_as_plain_weights(fake: FakeSGLang, tmp_path: Path) -> None:
    model, other = make_model(), make_model(seed=1)
    with training([fake], tmp_path, model) as engine:
        engine.load_weights(other.state_dict(), 1)
        expected = save_model(other, TOKENIZER, tmp_path / "expected")
        assert folder_checksums(fake.folder) == folder_checksums(expected)
    adapted: Any = get_peft_model(make_model(), LoraConfig(target_modules=["q_proj"], r=2))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(parameter)
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    merged = plain_model(adapted, adapted)
    layer = "model.layers.0.self_attn.q_proj.weight"
    a = before[f"base_model.model.{layer.replace('.weight', '.lora_A.default.weight')}"]
    scale = adapted.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"]
    plain = before[f"base_model.model.{layer.replace('.weight', '.base_layer.weight')}"]
    torch.testing.assert_close(merged.state_dict()[layer], plain + scale * torch.ones(16, 2) @ a)
    assert all(torch.equal(value, before[name]) for name, value in adapted.state_dict().items())
    with training([fake], tmp_path, adapted) as engine:
        assert ask(engine).weight_version == 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("corrupt", "serves other weights than the trainer has: model.norm.weight differs"),
        ("lies", "says that it serves weights 'a lie'"),
    ],
)
def test_weights_that_did_not_arrive_end_the_engine(
    fake: FakeSGLang, tmp_path: Path, fault: str, message: str
) -> None:
    model = make_model()
    with training([fake], tmp_path, model) as engine:
        setattr(fake, fault, True)
        with pytest.raises(EngineError, match=message):
            engine.load_weights(model, 1)
        assert fake.paths[-1] == "/continue_generation"  # not left paused for whoever comes next
        with pytest.raises(EngineError, match="weights 1 did not get over"):
            ask(engine)


def test_a_folder_that_the_server_cannot_read(fake: FakeSGLang, tmp_path: Path) -> None:
    model = make_model()
    with training([fake], tmp_path, model) as engine:
        carrier: Any = engine.pool.carrier
        real = carrier.prepare

        def vanish(model: Any, version: int) -> None:
            real(model, version)
            (carrier._current / "model.safetensors").unlink()

        carrier.prepare = vanish
        with pytest.raises(EngineError, match="update_weights_from_disk: status 400: Failed to get weights"):
            engine.load_weights(model, 1)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"model_type": "llama"}, "serves a llama model, these weights are of a qwen2 one"),
        ({"architectures": ["Qwen2Model"]}, "serves Qwen2Model, these weights are of Qwen2ForCausalLM"),
    ],
)
def test_a_server_of_another_model_is_refused_before_it_gets_anything(
    fake: FakeSGLang, tmp_path: Path, info: dict[str, Any], message: str
) -> None:
    fake.info |= info
    with pytest.raises(UserError, match=message), training([fake], tmp_path):
        pass
    assert "/update_weights_from_disk" not in fake.paths


def test_a_model_of_another_size_is_refused_where_the_folder_can_be_seen(tmp_path: Path) -> None:
    small = save_model(make_model(), TOKENIZER, tmp_path / "small")
    info = ServerInfo("qwen2", ("Qwen2ForCausalLM",), str(small), "float32", "cpu", 64, 1, 1, "default")
    refuse_other_model(make_model().config, info, "it")
    with pytest.raises(UserError, match="num_hidden_layers is 3 here and 2 there"):
        refuse_other_model(make_model(num_hidden_layers=3).config, info, "it")


def test_an_evaluation_refuses_a_server_of_another_size(fake: FakeSGLang) -> None:
    assert serving_engine([fake.url], make_model().config).weight_version == 0
    with pytest.raises(UserError, match=r"serves another model .*: hidden_size is 32 here and 16 there"):
        serving_engine([fake.url], make_model(hidden_size=32).config)


def test_a_server_with_other_tensors_is_refused(fake: FakeSGLang, tmp_path: Path) -> None:
    """Its first folder may be gone; the names of its tensors tell enough, and sizes it refuses itself."""
    fake.info["model_path"] = "/removed/long/ago"
    shorter = make_model(num_hidden_layers=1)
    with (
        pytest.raises(UserError, match=r"it has a tensor model\.layers\.1.* that the trainer's model lacks"),
        training([fake], tmp_path, shorter),
    ):
        pass
    with (
        pytest.raises(
            UserError, match=r"it has no tensor model\.layers\.2\..*, which the trainer's model has"
        ),
        training([fake], tmp_path, make_model(num_hidden_layers=3)),
    ):
        pass
    assert "/update_weights_from_disk" not in fake.paths


def test_checksums_notice_every_single_tensor(fake: FakeSGLang) -> None:
    server = Server(fake.url)
    info, model = server.info(), make_model()
    assert check_weights(server, info, model)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            before = parameter.reshape(-1)[-1].item()
            parameter.reshape(-1)[-1] = before + 1e-3
            with pytest.raises(EngineError, match="serves other weights"):
                check_weights(server, info, model)
            parameter.reshape(-1)[-1] = before
        assert check_weights(server, info, model), name
    del model.model.norm
    with pytest.raises(EngineError, match=r"has a tensor model\.norm\.weight that the trainer's model lacks"):
        check_weights(server, info, model)
    untied = make_model(tie_word_embeddings=False)
    with pytest.raises(EngineError, match="has no tensor"):
        check_weights(server, info, make_with_embeddings_of(untied))
    server.close()


def make_with_embeddings_of(untied: Any) -> Any:
    """The start model, but with an output layer of its own, which the server does not have."""
    state = {k: v for k, v in make_model().state_dict().items() if k != "lm_head.weight"}
    untied.load_state_dict(state, strict=False)
    return untied


def test_a_bfloat16_server_is_compared_in_its_own_type(fake: FakeSGLang, tmp_path: Path) -> None:
    rounded = make_model().to(torch.bfloat16)
    fake.folder = save_model(rounded, TOKENIZER, tmp_path / "rounded")
    server = Server(fake.url)
    fake.limits["dtype"] = "bfloat16"
    fake_checksums = {name: value for name, value in _bfloat16_checksums(rounded).items()}
    server.checksums = lambda: [fake_checksums]  # type: ignore[method-assign]
    assert check_weights(server, server.info(), make_model())
    server.close()


def _bfloat16_checksums(model: Any) -> dict[str, str]:
    def of(*parts: torch.Tensor) -> str:
        data = torch.cat(parts).contiguous().view(torch.int16).numpy().tobytes()
        return hashlib.sha256(data).hexdigest()[:16]

    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    found = {}
    for name, value in state.items():
        if "q_proj" in name:
            rest = [state[name.replace("q_proj", part)] for part in ("k_proj", "v_proj")]
            found[name.replace("q_proj", "qkv_proj")] = of(value, *rest)
        elif "gate_proj" in name:
            found[name.replace("gate_proj", "gate_up_proj")] = of(
                value, state[name.replace("gate_proj", "up_proj")]
            )
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            found[name] = of(value)
    return found


@pytest.mark.parametrize("kind", ["device", "experts"])
def test_where_hashes_are_not_comparable_they_must_at_least_move(
    fake: FakeSGLang, tmp_path: Path, kind: str
) -> None:
    """On a GPU; with experts."""
    model = make_model()
    if kind == "device":
        fake.limits["device"] = "cuda"
    else:
        fake.extra = {"model.layers.0.mlp.experts.w13_weight": "0" * 16}
    with training([fake], tmp_path, model) as engine:
        move(model)
        engine.load_weights(model, 1)
        engine.load_weights(model, 2)  # unmoved weights, unmoved checksums: nothing to complain about
        carrier: Any = engine.pool.carrier
        carrier.send = lambda server, info, label: setattr(fake, "label", label)  # the label alone goes over
        move(model)
        with pytest.raises(EngineError, match="its checksums are the old ones"):
            engine.load_weights(model, 3)


def test_what_is_in_flight_while_weights_change_is_sampled_again(fake: FakeSGLang, tmp_path: Path) -> None:
    model = make_model()
    with training([fake], tmp_path, model) as engine:
        fake.seconds = 60.0

        async def play() -> list[int]:
            tasks = [
                asyncio.create_task(engine.generate(GenerationRequest((n,), seed=n))) for n in range(1, 6)
            ]
            await eventually(lambda: fake.running() == 5)
            move(model)
            fake.seconds = 0.01
            await asyncio.to_thread(engine.load_weights, model, 1)
            return [(await task).weight_version for task in tasks]

        assert run(play()) == [1] * 5
        assert len(fake.served) == 10  # five aborted, five whole
        assert [body["input_ids"][0] for path, body in fake.calls if path == "/generate"].count(3) == 2


def test_a_completion_of_the_old_weights_is_never_handed_out(fake: FakeSGLang, tmp_path: Path) -> None:
    """An answer that was sampled before the push and read after it, and one that met both versions."""
    model = make_model()
    with training([fake], tmp_path, model) as engine:
        old = fake.label
        engine.load_weights(model, 1)
        mixed = completion("length", old, now=fake.label)
        mixed["meta_info"]["weight_versions"] = [
            {"version": old, "start": 0, "end": 1},
            {"version": fake.label, "start": 1, "end": 3},
        ]
        for late in (completion("length", old), completion("length", old, now=fake.label), mixed):
            fake.queue.append((200, late))
            fake.calls.clear()
            found = ask(engine)
            assert (found.finish, found.weight_version) == ("stop", 1)  # the recorded lengths are not it
            assert fake.paths.count("/generate") == 2
            assert "/update_weights_from_disk" in fake.paths  # a server that says so is brought up to date


def test_a_server_that_was_restarted_gets_the_current_weights_first(
    fakes: list[FakeSGLang], tmp_path: Path
) -> None:
    model = make_model()
    one, two = fakes
    with training(fakes, tmp_path, model) as engine:
        move(model)
        engine.load_weights(model, 3)
        current = folder_checksums(one.folder)
        one.die()
        one.start()  # unnoticed: it serves what it was started with
        assert folder_checksums(one.folder) != current

        async def play() -> list[int]:
            requests = [GenerationRequest((n,), seed=n, group=str(n)) for n in range(1, 9)]
            return [found.weight_version for found in await asyncio.gather(*map(engine.generate, requests))]

        assert run(play()) == [3] * 8
        two.die()
        assert run(play()) == [3] * 8
        assert folder_checksums(one.folder) == current
        two.start()
        engine.pool.take_back(engine.pool.members[1])
        assert folder_checksums(two.folder) == current and two.label == one.label


def test_a_server_that_is_away_during_a_push_gets_it_later(fakes: list[FakeSGLang], tmp_path: Path) -> None:
    model = make_model()
    one, two = fakes
    with training(fakes, tmp_path, model) as engine:
        one.die()
        move(model)
        engine.load_weights(model, 1)
        assert [member.alive for member in engine.pool.members] == [False, True]
        assert ask(engine).weight_version == 1
        one.start()
        assert engine.pool.take_back(engine.pool.members[0])
        assert one.label == two.label and folder_checksums(one.folder) == folder_checksums(two.folder)


def test_all_away_during_a_push(fake: FakeSGLang, tmp_path: Path) -> None:
    model = make_model()
    with training([fake], tmp_path, model, start_timeout=30) as engine:
        fake.die()
        back = threading.Timer(0.3, fake.start)
        back.start()
        move(model)
        engine.load_weights(model, 1)
        back.join()
        assert fake.label.startswith("1-") and ask(engine).weight_version == 1
    with training([fake], tmp_path, model, start_timeout=0.2) as engine:
        fake.die()
        with pytest.raises(EngineError, match="no server is there"):
            engine.load_weights(model, 1)
