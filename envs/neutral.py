"""Untrusted text made safe to show: cut with a mark, and without anything that could close or open a block.

What a tool returns, titles included, and what comes from data files is read by a model between our tags. A
tag of ours in it could end the block it stands in; a control token of a chat template could end the message.
Both are kept readable and made harmless: ``</information>`` becomes ``‹/information>``, ``[INST]`` becomes
``⟦INST]``.
"""

from __future__ import annotations

import re
from collections.abc import Callable

TAGS = ("mem", "think", "tool_call", "search", "answer", "information")
"""Names of the blocks of the turn grammar."""

CLIP_MARK = " […]"
"""Ends a text that was cut."""

# Written in angle brackets by the chat templates of Gemma, Llama, Mistral, Qwen, DeepSeek, T5 and their kin.
_ANGLE_TOKENS = (
    *TAGS,
    "tool_response",
    "tools",
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
)

# Whitespace, control characters and the invisible format characters (joiners, direction marks, soft hyphen).
_GAP = (
    r"[\s\x00-\x1f\x7f-\xa0\xad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]"
)


def _spelled(name: str) -> str:
    """Matches a name in any case, with gaps between its letters, in ASCII or full-width letters."""
    letters = []
    for letter in name:
        wide = chr(ord(letter) + 0xFEE0)
        letters.append(f"[{letter}{wide}]" if letter.isalpha() else f"[{letter}{wide}\\-]?")
    return f"{_GAP}*".join(letters)


def _either(names: tuple[str, ...]) -> str:
    return "|".join(sorted(map(_spelled, names), key=len, reverse=True))


_SLASHES = f"(?:{_GAP}|[/／\\\\])*"
_AFTER_ANGLE = "|".join(
    (
        f"(?:{_either(_ANGLE_TOKENS)})(?![^\\W_])",
        f"{_spelled('unused')}{_GAP}*\\d",
        _spelled("extra_id_"),
        f"{_spelled('s')}{_GAP}*[/>＞﹥]",
        "[|｜¦]",
        f"[<＜﹤]{_SLASHES}{_spelled('sys')}",
    )
)
_OPENERS = re.compile(
    f"[<＜﹤](?={_SLASHES}(?:{_AFTER_ANGLE}))"
    f"|[|｜](?={_GAP}*[>＞﹥])"
    f"|\\[(?={_SLASHES}(?:{_either(_SQUARE_TOKENS)}){_GAP}*\\])",
    re.IGNORECASE,
)
_SUSPECT = re.compile("[<＜﹤\\[|｜]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_HARMLESS = {"<": "‹", "＜": "‹", "﹤": "‹", "[": "⟦", "|": "¦", "｜": "¦"}


def replace_surrogates(text: str) -> str:
    """Lone surrogates, which no encoding can carry, as U+FFFD; lengths and offsets stay."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def neutralise(text: str) -> str:
    """The same text with our tags and chat control tokens made harmless, whatever their case or spacing.

    Only the character that opens one is replaced, so lengths and offsets stay. Idempotent.
    """
    text = replace_surrogates(text)
    if _SUSPECT.search(text) is None:
        return text
    return _OPENERS.sub(lambda match: _HARMLESS[match.group()], text)


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
