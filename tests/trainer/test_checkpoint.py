"""Checkpoints: what goes in comes out, to the bit; a kill at any moment leaves a complete one behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from envs.errors import UserError
from envs.tasks.task import Task
from trainer.checkpoint import (
    PHASES,
    CheckpointStore,
    fingerprint_tasks,
    load_checkpoint,
    restore_rng,
    rng_state,
)
from trainer.state_tree import flatten, restore

CONFIG = {"seed": 3, "learner": {"lr": 1e-4, "schedule": None}}


def save(store: CheckpointStore, step: int, score: float | None = None, **extra: Any) -> Path:
    state = {"weights": torch.full((5,), float(step)), "position": step}
    return store.save(step, state, config=CONFIG, data_fingerprint="abc", score=score, **extra)


def names(store: CheckpointStore) -> list[str]:
    return [folder.name for folder in store.folders()]


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and left.shape == right.shape
        assert torch.equal(
            left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8)
        )
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    else:
        assert left == right or (left != left and right != right)


def nested_state() -> dict[str, Any]:
    shared = torch.arange(6.0)
    generator = np.random.default_rng(5)
    generator.random(3)
    return {
        "plain": [1, -2.5, True, None, "text ‹π›", {"deeper": []}],
        "odd": [float("nan"), float("inf"), -float("inf"), 2**200],
        "tuple": (1, (2.0, "x"), {"t": torch.ones(2, dtype=torch.bfloat16)}),
        "keys": {0: "zero", (1, "a"): torch.tensor(3), "$tensor": "a name that looks like a mark"},
        "shared": [shared, shared, shared.view(2, 3).T, shared[2:4]],
        "empty": torch.empty(0, 3),
        "a.b": torch.tensor([1]),
        "a": {"b": torch.tensor([2])},
        "pcg": generator.bit_generator.state,
        "mersenne": np.random.RandomState(4).get_state(legacy=False),
        "array": np.arange(4, dtype=np.int16).reshape(2, 2)[:, ::-1],
        "types": [
            torch.tensor([1, 2], dtype=t) for t in (torch.uint8, torch.int64, torch.float16, torch.float64)
        ],
    }


def test_a_nested_state_comes_back_as_it_was(tmp_path):
    state = nested_state()
    folder = CheckpointStore(tmp_path).save(7, state, config=CONFIG, data_fingerprint="abc", score=0.25)
    read = load_checkpoint(folder, "abc")
    assert_same(read.state, state)
    assert (read.step, read.config, read.data_fingerprint, read.score) == (7, CONFIG, "abc", 0.25)
    values, tensors = flatten(state)
    assert_same(restore(json.loads(json.dumps(values)), tensors), state)


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", object(), np.int64(3)])
def test_what_cannot_be_kept_is_named(value, tmp_path):
    store = CheckpointStore(tmp_path)
    with pytest.raises(TypeError, match=r"state\.learner\.1\.odd is a"):
        store.save(1, {"learner": [0, {"odd": value}]}, config={}, data_fingerprint="")
    assert store.latest() is None
    save(store, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000002"]


def train(steps: int, resumed: Path | None = None, saved: CheckpointStore | None = None) -> dict[str, Any]:
    """AdamW with a schedule and dropout: weights, moments, schedule and generator must all come back."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = np.random.default_rng(1)
    done = 0
    if resumed is not None:
        read = load_checkpoint(resumed)
        model.load_state_dict(read.state["model"])
        optimizer.load_state_dict(read.state["optimizer"])
        schedule.load_state_dict(read.state["schedule"])
        data.bit_generator.state = read.state["data"]
        restore_rng(read.state["rng"])
        done = read.step
    for _ in range(steps):
        batch = torch.from_numpy(data.normal(size=(3, 4))).float()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        done += 1
    state = {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "data": data.bit_generator.state,
        "rng": rng_state(),
    }
    if saved is not None:
        saved.save(done, state, config={}, data_fingerprint="")
    return state


def test_four_steps_are_two_and_two_to_the_bit(tmp_path):
    store = CheckpointStore(tmp_path)
    whole = train(4)
    halfway = train(2, saved=store)
    torch.manual_seed(99)
    resumed = train(2, resumed=store.latest())
    assert_same(resumed, whole)
    assert not torch.equal(halfway["model"]["0.weight"], whole["model"]["0.weight"])


def test_a_model_goes_along_as_a_plain_folder(tmp_path):
    from agent.models import load_model
    from agent.tiny import build_model, build_tokenizer

    tokenizer = build_tokenizer(["Lima is the capital of Peru."], 300)
    model = build_model(tokenizer, hidden=16, layers=1, heads=2)
    folder = save(CheckpointStore(tmp_path), 3, model=model, tokenizer=tokenizer)
    loaded = load_model(folder / "model")
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], weight)
    assert load_checkpoint(folder).step == 3
    os.truncate(folder / "model" / "model.safetensors", 100)
    with pytest.raises(UserError, match=r"damaged: model/model.safetensors has 100 bytes"):
        load_checkpoint(folder)


def test_the_newest_and_the_best_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step, score in enumerate([0.1, 0.9, 0.3, 0.9, float("nan"), None], 1):
        save(store, step, score)
    assert names(store) == ["step-000002", "step-000005", "step-000006"]
    assert store.latest().name == "step-000006" and store.best().name == "step-000002"
    assert (tmp_path / "latest").read_text() == "step-000006\n"
    assert (tmp_path / "best").read_text() == "step-000002\n"
    save(store, 7, 0.95)
    assert names(store) == ["step-000006", "step-000007"] and store.best().name == "step-000007"
    assert store.load("abc").step == 7


def test_without_scores_there_is_no_best(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    save(store, 1_000_000)
    assert names(store) == ["step-1000000"]
    assert store.best() is None and not (tmp_path / "best").exists()


def test_going_on_from_an_earlier_step(tmp_path):
    store = CheckpointStore(tmp_path, keep=5)
    for step in (2, 4, 6, 8):
        save(store, step, score=step / 10)
    store.discard_after(5)
    assert names(store) == ["step-000002", "step-000004"]
    assert store.latest().name == store.best().name == "step-000004"
    assert (tmp_path / "best").read_text() == "step-000004\n"
    store.discard_after(0)
    assert names(store) == [] and store.latest() is None and not (tmp_path / "best").exists()


def test_the_same_step_again_replaces(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 4, score=0.1)
    save(store, 4, score=0.2)
    assert names(store) == ["step-000004"] and store.load().score == 0.2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "latest", "step-000004"]


def test_other_data_is_refused_with_both_named(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    with pytest.raises(UserError, match=r"other data: its fingerprint is abc, that of the data now is xyz"):
        store.load("xyz")


def test_what_is_no_checkpoint_is_refused_in_one_line(tmp_path):
    store = CheckpointStore(tmp_path / "none")
    with pytest.raises(UserError, match="no checkpoint in"):
        store.load()
    with pytest.raises(UserError, match=r"it has no state\.json"):
        load_checkpoint(tmp_path)
    with pytest.raises(UserError, match="keep is 0"):
        CheckpointStore(tmp_path, keep=0)
    folder = save(CheckpointStore(tmp_path), 1)
    text = (folder / "state.json").read_text()
    (folder / "state.json").write_text(text.replace('"format": 1', '"format": 9'))
    with pytest.raises(UserError, match="has format 9; 1 is needed"):
        load_checkpoint(folder)
    (folder / "state.json").write_text(text[:40])
    with pytest.raises(UserError, match=r"damaged: state\.json"):
        load_checkpoint(folder)
    (folder / "state.json").write_text(text)
    (folder / "state.safetensors").unlink()
    with pytest.raises(UserError, match=r"damaged: state\.safetensors has no bytes"):
        load_checkpoint(folder)


def test_fingerprints_tell_data_apart():
    one = Task("1", ("Q?",), (("a", "b"),))
    two = Task("2", ("R?",), (("c",),))
    variants = [
        [one, two],
        [two, one],
        [one],
        [Task("1", ("Q?",), (("b", "a"),)), two],
        [Task("1", ("Q!",), (("a", "b"),)), two],
        [Task("3", ("Q?",), (("a", "b"),)), two],
    ]
    prints = [fingerprint_tasks(tasks) for tasks in variants]
    assert len(set(prints)) == len(variants)
    assert fingerprint_tasks(iter(variants[0])) == prints[0]


# --- kill -9 ---


def writer(root: str, first: int, hold_at: tuple[int, str] | None, pipe: int) -> None:
    """Saves for ever; says on the pipe which phase begins; waits to be killed at ``hold_at``."""
    torch.set_num_threads(1)
    store = CheckpointStore(root, keep=2)
    step = first
    while True:

        def on_phase(phase: str, step: int = step) -> None:
            os.write(pipe, f"{step} {phase}\n".encode())
            if hold_at == (step - first, phase):
                time.sleep(60)

        # Three equal numbers in different files: a mixture of two steps would show.
        state = {
            "weights": torch.full((40_000,), float(step)),
            "position": step,
            "more": torch.tensor([step]),
        }
        store.save(
            step,
            state,
            config={"step": step},
            data_fingerprint="abc",
            score=-abs(step - 3),
            on_phase=on_phase,
        )
        os.write(pipe, f"{step} saved\n".encode())
        step += 1


def killed(root: Path, first: int, hold_at: tuple[int, str] | None, delay: float) -> list[tuple[int, str]]:
    """Run a writer, kill it with SIGKILL (while it holds, or ``delay`` seconds after its first word)."""
    reading, writing = os.pipe()
    process = multiprocessing.get_context("fork").Process(
        target=writer, args=(str(root), first, hold_at, writing)
    )
    process.start()
    os.close(writing)
    said = b""
    if hold_at is None:
        said = os.read(reading, 1)
        time.sleep(delay)
    else:
        goal = f"{first + hold_at[0]} {hold_at[1]}\n".encode()
        while goal not in said:
            said += os.read(reading, 4096)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    while more := os.read(reading, 65536):
        said += more
    os.close(reading)
    lines = [line.split() for line in said.decode().split("\n")[:-1]]
    return [(int(step), phase) for step, phase in lines]


def test_a_kill_at_any_moment_leaves_the_last_checkpoint(tmp_path):
    draw = random.Random(7)
    plan: list[tuple[int, str] | None] = [(draw.randrange(3), phase) for phase in PHASES for _ in range(2)]
    plan += [None] * 24
    draw.shuffle(plan)
    died_in: Counter[str] = Counter()
    step, acknowledged = 1, 0
    for number, hold_at in enumerate(plan):
        said = killed(tmp_path, step, hold_at, delay=draw.uniform(0, 0.03))
        died_in[said[-1][1]] += 1
        acknowledged = max([acknowledged, *(saved for saved, phase in said if phase == "saved")])
        store = CheckpointStore(tmp_path, keep=2)
        if store.latest() is None:
            assert acknowledged == 0
            continue
        read = store.load("abc")
        assert acknowledged <= read.step <= acknowledged + 1, (number, hold_at, said[-3:])
        assert read.config == {"step": read.step} and read.state["position"] == read.step
        assert torch.equal(read.state["weights"], torch.full((40_000,), float(read.step)))
        assert read.state["more"].tolist() == [read.step]
        for folder in store.folders():
            load_checkpoint(folder, "abc")
        # A resumed run goes on after what it found; every third time it comes by the same step again.
        step = read.step + (number % 3 > 0)
        acknowledged = read.step
    assert set(PHASES) <= set(died_in), f"phases without a kill: {set(PHASES) - set(died_in)}"
    # Held writers get as far as they are told on any machine; one that repeats a step gains one save less.
    promised = sum(
        max(0, hold_at[0] - (number % 3 == 1)) for number, hold_at in enumerate(plan) if hold_at is not None
    )
    assert acknowledged >= promised > 5
    save(CheckpointStore(tmp_path, keep=2), step)
    hidden = [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert not hidden, "a save cleans up what kills left"
    assert len(CheckpointStore(tmp_path).folders()) in (2, 3), "the two newest, and the best"


def test_a_kill_while_a_step_is_replaced(tmp_path):
    """The instant between the two renames: the old checkpoint of that step is found under its other name."""
    store = CheckpointStore(tmp_path)
    folder = save(store, 5, score=0.5)
    os.replace(folder, tmp_path / ".replaced-step-000005")
    shutil.copytree(tmp_path / ".replaced-step-000005", tmp_path / ".writing-step-000005")
    assert store.load("abc").step == 5 and store.best() is not None
    save(store, 6)
    assert names(store) == ["step-000005", "step-000006"]
