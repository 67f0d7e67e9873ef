"""`python -m trainer.replay RUN STEP`: one update of a run again, from the rollouts it left behind.

Needs a run with ``output.dump_rollouts``, and the checkpoint of the step before (``output.checkpoint_every = 1`` keeps
one a step, ``output.keep`` how many). The update starts from the same weights, optimizer and order of mini-batches, so
its metrics and the weights it ends with equal the original's to the bit, on the same machine and number of threads.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from agent.models import load_model
from envs.errors import UserError
from trainer.checkpoint import Checkpoint, CheckpointStore, load_checkpoint
from trainer.config import load_config
from trainer.learner import Learner
from trainer.records import read_steps
from trainer.rows import rows_from_groups
from trainer.trajectory_io import read_rollouts


@dataclass(frozen=True)
class Replayed:
    """What came of a replay.

    Attributes:
        learner: as the update left it.
        metrics: of the update, named as in ``metrics.jsonl``.
        differing: names of metrics and tensors that are not the original's.
        compared: how many metrics and tensors were compared; tensors only where the step has a checkpoint.
    """

    learner: Learner
    metrics: dict[str, float]
    differing: list[str]
    compared: tuple[int, int]


def replay(run: Path, step: int) -> Replayed:
    """Make the update of a step again and compare it with what the run wrote down.

    Raises:
        UserError: no run, no rollouts of the step, or no checkpoint to start from.
    """
    if not (run / "config.toml").is_file():
        raise UserError(f"{run} is no run: it has no config.toml")
    config = load_config(str(run / "config.toml"))
    rows_written = {row["step"]: row for row in read_steps(run / "metrics.jsonl")}
    if not rows_written:
        raise UserError(f"{run} has no finished step")
    if step not in rows_written:
        raise UserError(f"{run} has no step {step} (steps: {min(rows_written)} to {max(rows_written)})")
    groups, scores = read_rollouts(run / "rollouts" / f"step-{step:04d}.jsonl")
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    policy = load_model(run / "cold_start", dtype=config.model.torch_dtype, device=config.model.device)
    learner = Learner(policy.model, config.learner, seed=config.seed)
    if step > 1:
        before = _checkpoint(run, step - 1)
        if before is None:
            raise UserError(f"{run} keeps no checkpoint of step {step - 1}, which step {step} starts from")
        learner.load_state_dict(before.state["learner"])
    # A step whose groups were all dropped has an empty file, which does not tell whether memories are scored.
    rows = rows_from_groups(groups, scores, config.algorithm)[0] if groups else []
    metrics = {f"update/{key}": value for key, value in learner.update(rows).items()} if rows else {}

    written = {key: value for key, value in rows_written[step].items() if key.startswith("update/")}
    # What is not finite was written as null.
    found = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
    differing = sorted(
        key for key in found.keys() | written.keys() if found.get(key, "") != written.get(key, "")
    )
    tensors = {}
    after = _checkpoint(run, step)
    if after is not None:
        tensors = after.state["learner"]["tensors"]
        own = learner.state_dict()["tensors"]
        differing += sorted(
            name
            for name in tensors.keys() | own.keys()
            if name not in own or name not in tensors or not torch.equal(own[name].cpu(), tensors[name])
        )
    return Replayed(learner, metrics, differing, (len(written), len(tensors)))


def _checkpoint(run: Path, step: int) -> Checkpoint | None:
    for folder in CheckpointStore(run / "checkpoints").folders():
        checkpoint = load_checkpoint(folder)
        if checkpoint.step == step:
            return checkpoint
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.replay",
        description="Make one update of a run again from its rollouts, and compare it with the original.",
    )
    parser.add_argument("run", type=Path, help="folder of a run with output.dump_rollouts = true")
    parser.add_argument("step", type=int, help="training step, from 1")
    options = parser.parse_args(arguments)
    try:
        found = replay(options.run, options.step)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, value in sorted(found.metrics.items()):
        print(f"{name:32} {value:.9g}")
    metrics, tensors = found.compared
    print(f"compared with the run: {metrics} metrics, {tensors} tensors; {len(found.differing)} differ")
    for name in found.differing:
        print(f"differs: {name}")
    return 1 if found.differing else 0


if __name__ == "__main__":
    sys.exit(main())
