"""Models from a Hugging Face folder, a hub id or a GGUF file, and back into a plain folder.

Weights come from safetensors or GGUF only: never a pickle, never code from a repository.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from envs.errors import UserError

_ADAPTER = "adapter_config.json"
_AS_SAVED = ("TokenizersBackend", "PreTrainedTokenizerFast")


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer.

    Attributes:
        name: the folder's or file's name, or the hub id.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the weights as loaded; computed on first use (about a second a gigabyte)."""
        return weights_fingerprint(self.model)


def weights_fingerprint(model: torch.nn.Module) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of all weights, 16 hex digits; tied weights count once."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def load_model(
    path_or_id: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> LoadedModel:
    """Load a causal language model and its tokenizer, ready to generate (eval mode).

    Args:
        path_or_id: a folder with ``config.json`` and ``*.safetensors``, a ``.gguf`` file (dequantised to
            `dtype`), a folder with one ``.gguf`` file, a folder of LoRA adapters (merged into the base model that
            they name), or a hub id such as ``Qwen/Qwen2.5-7B``.
        device: ``cpu``, ``cuda``, ``cuda:1``, ``mps``.

    Raises:
        UserError: nothing there, a folder without a model, weights in pickles only, an unknown architecture, a
            device that this machine has not.
    """
    _check_device(device)
    source = str(path_or_id)
    path = Path(source).expanduser()
    if (path / _ADAPTER).is_file() and not (path / "config.json").exists():
        return _load_adapter(path, dtype, device)
    gguf = _gguf_file(path)
    if gguf is not None:
        return _load(str(gguf.parent), gguf.stem, dtype, device, gguf_file=gguf.name)
    if path.is_dir():
        _check_folder(path)
        return _load(str(path), path.resolve().name, dtype, device)
    if path.exists():
        raise UserError(f"model {source!r} is a file; a folder, a .gguf file or a hub id is needed")
    if source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise UserError(f"model folder {source!r} does not exist (a hub id has the form 'owner/name')")
    return _load(source, source, dtype, device)


def load_tokenizer(path_or_id: str | Path) -> tuple[PreTrainedTokenizerBase, PretrainedConfig]:
    """Tokenizer and text configuration of a model whose weights are elsewhere.

    Raises:
        UserError: nothing there.
    """
    source = str(Path(path_or_id).expanduser()) if Path(path_or_id).expanduser().is_dir() else str(path_or_id)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        return _load_tokenizer(source, {}), config.get_text_config()
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"model {source!r} cannot be loaded: {reason}") from error


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> Path:
    """Write a plain folder that any tool loads (config, safetensors, tokenizer, chat template).

    The folder is complete or absent: everything is written aside and flushed to the disk, then renamed into
        place; a folder that is there already is replaced.
    """
    target = Path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        for file in aside.iterdir():
            _flush(file)
        _flush(aside)
        aside.chmod(0o755)
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
            os.replace(target, old / "model")
            os.replace(aside, target)
            shutil.rmtree(old)
        else:
            os.replace(aside, target)
        _flush(target.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def merge_adapters(model: Any) -> Any:
    """The model below LoRA adapters, with them in its weights, as trainable as one without a past.

    Raises:
        ValueError: a merged weight is not finite.
    """
    merged = model.merge_and_unload(safe_merge=True)
    for parameter in merged.parameters():  # adapters froze what lies below them
        parameter.requires_grad_(parameter.is_floating_point())
    return merged


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _gguf_file(path: Path) -> Path | None:
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"GGUF file {str(path)!r} does not exist")
        return path
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise UserError(f"folder {str(path)!r} holds {len(files)} GGUF files ({names}); name one of them")
        return files[0] if files else None
    return None


def _check_folder(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise UserError(f"folder {str(path)!r} holds no model: config.json is missing")
    if not any(path.glob("*.safetensors")):
        pickles = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern)]
        what = f"only {pickles[0]} (a pickle, not loaded for safety)" if pickles else "no weights"
        raise UserError(f"folder {str(path)!r} holds {what}; *.safetensors files are needed")


def _load(
    source: str, name: str, dtype: torch.dtype, device: str | torch.device, gguf_file: str | None = None
) -> LoadedModel:
    extra = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        tokenizer = _load_tokenizer(source, extra)
        model: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            trust_remote_code=False,
            use_safetensors=None if gguf_file else True,
            **extra,
        )
    except ImportError as error:
        raise UserError(f"model {name!r} needs a package that is not installed: {error}") from error
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"model {name!r} cannot be loaded: {reason}") from error
    if gguf_file:
        _plain(model)
    model.to(torch.device(device))
    model.eval()
    return LoadedModel(model, tokenizer, name)


def _load_adapter(path: Path, dtype: torch.dtype, device: str | torch.device) -> LoadedModel:
    """The base model with the adapters of a folder in its weights, and the folder's tokenizer if it has one."""
    weights = path / "adapter_model.safetensors"
    if not weights.is_file():
        raise UserError(f"folder {str(path)!r} holds no adapter_model.safetensors (a pickle is not loaded)")
    try:
        base = str(json.loads((path / _ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"adapters {str(path)!r} do not name their base model: {error}") from error
    try:
        import peft
    except ImportError as error:
        raise UserError(f"adapters need a package that is not installed: {error}") from error
    loaded = load_model(base, dtype, device)
    try:
        wrapped: Any = peft.PeftModel.from_pretrained(loaded.model, str(path), torch_device=str(device))
        merged = merge_adapters(wrapped)
    except (ValueError, RuntimeError, KeyError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"adapters {str(path)!r} do not fit {base!r}: {reason}") from error
    merged.eval()
    own = (path / "tokenizer_config.json").is_file()
    tokenizer = _load_tokenizer(str(path), {}) if own else loaded.tokenizer
    return LoadedModel(merged, tokenizer, path.resolve().name)


def _check_device(device: str | torch.device) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise UserError(f"device {str(device)!r} is none of cpu, cuda, cuda:N, mps") from None
    missing = (kind == "cuda" and not torch.cuda.is_available()) or (
        kind == "mps" and not torch.backends.mps.is_available()
    )
    if missing:
        raise UserError(f"device {str(device)!r}: this machine (or this build of torch) has none")


def _plain(model: Any) -> None:
    """A GGUF file is dequantised when it is read; what still calls it quantised would forbid to save it."""
    model.hf_quantizer = None
    model.is_quantized = False
    for attribute in ("quantization_method", "_is_quantized_training_enabled"):
        if hasattr(model, attribute):
            setattr(model, attribute, None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def _load_tokenizer(source: str, extra: dict[str, str]) -> PreTrainedTokenizerBase:
    """The tokenizer exactly as saved.

    AutoTokenizer replaces the saved pre-tokenizer of a qwen2 folder by Qwen2's own and adds a normalizer,
    unless the class says what it is; a tokenizer saved as the generic class is loaded as such.
    """
    config = Path(source) / "tokenizer_config.json"
    if not extra and config.is_file():
        declared = json.loads(config.read_text(encoding="utf-8")).get("tokenizer_class")
        if declared in _AS_SAVED and (Path(source) / "tokenizer.json").is_file():
            kind: Any = PreTrainedTokenizerFast
            saved: PreTrainedTokenizerBase = kind.from_pretrained(source)
            return saved
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **extra)
    return found
