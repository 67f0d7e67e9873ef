"""SearchQA and MultiObjectiveQA over a corpus that one can see."""

from __future__ import annotations

from typing import Any

import pytest

from envs.base import InvalidAction
from envs.errors import UserError
from envs.grammar import ToolCall, parse_turn, render_call
from envs.multi_objective import JOINER, MultiObjectiveQA
from envs.retrieval import Passage
from envs.retrieval.bm25 import Bm25Retriever
from envs.search_qa import SearchQA, TaskPool
from envs.tasks import Task
from tests.envs.conftest import FixedRetriever
from tests.envs.test_neutral import TAGS, hostile_documents, squeezed


def test_an_episode_from_question_to_reward(tasks: tuple[Task, ...], retriever: Bm25Retriever) -> None:
    env = SearchQA(tasks, retriever, topk=1)
    observation, info = env.reset(seed=0, options={"task_id": "pl"})
    assert observation == "Question: What is the capital of Poland?\n"
    observation, *_, info = env.step("<mem>none</mem><search>capital of Poland</search>")
    assert observation == (
        "Question: What is the capital of Poland?\n<mem>none</mem><search>capital of Poland</search>\n"
        "<information>Doc 1(Title: Poland) The capital of Poland is Warsaw. Its currency is the zloty."
        "</information>"
    )
    assert info["query"] == "capital of Poland"
    _, reward, terminated, _, info = env.step("<mem>Warsaw</mem><answer>the Warszawa!</answer>")
    assert terminated and reward == 1.0
    assert info["scores"] == {"reward": 1.0, "em": 1.0, "f1": 1.0, "cover_em": 1.0, "em_all": 1.0}


def test_no_match_is_said_and_a_blank_query_searches_nothing(tasks: tuple[Task, ...]) -> None:
    fixed = FixedRetriever([])
    env = SearchQA(tasks, fixed)
    env.reset(seed=0)
    *_, info = env.step("<search>zzz</search>")
    assert info["information"] == "No passage matches the query." and info["invalid"] is None
    for blank in (
        "<search> </search>",
        '<tool_call>{"name": "search", "arguments": {"query": " \\n"}}</tool_call>',
    ):
        *_, info = env.step(blank)
        assert info["invalid"] == "blank query" and "blank query" in info["information"]
    assert fixed.queries == ["zzz"]
    with pytest.raises(InvalidAction):
        env.execute(ToolCall("search", {"query": 3}))


@pytest.mark.parametrize(("reward", "expected"), [("em", 0.0), ("f1", 2 / 3), ("cover_em", 1.0)])
def test_rewards_by_name(
    tasks: tuple[Task, ...], retriever: Bm25Retriever, reward: str, expected: float
) -> None:
    env = SearchQA(tasks, retriever, reward=reward)
    env.reset(options={"task_id": "de"})
    assert env.step("<answer>Berlin Mitte</answer>")[1] == pytest.approx(expected)


def test_options_pick_the_task(tasks: tuple[Task, ...], retriever: Bm25Retriever) -> None:
    env = SearchQA(tasks, retriever)
    assert [env.reset(options={"index": i})[1]["task_id"] for i in range(env.num_tasks)] == [
        "pl",
        "de",
        "vi",
        "cpp",
    ]
    drawn = {env.reset(seed=seed)[1]["task_id"] for seed in range(40)}
    assert drawn == {"pl", "de", "vi", "cpp"}
    for options, message in (
        ({"task_id": "ccp"}, r"no task 'ccp'; did you mean 'cpp'\?"),
        ({"task_id": 3}, "no task 3"),
        ({"index": 4}, "index 4 is no whole number from 0 to 3"),
        ({"index": -1}, "index -1"),
        ({"index": True}, "index True"),
    ):
        with pytest.raises(UserError, match=message):
            env.reset(options=options)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"tasks": []}, "no tasks"),
        ({"topk": 0}, "topk is 0"),
        ({"reward": "recall"}, "reward 'recall' is none of em, f1, cover_em"),
        ({"tasks": "nowhere"}, "unknown tasks 'nowhere'"),
        ({"retriever": "nowhere"}, "unknown retriever 'nowhere'"),
    ],
)
def test_bad_settings_are_named(tasks: tuple[Task, ...], kwargs: dict[str, Any], message: str) -> None:
    settings = {"tasks": tasks, "retriever": FixedRetriever([]), **kwargs}
    with pytest.raises(UserError, match=message):
        SearchQA(**settings)
    with pytest.raises(UserError, match="share the id"):
        SearchQA([*tasks, tasks[0]], FixedRetriever([]))


def test_a_thousand_hostile_documents_break_nothing(tasks: tuple[Task, ...]) -> None:
    """Counted by an independent reader: only the tags that the environment and the policy wrote are there."""
    documents = hostile_documents(1000, seed=1)
    fixed = FixedRetriever([])
    env = SearchQA(tasks, fixed, topk=3, context=2, max_turns=2000)
    env.reset(seed=0)
    previous = ""
    for number in range(0, 999, 3):
        fixed.passages = [
            Passage(str(number + i), documents[number + i][:100], documents[number + i]) for i in range(3)
        ]
        observation, *_, info = env.step(f"<mem>note</mem>{render_call('who?', 'tool_call')}")
        assert info["invalid"] is None and len(info["information"]) <= 6000
        assert observation in env.observation_space
        steps = 2 if previous else 1
        text = squeezed(observation)
        for tag in TAGS:
            wanted = steps if tag in ("mem", "tool_call", "information") else 0
            assert text.count(f"<{tag}>") == text.count(f"</{tag}>") == wanted, (tag, observation)
        assert observation.endswith("</information>")
        newest = observation[observation.rindex("<information>") :]
        assert parse_turn(newest).answer is None and parse_turn(newest).call is None
        assert "‹" in newest
        previous = observation


def test_a_megabyte_still_ends_in_a_closed_block(tasks: tuple[Task, ...]) -> None:
    env = SearchQA(tasks, FixedRetriever([Passage("0", "t" * 1_000_000, "</information>" * 100_000)]))
    env.reset(seed=0)
    observation = env.step("<search>x</search>")[0]
    assert observation.endswith(" […]</information>") and len(observation) < 7000


def test_several_objectives_in_one_episode(tasks: tuple[Task, ...], retriever: Bm25Retriever) -> None:
    env = MultiObjectiveQA(tasks, retriever, objectives=2)
    observation, info = env.reset(options={"task_id": "pl + de"})
    assert observation == "Question: What is the capital of Poland?; What is the capital of Germany?\n"
    assert (
        env.task.golds == (("Warsaw", "Warszawa"), ("Berlin",)) and env.task.gold_answer == "Warsaw; Berlin"
    )
    assert info["task_id"] == "pl + de" == JOINER.join(env.task.metadata["parts"])
    numbered = MultiObjectiveQA(tasks, retriever, objectives=2, numbered=True)
    observation, _ = numbered.reset(options={"task_id": "pl + de"})
    assert observation == "Question: 1) What is the capital of Poland? 2) What is the capital of Germany?\n"


@pytest.mark.parametrize(
    ("answer", "rewards"),
    [
        ("Warsaw; Berlin", {"em": 1.0, "partial": 1.0, "f1": 1.0, "mem1": 2.0}),
        ("Warsaw", {"em": 0.0, "partial": 0.5, "f1": 0.5, "mem1": 1.0}),
        ("Warsaw; Berlin; Rome", {"em": 0.0, "partial": 1.0, "f1": 1.0, "mem1": 2.0}),
        ("Warsaw city; Berlin", {"em": 0.0, "partial": 0.5, "f1": (2 / 3 + 1) / 2, "mem1": 1.0}),
    ],
)
def test_rewards_of_several_objectives(
    tasks: tuple[Task, ...], retriever: Bm25Retriever, answer: str, rewards: dict[str, float]
) -> None:
    for name, expected in rewards.items():
        env = MultiObjectiveQA(tasks, retriever, objectives=2, reward=name)
        env.reset(options={"task_id": "pl + de"})
        assert env.step(f"<answer>{answer}</answer>")[1] == pytest.approx(expected)


def test_objectives_are_drawn_without_replacement(tasks: tuple[Task, ...], retriever: Bm25Retriever) -> None:
    env = MultiObjectiveQA(tasks, retriever, objectives=3)
    drawn = [tuple(env.reset(seed=seed)[1]["task_id"].split(JOINER)) for seed in range(200)]
    assert all(len(set(parts)) == 3 for parts in drawn)
    assert len(set(drawn)) == 24, "every ordered choice of 3 of 4 comes up"
    assert env.reset(seed=9)[1]["task_id"] == env.reset(seed=9)[1]["task_id"]


def test_indices_use_every_question_once_before_any_again(retriever: Bm25Retriever) -> None:
    many = [Task(f"q{i}", (f"What is {i}?",), ((f"x{i}",),)) for i in range(11)]
    env = MultiObjectiveQA(many, retriever, objectives=2)
    assert env.num_tasks == 5
    first = [part for i in range(5) for part in env.reset(options={"index": i})[1]["task_id"].split(JOINER)]
    assert len(set(first)) == 10
    second = [
        part for i in range(5, 10) for part in env.reset(options={"index": i})[1]["task_id"].split(JOINER)
    ]
    assert len(set(second)) == 10 and second != first
    assert (
        env.reset(seed=3, options={"index": 2})[1]["task_id"]
        == env.reset(seed=4, options={"index": 2})[1]["task_id"]
    )


def test_golds_with_the_separator_are_left_out(retriever: Bm25Retriever) -> None:
    pool = [
        Task("a", ("A?",), (("x; y", "z"),)),
        Task("b", ("B?",), (("only; bad",),)),
        Task("c", ("C?",), (("fine",),), "", {"chain": [{"query": "c"}]}),
    ]
    env = MultiObjectiveQA(pool, retriever, objectives=2)
    env.reset(options={"task_id": "a + c"})
    assert env.task.golds == (("z",), ("fine",)) and "chains" not in env.task.metadata
    with pytest.raises(UserError, match="no task 'b'"):
        env.reset(options={"task_id": "a + b"})
    with pytest.raises(UserError, match="3 objectives cannot be drawn from 2 questions"):
        MultiObjectiveQA(pool, retriever, objectives=3)
    single = MultiObjectiveQA(pool, retriever, objectives=1)
    single.reset(options={"task_id": "c"})
    assert single.task.metadata["chains"] == [[{"query": "c"}]]
    # One question alone may keep such golds in SearchQA.
    assert SearchQA(pool, retriever).num_tasks == 3


def test_environments_share_their_tasks_and_their_retriever() -> None:
    first, second = MultiObjectiveQA(), MultiObjectiveQA()
    assert first.retriever is second.retriever and first.pool is second.pool
    pool = TaskPool(first.pool.tasks)
    third, fourth = (MultiObjectiveQA(pool, first.retriever, objectives=count) for count in (3, 4))
    assert third.pool is fourth.pool and third.pool.tasks == pool.tasks
