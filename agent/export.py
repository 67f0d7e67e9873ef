"""`python -m agent.export`: a model as a plain folder that any tool loads, and, when asked to, on the hub.

    python -m agent.export runs/latest-run OUT                        # the trained model of a run
    python -m agent.export MODEL.gguf OUT --dtype bfloat16            # dequantised
    python -m agent.export ADAPTERS OUT --push-to-hub owner/name      # LoRA merged into its base, and uploaded

The folder holds config, safetensors, tokenizer and chat template: transformers, vLLM and SGLang load it without this
package. Never a pickle, never code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from agent.models import load_model, save_model
from envs.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(source: str, folder: Path, dtype: str = "float32") -> Path:
    """Write the model to a folder that must not be there yet.

    Args:
        source: a run's folder (its trained model), or whatever `agent.models.load_model` takes.

    Raises:
        UserError: no model there, or something in the way.
    """
    if folder.exists():
        raise UserError(f"{folder} is there already: choose another folder")
    run = Path(source)
    trained = run / "model"
    if (run / "config.toml").is_file() and not trained.is_dir():
        raise UserError(f"run {source!r} is not complete: it has no folder 'model'")
    loaded = load_model(trained if trained.is_dir() else source, dtype=DTYPES[dtype])
    return save_model(loaded.model, loaded.tokenizer, folder)


def push(folder: Path, repository: str, private: bool = False) -> str:
    """Upload a folder to the hub (token: as `hf auth login` left it, or HF_TOKEN); returns its address.

    Raises:
        UserError: no form of a repository's name, or the hub refuses.
    """
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise UserError(f"{repository!r} is no repository: 'owner/name' is needed")
    import huggingface_hub

    hub = huggingface_hub.HfApi()
    try:
        hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="Model")
    except Exception as error:  # what its HTTP client raises has no base in common with its own errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"the hub did not take {repository!r}: {reason}") from error
    return f"{hub.endpoint}/{repository}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m agent.export", description="A model as a plain folder that any tool loads."
    )
    parser.add_argument(
        "source", metavar="RUN", help="a run, a model folder, adapters, a .gguf file or a hub id"
    )
    parser.add_argument("folder", type=Path, metavar="OUT", help="folder that is made")
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), default="float32", help="type of the weights (float32)"
    )
    parser.add_argument("--push-to-hub", metavar="OWNER/NAME", help="also upload it")
    parser.add_argument("--private", action="store_true", help="with --push-to-hub: nobody else sees it")
    options = parser.parse_args(arguments)
    try:
        folder = export(options.source, options.folder, options.dtype)
        print(f"saved {folder}")
        if options.push_to_hub is not None:
            print(push(folder, options.push_to_hub, options.private))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
