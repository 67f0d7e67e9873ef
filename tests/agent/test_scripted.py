"""The scripted players, against an environment written out by hand: two documents, exact expected texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agent.engines.scripted import Expert, Habits, RandomPlayer, RecordedPlayer, play
from envs.errors import UserError
from envs.tasks.task import Task

DOCUMENTS = {
    "capital of Poland": "Doc 1(Title: Poland) Capital: Warsaw. On the Vistula.",
    "country whose capital is Nuuk": "Doc 1(Title: Greenland) Capital: Nuuk. Very cold.",
    "currency of Greenland": "Doc 1(Title: Greenland) Currency: Danish kroner (DKK) per US dollar.",
}
POLAND = [{"query": "capital of Poland", "answer": "Warsaw", "question": "?", "passage": "poland/capital"}]
GREENLAND = [
    {
        "query": "country whose capital is Nuuk",
        "answer": "Greenland",
        "question": "?",
        "passage": "greenland/capital",
    },
    {
        "query": "currency of Greenland",
        "answer": "Danish kroner",
        "question": "?",
        "passage": "greenland/currency",
    },
]
TASK = Task(
    id="two",
    questions=(
        "What is the capital of Poland?",
        "What is the currency of the country whose capital is Nuuk?",
    ),
    golds=(("Warsaw", "Warszawa"), ("Danish kroner", "DKK")),
    metadata={"chains": [POLAND, GREENLAND]},
)


class PaperEnv:
    """Looks queries up in a dictionary; keeps what the memory block says, up to ``limit`` characters."""

    def __init__(self, documents: dict[str, str], limit: int = 1000, turns: int = 16) -> None:
        self.documents, self.limit, self.turns = documents, limit, turns
        self.task, self.turn = TASK, 0
        self.answer: str | None = None
        self.memory: str | None = None

    @property
    def unwrapped(self) -> PaperEnv:
        return self

    def _info(self, information: str) -> dict[str, Any]:
        return {
            "question": self.task.question,
            "memory": self.memory,
            "information": information,
            "turns_left": self.turns - self.turn,
            "scores": {} if self.answer is None else {"right": float(self.answer == self.task.gold_answer)},
            "stop_reason": "answered" if self.answer is not None else None,
        }

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        return self.task.question, self._info("")

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        memory, action = text.split("</mem>")
        self.memory = memory.removeprefix("<mem>")[: self.limit]
        information = ""
        if "<answer>" in action:
            self.answer = action.split("<answer>")[1].removesuffix("</answer>")
        else:
            query = action.split("<search>")[1].removesuffix("</search>")
            information = self.documents.get(query, "Nothing found.")
        truncated = self.answer is None and self.turn >= self.turns
        return information, 0.0, self.answer is not None, truncated, self._info(information)


def texts(habits: Habits, seed: int = 0, **env: Any) -> list[str]:
    rng = np.random.default_rng(seed)
    record = play(
        PaperEnv({**DOCUMENTS, **env.pop("documents", {})}, **env), lambda task: Expert(task, rng, habits)
    )
    return [said for _, said in record.turns]


def test_perfect_play_to_the_letter() -> None:
    assert texts(Habits()) == [
        "<mem>none</mem><search>capital of Poland</search>",
        "<mem>1) Warsaw</mem><search>country whose capital is Nuuk</search>",
        "<mem>1) Warsaw 2) see Greenland</mem><search>currency of Greenland</search>",
        "<mem>1) Warsaw 2) Danish kroner</mem><answer>Warsaw; Danish kroner</answer>",
    ]


def test_tool_call_style_and_thoughts() -> None:
    rng = np.random.default_rng(0)
    said = Expert(TASK, rng, call_style="tool_call", think=True).act("", {"memory": None, "information": ""})
    assert said == (
        "<mem>none</mem><think>next: capital of Poland</think>"
        '<tool_call>{"name": "search", "arguments": {"query": "capital of Poland"}}</tool_call>'
    )


def test_forgetting_drops_the_finished_item_for_good_and_answers_by_heart() -> None:
    assert texts(Habits(forget=1.0)) == [
        "<mem>none</mem><search>capital of Poland</search>",
        "<mem>1) Warsaw</mem><search>country whose capital is Nuuk</search>",
        "<mem>2) see Greenland</mem><search>currency of Greenland</search>",
        "<mem>2) Danish kroner</mem><answer>Warsaw; Danish kroner</answer>",
    ]


def test_skipping_searches_nothing_and_answers_by_heart() -> None:
    assert texts(Habits(skip=1.0)) == ["<mem>none</mem><answer>Warsaw; Danish kroner</answer>"]


def test_hoarding_keeps_whole_passages() -> None:
    poland = "Poland Capital: Warsaw. On the Vistula."
    assert texts(Habits(hoard=1.0)) == [
        "<mem>none</mem><search>capital of Poland</search>",
        f"<mem>1) {poland}</mem><search>country whose capital is Nuuk</search>",
        f"<mem>1) {poland} 2) Greenland Capital: Nuuk. Very cold.</mem>"
        "<search>currency of Greenland</search>",
        f"<mem>1) {poland} 2) Greenland Currency: Danish kroner (DKK) per US dollar.</mem>"
        "<answer>Warsaw; Danish kroner</answer>",
    ]


def test_repeating_searches_each_hop_twice() -> None:
    queries = [said.split("<search>")[1] for said in texts(Habits(repeat=1.0)) if "<search>" in said]
    assert queries == [f"{hop['query']}</search>" for hop in POLAND + GREENLAND for _ in range(2)]


def test_careful_episodes_have_no_bad_habit() -> None:
    sloppy = Habits(forget=1.0, skip=1.0, hoard=1.0, repeat=1.0)
    assert texts(Habits(**{**vars(sloppy), "careful": 1.0})) == texts(Habits())
    runs = [len(texts(Habits(skip=1.0, careful=0.5), seed)) for seed in range(200)]
    assert set(runs) == {1, 4}
    assert 70 < runs.count(4) < 130  # half of 200, more than 4 standard deviations wide


def test_what_the_search_does_not_show_is_not_known() -> None:
    said = texts(Habits(), documents={"capital of Poland": "Doc 1(Title: Poland) Capital: Warsawa."})
    assert said[1] == "<mem>none</mem><search>country whose capital is Nuuk</search>"
    assert said[-1] == "<mem>2) Danish kroner</mem><answer>unknown; Danish kroner</answer>"


def test_a_lost_bridge_ends_the_objective() -> None:
    said = texts(Habits(), documents={"country whose capital is Nuuk": "Nothing found."})
    assert said[-1] == "<mem>1) Warsaw</mem><answer>Warsaw; unknown</answer>"
    assert len(said) == 3


def test_answers_come_from_the_carried_memory_alone() -> None:
    assert texts(Habits(), limit=27)[-1].endswith("<answer>Warsaw; Danish kroner</answer>")
    cut = texts(Habits(), limit=8)  # all that is carried of the first finding is "1) Warsa"
    assert cut[-1].endswith("<answer>unknown; Danish kroner</answer>")


def test_answers_in_the_last_turn_with_what_it_has() -> None:
    assert texts(Habits(), turns=3) == [
        "<mem>none</mem><search>capital of Poland</search>",
        "<mem>1) Warsaw</mem><search>country whose capital is Nuuk</search>",
        "<mem>1) Warsaw 2) see Greenland</mem><answer>Warsaw; unknown</answer>",
    ]


def test_the_same_generator_gives_the_same_episode() -> None:
    habits = Habits(forget=0.4, skip=0.3, hoard=0.4, repeat=0.4)
    assert all(texts(habits, seed) == texts(habits, seed) for seed in range(20))
    assert len({tuple(texts(habits, seed)) for seed in range(40)}) > 10


def test_the_record_holds_what_was_read_and_remembered() -> None:
    env = PaperEnv(DOCUMENTS)
    record = play(env, Expert(TASK, np.random.default_rng(0)))
    assert record.memories == [
        "none",
        "1) Warsaw",
        "1) Warsaw 2) see Greenland",
        "1) Warsaw 2) Danish kroner",
    ]
    assert record.information[0] == f"<information>{DOCUMENTS['capital of Poland']}</information>"
    assert record.information[-1] == ""
    assert (record.scores, record.stop_reason, record.task) == ({"right": 1.0}, "answered", TASK)


def test_recorded_and_random_players() -> None:
    said = texts(Habits())
    assert [text for _, text in play(PaperEnv(DOCUMENTS), RecordedPlayer(said)).turns] == said
    with pytest.raises(UserError, match="2 turns"):
        play(PaperEnv(DOCUMENTS), RecordedPlayer(said[:2]))
    first, second = (
        [text for _, text in play(PaperEnv(DOCUMENTS), RandomPlayer(np.random.default_rng(3), 0.2)).turns]
        for _ in range(2)
    )
    assert first == second
    assert all(text.startswith("<mem>") and text.endswith(("</answer>", "</search>")) for text in first)


def test_bad_habits_and_tasks_without_chains_are_refused() -> None:
    with pytest.raises(UserError, match=r"forget is 1\.5"):
        Habits(forget=1.5)
    bare = Task(id="bare", questions=("q",), golds=(("a",),))
    with pytest.raises(UserError, match="'bare' carries no chain"):
        Expert(bare, np.random.default_rng(0))
