"""The text space: membership, seeded samples, equality, JSON."""

from __future__ import annotations

import json
import pickle
import time

import numpy as np
import pytest

from envs.errors import UserError
from envs.grammar import parse_turn
from envs.spaces import TextSpace


def test_any_valid_text_up_to_the_length_is_inside() -> None:
    space = TextSpace(30)
    for text in ("", "A sentence, with: (all)!", "東京 القدس 🙂\x00\u202e\n", "x" * 30, np.str_("np")):
        assert text in space
    for other in ("x" * 31, "\ud800", "a\udfffb", b"bytes", 3, None, ["x"]):
        assert other not in space


def test_building_a_space_takes_no_time() -> None:
    start = time.perf_counter()
    for _ in range(100):
        TextSpace(10_000_000)
    assert time.perf_counter() - start < 1.0


def test_samples_are_inside_seeded_and_varied() -> None:
    for style in ("text", "turn"):
        space = TextSpace(200, style=style, seed=3)
        samples = [space.sample() for _ in range(200)]
        assert all(sample in space for sample in samples)
        assert len(set(samples)) > 150
        again = TextSpace(200, style=style, seed=3)
        assert [again.sample() for _ in range(200)] == samples
        assert any(not sample.isascii() for sample in samples)
    assert all(len(TextSpace(5, style="turn", seed=s).sample()) <= 5 for s in range(20))


def test_turn_samples_hold_searches_answers_and_broken_turns() -> None:
    space = TextSpace(style="turn", seed=0)
    turns = [parse_turn(space.sample()) for _ in range(200)]
    assert sum(turn.call is not None for turn in turns) > 20
    assert sum(turn.answer is not None for turn in turns) > 10
    assert sum(turn.invalid is not None for turn in turns) > 20
    assert sum(turn.memory is not None for turn in turns) > 50


def test_equality_and_hash() -> None:
    assert TextSpace(5) == TextSpace(5, seed=7) and hash(TextSpace(5)) == hash(TextSpace(5))
    assert TextSpace(5) != TextSpace(6) and TextSpace(5) != TextSpace(5, style="turn") and TextSpace(5) != "x"
    assert pickle.loads(pickle.dumps(TextSpace(5))) == TextSpace(5)


def test_json_round_trip() -> None:
    space = TextSpace(50, style="turn", seed=1)
    samples = [space.sample() for _ in range(20)]
    assert space.from_jsonable(json.loads(json.dumps(space.to_jsonable(samples)))) == samples
    with pytest.raises(UserError, match="no text of this space"):
        space.from_jsonable(["fine", 3])


def test_bad_settings_are_refused() -> None:
    with pytest.raises(UserError, match="max_length is 0"):
        TextSpace(0)
    with pytest.raises(UserError, match="'prose'"):
        TextSpace(5, style="prose")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="mask"):
        TextSpace(5).sample(mask="x")  # type: ignore[arg-type]
