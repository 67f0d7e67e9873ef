"""The registry of benchmarks: what is asked, in which environment, under which rule.

A benchmark is data. A user adds one with `register` or with a TOML file (`load_file`):

    [[benchmark]]
    name = "my-questions"
    tasks = "questions.jsonl"
    env_kwargs = { retriever = "corpus.jsonl", topk = 3 }
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any

from envs.errors import UserError, did_you_mean
from envs.tasks import Task, load_tasks
from eval.environments import draw_tasks
from eval.scorers import scorer_names

SEARCH_SERVER = "http://127.0.0.1:8000/retrieve"
"""Where the public sets expect a search over Wikipedia (Search-R1's server and its usual port)."""

FLASHRAG = "hub:RUC-NLPIR/FlashRAG_datasets"
PUBLIC_SPLITS = {
    "nq": "test",
    "triviaqa": "test",
    "popqa": "test",
    "hotpotqa": "dev",
    "2wikimultihopqa": "dev",
    "musique": "dev",
    "bamboogle": "test",
}
"""The seven single-question sets of the paper, and the split of each that has public answers."""

RULER_DOCUMENTS = (50, 100, 200, 400, 800, 1600, 3200, 6400)
"""MemAgent's test files: that many paragraphs of HotpotQA in one text, 7,000 to 900,000 tokens."""

STREAMS = {
    **{
        f"ruler-hqa-{count}": (
            f"hub:BytedTsinghua-SIA/hotpotqa/eval_{count}.json",
            f"RULER-HQA, {count} documents in one text, read piece by piece",
        )
        for count in RULER_DOCUMENTS
    },
    "longmemeval-s": (
        "hub:xiaowu0162/longmemeval-cleaned/longmemeval_s_cleaned.json",
        "LongMemEval S, about 40 sessions of a user with an assistant",
    ),
    "longmemeval-oracle": (
        "hub:xiaowu0162/longmemeval-cleaned/longmemeval_oracle.json",
        "LongMemEval, the sessions that hold the answer",
    ),
    "locomo": (
        "locomo:locomo10.json",
        "LoCoMo, from its released file locomo10.json in the working directory",
    ),
}
"""Texts and conversations to read: name, source and description."""

STREAM_CHUNK = 20_000
"""Characters of a piece of the public streams: about the 5,000 tokens of MemAgent."""

OBJECTIVES = (2, 4, 6, 8, 10)


_KINDS: Mapping[str, tuple[type | UnionType, str]] = {
    "name": (str, "a text"),
    "tasks": (tuple, "a text or a list of texts"),
    "env": (str, "a text"),
    "env_kwargs": (Mapping, "a table"),
    "scorer": (str | None, "a text"),
    "questions": (int | None, "a whole number"),
    "samples": (int, "a whole number"),
    "temperature": (int | float, "a number"),
    "version": (int, "a whole number"),
    "description": (str, "a text"),
}


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
        name, version: a change of anything below that changes scores is a new version.
        tasks: sources for `envs.tasks.load_tasks`; several are put together. Empty: the environment's own.
        env: id of the environment.
        env_kwargs: its arguments (retriever, objectives, ...).
        scorer: a rule of `eval.scorers`; None takes the one that fits the number of objectives.
        questions: how many episodes, the first ones of a fixed order; None for all.
        samples: attempts at each.
        temperature: of sampling; 0 is greedy.
        description: one line.
    """

    name: str
    tasks: tuple[str, ...] = ()
    env: str = "mempo/SearchQA-v0"
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    scorer: str | None = None
    questions: int | None = None
    samples: int = 1
    temperature: float = 0.0
    version: int = 1
    description: str = ""

    def __post_init__(self) -> None:
        self._check_kinds()
        if self.scorer is not None and self.scorer not in scorer_names():
            raise UserError(
                f"benchmark {self.name!r}: unknown scorer {self.scorer!r}"
                f"{did_you_mean(self.scorer, scorer_names())}"
            )
        if self.samples < 1 or (self.questions is not None and self.questions < 1):
            raise UserError(f"benchmark {self.name!r}: questions and samples must be at least 1")
        if not 0 <= self.temperature < math.inf:
            raise UserError(
                f"benchmark {self.name!r}: temperature is {self.temperature}; 0 or more is needed"
            )

    def _check_kinds(self) -> None:
        for key, (kinds, what) in _KINDS.items():
            value = getattr(self, key)
            # A bool is an int to Python, and never meant here.
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise UserError(f"benchmark {self.name!r}: {key} is {value!r}; {what} is needed")
        if not self.name or not all(isinstance(source, str) for source in self.tasks):
            raise UserError(f"benchmark {self.name!r}: a name, and texts as tasks, are needed")

    @property
    def objectives(self) -> int | None:
        """Questions in one episode, where the environment's arguments say so."""
        value = self.env_kwargs.get("objectives")
        return value if isinstance(value, int) else None

    def kwargs(self) -> dict[str, Any]:
        """Arguments that make its environment, its tasks among them.

        Raises:
            UserError: a source that is not there or holds malformed rows.
        """
        if not self.tasks:
            return dict(self.env_kwargs)
        source: str | tuple[Task, ...] = self.tasks[0]
        if len(self.tasks) > 1:
            source = tuple(_merge(self.tasks))
        return {**self.env_kwargs, "tasks": source}

    def load(self) -> list[Task]:
        """The tasks it asks, in order.

        Raises:
            UserError: as `kwargs`; fewer tasks than ``questions``.
        """
        count = self.questions
        if count is not None and self.env.startswith("mempo/") and self.tasks:
            # Past the first pass MultiObjectiveQA would combine the same questions again.
            singles = sum(len(load_tasks(source)) for source in self.tasks)
            count = min(count, singles // (self.objectives or 1))
        return draw_tasks(self.env, self.kwargs(), count)

    def describe(self) -> dict[str, Any]:
        """JSON-ready; the arguments that decide what is asked and how it is scored."""
        return {key: value for key, value in asdict(self).items() if key != "description"}


def _merge(sources: Sequence[str]) -> list[Task]:
    """Tasks of several sources; ids get the source's last part, for sets number their questions alike."""
    merged: list[Task] = []
    for source in sources:
        label = source.rstrip("/").split("/")[-1].split(":")[0].removesuffix(".jsonl")
        merged += [replace(task, id=f"{label}/{task.id}") for task in load_tasks(source)]
    return merged


def fingerprint(tasks: Sequence[Task]) -> str:
    """Hash of what is asked and accepted: ids, questions and golds; 16 hex digits."""
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(json.dumps([task.id, task.questions, task.golds], ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()[:16]


def revisions(benchmark: Benchmark) -> dict[str, str]:
    """The revision of each source on the hub, as recorded when it was first loaded."""
    found: dict[str, str] = {}
    for source in benchmark.tasks:
        if source.startswith("hub:"):
            from envs.tasks.hub import recorded_revision

            found[source] = recorded_revision(source) or "unknown"
    return found


_registry: dict[str, Benchmark] = {}


def register(benchmark: Benchmark | Callable[[], Benchmark]) -> Benchmark:
    """Add a benchmark; also a decorator of a function that returns one.

    Raises:
        UserError: the name is taken by another one.
    """
    made = benchmark if isinstance(benchmark, Benchmark) else benchmark()
    known = _registry.get(made.name)
    if known is not None and known != made:
        raise UserError(f"benchmark {made.name!r} exists already; take another name or raise the version")
    _registry[made.name] = made
    return made


def get(name: str) -> Benchmark:
    """A benchmark by name, or the only one in a TOML file.

    Raises:
        UserError: unknown name (with the closest one), a file that cannot be read or holds several.
    """
    if name.endswith(".toml"):
        loaded = load_file(name)
        if len(loaded) != 1:
            raise UserError(f"{name} holds {len(loaded)} benchmarks; name one: {', '.join(loaded)}")
        return next(iter(loaded.values()))
    found = _registry.get(name)
    if found is None:
        hint = did_you_mean(name, _registry)
        raise UserError(f"unknown benchmark {name!r}{hint} (`python -m eval.bench list` shows all)")
    return found


def names() -> list[str]:
    return list(_registry)


def load_file(path: str | Path) -> dict[str, Benchmark]:
    """Benchmarks of a TOML file, by name; relative paths in it are taken from its folder.

    Raises:
        UserError: no such file, not TOML, no ``[[benchmark]]`` table, or an unknown or missing key.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"benchmark file {file} does not exist")
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: not valid TOML ({error})") from None
    tables = data.get("benchmark")
    if not isinstance(tables, list) or not tables:
        raise UserError(f"{file}: at least one [[benchmark]] table is needed")
    found = [_from_table(table, f"{file}, benchmark {i}", file.parent) for i, table in enumerate(tables, 1)]
    return {benchmark.name: benchmark for benchmark in found}


def _from_table(table: Mapping[str, Any], where: str, folder: Path) -> Benchmark:
    known = [each.name for each in fields(Benchmark)]
    for key in table:
        if key not in known:
            raise UserError(
                f"{where}: unknown key {key!r}{did_you_mean(key, known)} (keys: {', '.join(known)})"
            )
    if not isinstance(table.get("name"), str):
        raise UserError(f"{where}: a text under 'name' is needed")
    values = dict(table)
    tasks = values.get("tasks", ())
    if isinstance(tasks, str | list | tuple):
        sources = [tasks] if isinstance(tasks, str) else tasks
        values["tasks"] = tuple(_beside(each, folder) if isinstance(each, str) else each for each in sources)
    kwargs = values.get("env_kwargs", {})
    if isinstance(kwargs, dict) and isinstance(kwargs.get("retriever"), str):
        values["env_kwargs"] = {**kwargs, "retriever": _beside(kwargs["retriever"], folder)}
    try:
        return Benchmark(**values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _beside(source: str, folder: Path) -> str:
    beside = folder / source
    return str(beside) if beside.is_file() else source


def _register_ours() -> None:
    for world, questions, temperature in (("factbook-tiny", 300, 1.0), ("factbook", 500, 0.0)):
        search = {"retriever": world}
        register(
            Benchmark(
                world,
                (f"{world}:heldout",),
                "mempo/SearchQA-v0",
                search,
                questions=questions,
                temperature=temperature,
                description="embedded: one question about held-out countries",
            )
        )
        for k in OBJECTIVES:
            register(
                Benchmark(
                    f"{world}-{k}",
                    (f"{world}:heldout",),
                    "mempo/MultiObjectiveQA-v0",
                    {**search, "objectives": k, "max_turns": max(16, 3 * k)},
                    questions=questions,
                    temperature=temperature,
                    description=f"embedded: {k} questions in one episode, held-out countries",
                )
            )
    for name, tasks, text in (
        ("haystack-tiny", "haystack-tiny:heldout", "short texts with the facts hidden in them"),
        ("haystack", "haystack:heldout", "long texts with the facts hidden in them"),
        ("shakespeare", "shakespeare:heldout", "scenes of plays"),
    ):
        register(
            Benchmark(
                name,
                (tasks,),
                "mempo/DocumentStream-v0",
                questions=200,
                description=f"embedded: {text}, read piece by piece",
            )
        )
    register(Benchmark("errands", (), "mempo/Errands-v0", questions=200, description="embedded: a house"))
    for name, split in PUBLIC_SPLITS.items():
        register(
            Benchmark(
                name,
                (f"{FLASHRAG}/{name}:{split}",),
                "mempo/SearchQA-v0",
                {"retriever": SEARCH_SERVER},
                scorer="hotpotqa" if name == "hotpotqa" else "squad",
                description=f"public: {name} {split}, revision recorded at the first load",
            )
        )
    for name, (source, text) in STREAMS.items():
        register(
            Benchmark(
                name,
                (source,),
                "mempo/DocumentStream-v0",
                {"chunk_size": STREAM_CHUNK},
                scorer="squad",
                description=f"public: {text}",
            )
        )
    for k in OBJECTIVES:
        register(
            Benchmark(
                f"mempo-{k}",
                (f"{FLASHRAG}/hotpotqa:dev", f"{FLASHRAG}/nq:test"),
                "mempo/MultiObjectiveQA-v0",
                {"retriever": SEARCH_SERVER, "objectives": k, "max_turns": max(16, 3 * k)},
                questions=500,
                description=f"public: {k} questions of HotpotQA and NQ in one episode, as in the paper",
            )
        )


_register_ours()
