"""A space of plain text: any valid Unicode up to a length.

Gymnasium's own `Text` holds only ``[A-Za-z0-9]`` by default and takes seconds to build over all of Unicode;
this one names no alphabet.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from gymnasium import Space

from envs.errors import UserError
from envs.grammar import render_call

_SAMPLES = """where which river capital highest point long name the of in and was born Größe Ōsaka São Paulo
東京 река القاهرة C++ U.S. 3.14 1969 “quoted” naïve 🙂 mountain film author a-b x<y & ; population"""
_WORDS = tuple(_SAMPLES.split())

Style = Literal["text", "turn"]


class TextSpace(Space[str]):
    """All strings of at most ``max_length`` characters without lone surrogates.

    Args:
        max_length: in characters, at least 1.
        style: what `sample` draws: ``text``, words of several scripts; ``turn``, what a policy might write
            (searches, answers, broken turns). Membership is the same.
        seed: of `sample`.
    """

    def __init__(
        self,
        max_length: int = 1_000_000,
        style: Style = "text",
        seed: int | np.random.Generator | None = None,
    ) -> None:
        if max_length < 1:
            raise UserError(f"max_length is {max_length}; at least 1 is needed")
        if style not in ("text", "turn"):
            raise UserError(f"style {style!r} is none of 'text', 'turn'")
        self.max_length = int(max_length)
        self.style: Style = style
        super().__init__(shape=None, dtype=None, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def contains(self, x: Any) -> bool:
        if not isinstance(x, str) or len(x) > self.max_length:
            return False
        try:
            x.encode("utf-8")
        except UnicodeEncodeError:
            return False
        return True

    def sample(self, mask: None = None, probability: None = None) -> str:
        if mask is not None or probability is not None:
            raise UserError("a text space takes neither mask nor probability")
        rng = self.np_random
        text = self._words(rng)
        if self.style == "turn":
            action = (
                render_call(text, "tool_call"),
                render_call(text, "search"),
                f"<answer>{text}</answer>",
                text,
                "<tool_call>{}</tool_call>",
                "<answer>",
            )[int(rng.integers(6))]
            memory = f"<mem>{self._words(rng)}</mem>" if rng.random() < 0.7 else ""
            text = memory + action
        return text[: self.max_length]

    def _words(self, rng: np.random.Generator) -> str:
        return " ".join(_WORDS[int(i)] for i in rng.integers(len(_WORDS), size=int(rng.integers(1, 8))))

    def to_jsonable(self, sample_n: Sequence[str]) -> list[str]:
        return list(sample_n)

    def from_jsonable(self, sample_n: Sequence[Any]) -> list[str]:
        for sample in sample_n:
            if sample not in self:
                raise UserError(f"{json.dumps(sample)[:80]} is no text of this space")
        return list(sample_n)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, TextSpace) and (self.max_length, self.style) == (
            other.max_length,
            other.style,
        )

    def __hash__(self) -> int:
        return hash((self.max_length, self.style))

    def __repr__(self) -> str:
        return f"TextSpace(max_length={self.max_length}, style={self.style!r})"
