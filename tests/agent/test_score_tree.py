"""Token trees worked out by hand, and the contexts they are made of."""

from __future__ import annotations

import numpy as np

from agent.memory_score import memory_context, transcript_context
from agent.score_context import answer_forms
from agent.score_tree import Query, build_row, plan_rows
from envs.base import render_observation


def test_contexts_are_the_documented_text():
    assert memory_context("Who?", "a; b") == "Question: Who?\n<mem>a; b</mem>"
    assert transcript_context("Who?", []) == "Question: Who?\n"
    steps = ["<mem>m</mem>\n<information>i</information>", "<search>q</search>\n<information>j</information>"]
    assert transcript_context("Who?", steps) == (
        "Question: Who?\n"
        "<mem>m</mem>\n<information>i</information>\n"
        "<search>q</search>\n<information>j</information>"
    )


def test_answer_forms():
    assert answer_forms([["a"]]) == ("a",)
    assert answer_forms([["a", "b"], ["c", "d", "e"]]) == ("a; c", "b; c", "a; d", "a; e")
    assert answer_forms([["a", "a", " "]]) == ("a",)
    many = answer_forms([[f"x{index}" for index in range(20)], ["y", "z"]])
    assert len(many) == 8 and many[:3] == ("x0; y", "x1; y", "x0; z")


def test_contexts_are_what_the_environment_would_show():
    """A whole history read as an observation, with the environment's own renderer."""
    steps = ["<mem>m</mem>\n<information>i</information>", "<mem>n</mem>\n<information>j</information>"]
    for carried in ([], steps[:1], steps):
        parts = {"question": "Who?", "carried": carried, "hint": ""}
        assert transcript_context("Who?", carried) == render_observation(parts)


def test_the_tree_by_hand():
    first = Query("first", np.array([5, 6, 7]), (np.array([8, 9]), np.array([3])))
    second = Query("second", np.array([5, 6, 4]), (np.array([8]),))
    row = build_row([first, second])
    # Tokens: 5 6 | 7 8 (answer [8, 9] reads up to 8) | 4. Outputs are needed at 7 (for 8 and for 3), 8 and 4.
    assert row.outputs == 3 and list(row.ids[:2]) == [5, 6] and set(row.ids[2:]) == {7, 8, 4}
    column = {int(token): index for index, token in enumerate(row.ids)}
    sees = {token: {int(row.ids[j]) for j in np.flatnonzero(row.mask[column[token]])} for token in column}
    assert sees == {5: {5}, 6: {5, 6}, 7: {5, 6, 7}, 8: {5, 6, 7, 8}, 4: {5, 6, 4}}
    assert {token: int(row.positions[column[token]]) for token in column} == {5: 0, 6: 1, 7: 2, 8: 3, 4: 2}
    assert [(t.key, [int(row.ids[c]) for c in t.columns], t.ids.tolist()) for t in row.targets] == [
        ("first", [7, 8], [8, 9]),
        ("first", [7], [3]),
        ("second", [4], [8]),
    ]


def test_rows_keep_to_their_budget():
    draw = np.random.default_rng(3)
    trunk = draw.integers(9, size=60)
    unit = [
        Query(
            index,
            np.concatenate([trunk[: 10 * index], draw.integers(9, size=5)]),
            (draw.integers(9, size=3),),
        )
        for index in range(1, 7)
    ]
    for budget in (10, 40, 70, 200):
        plan = plan_rows([unit, unit[:2]], budget)
        assert [query.key for row in plan for query in row] == [1, 2, 3, 4, 5, 6, 1, 2]
        assert all(len(build_row(row)) <= budget or len(row) == 1 for row in plan)


def test_a_longer_row_must_pay():
    """Ten tokens each. Two shared: 18 + 0.1 * 18^2 = 50.4 > 2 * (10 + 0.1 * 10^2); nine shared: 23.1 < 40."""
    first, little, much = np.arange(10), np.array([0, 1, *range(20, 28)]), np.array([*range(9), 30])
    unit = [Query(name, ids, (np.array([1]),)) for name, ids in (("a", first), ("b", little))]
    assert [len(row) for row in plan_rows([unit], 100)] == [2]
    assert [len(row) for row in plan_rows([unit], 100, quadratic=0.1)] == [1, 1]
    assert [len(row) for row in plan_rows([[unit[0], Query("c", much, (np.array([1]),))]], 100, 0.1)] == [2]
