"""What a person did wrong, in one line that a command can print."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: the message is one line that says what was wrong, where, and what would be right.

    Command lines print it to stderr as ``error: ...`` and exit with 2.
    """


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the option closest to ``name``, or ``""`` when none is close."""
    by_folded = {option.casefold(): option for option in options}
    close = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return f"; did you mean {by_folded[close[0]]!r}?" if close else ""
