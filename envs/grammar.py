"""The turn grammar: what one text of the policy says.

``<mem>…</mem>``, optionally ``<think>…</think>``, then one action: ``<tool_call>{"name": …, "arguments": {…}}
</tool_call>``, ``<search>…</search>`` (read as a call of search) or ``<answer>…</answer>``. Tags are lower
case and without spaces. They are matched with a stack: a block counts only at the top level, a tag inside
another block is text. The first action that closes wins and cuts the rest off; a memory or thought after it
was never written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from envs.neutral import TAGS, clip, neutralise, replace_surrogates

__all__ = ["ACTION_STOPS", "ParsedTurn", "ToolCall", "clip", "neutralise", "parse_turn", "render_call"]

ACTION_STOPS = ("</answer>", "</tool_call>", "</search>")
"""Strings after which generation can stop: whatever follows is dropped."""

CallStyle = Literal["tool_call", "search"]

_TAG = re.compile(rf"<(/?)({'|'.join(TAGS)})>")
_MAX_DEPTH = 16
_ACTIONS = frozenset(("tool_call", "search", "answer"))


@dataclass(frozen=True)
class ToolCall:
    """A well-formed call: whether such a tool exists is for the environment to say."""

    name: str
    arguments: Mapping[str, Any]

    @property
    def query(self) -> str | None:
        """The ``query`` argument, when it is text."""
        query = self.arguments.get("query")
        return query if isinstance(query, str) else None


@dataclass(frozen=True)
class ParsedTurn:
    """What a turn says. Offsets are characters of the text that was parsed.

    Attributes:
        memory: text of the first top-level memory block; None when missing, not closed, or blank.
        memory_span: its ``[start, end)``, tags included; None exactly when ``memory`` is None.
        think: text of the first top-level thought, or None.
        call, answer: the action; at most one of them.
        action: the action's block as it was written, tags included; None when it is not valid.
        invalid: why there is no valid action, or None.
        closed: whether an action, valid or not, was closed.
        end: where the first action closed; the length of the text when none did.
        text: the text up to ``end``.
    """

    memory: str | None
    memory_span: tuple[int, int] | None
    think: str | None
    call: ToolCall | None
    answer: str | None
    action: str | None
    invalid: str | None
    closed: bool
    end: int
    text: str


def parse_turn(text: str) -> ParsedTurn:
    """Read one turn. Never raises: what is wrong with the action is in ``invalid``.

    A thought that the chat template opened (``x</think>…``) is read as one. Lone surrogates are replaced.
    """
    text = replace_surrogates(text)
    memory: str | None = None
    memory_span: tuple[int, int] | None = None
    think: str | None = None
    stack: list[tuple[str, int, int]] = []  # name, start of the opening tag, end of it
    opened = dict.fromkeys(TAGS, 0)  # how many of each are in the stack: no search in it for what is not
    closed_any = False
    for match in _TAG.finditer(text):
        closing, name = match.groups()
        if not closing:
            stack.append((name, match.start(), match.end()))
            opened[name] += 1
            continue
        if not opened[name]:
            if name == "think" and not closed_any:
                think, closed_any = text[: match.start()], True
                stack.clear()
                opened = dict.fromkeys(TAGS, 0)
            continue
        popped = ""
        while popped != name:
            popped, start, inner = stack.pop()
            opened[popped] -= 1
        if stack:
            continue
        closed_any = True
        content = text[inner : match.start()]
        if name == "mem" and memory_span is None:
            memory_span = (start, match.end())
            memory = content
        elif name == "think" and think is None:
            think = content
        elif name in _ACTIONS:
            call, answer, invalid = _read_action(name, content)
            action = text[start : match.end()] if invalid is None else None
            return _turn(text[: match.end()], memory, memory_span, think, call, answer, action, invalid, True)
    return _turn(text, memory, memory_span, think, None, None, None, _why_no_action(text, stack), False)


def _turn(
    text: str,
    memory: str | None,
    memory_span: tuple[int, int] | None,
    think: str | None,
    call: ToolCall | None,
    answer: str | None,
    action: str | None,
    invalid: str | None,
    closed: bool,
) -> ParsedTurn:
    if memory is None or not memory.strip():
        memory = memory_span = None
    return ParsedTurn(memory, memory_span, think, call, answer, action, invalid, closed, len(text), text)


def _why_no_action(text: str, stack: list[tuple[str, int, int]]) -> str:
    if not text.strip():
        return "empty turn: a tool call or an answer is needed"
    if stack:
        return f"the block {stack[0][0]} is never closed, so there is no action"
    return "no action: a tool call or an answer is needed"


def _read_action(name: str, content: str) -> tuple[ToolCall | None, str | None, str | None]:
    stripped = content.strip()
    if name == "answer":
        return (None, stripped, None) if stripped else (None, None, "blank answer")
    if name == "search":
        return (
            (ToolCall("search", {"query": stripped}), None, None) if stripped else (None, None, "blank query")
        )
    try:
        data = json.loads(stripped, strict=False, parse_constant=_refuse_constant)
        arguments = data.get("arguments", {}) if isinstance(data, dict) else None
        if isinstance(arguments, str):
            arguments = json.loads(arguments, strict=False, parse_constant=_refuse_constant)
        arguments = _clean(arguments)
    except (ValueError, RecursionError):
        return None, None, "the tool call is not valid JSON"
    if not isinstance(data, dict) or not isinstance(data.get("name"), str) or not data["name"].strip():
        return None, None, 'the tool call needs the form {"name": "…", "arguments": {…}}'
    if not isinstance(arguments, dict):
        return None, None, "the arguments of the tool call must be an object"
    return ToolCall(replace_surrogates(data["name"].strip()), arguments), None, None


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _clean(value: Any, depth: int = 0) -> Any:
    """JSON can spell lone surrogates (``\\ud800``) that the turn's own text cannot hold."""
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deep")
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, list):
        return [_clean(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {replace_surrogates(key): _clean(item, depth + 1) for key, item in value.items()}
    return value


def render_call(query: str, style: CallStyle = "tool_call") -> str:
    """A search as the policy writes it, in either of the two accepted forms."""
    if style == "search":
        return f"<search>{query}</search>"
    if style == "tool_call":
        call = {"name": "search", "arguments": {"query": query}}
        return f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>"
    raise ValueError(f"call style {style!r} is none of 'tool_call', 'search'")
