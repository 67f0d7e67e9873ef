"""Memory spans against a byte-by-byte ownership table, on random cuts of random texts into tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from agent.spans import memory_token_span, token_bytes
from envs.grammar import parse_turn

SHIPPED = Path(__file__).parents[2] / "trainer" / "assets" / "tiny-cold-start"
COUNT = 10_000
MERGED = ["<mem", "mem>", "></", "</", ">.", ".<", "m>b", " <mem>", "x</mem", "> ", "em", "a b", "é", "漢</"]
PIECES = [
    "<mem>",
    "</mem>",
    "<mem>",
    "</mem>",
    "<think>",
    "</answer>",
    "a",
    " b ",
    "é",
    "漢字",
    "🙂",
    "<",
    ">",
    "x",
    ".",
    "\n",
]


def shipped() -> tuple[PreTrainedTokenizerFast, dict[int, bytes], list[int]]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(SHIPPED)
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    added = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items()}
    table = {
        index: added[index].encode() if index in added else bytes(byte_of[letter] for letter in token)
        for token, index in tokenizer.get_vocab().items()
    }
    return tokenizer, table, list(tokenizer.all_special_ids)


def byte_fallback(metaspace: bool) -> tuple[PreTrainedTokenizerFast, dict[int, bytes], list[int]]:
    """Like SentencePiece: ``▁`` for a space, ``<0xE9>`` for a byte; tags are no tokens of their own."""
    words: list[tuple[str, bytes]] = [(token, token.encode()) for token in ("<unk>", "<s>", "</s>")]
    words += [(f"<0x{byte:02X}>", bytes([byte])) for byte in range(256)]
    words += [(letter, letter.encode()) for letter in "abcdemnrstwhikx<>/.é漢"]
    words += [("▁", b" ")] + [(text.replace(" ", "▁"), text.encode()) for text in MERGED if len(text) > 1]
    core = Tokenizer(
        models.BPE(
            vocab={word: index for index, (word, _) in enumerate(words)},
            merges=[("e", "m"), ("<", "/")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    core.normalizer = normalizers.Replace(" ", "▁")
    space = decoders.Metaspace(prepend_scheme="never") if metaspace else decoders.Replace("▁", " ")
    core.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    return tokenizer, {index: content for index, (_, content) in enumerate(words)}, [1, 2]


def completion(
    rng: random.Random, by_bytes: dict[bytes, list[int]], special: list[int], size: int
) -> list[int]:
    """A random text cut into tokens at random places, with stray tokens thrown in."""
    text = "".join(rng.choices(PIECES, k=rng.randint(0, 4)))
    if rng.random() < 0.7:
        text += "<mem>" + "".join(rng.choices(PIECES[6:], k=rng.randint(0, 4))) + "</mem>"
    rest = (text + "".join(rng.choices(PIECES, k=rng.randint(0, 3)))).encode()
    ids: list[int] = []
    while rest:
        lengths = [length for length in range(1, min(len(rest), 12) + 1) if rest[:length] in by_bytes]
        length = rng.choice(lengths)
        ids.append(rng.choice(by_bytes[rest[:length]]))
        rest = rest[length:]
        if rng.random() < 0.03:
            ids.append(rng.choice([rng.randrange(size), rng.choice(special)]))
    return ids


def characters(data: bytes) -> list[tuple[str, int, int]]:
    """Characters with their byte ranges; a byte of no whole character is one U+FFFD."""
    found: list[tuple[str, int, int]] = []
    place = 0
    while place < len(data):
        for length in (1, 2, 3, 4):
            try:
                letter = data[place : place + length].decode()
            except UnicodeDecodeError:
                continue
            if len(letter) == 1:
                found.append((letter, place, place + length))
                place += length
                break
        else:
            found.append(("\ufffd", place, place + 1))
            place += 1
    return found


@pytest.mark.parametrize("kind", ["shipped", "metaspace", "replace"])
def test_exactly_the_tokens_that_overlap_the_block(kind: str) -> None:
    tokenizer, table, special = shipped() if kind == "shipped" else byte_fallback(kind == "metaspace")
    by_bytes: dict[bytes, list[int]] = {}
    for index, content in table.items():
        by_bytes.setdefault(content, []).append(index)
    rng = random.Random(11)
    spans = merged = split = stray = marked = 0
    for _ in range(COUNT):
        ids = completion(rng, by_bytes, special, len(table))
        owner = [place for place, index in enumerate(ids) for _ in table[index]]
        letters = characters(b"".join(table[index] for index in ids))
        text = "".join(letter for letter, _, _ in letters)
        assert token_bytes(tokenizer).text(ids) == text
        block = parse_turn(text).memory_span
        if block is None:
            continue
        first, last = letters[block[0]][1], letters[block[1] - 1][2]
        inside = sorted(set(owner[first:last]))
        assert memory_token_span(tokenizer, ids, block) == (inside[0], inside[-1] + 1)
        assert inside == list(range(inside[0], inside[-1] + 1))
        spans += 1
        merged += (first > 0 and owner[first - 1] == inside[0]) or owner[last : last + 1] == [inside[-1]]
        split += owner[first] != owner[first + 4]
        stray += "\ufffd" in text
        marked += any(index in special for index in ids[inside[0] : inside[-1]])
    assert min(spans - 3000, split - 500, stray - 20, marked - 20) > 0, (spans, split, stray, marked)
    assert kind == "shipped" or merged > 200


@pytest.mark.parametrize("kind", ["shipped", "metaspace", "replace"])
def test_text_is_what_the_tokenizer_decodes(kind: str) -> None:
    tokenizer, _, _ = shipped() if kind == "shipped" else byte_fallback(kind == "metaspace")
    for text in ("<mem>a b</mem>", "é 漢字 🙂", "<mem>x</mem> b<think>a</think>", "c.\n"):
        ids = tokenizer.encode(f"a{text}", add_special_tokens=False)
        assert token_bytes(tokenizer).text(ids) == f"a{text}" == tokenizer.decode(ids)


def test_by_hand() -> None:
    tokenizer, table, _ = byte_fallback(False)
    index = {content: place for place, content in reversed(table.items())}
    ids = [index[piece] for piece in (b"a", b".<", b"mem>", b"x</mem", b">.", b"b")]
    assert token_bytes(tokenizer).text(ids) == "a.<mem>x</mem>.b"
    assert memory_token_span(tokenizer, ids, (2, 14)) == (1, 5)
    assert memory_token_span(tokenizer, ids, (2, 7)) == (1, 3)
    assert memory_token_span(tokenizer, ids, (3, 3)) is None
    with pytest.raises(ValueError, match="16 characters"):
        memory_token_span(tokenizer, ids, (2, 17))


def test_a_character_over_two_tokens_and_an_unknown_id() -> None:
    tokenizer, _, _ = byte_fallback(False)
    ids = [3 + 0xC3, 3 + 0xA9, 3 + 0xA9, 10**6]
    assert token_bytes(tokenizer).text(ids) == "é\ufffd"
    assert memory_token_span(tokenizer, ids, (0, 1)) == (0, 2)
    assert memory_token_span(tokenizer, ids, (1, 2)) == (2, 3)
