"""The turn grammar: hand-written turns and what they must mean."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.grammar import ACTION_STOPS, ParsedTurn, parse_turn, render_call

CALL = '<tool_call>{"name": "search", "arguments": {"query": "capital of Poland"}}</tool_call>'


def meaning(turn: ParsedTurn) -> tuple[str | None, str | None, str | None, str | None]:
    """Memory, thought, query and answer."""
    return turn.memory, turn.think, turn.call.query if turn.call else None, turn.answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<mem>m</mem><think>t</think>{CALL}", ("m", "t", "capital of Poland", None)),
        ("<mem>m</mem><think>t</think><answer> Warsaw </answer>", ("m", "t", None, "Warsaw")),
        ("<mem>m</mem><search> river </search>", ("m", None, "river", None)),
        (CALL, (None, None, "capital of Poland", None)),
        ("<mem>  \n</mem><answer>x</answer>", (None, None, None, "x")),
        ("<mem>m<answer>x</answer>", (None, None, None, None)),
        ("<think>t<answer>x</answer>", (None, None, None, None)),
        (
            "<think>a<answer>no</answer></think><answer>yes</answer>",
            (None, "a<answer>no</answer>", None, "yes"),
        ),
        ("<mem>a<answer>no</answer></mem><answer>yes</answer>", ("a<answer>no</answer>", None, None, "yes")),
        ("<information><answer>no</answer></information>", (None, None, None, None)),
        ("<information><answer>no</answer></information><answer>yes</answer>", (None, None, None, "yes")),
        ("<search>q</search><information>fake</information><answer>x</answer>", (None, None, "q", None)),
        ("<answer>first</answer><answer>second</answer>", (None, None, None, "first")),
        ("<answer>a</answer><mem>late</mem>", (None, None, None, "a")),
        ("<think>use <answer> here</think><answer>x</answer>", (None, "use <answer> here", None, "x")),
        ("<mem>a <think> b</mem><answer>x</answer>", ("a <think> b", None, None, "x")),
        ("<mem>one</mem><mem>two</mem><answer>x</answer>", ("one", None, None, "x")),
        ("<think>t</think><mem>m</mem><answer>x</answer>", ("m", "t", None, "x")),
        # Opened by the chat template.
        ("plan</think><mem>m</mem><answer>x</answer>", ("m", "plan", None, "x")),
        (
            "say <mem> or <answer>no</think><mem>m</mem><answer>x</answer>",
            ("m", "say <mem> or <answer>no", None, "x"),
        ),
        # Stray closers are text.
        ("</mem></answer><mem>m</mem></think><answer>x</answer>", ("m", None, None, "x")),
        # Tags are exact.
        ("<Answer>x</Answer>", (None, None, None, None)),
        ("< answer>x</ answer>", (None, None, None, None)),
        ("<answers>x</answers>", (None, None, None, None)),
    ],
)
def test_what_a_turn_means(text: str, expected: tuple[str | None, ...]) -> None:
    turn = parse_turn(text)
    assert meaning(turn) == expected
    assert (turn.invalid is None) == (turn.call is not None or turn.answer is not None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty turn"),
        (" \n ", "empty turn"),
        ("hello", "no action"),
        ("<mem>m</mem>", "no action"),
        ("<mem>m", "block mem is never closed"),
        ("<answer>x", "block answer is never closed"),
        ("<answer> \n</answer>", "blank answer"),
        ("<search> </search>", "blank query"),
        ("<tool_call>search Poland</tool_call>", "not valid JSON"),
        ("<tool_call></tool_call>", "not valid JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "search", "arguments": {"query": NaN}}</tool_call>', "not valid JSON"),
        (
            '<tool_call>{"name": "search", "arguments": {"a": ' + "[" * 40 + "]" * 40 + "}}</tool_call>",
            "JSON",
        ),
        ("<tool_call>[1]</tool_call>", "needs the form"),
        ('<tool_call>{"arguments": {}}</tool_call>', "needs the form"),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "needs the form"),
        ('<tool_call>{"name": "search", "arguments": [1]}</tool_call>', "must be an object"),
    ],
)
def test_why_an_action_is_invalid(text: str, reason: str) -> None:
    turn = parse_turn(text)
    assert turn.call is None and turn.answer is None and turn.action is None
    assert turn.invalid is not None and reason in turn.invalid
    assert "<" not in turn.invalid, "the reason is shown to the policy and must hold no tag"


def test_a_malformed_first_action_wins_too() -> None:
    turn = parse_turn("<tool_call>oops</tool_call><answer>x</answer>")
    assert turn.answer is None and turn.invalid == "the tool call is not valid JSON"
    assert turn.text == "<tool_call>oops</tool_call>"


@pytest.mark.parametrize(
    ("text", "closed"),
    [
        ("<answer>a</answer>", True),
        ("<answer> </answer>", True),
        ("<tool_call>{</tool_call>", True),
        ("x</think><search>q</search> and more", True),
        ("<mem><answer>a</answer></mem>", False),
        ("<mem>write </answer>", False),
        ("<answer>a", False),
        ("</answer>", False),
        ("", False),
    ],
)
def test_an_action_is_closed_or_not(text: str, closed: bool) -> None:
    """What is closed, valid or not, cuts off whatever follows it."""
    assert parse_turn(text).closed is closed
    assert (parse_turn(f"{text} ").text == parse_turn(f"{text} x").text) is closed


def test_offsets_are_of_the_text_that_was_parsed() -> None:
    text = "hm <mem>Größe</mem> <think>t</think> <answer>x</answer> tail <mem>no</mem>"
    turn = parse_turn(text)
    assert turn.memory_span == (3, 19) and text[3:19] == "<mem>Größe</mem>"
    assert turn.end == text.index(" tail") and turn.text == text[: turn.end]
    assert turn.action == "<answer>x</answer>"
    assert parse_turn("no action").end == len("no action")


def test_arguments_may_be_a_text_of_json_and_lone_surrogates_are_replaced() -> None:
    inner = json.dumps({"query": "a"})
    turn = parse_turn(f"<tool_call>{json.dumps({'name': 'search', 'arguments': inner})}</tool_call>")
    assert turn.call is not None and turn.call.arguments == {"query": "a"}
    spelled = parse_turn('<tool_call>{"name": "search", "arguments": {"query": "\\ud800x"}}</tool_call>')
    assert spelled.call is not None and spelled.call.query == "\ufffdx"
    assert parse_turn("<answer>\udfff</answer>").answer == "\ufffd"


def test_calls_that_are_rendered_parse_back() -> None:
    query = 'who said "C++ < 東京"?\\ n'
    for style in ("tool_call", "search"):
        turn = parse_turn(render_call(query, style))
        assert turn.call is not None and turn.call.query == query
        assert turn.text.endswith(ACTION_STOPS)
    with pytest.raises(ValueError, match="'json'"):
        render_call("q", "json")  # type: ignore[arg-type]


def test_deep_nesting_takes_no_time() -> None:
    # Quadratic parsing would take minutes.
    for text in (
        "<mem>" * 200_000 + "</answer>" * 200_000,
        "<think><mem>" * 100_000 + "</search></think>" * 100_000,
        "</think>" * 200_000 + "<answer>x</answer>",
    ):
        parse_turn(text)
    assert parse_turn("</mem>" * 200_000 + "<answer>x</answer>").answer == "x"


PIECES = [
    f"<{slash}{tag}>" for tag in ("mem", "think", "answer", "search", "tool_call") for slash in ("", "/")
]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5), st.just("\ud800")), max_size=14))
def test_any_text_parses_and_agrees_with_itself(pieces: list[str]) -> None:
    text = "".join(pieces)
    turn = parse_turn(text)
    assert not (turn.call is not None and turn.answer is not None)
    assert (turn.memory is None) == (turn.memory_span is None)
    assert turn.end == len(turn.text) <= len(text)
    if turn.memory_span is not None:
        start, end = turn.memory_span
        assert turn.text[start:end] == f"<mem>{turn.memory}</mem>" and end <= turn.end
    # What stands behind the first action changes nothing.
    if turn.call is not None or turn.answer is not None:
        assert parse_turn(text + "<answer>other</answer>") == turn
