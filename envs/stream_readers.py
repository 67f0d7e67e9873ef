"""Scripted readers of `DocumentStream`, to show that the embedded questions can be answered through it.

`PlayReader` knows nothing but the rules of the questions about plays and keeps all it knows in the memory it
writes. `ChainReader` is privileged, as a teacher may be: it knows which passage holds the answer, but answers
only with what it has read and remembered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from envs.retrieval.base import Passage
from envs.tasks import Task

_SPEECH = re.compile(r"([A-Z][A-Z' .&-]*): (.*)")
_SCENE = re.compile(r"SCENE ([IVXL]+)\. (.*)\.$")
_QUESTIONS = {
    "who": re.compile(r'who says "(?P<line>.*)"\?$'),
    "next": re.compile(r'after the speech with "(?P<line>.*)"\?$'),
    "first": re.compile(r"first in Scene (?P<scene>\w+) of"),
    "place": re.compile(r"Where is Scene (?P<scene>\w+) of"),
    "count": re.compile(r" of .* does (?P<speaker>.*) speak\?$"),
}
_TAIL_WORDS = 20


class PlayReader:
    """Plays one episode after another with ``ask="first"``; one object serves all."""

    def act(self, observation: str, info: Mapping[str, Any]) -> str:
        """The whole text of one turn."""
        known = dict(line.split(": ", 1) for line in (info["memory"] or "").split("\n") if ": " in line)
        kind, wanted = _understand(info["question"])
        head, _, text = info["information"].partition("\n")
        for line in text.split("\n") if head.startswith("Part ") else ():
            _read_line(line, kind, wanted, known)
        memory = "\n".join(f"{key}: {value}" for key, value in known.items()) or "nothing yet"
        if head.endswith("the last:"):
            return f"<mem>{memory}</mem><answer>{known.get('answer', 'unknown')}</answer>"
        return f'<mem>{memory}</mem><tool_call>{{"name": "next", "arguments": {{}}}}</tool_call>'


def _understand(question: str) -> tuple[str, str]:
    for kind, pattern in _QUESTIONS.items():
        if match := pattern.search(question):
            return kind, match[1]
    raise ValueError(f"no question about a play: {question[:80]!r}")


def _read_line(line: str, kind: str, wanted: str, known: dict[str, str]) -> None:
    if scene := _SCENE.match(line):
        known["scene"] = scene[1]
        known.pop("speaker", None)
        known.pop("said", None)
        known.pop("waiting", None)
        if kind == "place" and scene[1] == wanted:
            known["answer"] = scene[2]
        return
    if line.startswith("["):
        return
    speech = _SPEECH.match(line)
    # What has no name in front of it goes on where the piece before was cut.
    speaker = speech[1] if speech else known.get("speaker", "")
    words = _plain(speech[2] if speech else line)
    if speech and speaker != known.get("speaker"):
        if kind == "next" and known.pop("waiting", ""):
            known["answer"] = speaker
        if kind == "first" and known.get("scene") == wanted and "answer" not in known:
            known["answer"] = speaker
        if kind == "count" and speaker == wanted.upper() and known.get("counted") != known.get("scene", "I"):
            known["answer"] = str(int(known.get("answer", "0")) + 1)
            known["counted"] = known.get("scene", "I")
    known["speaker"] = speaker
    said = f"{'' if speech else known.get('said', '')} {words}".strip()
    if kind in ("who", "next") and "answer" not in known and _plain(wanted) in said:
        known["answer" if kind == "who" else "waiting"] = speaker
    known["said"] = " ".join(said.split()[-_TAIL_WORDS:])


def _plain(text: str) -> str:
    return " ".join(re.sub(r"[^\w\s]", "", text.lower()).split())


class ChainReader:
    """Plays one episode of a task of `envs.tasks.haystack`."""

    def __init__(self, task: Task) -> None:
        hop = task.metadata["chain"][-1]
        passages: tuple[Passage, ...] = task.metadata["passages"]
        self._answer = str(hop["answer"])
        self._passage = next(passage for passage in passages if passage.id == hop["passage"])

    def act(self, observation: str, info: Mapping[str, Any]) -> str:
        """The whole text of one turn."""
        head, _, text = info["information"].partition("\n")
        memory = info["memory"] or "nothing yet"
        if f"(Title: {self._passage.title}) {self._passage.text[:40]}" in text and self._answer in text:
            memory = self._answer
        if head.endswith("the last:"):
            return f"<mem>{memory}</mem><answer>{memory}</answer>"
        return f'<mem>{memory}</mem><tool_call>{{"name": "next", "arguments": {{}}}}</tool_call>'
