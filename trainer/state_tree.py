"""A nested state as plain JSON and a flat dict of tensors, and back, without a pickle.

What JSON cannot say is said by a dict with one key that begins with ``$``:
``{"$tensor": name}``, ``{"$array": name}`` (numpy), ``{"$tuple": [...]}``, ``{"$float": "nan"}`` and
``{"$items": [[key, value], ...]}`` for dicts whose keys are not all plain strings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def flatten(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split into JSON values and tensors (contiguous, on the CPU, no two sharing memory).

    Raises:
        TypeError: a value of another type; its path is named.
    """
    kept = _Tensors()
    return _flatten(state, "state", kept), kept.named


class _Tensors:
    """Tensors by name; safetensors refuses two names for one memory, so what is shared is copied."""

    def __init__(self) -> None:
        self.named: dict[str, Tensor] = {}
        self._memory: set[int] = set()

    def keep(self, tensor: Tensor, name: str) -> str:
        """Add a tensor; returns the name it got."""
        tensor = tensor.detach().cpu().contiguous()
        if tensor.untyped_storage().data_ptr() in self._memory:
            tensor = tensor.clone()
        if tensor.numel():
            self._memory.add(tensor.untyped_storage().data_ptr())
        while name in self.named:  # {"a.b": t} beside {"a": {"b": t}}
            name += "'"
        self.named[name] = tensor
        return name


def restore(values: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `flatten`.

    Raises:
        KeyError: a tensor is missing.
    """
    if isinstance(values, list):
        return [restore(value, tensors) for value in values]
    if not isinstance(values, dict):
        return values
    if len(values) == 1:
        (mark, content), *_ = values.items()
        if mark == "$tensor":
            return tensors[content]
        if mark == "$array":
            return tensors[content].numpy()
        if mark == "$tuple":
            return tuple(restore(value, tensors) for value in content)
        if mark == "$float":
            return math.nan if content == "nan" else float(content)
        if mark == "$items":
            return {restore(key, tensors): restore(value, tensors) for key, value in content}
    return {key: restore(value, tensors) for key, value in values.items()}


def _flatten(value: Any, path: str, tensors: _Tensors) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Tensor):
        return {"$tensor": tensors.keep(value, path)}
    if isinstance(value, np.ndarray):
        return {"$array": tensors.keep(torch.from_numpy(value.copy()), path)}
    if isinstance(value, list):
        return [_flatten(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": _flatten(list(value), path, tensors)}
    if isinstance(value, Mapping):
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        if plain:
            return {key: _flatten(item, f"{path}.{key}", tensors) for key, item in value.items()}
        return {
            "$items": [
                [_flatten(key, path, tensors), _flatten(item, f"{path}.{key}", tensors)]
                for key, item in value.items()
            ]
        }
    raise TypeError(f"{path} is a {type(value).__name__}: a checkpoint holds plain values and tensors only")
