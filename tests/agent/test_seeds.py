"""Seeds against literal values: BLAKE2b over ``kind length : body`` of each part, 8 bytes, halved."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from agent.seeds import derive

# Computed once with hashlib from the byte strings on the right, without this package.
LITERALS: list[tuple[tuple[int | str, ...], int, bytes]] = [
    ((), 8238016292129134938, b""),
    ((0,), 6148773199958884930, b"i1:0"),
    (("0",), 384157422120658919, b"s1:0"),
    ((-1,), 6125448066308047851, b"i2:-1"),
    (("é",), 9117068025318219646, b"s2:\xc3\xa9"),
    ((7, 3, "q-1", 0, 2), 5822168072204031552, b"i1:7i1:3s3:q-1i1:0i1:2"),
    ((7, 3, "q-1", "reset"), 4193265936222067563, b"i1:7i1:3s3:q-1s5:reset"),
    ((1, "23"), 621659194900770596, b"i1:1s2:23"),
    ((12, "3"), 251568825591147433, b"i2:12s1:3"),
    (("1", "23"), 6898160559960878797, b"s1:1s2:23"),
]


@pytest.mark.parametrize(("parts", "value", "body"), LITERALS)
def test_literal_values(parts: tuple[int | str, ...], value: int, body: bytes) -> None:
    assert derive(*parts) == value
    assert int.from_bytes(hashlib.blake2b(body, digest_size=8).digest(), "big") // 2 == value


def test_63_bits_and_no_collision_between_neighbours() -> None:
    seeds = {
        derive(7, step, f"q{task}", sample)
        for step in range(20)
        for task in range(20)
        for sample in range(20)
    }
    assert len(seeds) == 8000
    assert min(seeds) >= 0 and 2**62 < max(seeds) < 2**63


@pytest.mark.parametrize("part", [True, 1.0, None, b"x"])
def test_other_types_are_refused(part: Any) -> None:
    with pytest.raises(TypeError, match=type(part).__name__):
        derive(1, part)
