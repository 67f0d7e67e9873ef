"""New weights on their way to SGLang servers, and the proof that they arrived."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from agent.engines.base import EngineError
from agent.engines.sglang_server import Server, ServerInfo
from agent.models import save_model
from envs.errors import UserError

# SGLang keeps these projections as one tensor, in this order.
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_PADDED_VOCABULARY = 64
_SHAPE_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)


class Carrier(Protocol):
    """One way to bring weights to a server: `prepare` once, `send` to each server, `settle` when all have them."""

    def prepare(self, model: PreTrainedModel, version: int) -> None: ...

    def send(self, server: Server, info: ServerInfo, label: str) -> None: ...

    def settle(self) -> None: ...

    def forget(self, url: str) -> None:
        """Whatever connects us with this server is of no use any more."""
        ...

    def close(self) -> None: ...


class DiskCarrier:
    """A folder for each version, complete or absent; the current one stays for servers that come back.

    Args:
        folder: where versions are written, removed in the end; servers must see it under the same path.
    """

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self._folder, self._tokenizer = folder.resolve(), tokenizer
        self._current: Path | None = None
        self._config: Any = None

    def prepare(self, model: PreTrainedModel, version: int) -> None:
        self._config = model.config
        self._current = save_model(model, self._tokenizer, self._folder / f"version-{version:06d}")

    def send(self, server: Server, info: ServerInfo, label: str) -> None:
        assert self._current is not None, "prepare comes first"
        refuse_other_model(self._config, info, server.url)
        server.load_folder(str(self._current), label)

    def settle(self) -> None:
        """Remove the versions before the current one."""
        for old in self._folder.glob("version-*"):
            if old != self._current:
                shutil.rmtree(old, ignore_errors=True)

    def forget(self, url: str) -> None:
        pass

    def close(self) -> None:
        if self._current is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def plain_model(source: Any, like: PreTrainedModel) -> PreTrainedModel:
    """The weights as a plain transformers model: adapters merged, a state dict put into a copy of ``like``.

    Raises:
        ValueError: tensors or a configuration that do not fit ``like``.
    """
    if isinstance(source, Mapping):
        filled = copy.deepcopy(like)
        tied = set(getattr(filled, "_tied_weights_keys", None) or ())
        try:
            missing, unexpected = filled.load_state_dict(source, strict=False)
        except RuntimeError as error:
            raise ValueError(f"weights do not fit the engine's model: {error}") from error
        if wrong := [*unexpected, *(set(missing) - tied)]:
            raise ValueError(f"weights do not fit the engine's model: {wrong[0]} is missing or unknown")
        return filled
    if hasattr(source, "merge_and_unload"):
        merged: PreTrainedModel = copy.deepcopy(source).merge_and_unload()
        return merged
    found: PreTrainedModel = source
    difference = _difference(_shape(found.config), _shape(like.config))
    if difference:
        raise ValueError(f"weights of another model: {difference}")
    return found


def refuse_other_server(server: Server, info: ServerInfo, model: PreTrainedModel) -> None:
    """Before a server gets the first weights: it must have been started with a model of the same kind and shape.

    Raises:
        UserError: it was not.
    """
    refuse_other_model(model.config, info, server.url)
    if info.ranks == info.tensor_parallel:  # with a pipeline each process has some layers only
        served = server.checksums()[0]
        try:
            if not _has_experts(served):
                pair_tensors(served, model)
        except ValueError as error:
            raise UserError(f"{server.url} serves another model: it {error}") from None


def refuse_other_model(config: Any, info: ServerInfo, url: str) -> None:
    """A server loads a folder of another architecture without a complaint and serves nonsense: compare before.

    Args:
        config: of the model whose weights it is to get.

    Raises:
        UserError: the server was started with a model of another kind, or of another size where that can be seen.
    """
    if info.model_type and config.model_type != info.model_type:
        raise UserError(
            f"{url} serves a {info.model_type} model, these weights are of a {config.model_type} one"
        )
    architectures = tuple(config.architectures or ())
    if architectures and info.architectures and not set(architectures) & set(info.architectures):
        raise UserError(f"{url} serves {info.architectures[0]}, these weights are of {architectures[0]}")
    served = Path(info.model_path)
    if (served / "config.json").is_file():
        theirs = AutoConfig.from_pretrained(served, trust_remote_code=False)
        if difference := _difference(_shape(config), _shape(theirs)):
            raise UserError(f"{url} serves another model than these weights belong to: {difference}")


def check_weights(server: Server, info: ServerInfo, model: PreTrainedModel) -> bool:
    """Compare the server's checksums with the model's own.

    On a CPU SGLang hashes the bytes of each tensor with SHA-256. On a GPU it uses a kernel of its own, several
    ranks hold shares, and experts are stacked: those are not comparable with a whole model from outside.

    Returns:
        Whether the checksums could be compared.

    Raises:
        EngineError: a tensor differs, or one that the model has is not there.
    """
    ranks = server.checksums()
    if info.device != "cpu" or len(ranks) != 1 or _has_experts(ranks[0]):
        return False
    state = tensors(model)
    try:
        pairs = pair_tensors(ranks[0], model)
    except ValueError as error:
        raise EngineError(f"{server.url} {error}") from None
    for name, parts in pairs.items():
        if ranks[0][name] not in _hashes([state[part] for part in parts], info.dtype, name):
            raise EngineError(f"{server.url} serves other weights than the trainer has: {name} differs")
    return True


def pair_tensors(served: Iterable[str], model: PreTrainedModel) -> dict[str, list[str]]:
    """Which of the model's tensors each of a server's tensors is made of.

    Raises:
        ValueError: one side has a tensor that the other lacks: the server's model is another one.
    """
    state = tensors(model)
    pairs: dict[str, list[str]] = {}
    for name in served:
        parts = [part for part in _parts(name) if part in state] or ([name] if name in state else [])
        if parts:
            pairs[name] = parts
        elif name != "lm_head.weight" or not model.config.tie_word_embeddings:
            raise ValueError(f"has a tensor {name} that the trainer's model lacks")
    if lost := sorted(set(state).difference(*pairs.values())):
        raise ValueError(f"has no tensor {lost[0]}, which the trainer's model has")
    return pairs


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters by name, tied ones once, without gradient."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _has_experts(names: Iterable[str]) -> bool:
    """Mixtures of experts: SGLang stacks all experts of a layer, in a layout that depends on its kernels."""
    return any(".experts." in name for name in names)


def _parts(name: str) -> list[str]:
    for fused, parts in _FUSED.items():
        if f".{fused}." in name:
            return [name.replace(f".{fused}.", f".{part}.") for part in parts]
    return [name]


def _hashes(parts: list[torch.Tensor], dtype: str, name: str) -> Iterator[str]:
    """The hashes that a server may show: as it is, and with the vocabulary padded to full blocks."""
    whole = torch.cat([part.cpu() for part in parts]) if len(parts) > 1 else parts[0].cpu()
    if dtype != "auto":
        whole = whole.to(getattr(torch, dtype))
    yield _hash(whole)
    short = -whole.shape[0] % _PADDED_VOCABULARY
    if short and name.endswith(("embed_tokens.weight", "lm_head.weight")):
        yield _hash(torch.cat([whole, whole.new_zeros(short, *whole.shape[1:])]))


def _hash(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return hashlib.sha256(data).hexdigest()[:16]


def _shape(config: Any) -> dict[str, Any]:
    text = config.get_text_config()
    return {key: getattr(text, key, None) for key in _SHAPE_KEYS}


def _difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    for key in _SHAPE_KEYS:
        if ours[key] is not None and theirs[key] is not None and ours[key] != theirs[key]:
            return f"{key} is {json.dumps(ours[key])} here and {json.dumps(theirs[key])} there"
    return ""
