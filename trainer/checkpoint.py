"""Checkpoints that are complete or absent, and hold everything that a bit-exact resume needs.

    checkpoints/
      step-000010/          written aside, flushed to the disk, then renamed into place
        model/              a plain Hugging Face folder (when a model is handed over)
        state.safetensors   all tensors of the state
        state.json          everything else, with the size of every file of the folder
      latest                name of the newest checkpoint, replaced last
      best                  name of the one with the highest score, where scores are known

A state is nested: dicts, lists, tuples, numbers, strings, None, tensors and numpy arrays, restored as they
were. There is no pickle in it. One process writes; any number may read at the same time.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from envs.errors import UserError
from envs.tasks.task import Task
from trainer.state_tree import flatten, restore

FORMAT = 1
PHASES = ("clean", "weights", "tensors", "values", "flush", "publish", "point", "retire")
"""What a save does, in this order; a kill in any of them loses at most the checkpoint being written."""

_NAME = re.compile(r"step-(\d{6,})")
_ASIDE, _REPLACED, _RETIRED = ".writing-", ".replaced-", ".retired-"


@dataclass(frozen=True)
class Checkpoint:
    """What was saved.

    Attributes:
        folder: where it was read from; `agent.models.load_model` takes ``folder / "model"`` if it is there.
        step: training steps done.
        state: the nested state, tensors on the CPU.
        config: the resolved configuration of the run that wrote it.
        data_fingerprint: of the training data.
        score: validation score, or None.
    """

    folder: Path
    step: int
    state: dict[str, Any]
    config: dict[str, Any]
    data_fingerprint: str
    score: float | None


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        root: made when the first one is saved.
        keep: newest checkpoints kept; the best one is kept beside them.
    """

    def __init__(self, root: str | Path, keep: int = 2) -> None:
        if keep < 1:
            raise UserError(f"keep is {keep}; at least the newest checkpoint is kept")
        self.root, self.keep = Path(root), keep

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        config: Mapping[str, Any],
        data_fingerprint: str,
        score: float | None = None,
        model: Any = None,
        tokenizer: Any = None,
        on_phase: Callable[[str], None] = lambda phase: None,
    ) -> Path:
        """Write one checkpoint; when this returns it survives a power cut.

        Args:
            state: nested; ``state["learner"]``, the data position, RNG states, ...
            config: JSON-able.
            score: higher is better; None or nan: not measured.
            model, tokenizer: also written as a plain folder, both or neither.
            on_phase: called with each of `PHASES` as it begins.

        Raises:
            TypeError: something in the state is neither a plain value nor a tensor (its place is named).
        """
        name = f"step-{step:06d}"
        aside = self.root / f"{_ASIDE}{name}"
        on_phase("clean")
        self.root.mkdir(parents=True, exist_ok=True)
        self._clean()
        aside.mkdir()
        on_phase("weights")
        if model is not None:
            from agent.models import save_model  # late: transformers takes seconds to import

            save_model(model, tokenizer, aside / "model")
        on_phase("tensors")
        values, tensors = flatten(state)
        save_file(tensors, aside / "state.safetensors")
        on_phase("values")
        sizes = {str(f.relative_to(aside)): f.stat().st_size for f in sorted(aside.rglob("*")) if f.is_file()}
        manifest = {
            "format": FORMAT,
            "step": step,
            "score": None if score is None or math.isnan(score) else score,
            "data_fingerprint": data_fingerprint,
            "config": config,
            "files": sizes,
            "state": values,
        }
        (aside / "state.json").write_text(json.dumps(manifest, allow_nan=False), encoding="utf-8")
        on_phase("flush")
        for path in sorted(aside.rglob("*")):
            _flush(path)
        _flush(aside)
        on_phase("publish")
        target = self.root / name
        if target.exists():  # a run that was resumed from an earlier step comes by again
            os.replace(target, self.root / f"{_REPLACED}{name}")
        os.replace(aside, target)
        _flush(self.root)
        on_phase("point")
        self._point("latest", name)
        best = self.best()
        if best is not None:
            self._point("best", best.name)
        on_phase("retire")
        self._retire(best)
        return target

    def folders(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        if not self.root.is_dir():
            return []
        found: dict[str, Path] = {}
        for path in self.root.iterdir():
            name = path.name.removeprefix(_REPLACED)
            if _NAME.fullmatch(name) and (path.name == name or name not in found):
                found[name] = path
        return sorted(found.values(), key=lambda path: _step(path.name))

    def latest(self) -> Path | None:
        """Where `latest` points, or the newest complete checkpoint when it points nowhere."""
        complete = self.folders()
        pointer = self.root / "latest"
        if pointer.is_file():
            name = pointer.read_text(encoding="utf-8").strip()
            for folder in complete:
                if folder.name.removeprefix(_REPLACED) == name:
                    return folder
        return complete[-1] if complete else None

    def best(self) -> Path | None:
        """The checkpoint with the highest score (the earliest of equals), or None when none has a score."""
        scored = [(folder, _manifest(folder)["score"]) for folder in self.folders()]
        return max(
            (pair for pair in scored if pair[1] is not None),
            key=lambda pair: pair[1],
            default=(None, None),
        )[0]

    def load(self, data_fingerprint: str | None = None) -> Checkpoint:
        """The latest checkpoint.

        Raises:
            UserError: there is none; or see `load_checkpoint`.
        """
        folder = self.latest()
        if folder is None:
            raise UserError(f"no checkpoint in {self.root}: nothing to resume from")
        return load_checkpoint(folder, data_fingerprint)

    def discard_after(self, step: int) -> None:
        """Forget checkpoints of later steps (a run that goes on from an earlier one makes them anew)."""
        self._clean()
        keep = [folder for folder in self.folders() if _step(folder.name) <= step]
        if keep:
            self._point("latest", keep[-1].name)
        for folder in self.folders():
            if folder not in keep:
                self._remove(folder)
        best = self.best()
        if best is not None:
            self._point("best", best.name)
        else:
            (self.root / "best").unlink(missing_ok=True)

    def _clean(self) -> None:
        """Finish or undo what a killed process left behind."""
        for path in self.root.iterdir():
            if path.name.startswith((_ASIDE, _RETIRED)) or path.name.endswith(".new"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            elif path.name.startswith(_REPLACED):
                original = self.root / path.name.removeprefix(_REPLACED)
                if original.exists():
                    self._remove(path)
                else:
                    os.replace(path, original)

    def _retire(self, best: Path | None) -> None:
        complete = self.folders()
        for folder in complete[: -self.keep]:
            if folder != best:
                self._remove(folder)
        for path in self.root.glob(f"{_REPLACED}*"):
            self._remove(path)

    def _remove(self, folder: Path) -> None:
        """Out of sight in one step first: a kill in the middle leaves no half of it under a good name."""
        retired = self.root / f"{_RETIRED}{folder.name}"
        if retired.exists():
            shutil.rmtree(retired)
        os.replace(folder, retired)
        shutil.rmtree(retired)

    def _point(self, pointer: str, name: str) -> None:
        new = self.root / f"{pointer}.new"
        new.write_text(name + "\n", encoding="utf-8")
        _flush(new)
        os.replace(new, self.root / pointer)
        _flush(self.root)


def load_checkpoint(folder: str | Path, data_fingerprint: str | None = None) -> Checkpoint:
    """Read a checkpoint folder.

    Args:
        data_fingerprint: of the data that training is about to go on with; None skips the check.

    Raises:
        UserError: no checkpoint, one of another format, a damaged one, one made with other data.
    """
    folder = Path(folder)
    manifest = _manifest(folder)
    for name, size in manifest["files"].items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise UserError(
                f"checkpoint {folder} is damaged: {name} has {found or 'no'} bytes, {size} were written"
            )
    if data_fingerprint is not None and manifest["data_fingerprint"] != data_fingerprint:
        raise UserError(
            f"checkpoint {folder} was made with other data: its fingerprint is "
            f"{manifest['data_fingerprint']}, that of the data now is {data_fingerprint}"
        )
    state = restore(manifest["state"], load_file(folder / "state.safetensors"))
    return Checkpoint(
        folder, manifest["step"], state, manifest["config"], manifest["data_fingerprint"], manifest["score"]
    )


def fingerprint_tasks(tasks: Iterable[Task]) -> str:
    """Hash of what training reads: ids, questions and golds in order, 16 hex digits."""
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(json.dumps([task.id, task.questions, task.golds]).encode())
    return digest.hexdigest()[:16]


def rng_state() -> dict[str, Any]:
    """States of torch's global generators; everything else draws from seeds (`agent.seeds`)."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda}


def restore_rng(state: Mapping[str, Any]) -> None:
    """Take up what `rng_state` gave; devices that are not there any more are left out."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "state.json"
    if not path.is_file():
        raise UserError(f"{folder} is no checkpoint: it has no state.json")
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"checkpoint {folder} is damaged: state.json: {error}") from None
    if manifest.get("format") != FORMAT:
        raise UserError(f"checkpoint {folder} has format {manifest.get('format')}; {FORMAT} is needed")
    return manifest


def _step(name: str) -> int:
    return int(name.removeprefix(_REPLACED).removeprefix("step-"))


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
