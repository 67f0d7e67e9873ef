"""Whole runs from the shipped cold start: repeatable to the bit, resumable to the bit, and they leave what they say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from envs.errors import UserError
from eval.store import only_writer
from trainer import learner, replay, run
from trainer.config import RunConfig, load_config

SMALL = [
    "threads=1",
    "rollout.questions_per_step=3",
    "rollout.group_size=4",
    "evaluation.questions=4",
    "evaluation.objectives=[2]",
    "output.checkpoint_every=1",
    "output.keep=5",
    "output.dump_rollouts=true",
    "learner.optimizer.warmup_steps=1",
    "learner.optimizer.lr=1e-3",
]


def small(*overrides: str, recipe: str = "tiny") -> RunConfig:
    return load_config(recipe, [*SMALL, *overrides])


def weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model" / "model.safetensors")


def same_weights(one: Path, other: Path) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(a[key].equal(b[key]) for key in a)


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "four"
    run.run_folder(small("steps=4"), folder)
    return folder


def test_the_same_seed_gives_the_same_run_to_the_bit(four_steps: Path, tmp_path: Path) -> None:
    run.run_folder(small("steps=4"), tmp_path / "again")
    for name in ("metrics.jsonl", "rollouts/step-0004.jsonl", "episodes/step-0001.md"):
        assert (tmp_path / "again" / name).read_bytes() == (four_steps / name).read_bytes(), name
    assert same_weights(four_steps, tmp_path / "again")
    first, second = (json.loads((f / "summary.json").read_text()) for f in (four_steps, tmp_path / "again"))
    assert {**first, "seconds": 0} == {**second, "seconds": 0}


def test_it_learns_from_advantages_of_both_signs_and_the_weights_move(four_steps: Path) -> None:
    rows = [json.loads(line) for line in (four_steps / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert any(row["reward/std_within_groups"] > 0 for row in rows)
    assert all(0 < row["memory/positive_share"] < 1 and 0 < row["memory/negative_share"] < 1 for row in rows)
    moved = {**weights(four_steps)}
    start = load_file(four_steps / "cold_start" / "model.safetensors")
    assert all(not moved[key].equal(start[key]) for key in start)


def test_the_first_step_on_fresh_data_has_ratio_one(four_steps: Path) -> None:
    """Against the engine's own log-probs: one optimizer step an update here, so every step is a first one."""
    for row in (json.loads(line) for line in (four_steps / "metrics.jsonl").read_text().splitlines()):
        assert row["update/optimizer_steps"] == 1 and row["update/clip_fraction"] == 0.0
        assert row["update/ratio_max"] == pytest.approx(1, abs=2e-5)
        assert row["update/ratio_min"] == pytest.approx(1, abs=2e-5)
        assert row["update/engine_diff_mean"] < 1e-6 and row["rollout/weight_gap"] == 0


PROMISED = """reward/mean reward/std_within_groups score/em score/f1 memory/p_mem memory/p_full memory/r_mem
memory/r_mem_turn1 memory/r_mem_turn2 memory/a_mem_turn1 memory/positive_share memory/negative_share
memory/transcripts_cut update/clip_fraction update/ratio_max update/kl_reference update/kl_reference_max
update/engine_kl_mean update/engine_kl_max update/engine_diff_mean update/engine_diff_max update/entropy
update/grad_norm update/lr dropped/groups episode/invalid_turns tokens/prompt tokens/completion tokens/memory
tokens/thought_and_action tokens/total tokens/peak tokens/memory_block tokens/memory_block_max
repeat/memories_across_questions repeat/queries_across_questions repeat/distinct_rollouts_in_group"""


def test_every_step_has_every_metric(four_steps: Path) -> None:
    rows = [json.loads(line) for line in (four_steps / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert set(PROMISED.split()) <= set(row)
        assert all(isinstance(value, int | float) for value in row.values())
        whole = row["tokens/prompt"] + row["tokens/memory"] + row["tokens/thought_and_action"]
        assert whole == pytest.approx(row["tokens/total"])
    assert rows[0]["update/kl_reference"] == pytest.approx(0, abs=1e-6)
    assert rows[3]["update/kl_reference"] > 1e-6


def test_validated_policies_are_kept_and_the_best_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation every 2 of 5 steps, checkpoints every 4, one kept: the best stays beside the newest."""
    scores = {2: 0.9, 4: 0.5}
    monkeypatch.setattr(
        "trainer.validation.Validation.after",
        lambda self, step, engine: {"validation/f1": scores[step]} if step in scores else {},
    )
    config = small("steps=5", "evaluation.tasks=''", "output.checkpoint_every=4", "output.keep=1")
    run.run_folder(config, tmp_path / "run")
    kept = tmp_path / "run" / "checkpoints"
    assert sorted(p.name for p in kept.iterdir() if p.is_dir()) == ["step-000002", "step-000005"]
    assert (kept / "best").read_text().strip() == "step-000002"
    assert (kept / "latest").read_text().strip() == "step-000005"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("validation/f1") for row in rows] == [None, 0.9, None, 0.5, None]


def test_a_run_of_broken_steps_stops_at_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, calls = learner.objective, [0]

    def breaks(*arguments: Any) -> Any:
        calls[0] += 1
        return real(*arguments) * (float("nan") if calls[0] > 2 else 1.0)

    options = [*SMALL, "steps=6", "evaluation.tasks=''", "learner.max_nonfinite_steps=2"]
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(learner, "objective", breaks)
        arguments = [part for option in options for part in ("--set", option)]
        assert run.main(["tiny", "--out", str(folder), *arguments]) == 1
    said = capsys.readouterr().err
    assert "not finite" in said and str(folder / "checkpoints") in said
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["update/skipped_steps"] for row in rows][-1] == 1 and rows[0]["update/skipped_steps"] == 0
    latest = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()
    last = load_file(latest / "state.safetensors")
    assert all(value.isfinite().all() for value in last.values() if value.is_floating_point())
    assert run.main(["--resume", str(folder)]) == 0  # and it goes on from there
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 7)) and rows[-1]["update/skipped_steps"] == 0


def test_an_interrupted_run_says_in_one_line_how_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "train", interrupt)
    options = [part for option in [*SMALL, "evaluation.tasks=''"] for part in ("--set", option)]
    assert run.main(["tiny", "--out", str(tmp_path / "run"), *options]) == 130
    assert (
        capsys.readouterr().err
        == f"interrupted; --resume {tmp_path / 'run'} goes on from the last checkpoint\n"
    )


def test_another_seed_gives_another_run(four_steps: Path, tmp_path: Path) -> None:
    run.run_folder(small("steps=1", "seed=1"), tmp_path / "other")
    first = (four_steps / "metrics.jsonl").read_text().splitlines()[0]
    assert (tmp_path / "other" / "metrics.jsonl").read_text().splitlines()[0] != first


def test_two_steps_and_a_resume_equal_four_steps(four_steps: Path, tmp_path: Path) -> None:
    folder = tmp_path / "resumed"
    run.run_folder(small("steps=4"), folder)
    # What a kill after the second step leaves: no later checkpoint, half a line of metrics, no result.
    for name in ("step-000003", "step-000004"):
        shutil.rmtree(folder / "checkpoints" / name)
    (folder / "checkpoints" / "latest").unlink()
    shutil.rmtree(folder / "model")
    (folder / "summary.json").unlink()
    whole = (folder / "metrics.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:3]) + lines[3][:40])

    assert run.main(["--resume", str(folder)]) == 0
    assert (folder / "metrics.jsonl").read_text() == whole
    assert same_weights(four_steps, folder)
    first, second = (json.loads((f / "summary.json").read_text()) for f in (four_steps, folder))
    assert {**first, "seconds": 0} == {**second, "seconds": 0}


@pytest.mark.parametrize("step", [1, 3])
def test_an_update_from_the_dump_equals_the_original_to_the_bit(four_steps: Path, step: int) -> None:
    found = replay.replay(four_steps, step)
    row = json.loads((four_steps / "metrics.jsonl").read_text().splitlines()[step - 1])
    assert found.metrics == {key: value for key, value in row.items() if key.startswith("update/")}
    assert found.metrics["update/grad_norm"] > 0 and found.metrics["update/optimizer_steps"] >= 1
    kept = load_file(four_steps / "checkpoints" / f"step-{step:06d}" / "state.safetensors")
    weights_kept = [value for key, value in kept.items() if ".model." in key]
    own = {name: p for name, p in found.learner.model.named_parameters()}
    assert len(weights_kept) >= len(own) > 10  # tied weights are named once
    for name, parameter in own.items():
        assert any(value.shape == parameter.shape and value.equal(parameter) for value in weights_kept), name
    assert found.differing == [] and found.compared[1] > 3 * len(own)
    assert replay.main([str(four_steps), str(step)]) == 0


def test_a_step_without_groups_or_with_a_norm_that_is_not_finite_is_replayed(
    four_steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(four_steps, folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[0] = {key: None if key == "update/grad_norm" else value for key, value in rows[0].items()}
    rows[1] = {key: value for key, value in rows[1].items() if not key.startswith("update/")}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rollouts" / "step-0002.jsonl").write_text("")
    shutil.rmtree(folder / "checkpoints" / "step-000002")
    found = replay.replay(folder, 2)
    assert (found.metrics, found.differing, found.compared) == ({}, [], (0, 0))

    update = learner.Learner.update
    infinite = {"grad_norm": float("inf")}
    monkeypatch.setattr(learner.Learner, "update", lambda self, rows: {**update(self, rows), **infinite})
    assert replay.replay(folder, 1).differing == []

    (folder / "metrics.jsonl").write_text("")
    assert replay.main([str(folder), "1"]) == 2
    assert "has no finished step" in capsys.readouterr().err


def test_a_replay_notices_what_differs(four_steps: Path, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(four_steps, folder)
    dump = folder / "rollouts" / "step-0002.jsonl"
    lines = dump.read_text().splitlines(keepends=True)
    dump.write_text("".join(lines[1:]))
    assert replay.main([str(folder), "2"]) == 1
    assert "differs: update/trained_tokens" in capsys.readouterr().out
    shutil.rmtree(folder / "checkpoints" / "step-000001")
    assert replay.main([str(folder), "2"]) == 2
    assert "no checkpoint of step 1" in capsys.readouterr().err
    assert replay.main([str(folder), "9"]) == 2
    assert "no step 9 (steps: 1 to 4)" in capsys.readouterr().err


def test_a_resume_with_other_data_is_refused(four_steps: Path, tmp_path: Path) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(four_steps, folder)
    text = (folder / "config.toml").read_text().replace("factbook-tiny:train", "factbook-tiny:heldout", 1)
    (folder / "config.toml").write_text(text)
    with pytest.raises(UserError, match="other data"):
        run.run_folder(load_config(str(folder / "config.toml")), folder, resumed=True)


def test_a_run_leaves_what_it_says(four_steps: Path) -> None:
    summary = json.loads((four_steps / "summary.json").read_text())
    for policy in ("cold_start", "trained"):
        assert set(summary[policy]) == {"2"}
        for key in ("em", "f1", "greedy_f1", "total_tokens", "peak_tokens"):
            assert isinstance(summary[policy]["2"][key], float), key
    assert summary["seconds"]["total"] >= summary["seconds"]["train"] > 0
    assert (four_steps / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert (four_steps.parent / "latest").read_text().strip() in {"four", "latest"}
    text = (four_steps / "episodes" / "step-0001.md").read_text()
    assert "<mem>" in text or "memory" in text


def test_the_final_table_and_the_first_policy_come_from_the_same_questions(four_steps: Path) -> None:
    summary = json.loads((four_steps / "summary.json").read_text())
    assert summary["cold_start"]["2"]["questions"] == summary["trained"]["2"]["questions"] == 4


@pytest.mark.parametrize(
    "recipe",
    [
        "grpo",
        "dr-grpo",
        "dapo",
        "gspo",
        "rloo",
        "mempo-previous",
        "mempo-turn",
        "two-loss",
        "imitation",
        "ppo",
        "mixture",
        "mempo-none",
    ],
)
def test_every_recipe_trains_a_step(recipe: str, tmp_path: Path) -> None:
    run.run_folder(small("steps=1", "evaluation.tasks=''", recipe=recipe), tmp_path / recipe)
    start = load_file(tmp_path / recipe / "cold_start" / "model.safetensors")
    assert any(not value.equal(start[key]) for key, value in weights(tmp_path / recipe).items())


def test_two_processes_do_not_write_one_run(
    four_steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(four_steps, folder)
    before = (folder / "metrics.jsonl").read_bytes()
    with only_writer(folder):
        assert run.main(["--resume", str(folder)]) == 2
    assert "another process is writing there" in capsys.readouterr().err
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_folder_that_holds_a_run_is_not_overwritten(
    four_steps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["tiny", "--out", str(four_steps)]) == 2
    assert "--resume" in capsys.readouterr().err
