"""Texts as unit vectors by an E5-type model: mean of the last hidden states over the tokens, normalised.

The model is any encoder that ``transformers`` reads from a folder or by id, in safetensors and without code of its
own. E5 was trained with ``query: `` and ``passage: `` in front of the texts; a model that was not (MiniLM) takes both
prefixes empty. Models that pool by their first or last token (BGE, E5-Mistral) are not of this type.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envs.errors import UserError
from envs.neutral import replace_surrogates

DEFAULT_MODEL = "intfloat/e5-base-v2"

_CHUNK = 4096
_NO_PART = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}
"""Of a configuration that changes no vector."""


class Encoder:
    """Encodes queries and passages; one may be shared by threads.

    Args:
        model: a folder or a hub id.
        revision: of a hub id.
        query_prefix, passage_prefix: in front of every text.
        max_tokens: of a text with its prefix; a longer one is cut. At most what the model takes.
        batch: texts that go through the model at once.
        device: where it runs, in float32.

    Raises:
        UserError: no such model, one without safetensors or with code of its own, or a value out of range.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        revision: str | None = None,
        query_prefix: str = "query: ",
        passage_prefix: str = "passage: ",
        max_tokens: int = 512,
        batch: int = 32,
        device: str = "cpu",
    ) -> None:
        if min(max_tokens, batch) < 1:
            raise UserError("max_tokens and batch must be at least 1")
        self.settings: dict[str, Any] = {
            "model": str(model),
            "revision": revision,
            "query_prefix": query_prefix,
            "passage_prefix": passage_prefix,
            "max_tokens": max_tokens,
            "batch": batch,
            "device": device,
        }
        self._batch = batch
        self._tokenizer, self._model = _load(str(model), revision, device)
        self._device = device
        longest = getattr(self._model.config, "max_position_embeddings", max_tokens)
        self._max_tokens = min(max_tokens, self._tokenizer.model_max_length, longest)
        self.dim = int(self._model.config.hidden_size)
        # Before the first use, which would write its truncation into the tokenizer.
        self.fingerprint = _fingerprint(self._tokenizer, self._model)
        # A fast tokenizer keeps truncation and padding as state of its own.
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.settings,)

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors, float32: (texts, `dim`)."""
        return self._encode([self.settings["query_prefix"] + text for text in texts])

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors, float32: (texts, `dim`)."""
        return self._encode([self.settings["passage_prefix"] + text for text in texts])

    def _encode(self, texts: list[str]) -> np.ndarray:
        vectors = np.empty((len(texts), self.dim), dtype=np.float32)
        with self._lock:
            for start in range(0, len(texts), _CHUNK):
                self._encode_chunk(texts[start : start + _CHUNK], vectors[start : start + _CHUNK])
        return vectors

    def _encode_chunk(self, texts: list[str], out: np.ndarray) -> None:
        import torch

        ids = self._tokenizer(
            [replace_surrogates(text) for text in texts], truncation=True, max_length=self._max_tokens
        )["input_ids"]
        # Texts of a length go together: padding costs as much as text.
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        for start in range(0, len(order), self._batch):
            chosen = order[start : start + self._batch]
            padded = self._tokenizer.pad({"input_ids": [ids[i] for i in chosen]}, return_tensors="pt")
            mask = padded["attention_mask"].to(self._device)
            with torch.inference_mode():
                hidden = self._model(
                    input_ids=padded["input_ids"].to(self._device), attention_mask=mask
                ).last_hidden_state
                summed = hidden.masked_fill(mask[:, :, None] == 0, 0.0).sum(dim=1)
                mean = summed / mask.sum(dim=1, keepdim=True)
                out[chosen] = torch.nn.functional.normalize(mean, dim=1).cpu().numpy()


def _rebuild(settings: Mapping[str, Any]) -> Encoder:
    return Encoder(**settings)


def _load(model: str, revision: str | None, device: str) -> tuple[Any, Any]:
    import torch
    import transformers

    common: dict[str, Any] = {"revision": revision, "trust_remote_code": False}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model, **common)
        network = transformers.AutoModel.from_pretrained(
            model, use_safetensors=True, dtype=torch.float32, **common
        )
        network = network.to(device).eval()
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            f"encoder {model!r} cannot be loaded: {reason} (a folder with config.json, tokenizer.json and "
            f"model.safetensors, or a hub id such as {DEFAULT_MODEL})"
        ) from None
    if tokenizer.pad_token is None or not getattr(network.config, "hidden_size", None):
        raise UserError(f"encoder {model!r} is no text encoder with a padding token, such as {DEFAULT_MODEL}")
    return tokenizer, network


def _fingerprint(tokenizer: Any, model: Any) -> str:
    """sha256 of what decides the vectors: configuration, tokenizer, weights; the same wherever they were."""
    digest = hashlib.sha256()
    config = {key: value for key, value in model.config.to_diff_dict().items() if key not in _NO_PART}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend else json.dumps(sorted(tokenizer.get_vocab().items()))
    digest.update(vocabulary.encode())
    for name, tensor in sorted(model.state_dict().items()):
        # The pooler is not used, and drawn by chance where a checkpoint has none.
        if not name.startswith("pooler."):
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().numpy().data)
    return digest.hexdigest()
