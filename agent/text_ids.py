"""Ids of a text, those of ``tokenizer.encode(text, add_special_tokens=False)``, in a part of its time.

Prompts of an episode repeat themselves: rules, question, carried steps. A tokenizer cuts a text at its added tokens
(chat markers, ``<think>``, the tags of the grammar where they are tokens) before anything else, so what lies between
them is encoded on its own, and kept. The tokenizer behind is asked for ids alone: transformers has it find offsets as
well, and copies masks and types that nobody reads.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_KEPT_PIECES = 4096
_MOST_ADDED = 64  # Gemma's 6,000 unused ones would make the cutting slower than the encoding
_ANYWHERE = {
    "ByteLevel",
    "Split",
    "Digits",
    "Punctuation",
    "Whitespace",
    "WhitespaceSplit",
    "BertPreTokenizer",
}


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of the text with nothing put before or behind it.

    Transformers is asked where it does more than that: for a class with rules of its own (Code Llama's infilling),
    where special tokens are to be split, and where a call before this one left that, truncation or padding on.
    """
    plain = getattr(type(tokenizer), "_encode_plus", None) is PreTrainedTokenizerFast._encode_plus
    backend = tokenizer.backend_tokenizer if plain else None
    left_on = backend and (backend.truncation or backend.padding or backend.encode_special_tokens)
    if backend is None or left_on or tokenizer.split_special_tokens:
        return list(tokenizer.encode(text, add_special_tokens=False))
    known = _KNOWN.get(tokenizer)
    if known is None or known.backend is not backend or known.size != backend.get_vocab_size():
        known = _KNOWN[tokenizer] = _Pieces(backend)
    return known.ids(text)


class _Pieces:
    """Encodes what lies between added tokens, where that gives the ids of the whole."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.size = backend, backend.get_vocab_size()
        self._kept = lru_cache(maxsize=_KEPT_PIECES)(self._encode)
        tokens = backend.get_added_tokens_decoder()
        self._added = {token.content: index for index, token in tokens.items()}
        self._cut = re.compile(f"({'|'.join(map(re.escape, sorted(self._added, key=len, reverse=True)))})")
        self._cuts = (
            0 < len(tokens) <= _MOST_ADDED
            and not any(t.lstrip or t.rstrip or t.single_word or t.normalized for t in tokens.values())
            and not getattr(backend.model, "dropout", None)
            and _same_everywhere(backend.pre_tokenizer)
            and all(self._joined(text) == list(self._encode(text)) for text in self._probes())
        )

    def ids(self, text: str) -> list[int]:
        return self._joined(text) if self._cuts else list(self._encode(text))

    def _joined(self, text: str) -> list[int]:
        ids: list[int] = []
        for place, part in enumerate(self._cut.split(text)):
            if place % 2:
                ids.append(self._added[part])
            elif part:
                ids += self._kept(part)
        return ids

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def _probes(self) -> list[str]:
        """A sample of what can stand around a token, should a tokenizer do what none is known to do."""
        return [
            f"{before}{token}{behind}"
            for token in self._added
            for before in ("", "a", " a ", f"a\n{token}")
            for behind in ("", "b", " b ", f"{token}\nb c")
        ]


def _same_everywhere(pre_tokenizer: Any) -> bool:
    """Whether it cuts a piece of a text as it would cut it at the start: Metaspace can mark the first word alone."""
    if pre_tokenizer is None:
        return True
    state = json.loads(pre_tokenizer.__getstate__())
    parts = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    return all(
        part["type"] in _ANYWHERE
        or (part["type"] == "Metaspace" and part.get("prepend_scheme") in ("always", "never"))
        for part in parts
    )


_KNOWN: WeakKeyDictionary[Any, _Pieces] = WeakKeyDictionary()
