"""Question sets from the Hugging Face hub: through ``datasets`` (parquet and JSON lines, no remote code), or one file.

A set's revision is looked up when it is first loaded, recorded, and pinned from then on; one that is named in
the source is taken as it is. Records lie in ``hub.json`` under ``MEMPO_CACHE`` (default ``~/.cache/mempo``).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from envs.errors import UserError
from envs.tasks.forms import tasks_of_rows
from envs.tasks.rows import Row, iterate_rows
from envs.tasks.task import Task

PREFIX = "hub:"
_SOURCE = re.compile(
    r"hub:(?P<name>[\w.-]+/[\w.-]+)(?:/(?P<config>[\w.-]+))?(?:@(?P<revision>[\w.-]+))?(?::(?P<split>[\w.-]+))?"
)
_SPLITS = ("test", "dev", "validation", "train")
# The library calls what a file named dev holds validation.
_ALSO = {"dev": "validation", "validation": "dev"}
_FILES = (".json", ".jsonl", ".parquet")


@dataclass(frozen=True)
class HubSource:
    """``hub:OWNER/NAME[/CONFIG][@REVISION][:SPLIT]``; without a split test, else dev, else train.

    In place of a config and a split a file: ``hub:OWNER/NAME/rows.json[@REVISION]``, for sets whose columns hold texts
    here and numbers there, or whose files are no splits of one table.
    """

    name: str
    config: str | None
    revision: str | None
    split: str | None

    @classmethod
    def parse(cls, source: str) -> HubSource:
        """Raises UserError when the text has another form."""
        match = _SOURCE.fullmatch(source)
        if match is None:
            raise UserError(f"{source!r}: the form is hub:OWNER/NAME[/CONFIG][@REVISION][:SPLIT]")
        found = cls(**match.groupdict())
        if found.file and found.split:
            raise UserError(f"{source!r}: a file has no split")
        return found

    @property
    def file(self) -> str | None:
        """The file's name, when one is named."""
        return self.config if self.config and self.config.endswith(_FILES) else None


def load_hub_tasks(source: str) -> list[Task]:
    """The tasks of a set on the hub; the form of its rows is seen from their columns.

    Raises:
        UserError: a malformed source, a set or split that is not there, or rows of no known form.
    """
    parsed = HubSource.parse(source)
    rows = _rows(parsed, source)
    label = Path(parsed.file).stem if parsed.file else parsed.config or parsed.name.split("/")[1]
    return tasks_of_rows(rows, label, source)


def _rows(source: HubSource, place: str) -> Iterator[Row]:
    revision = source.revision or _pinned_revision(source.name)
    if source.file:
        yield from iterate_rows(_download(source.name, source.file, revision, place))
        return
    import datasets

    try:
        available = datasets.get_dataset_split_names(source.name, source.config, revision=revision)
        wanted = (source.split, _ALSO.get(source.split, "")) if source.split else _SPLITS
        split = next((name for name in wanted if name in available), None)
        if split is None:
            raise UserError(f"{place}: no such split; there are {', '.join(available)}")
        table = datasets.load_dataset(source.name, source.config, split=split, revision=revision)
    except (ValueError, RuntimeError, OSError, datasets.exceptions.DatasetsError) as error:
        if isinstance(error, UserError):
            raise
        # What is wrong with a file stands in the cause.
        raise UserError(f"{place}: cannot be loaded ({_first_line(error.__cause__ or error)})") from None
    for number, row in enumerate(table, 1):
        yield f"{place}, row {number}", row


def _download(name: str, file: str, revision: str, place: str) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(name, file, repo_type="dataset", revision=revision))
    except Exception as error:  # what its HTTP client raises has no base in common with its own errors
        raise UserError(f"{place}: cannot be loaded ({_first_line(error)})") from None


def recorded_revision(source: str) -> str | None:
    """The revision that a source names or that was recorded when its set was first loaded; None before that.

    Raises:
        UserError: a malformed source.
    """
    parsed = HubSource.parse(source)
    return parsed.revision or _recorded().get(parsed.name)


def _pinned_revision(name: str) -> str:
    known = _recorded()
    if name not in known:
        import huggingface_hub

        try:
            found = huggingface_hub.HfApi().dataset_info(name).sha
        except Exception as error:  # as in `_download`
            raise UserError(f"hub:{name}: its revision cannot be looked up ({_first_line(error)})") from None
        known = _record(name, str(found))
    return str(known[name])


def _record(name: str, revision: str) -> dict[str, Any]:
    """What is recorded once this is, too; where another process was first with a set, its revision counts."""
    record = _record_file()
    record.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(record.with_name(f"{record.name}.lock")):
        known = {name: revision, **_recorded()}
        aside = record.with_name(f"{record.name}.{os.getpid()}")
        aside.write_text(json.dumps(known, indent=1, sort_keys=True), encoding="utf-8")
        aside.replace(record)
    return known


def _recorded() -> dict[str, Any]:
    record = _record_file()
    if not record.is_file():
        return {}
    try:
        known = json.loads(record.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{record}: no JSON ({error}); remove it to look revisions up again") from None
    if not isinstance(known, dict):
        raise UserError(f"{record}: no JSON object; remove it to look revisions up again")
    return known


def _record_file() -> Path:
    return Path(os.environ.get("MEMPO_CACHE") or Path.home() / ".cache" / "mempo") / "hub.json"


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
