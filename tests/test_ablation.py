"""The ablation's table and its curves against time, on runs written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ablation import MORE_STEPS, SETTINGS, _prepare, by_seconds, report
from trainer.config import load_config


def _run(trained: float, cold: float, seconds: list[float]) -> dict[str, Any]:
    score = {"f1": trained, "greedy_f1": trained + 0.1, "total_tokens": 300.0}
    return {
        "summary": {
            "cold_start": {"2": {"f1": cold}},
            "trained": {"2": score, "4": {"f1": trained / 2}},
        },
        "seconds": seconds,
        "peak_mib": 700.0,
        "frozen": {"before": 0.4, "after": 0.5},
    }


def test_table_pairs_runs_by_seed_and_divides_gains_by_minutes_of_training() -> None:
    mempo = [_run(0.8, 0.6, [30.0, 30.0]), _run(0.7, 0.6, [60.0, 60.0])]
    grpo = [_run(0.6, 0.6, [30.0, 30.0]), _run(0.9, 0.6, [60.0, 60.0])]
    rows = report({"grpo": grpo, "tiny": mempo}).splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    # GRPO, paired: -0.2 and +0.2 (sample standard deviation 0.283); gains 0.0 in one minute and 0.3 in two
    assert cells[0][:3] == ["grpo", "0.750 ± 0.212", "0.000 ± 0.283"]
    assert cells[0][3:8] == ["0.850 ± 0.212", "0.375 ± 0.106", "300", "0.400 -> 0.500", "45.0"]
    assert cells[0][8:] == ["0.075 ± 0.106", "700"]
    assert cells[1][:3] == ["mempo", "0.750 ± 0.071", "-"]
    assert cells[1][8] == "0.125 ± 0.106"  # 0.2 in one minute, 0.1 in two
    assert report({"grpo": grpo}).splitlines()[2].split("|")[3].strip() == "-"  # nothing to compare with


def test_curves_against_time_are_interpolated_between_the_ends_of_steps() -> None:
    rows = [
        {"step": step, "reward/mean": reward, "score/f1": 0.5, "tokens/total": 100.0 * step}
        for step, reward in ((1, 0.0), (2, 0.3), (3, 0.5))
    ]
    curve = by_seconds({"seconds": [8.0, 12.0, 10.0], "rows": rows})  # steps end at 8, 20 and 30 s
    assert [row["step"] for row in curve] == [10, 20, 30]
    assert [row["reward/mean"] for row in curve] == pytest.approx([0.05, 0.3, 0.5])
    assert curve[0]["tokens/total"] == pytest.approx(100 + 100 / 6)


def test_a_run_is_prepared_once_and_takes_over_what_is_known_of_its_seed(tmp_path: Path) -> None:
    known = tmp_path / "grpo-3"
    known.mkdir()
    (known / "cold_start.json").write_text('{"2": {}}', encoding="utf-8")
    _prepare("imitation", 3, tmp_path, ["learner.optimizer.lr=2e-4"])
    folder = tmp_path / "imitation-3"
    config = load_config(str(folder / "config.toml"))
    steps = int(dict(setting.split("=") for setting in SETTINGS)["steps"])
    assert (config.seed, config.steps) == (3, round(steps * MORE_STEPS["imitation"]))
    assert config.learner.optimizer.lr == 2e-4 and config.recipe == "imitation"
    assert json.loads((folder / "cold_start.json").read_text(encoding="utf-8")) == {"2": {}}
    written = (folder / "config.toml").read_bytes()
    _prepare("imitation", 3, tmp_path, ["learner.optimizer.lr=9e-4"])  # an interrupted run goes on as it was
    assert (folder / "config.toml").read_bytes() == written
    _prepare("grpo", 4, tmp_path, [])
    assert not (tmp_path / "grpo-4" / "cold_start.json").exists()
