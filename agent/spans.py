"""From sampled ids to text and back to token ranges, exact to the byte.

A completion is never decoded and encoded again: the text is the concatenation of each token's own bytes, so
the character range of a memory block maps to a token range from the ids alone. Where the bytes are not
valid UTF-8 (a token can end inside a character) every stray byte becomes one U+FFFD, which keeps offsets
exact.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"


class TokenBytes:
    """The bytes that each token id adds to a text.

    Covers byte-level BPE (GPT-2, Qwen, Llama 3), byte-fallback pieces with a ``▁`` for the space (Llama 2,
    Gemma, Mistral), word-level vocabularies, and any other tokenizer by decoding the token behind an
    anchor. Special tokens count with their literal content. A leading space that some tokenizers strip at
    the start of a text is kept: a completion continues a prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._added = {
            int(index): str(token.content).encode() for index, token in tokenizer.added_tokens_decoder.items()
        }
        self.special = frozenset(tokenizer.all_special_ids)
        self._convert = _converter(tokenizer)
        self._table: dict[int, bytes] = {}

    def piece(self, index: int) -> bytes:
        """Bytes of one token; empty for an id beyond the tokenizer's vocabulary (padded embeddings)."""
        known = self._table.get(index)
        if known is None:
            known = self._added.get(index)
            if known is None:
                token = self._tokenizer.convert_ids_to_tokens(index)
                known = b"" if token is None else self._convert(index, str(token))
            self._table[index] = known
        return known

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        table = self._table
        return [table[index] if index in table else self.piece(index) for index in ids]

    def text(self, ids: Sequence[int]) -> str:
        """The ids' text; one U+FFFD for each byte that is part of no complete character."""
        whole = b"".join(self.pieces(ids))
        try:
            return whole.decode()
        except UnicodeDecodeError:
            escaped = whole.decode("utf-8", "surrogateescape")
            return "".join(REPLACEMENT if "\udc80" <= c <= "\udcff" else c for c in escaped)

    def token_span(self, ids: Sequence[int], char_span: tuple[int, int]) -> tuple[int, int] | None:
        """Tokens whose bytes overlap the characters ``[start, end)`` of ``text(ids)``.

        Returns:
            ``(first, last + 1)``; tokens without bytes belong to it only between two that do. None when the
            range is empty.

        Raises:
            ValueError: the range lies outside the text.
        """
        pieces = self.pieces(ids)
        escaped = b"".join(pieces).decode("utf-8", "surrogateescape")
        start, end = char_span
        if not 0 <= start <= end <= len(escaped):
            raise ValueError(f"character range {char_span} lies outside a text of {len(escaped)} characters")
        first_byte = len(escaped[:start].encode("utf-8", "surrogateescape"))
        last_byte = first_byte + len(escaped[start:end].encode("utf-8", "surrogateescape"))
        offset, overlapping = 0, []
        for position, piece in enumerate(pieces):
            if piece and offset < last_byte and offset + len(piece) > first_byte:
                overlapping.append(position)
            offset += len(piece)
        return (overlapping[0], overlapping[-1] + 1) if overlapping else None


_CACHE: WeakKeyDictionary[Any, TokenBytes] = WeakKeyDictionary()


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> TokenBytes:
    """The tokenizer's byte table, built once."""
    known = _CACHE.get(tokenizer)
    if known is None:
        known = _CACHE[tokenizer] = TokenBytes(tokenizer)
    return known


def memory_token_span(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], char_span: tuple[int, int]
) -> tuple[int, int] | None:
    """Token range of a memory block: exactly the tokens whose text overlaps it (tags included).

    Args:
        ids: the completion as sampled.
        char_span: ``[start, end)`` in ``token_bytes(tokenizer).text(ids)``, as ``envs.grammar.parse_turn``
            gives it.
    """
    return token_bytes(tokenizer).token_span(ids, char_span)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: the printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + rank): byte for rank, byte in enumerate(others)})
    return table


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if not decoder:
        return set()
    if decoder.get("type") == "Sequence":
        return {kind for part in decoder.get("decoders", []) for kind in _decoder_kinds(part)}
    return {str(decoder.get("type"))}


def _converter(tokenizer: PreTrainedTokenizerBase) -> Callable[[int, str], bytes]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return _by_anchor(tokenizer)
    layout = json.loads(backend.to_str())
    kinds = _decoder_kinds(layout.get("decoder"))
    model = layout.get("model", {})
    if "ByteLevel" in kinds:
        alphabet = _byte_level_alphabet()

        def byte_level(index: int, token: str) -> bytes:
            if all(c in alphabet for c in token):
                return bytes(alphabet[c] for c in token)
            return token.encode()

        return byte_level
    if kinds & {"ByteFallback", "Metaspace"} or ("Replace" in kinds and model.get("byte_fallback")):
        fallback = "ByteFallback" in kinds or bool(model.get("byte_fallback"))

        def sentence_piece(index: int, token: str) -> bytes:
            if fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes([int(token[3:5], 16)])
            return token.replace("▁", " ").encode()

        return sentence_piece
    if not kinds and model.get("type") == "WordLevel":
        return lambda index, token: f" {token}".encode()
    return _by_anchor(tokenizer)


def _by_anchor(tokenizer: PreTrainedTokenizerBase) -> Callable[[int, str], bytes]:
    """Decode ``anchor token`` and take off the anchor's own text: works without knowing the kind."""
    anchor = tokenizer.encode("a", add_special_tokens=False)
    own = str(tokenizer.decode(anchor))

    def convert(index: int, token: str) -> bytes:
        both = str(tokenizer.decode([*anchor, index], clean_up_tokenization_spaces=False))
        return both[len(own) :].encode() if both.startswith(own) else token.encode()

    return convert
