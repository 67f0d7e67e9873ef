"""What the cold start imitates: right episodes with habits in them, names that can be replaced, copying exercises."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agent.engines.scripted import Habits
from trainer.teacher import Episode, copying_example, rename, scoring_examples, teach, turn_examples

KWARGS = dict(
    tasks="factbook-tiny:train", retriever="factbook-tiny", topk=1, numbered=True, call_style="search"
)

EPISODE = Episode(
    question="1) What is the capital of Poland? 2) What is the currency of Japan?",
    gold_answer="Warsaw; yen",
    turns=(
        ("Question: capital of Poland", "<mem>none</mem><search>capital of Poland</search>"),
        ("Poland is Polish. Capital: Warsaw.", "<mem>1) Warsaw</mem><search>currency of Japan</search>"),
        ("Currency: yen.", "<mem>1) Warsaw 2) yen</mem><answer>Warsaw; yen</answer>"),
    ),
    information=(
        "<information>Capital: Warsaw.</information>",
        "<information>Currency: yen.</information>",
        "",
    ),
    memories=("none", "1) Warsaw", "1) Warsaw 2) yen"),
    names=("Poland", "Warsaw", "Japan", "yen"),
)


def episodes(habits: Habits, count: int = 60, seed: int = 0) -> tuple[list[Episode], float]:
    return teach("mempo/MultiObjectiveQA-v0", KWARGS, habits, {"2": 1.0}, count, "search", " ", seed)


def test_only_right_episodes_are_kept_and_a_careful_teacher_remembers_everything() -> None:
    kept, share = episodes(Habits(), 200)
    assert share > 0.95 and len(kept) == round(share * 200)
    for episode in kept:
        assert episode.remembered
        assert f"<answer> {episode.gold_answer}</answer>" in episode.turns[-1][1]
        assert len(episode.turns) == len(episode.information) == len(episode.memories)


def test_a_careless_teacher_is_right_by_heart() -> None:
    kept, share = episodes(Habits(forget=0.5, skip=0.3, hoard=0.3, repeat=0.3), 200)
    assert share > 0.95
    remembered = np.mean([episode.remembered for episode in kept])
    assert 0.1 < remembered < 0.9
    assert any(len(memory or "") > 60 for episode in kept for memory in episode.memories)


def test_the_same_seed_gives_the_same_episodes() -> None:
    habits = Habits(forget=0.5, skip=0.3)
    assert episodes(habits, 20) == episodes(habits, 20)
    assert episodes(habits, 20) != episodes(habits, 20, seed=1)


def test_renaming_replaces_whole_names_everywhere_and_the_same_everywhere() -> None:
    renamed = rename(EPISODE, ["foo", "bar", "baz", "qux"], np.random.default_rng(0))
    text = " ".join(
        [renamed.question, renamed.gold_answer, *(part for turn in renamed.turns for part in turn)]
    )
    assert not any(name in text.replace("Polish", "") for name in EPISODE.names)
    assert "Polish" in text  # only whole words are names
    first, second = renamed.gold_answer.split("; ")
    assert renamed.memories == ("none", f"1) {first}", f"1) {first} 2) {second}")
    assert renamed.turns[2][1] == f"<mem>1) {first} 2) {second}</mem><answer>{first}; {second}</answer>"
    assert first in renamed.information[0] and second in renamed.information[1]
    assert renamed.remembered and EPISODE.remembered


def test_an_answer_by_heart_is_not_remembered() -> None:
    forgotten = replace(EPISODE, memories=("none", "1) Warsaw", "2) yen"))
    assert not forgotten.remembered
    assert not replace(EPISODE, memories=("none", "1) Warsaw", None)).remembered


def test_scoring_contexts_are_those_of_p_full_and_p_mem() -> None:
    full, bare = scoring_examples(EPISODE, 2, answer_lead=" ")
    assert full.prompt == (
        "Question: 1) What is the capital of Poland? 2) What is the currency of Japan?\n"
        "<mem>none</mem><search>capital of Poland</search>\n<information>Capital: Warsaw.</information>"
    )
    assert bare.prompt == (
        "Question: 1) What is the capital of Poland? 2) What is the currency of Japan?\n<mem>1) Warsaw</mem>"
    )
    assert (
        (full.prefix, full.completion)
        == (bare.prefix, bare.completion)
        == ("<answer>", " Warsaw; yen</answer>")
    )
    first, _ = scoring_examples(EPISODE, 1)
    assert first.prompt == "Question: 1) What is the capital of Poland? 2) What is the currency of Japan?\n"
    assert len(scoring_examples(replace(EPISODE, memories=(None, None, None)), 3)) == 1


def test_turns_are_what_the_teacher_read_and_wrote() -> None:
    assert [(example.prompt, example.completion) for example in turn_examples(EPISODE)] == list(EPISODE.turns)


@pytest.mark.parametrize("seed", range(20))
def test_a_copying_exercise_goes_on_where_the_prompt_points(seed: int) -> None:
    example = copying_example(["foo", "bar", "baz"], np.random.default_rng(seed))
    listed, start = example.prompt.rsplit("\n", 1)
    assert f"{start}{example.completion.removesuffix('</mem>')}" == listed[listed.index(f"{start} ") :]
