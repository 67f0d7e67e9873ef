"""Streams: every character is shown once, in order; the embedded questions can be answered through them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from envs.document_stream import LATER, DocumentStream
from envs.errors import UserError
from envs.retrieval import Passage
from envs.stream_readers import ChainReader, PlayReader
from envs.tasks import Task, load_tasks
from envs.tasks.chunks import chunks_of, split_text
from envs.tasks.haystack import hide
from envs.tasks.shakespeare import build_plays, read_play

NEXT = '<tool_call>{"name": "next", "arguments": {}}</tool_call>'
STORY = Task("s", ("Who came?",), (("Ann",),), "toy", {"text": "One day.\nAnn came. She sat.\n\nThe end."})


def test_pieces_hold_everything_in_order_and_fit() -> None:
    rng = random.Random(0)
    for _ in range(300):
        words = [
            "".join(rng.choices("abc東.!?é", k=rng.choice([1, 3, 8, 40]))) for _ in range(rng.randint(0, 60))
        ]
        text = "".join(word + rng.choice([" ", "\n", "\n\n", ". ", "  "]) for word in words)
        size = rng.choice([1, 2, 5, 17, 100, 1000])
        pieces = split_text(text, size)
        assert all(0 < len(piece) <= size for piece in pieces)
        assert "".join("".join(pieces).split()) == "".join(text.split())


def test_cuts_are_where_a_reader_would_cut() -> None:
    assert split_text("One day.\nAnn came. She sat.", 30) == ["One day.\nAnn came. She sat."]
    assert split_text("One day.\nAnn came. She sat.", 20) == ["One day.", "Ann came. She sat."]
    assert split_text("One day.\nAnn came. She sat.", 10) == ["One day.", "Ann came.", "She sat."]
    assert split_text("a bb ccc", 4) == ["a bb", "ccc"] and split_text("abcdef", 4) == ["abcd", "ef"]
    with pytest.raises(UserError, match="size is 0"):
        split_text("x", 0)


def test_what_a_task_can_carry() -> None:
    passages = (Passage("1", "A", "one"), Passage("2", "B", "two"))
    assert chunks_of(Task("t", ("q",), (("g",),), "", {"passages": passages}), 24) == [
        "Doc 1(Title: A) one",
        "Doc 2(Title: B) two",
    ]
    sessions = Task("t", ("q",), (("g",),), "", {"chunks": ("a b", "c")})
    assert chunks_of(sessions, 100) == ["a b", "c"] and chunks_of(sessions, 1) == ["a", "b", "c"]
    with pytest.raises(UserError, match="task 't' from toy has nothing to read"):
        chunks_of(Task("t", ("q",), (("g",),), "toy"), 10)


def test_an_episode_piece_by_piece() -> None:
    env = DocumentStream([STORY], chunk_size=18)
    observation, info = env.reset(seed=0)
    assert observation == "Question: Who came?\n" and info["turns_left"] == 3 + 1 + 4
    shown = []
    for _ in range(3):
        observation, *_, info = env.step(f"<mem>m</mem>{NEXT}")
        shown.append(info["information"])
    assert shown == [
        "Part 1 of 3:\nOne day.",
        "Part 2 of 3:\nAnn came. She sat.",
        "Part 3 of 3, the last:\nThe end.",
    ]
    assert "Ann" not in observation, "a piece is gone with the next one"
    *_, info = env.step(NEXT)
    assert info["invalid"] == "the text has ended: answer the question"
    assert env.step("<answer>ann</answer>")[1] == 1.0


def test_the_question_may_come_last() -> None:
    env = DocumentStream([STORY], chunk_size=18, ask="last")
    observation, info = env.reset(seed=0)
    assert observation == f"Question: {LATER}\n" and "came" not in repr(info)
    observations = [env.step(NEXT)[0] for _ in range(3)]
    assert [observation.startswith("Question: Who came?\n") for observation in observations] == [
        False,
        False,
        True,
    ]
    assert env.reset(seed=0)[0] == f"Question: {LATER}\n"


def test_settings() -> None:
    env = DocumentStream([STORY], chunk_size=5, max_turns=2)
    assert env.reset(seed=0)[1]["turns_left"] == 2
    env.step(NEXT)
    assert env.step(NEXT)[3], "too few turns for the text: truncated"
    assert DocumentStream([STORY], reward="cover_em").score("it was Ann!", STORY)["reward"] == 1.0
    for kwargs, message in (
        ({"ask": "never"}, "ask 'never'"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"reward": "em_all"}, "reward 'em_all' is none of em, f1, cover_em"),
    ):
        with pytest.raises(UserError, match=message):
            DocumentStream([STORY], **kwargs)  # type: ignore[arg-type]


def win_rate(env: DocumentStream, indices: range, reader: Any) -> float:
    won = 0.0
    for index in indices:
        observation, info = env.reset(options={"index": index})
        player = reader(env.task)
        reward, over = 0.0, False
        while not over:
            observation, reward, terminated, truncated, info = env.step(player.act(observation, info))
            over = terminated or truncated
        won += reward
    return won / len(indices)


@pytest.mark.parametrize("chunk_size", [300, 2000])
def test_questions_about_plays_follow_from_the_text(chunk_size: int) -> None:
    """The reader knows the rules of the questions only; it may lose at odd cuts, 95 % is asked for."""
    env = DocumentStream("shakespeare:heldout", chunk_size=chunk_size)
    assert win_rate(env, range(0, env.num_tasks, 4), lambda task: PlayReader()) >= 0.98


def test_a_reader_without_memory_fails_at_plays() -> None:
    class Forgetful(PlayReader):
        def act(self, observation: str, info: Any) -> str:
            return super().act(observation, {**info, "memory": None})

    env = DocumentStream("shakespeare:heldout")
    assert win_rate(env, range(0, env.num_tasks, 10), lambda task: Forgetful()) < 0.3


def test_plays_are_split_whole_and_their_questions_are_sound() -> None:
    plays = build_plays()
    assert plays.report["plays"] >= 37 and len(plays.train) > 1000 and len(plays.heldout) > 400
    sides = [{task.id.split("/")[1] for task in side} for side in (plays.train, plays.heldout)]
    assert not sides[0] & sides[1]
    for task in plays.train + plays.heldout:
        answer = task.gold_answer.lower()
        assert answer not in task.question.lower().replace('"', "")
        if task.metadata["kind"] in ("who", "next"):
            line = task.question.split('"')[1]
            assert task.metadata["text"].count(line) == 1
            assert f"{task.gold_answer.upper()}: " in task.metadata["text"]
    assert {task.metadata["kind"] for task in plays.heldout} == {"who", "next", "first", "place", "count"}


def test_a_known_place_in_a_known_play() -> None:
    """Hamlet, Act I, read by eye."""
    tasks = [*load_tasks("shakespeare:train"), *load_tasks("shakespeare:heldout")]
    first_act = [task for task in tasks if task.id.startswith("shakespeare/hamlet/I/")]
    assert len(first_act) >= 6
    text = first_act[0].metadata["text"]
    assert text.startswith(
        "Hamlet. ACT I.\nSCENE I. Elsinore. A platform before the castle.\n"
        "[FRANCISCO at his post. Enter to him BERNARDO]\nBERNARDO: Who's there?\n"
        "FRANCISCO: Nay, answer me: stand, and unfold yourself."
    )


def test_reading_a_play() -> None:
    acts = read_play(
        "# A Play\n\n## ACT I\n\n### SCENE I. A  heath.\n\n_Enter X and\nY_\n\n**X**  \nOne  \ntwo.\n\n"
        "_Exit_\n\nthree.\n\n**Y & X**  \nFour.\n\n"
        "## ACT II\n\n## SCENE II. The same.\n\n"
        "**Y:**  \nFive.\n\n## EPILOGUE\n\n**Z**\nSix.\n"
    )
    assert [(act.play, act.number, len(act.scenes)) for act in acts] == [
        ("A Play", "I", 1),
        ("A Play", "II", 1),
    ]
    assert acts[0].text == (
        "A Play. ACT I.\nSCENE I. A heath.\n[Enter X and Y]\nX: One two.\n[Exit]\nX: three.\nY & X: Four."
    )
    assert acts[1].scenes[0].speeches == [("Y", ["Five."])]


def test_hidden_passages_are_there_among_others() -> None:
    passages = [Passage(f"p{i}", f"T{i % 4}", f"text {i}") for i in range(40)]
    chain = [{"passage": "p1", "answer": "a"}, {"passage": "p2", "answer": "b"}]
    task = Task("t", ("q",), (("b",),), "", {"chain": chain})
    first, again = (hide([task], passages, 10, seed=1)[0] for _ in range(2))
    assert first == again and first.id == "haystack/t" and first.metadata["supporting"] == ("p1", "p2")
    shown = [passage.id for passage in first.metadata["passages"]]
    assert len(shown) == len(set(shown)) == 12 and {"p1", "p2"} <= set(shown)
    assert sum(passage.title in ("T1", "T2") for passage in first.metadata["passages"]) >= 7
    places = {
        [p.id for p in hide([task], passages, 10, seed=s)[0].metadata["passages"]].index("p1")
        for s in range(40)
    }
    assert len(places) > 6, "the place of what matters is no hint"
    with pytest.raises(UserError, match="has no chain"):
        hide([STORY], passages, 3)
    with pytest.raises(UserError, match="39 distractors cannot be drawn from 40"):
        hide([task], passages, 39)


def test_hidden_multi_hop_questions_can_be_answered() -> None:
    env = DocumentStream("haystack-tiny:heldout", chunk_size=800)
    assert env.num_tasks > 100
    assert win_rate(env, range(0, env.num_tasks, 2), ChainReader) >= 0.95
