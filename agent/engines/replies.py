"""What an HTTP server says went wrong, whichever form it says it in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

_KEYS = ("error", "message", "detail", "msg", "title")


def error_message(answer: httpx.Response) -> str:
    """One line of at most 300 characters.

    Out of ``{"error": {"message": ...}}``, ``{"error": "..."}``, ``{"object": "error", "message": ...}``,
    ``{"detail": ...}`` (a string, or pydantic's list), ``{"success": false, "message": ...}``, lists of these, or plain
    text: the forms of SGLang, vLLM and the providers of OpenAI-compatible endpoints.
    """
    try:
        found: Any = answer.json()
    except ValueError:
        found = answer.text
    for _ in range(4):
        if isinstance(found, list) and found:
            found = found[0]
        elif isinstance(found, Mapping):
            found = next((found[key] for key in _KEYS if found.get(key)), str(found))
        else:
            break
    return " ".join(str(found).split())[:300] or "empty reply"
