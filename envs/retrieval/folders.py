"""Where an index over a corpus file is kept: a folder beside it, complete or absent, bound to its content."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from envs.retrieval.corpus import file_digest


def cache_root() -> Path:
    """``MEMPO_CACHE``, or ``~/.cache/mempo``."""
    return Path(os.environ.get("MEMPO_CACHE") or Path.home() / ".cache" / "mempo")


def kept_index(
    path: Path, suffix: str, settings: Mapping[str, Any], build: Callable[[Path], None], kind: str
) -> Path:
    """The folder with the index of a corpus file as the file is now; built first when there is none.

    It is ``FILE + suffix``, or, where that cannot be written, lies in a folder named ``kind`` under `cache_root`. It is
    built aside and renamed.

    Args:
        path: of the corpus file.
        suffix: of the folder's name.
        settings: whatever else the index depends on (JSON values); other ones make it be built anew.
        build: writes the index into the empty folder that it is given.
        kind: of index.
    """
    folder = path.with_name(path.name + suffix)
    if not _is_current(folder, path, settings):
        if not _writable(folder.parent):
            folder = cache_root() / kind / f"{file_digest(path)[:16]}-{path.name}{suffix}"
        if not _is_current(folder, path, settings):
            _build(folder, path, settings, build)
    return folder


def _build(folder: Path, path: Path, settings: Mapping[str, Any], build: Callable[[Path], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
    try:
        before = path.stat()
        build(aside)
        about = {
            **settings,
            "size": before.st_size,
            "mtime_ns": before.st_mtime_ns,
            "sha256": file_digest(path),
        }
        (aside / "about.json").write_text(json.dumps(about), encoding="utf-8")
        aside.chmod(0o755)
        # Another process may have been faster: what it put there is the same.
        if not _is_current(folder, path, settings):
            if folder.exists():
                shutil.rmtree(folder)
            try:
                aside.rename(folder)
            except OSError:
                if not _is_current(folder, path, settings):
                    raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _is_current(folder: Path, path: Path, settings: Mapping[str, Any]) -> bool:
    """Whether the folder is the index of the file as it is now: by size and time, else by its content."""
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    now = path.stat()
    if any(about.get(key) != value for key, value in settings.items()) or about.get("size") != now.st_size:
        return False
    return bool(about.get("mtime_ns") == now.st_mtime_ns or about.get("sha256") == file_digest(path))


def _writable(folder: Path) -> bool:
    """Whether one may and should write there: root may anywhere, but a folder without write bits says no."""
    return os.access(folder, os.W_OK) and bool(folder.stat().st_mode & 0o222)
