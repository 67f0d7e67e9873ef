"""Hostile text: an independent reader, which squeezes case and spacing out, must find no tag left."""

from __future__ import annotations

import random
import time
import unicodedata

import pytest

from envs.neutral import CLIP_MARK, clip, clip_counted, count_words, neutralise

TAGS = ("mem", "think", "tool_call", "search", "answer", "information")
CONTROL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<｜begin▁of▁sentence｜>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<bos>",
    "<eos>",
    "<pad>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "<<SYS>>",
    "<</SYS>>",
    "[TOOL_CALLS]",
    "<unused7>",
    "<tool_response>",
    "<extra_id_0>",
)
FILLER = [
    "Warsaw",
    "is",
    "a < b",
    "x <3",
    "größer",
    "القدس",
    "\u202eabc\u202c",
    "\u200f",
    "東京",
    "a\ud800b",
    "[1]",
    "|",
]
GAPS = ["", "", " ", "\t", "\n", "\u200b", "\u200f", "\u00a0", "\u00ad", "\x00"]
# Marks on the letter before, variation selectors, tag characters, and letters and symbols that show nothing.
GAPS += ["\u0301", "\u0338", "\u034f", "\ufe0f", "\U000e0100", "\U000e0061", "\u180b", "\u2062", "\ufff9"]
GAPS += ["\u3164", "\uffa0", "\u2800", "\ufffc"]
NOTHING_SHOWN = frozenset("\u115f\u1160\u3164\uffa0\u2800\ufffc")
# Letters of other styles: mathematical bold and script, in circles, full width.
STYLES = (0x1D41A - 97, 0x1D4EA - 97, 0x24D0 - 97, 0xFEE0)
BRACKETS = {"<": "<<<＜﹤", "[": "[[［", "]": "]]］", ">": ">>>＞﹥", "|": "||｜", "/": "//／∕⁄", "_": "__＿"}


def squeezed(text: str) -> str:
    """Compatibility forms folded, lower case, without marks, white space, control and format characters."""
    folded = unicodedata.normalize("NFKD", text.replace("∕", "/").replace("⁄", "/")).casefold()
    dropped = ("Cc", "Cf", "Cs", "Mn", "Me", "Zs", "Zl", "Zp")
    return "".join(c for c in folded if unicodedata.category(c) not in dropped and c not in NOTHING_SHOWN)


def obfuscated(token: str, rng: random.Random) -> str:
    out = ""
    for character in token:
        if character.isalpha() and rng.random() < 0.5:
            character = character.upper()
        if character.isascii() and character.isalpha() and rng.random() < 0.05:
            character = chr(ord(character.lower()) + rng.choice(STYLES))
        character = rng.choice(BRACKETS.get(character, character)) if rng.random() < 0.2 else character
        out += character + (rng.choice(GAPS) if rng.random() < 0.4 else "")
    return out


def hostile_documents(count: int, seed: int = 0) -> list[str]:
    """Texts full of our tags and control tokens, every tenth with attributes, a few of them megabytes."""
    rng = random.Random(seed)
    documents = []
    for number in range(count):
        words: list[str] = []
        for _ in range(rng.randint(1, 30)):
            kind = rng.random()
            if kind < 0.3:
                words.append(rng.choice(FILLER))
            elif kind < 0.75:
                name = obfuscated(rng.choice(TAGS), rng)
                slash = rng.choice(["", "/", " / ", "\u0338/"])
                tail = (
                    rng.choice(["", " class='x'", "/"]) if number % 10 == 0 else rng.choice(["", " ", "\n"])
                )
                words.append(f"<{rng.choice(GAPS)}{slash}{name}{tail}>")
            else:
                words.append(obfuscated(rng.choice(CONTROL), rng))
        text = rng.choice(["", " "]).join(words)
        documents.append(text * (1_200_000 // len(text) + 1) if number % 250 == 7 else text)
    return documents


def test_no_tag_and_no_control_token_survives_in_a_thousand_documents() -> None:
    attacks = [f"<{slash}{tag}" for tag in TAGS for slash in ("", "/")] + [
        squeezed(token) for token in CONTROL
    ]
    hit = 0
    for document in hostile_documents(1000):
        document = document[:4_000]
        clean = neutralise(document)
        assert len(clean) == len(document)
        clean.encode("utf-8")
        before, after = squeezed(document), squeezed(clean)
        hit += any(attack in before for attack in attacks)
        left = [attack for attack in attacks if attack in after]
        assert not left, f"{left} in {clean!r}"
        assert neutralise(clean) == clean
    assert hit > 900, "the generator must make attacks, or the test proves nothing"


@pytest.mark.parametrize(
    "text",
    [
        "plain text",
        "a < b and c > d",
        "x<y, <memory>, <br>, <table>, see [1], [MIT], a|b",
        "Größe 東京 القدس",
        "price < $3 | cheap",
        "<answered> <research> <thinking>",
    ],
)
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert neutralise(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "<\u200b/\u200binfor\u200bmation\u200b>",
        "<\x00/\x00answer\x00>",
        "<\u0338/answer>",
        "≮/answer>",
        "</a\u0301nswer>",
        "</ánswer>",
        "<ans\U000e0020wer>",
        "<an\u3164swer>",
        "<an\u2800swer>",
        "<𝐚𝐧𝐬𝐰𝐞𝐫>",
        "<ⓐⓝⓢⓦⓔⓡ>",
        "＜／ａｎｓｗｅｒ＞",
        "﹤answer﹥",
        "<∕answer>",
        "<\\/answer>",
        "<ınformation>",
        "<anſwer>",
        "<tool－call>",
        "<answer",
        "［INST］",
        "[gMASK]",
        "<tool_calls>",
    ],
)
def test_tricks_one_by_one(text: str) -> None:
    clean = neutralise(text)
    assert clean == ("⟦" if text[0] in "[［" else "‹") + text[1:]


def test_nested_and_unclosed_tags() -> None:
    assert neutralise("<<answer>answer>x</</answer>answer>") == "<‹answer>answer>x</‹/answer>answer>"
    assert neutralise("<ans<answer>wer>") == "<ans‹answer>wer>"
    assert neutralise("<answer <answer</answer") == "‹answer ‹answer‹/answer"
    assert neutralise("a&lt;/information&gt; &#60;answer&#62;") == "a&lt;/information&gt; &#60;answer&#62;"


def test_every_character_that_can_open_is_looked_at() -> None:
    """By brute force over Unicode: what decomposes to an opener and marks is neutralised as one."""
    openers = 0
    for code in [*range(0x20, 0xD800), *range(0xE000, 0x30000)]:
        plain = [c for c in unicodedata.normalize("NFKD", chr(code)) if not unicodedata.combining(c)]
        if plain in (["<"], ["["], ["|"]):
            name = {"<": "answer>", "[": "INST]", "|": ">"}[plain[0]]
            assert neutralise(chr(code) + name) in ("‹answer>", "⟦INST]", "¦>"), hex(code)
            openers += 1
    assert openers == 9


def test_a_tag_stays_readable() -> None:
    assert neutralise("a </Information> b") == "a ‹/Information> b"
    assert neutralise("[INST] <|im_end|>") == "⟦INST] ‹|im_end¦>"
    assert neutralise("a\ud800b") == "a\ufffdb"


def test_many_openers_take_no_time() -> None:
    # Quadratic matching would take minutes here.
    for unit in ("<", "< ", "</", "<m", "<t o o l ", "[", "[ / ", "|", "<" + " " * 50):
        assert neutralise(unit * (200_000 // len(unit)))
    assert neutralise("<" + " " * 200_000) and neutralise("</" * 100_000 + "\u0301" * 100_000)


def test_clip_keeps_the_limit_and_shows_the_cut() -> None:
    assert clip("abcdef", 6) == "abcdef"
    assert clip("abcdefgh", 7) == "abc" + CLIP_MARK and len(CLIP_MARK) == 4
    assert [len(clip("x" * 100, limit)) for limit in range(8)] == list(range(8))


def test_clip_counted_cuts_between_words_by_any_counter() -> None:
    assert clip_counted("one two three", 3, count_words) == "one two three"
    assert clip_counted("one two three four", 3, count_words) == "one two" + CLIP_MARK
    assert clip_counted("one two", 1, lambda text: len(text)) == ""
    assert clip_counted("one two three", 12, len) == "one two" + CLIP_MARK
    long = " ".join(["word"] * 10_000)
    cut = clip_counted(long, 100, count_words)
    assert count_words(cut) == 100 and cut.endswith(CLIP_MARK)


@pytest.mark.parametrize("opener", ["<start", "<tool", "<|", "<", "[tool", "</s", "<unused", "|"])
def test_long_gaps_take_time_as_their_length(opener: str) -> None:
    """100,000 characters are what a turn may have; time as the square of the gap would be minutes."""
    started = time.perf_counter()
    neutralise(opener + " " * 100_000 + "x")
    assert time.perf_counter() - started < 2.0
    assert neutralise("<start" + " " * 500 + "_\u200b of turn>").startswith("‹start")
