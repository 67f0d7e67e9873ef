"""Untrusted text made safe to show: cut with a mark, and without anything that could close or open a block.

What a tool returns, titles included, and what comes from data files is read by a model between our tags. A
tag of ours in it could end the block it stands in; a control token of a chat template could end the message.
Both are kept readable and made harmless: ``</information>`` becomes ``‹/information>``, ``[INST]`` becomes
``⟦INST]``.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

TAGS = ("mem", "think", "tool_call", "search", "answer", "information")
"""Names of the blocks of the turn grammar."""

CLIP_MARK = " […]"
"""Ends a text that was cut."""

# Written in angle brackets by the chat templates of Gemma, Llama, Mistral, Qwen, DeepSeek, T5 and their kin.
_ANGLE_TOKENS = (
    *TAGS,
    "tool_calls",
    "tool_response",
    "tools",
    "endoftext",
    "cls",
    "sep",
    "sop",
    "eop",
    "bos",
    "eos",
    "pad",
    "unk",
    "mask",
    "start_of_turn",
    "end_of_turn",
    "start_of_image",
    "end_of_image",
    "image_soft_token",
    "fim_prefix",
    "fim_middle",
    "fim_suffix",
    "file_sep",
)
_SQUARE_TOKENS = (
    "inst",
    "system_prompt",
    "available_tools",
    "tool_calls",
    "tool_results",
    "tool_content",
    "img",
    "think",
    "cls",
    "sep",
    "mask",
    "pad",
    "unk",
    "bos",
    "eos",
    "gmask",
)

# How a character counts when tags are looked for. Gap: white space, control, format and combining characters, and
# those that show nothing although they are letters or symbols (Hangul fillers, empty Braille) or not assigned.
_GAP = "\0"
_GAP_CATEGORIES = frozenset(("Zs", "Zl", "Zp", "Cc", "Cf", "Mn", "Me"))
_BLANK = frozenset((0x115F, 0x1160, 0x2065, 0x2800, 0x3164, 0xFFA0, 0xFFFC))
_ALIKE = {"\u0131": "i", "\u0237": "j", "\u2044": "/", "\u2215": "/", "\u29f8": "/"}


class _Folded(dict[int, str]):
    """By code point: a gap, or without accents, in lower case and ASCII where that is one character."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        if unicodedata.category(character) in _GAP_CATEGORIES or code in _BLANK or 0xE0000 <= code < 0xE1000:
            folded = _GAP
        else:
            plain = unicodedata.normalize("NFKD", _ALIKE.get(character, character)).casefold()
            plain = "".join(part for part in plain if not unicodedata.combining(part))
            folded = plain if len(plain) == 1 and plain.isascii() else character
        self[code] = folded
        return folded


_FOLDED = _Folded()


def _spelled(name: str) -> str:
    """Matches a folded name with gaps between its letters, an underscore as a hyphen or not at all.

    No match is tried with a shorter gap: with an underscore between two gaps that took time as the gap squared.
    """
    return f"{_GAP}*+".join(letter if letter.isalpha() else "[_-]?" for letter in name)


def _either(names: tuple[str, ...]) -> str:
    return "|".join(sorted(map(_spelled, names), key=len, reverse=True))


_SLASHES = f"[{_GAP}/\\\\]*+"
_AFTER_ANGLE = "|".join(
    (
        f"(?:{_either(_ANGLE_TOKENS)})(?![^\\W_])",
        f"{_spelled('unused')}{_GAP}*+\\d",
        _spelled("extra_id_"),
        f"{_spelled('s')}{_GAP}*+[/>]",
        "[|¦]",
        f"<{_SLASHES}{_spelled('sys')}",
    )
)
_OPENERS = re.compile(
    f"<(?={_SLASHES}(?:{_AFTER_ANGLE}))"
    f"|\\|(?={_GAP}*+>)"
    f"|\\[(?={_SLASHES}(?:{_either(_SQUARE_TOKENS)}){_GAP}*+\\])"
)
_SUSPECT = re.compile("[<＜﹤≮\\[［﹇|｜]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_HARMLESS = {"<": "‹", "[": "⟦", "|": "¦"}


def replace_surrogates(text: str) -> str:
    """Lone surrogates, which no encoding can carry, as U+FFFD; lengths and offsets stay."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def neutralise(text: str) -> str:
    """The same text with our tags and chat control tokens made harmless, whatever their case or spacing.

    Also with invisible characters, combining marks and accents in them, or in letters of another width or style.
    Entities (``&lt;``) stay: nothing decodes them afterwards. Only the character that opens one is replaced, so
    lengths and offsets stay. Idempotent.
    """
    text = replace_surrogates(text)
    if _SUSPECT.search(text) is None:
        return text
    pieces, end = [], 0
    for match in _OPENERS.finditer(text.translate(_FOLDED)):
        pieces += [text[end : match.start()], _HARMLESS[match.group()]]
        end = match.end()
    return "".join([*pieces, text[end:]])


def clip(text: str, limit: int) -> str:
    """At most ``limit`` characters, the mark included when something was cut off.

    A limit shorter than the mark leaves as much of the mark as fits.
    """
    if len(text) <= limit:
        return text
    mark = CLIP_MARK[-max(limit, 0) :] if limit < len(CLIP_MARK) else CLIP_MARK
    return text[: max(limit - len(mark), 0)] + (mark if limit > 0 else "")


def clip_counted(text: str, limit: int, counter: Callable[[str], int]) -> str:
    """The longest beginning of ``text`` that, with the mark, counts at most ``limit``; cut between words.

    Args:
        counter: size of a text (words, or tokens of some tokenizer), growing with the text.
    """
    if counter(text) <= limit:
        return text
    ends = [match.end() for match in re.finditer(r"\S+", text)]
    low, high = 0, len(ends)
    while low < high:
        middle = (low + high + 1) // 2
        if counter(text[: ends[middle - 1]] + CLIP_MARK) <= limit:
            low = middle
        else:
            high = middle - 1
    return text[: ends[low - 1]] + CLIP_MARK if low else ""


def count_words(text: str) -> int:
    """Words between white space: the default size of a memory."""
    return len(text.split())
