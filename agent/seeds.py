"""One seed for each thing that is random: a stable hash of what the thing is, never of when it ran.

A rollout at (run seed, step, task id, sample, turn) draws the same tokens whatever the concurrency, the
number of workers or the Python process: no global generator is read and none is advanced.
"""

from __future__ import annotations

import hashlib


def derive(*parts: int | str) -> int:
    """Hash `parts` into a seed in ``[0, 2**63)``: equal parts give equal seeds on every machine.

    Parts are tagged with type and length, so ``derive(1, "23")``, ``derive(12, "3")`` and ``derive("1",
    "23")`` all differ.

    Raises:
        TypeError: a part is neither int nor str (a bool or a float would hash by accident).
    """
    tagged = []
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, int | str):
            raise TypeError(f"seed part {part!r} is a {type(part).__name__}; int or str is needed")
        kind = b"i" if isinstance(part, int) else b"s"
        body = str(part).encode("utf-8", "surrogatepass")
        tagged.append(b"%s%d:%s" % (kind, len(body), body))
    return int.from_bytes(hashlib.blake2b(b"".join(tagged), digest_size=8).digest(), "big") >> 1
