"""BM25: what is found, what is not, and the index on disk."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from envs.errors import UserError
from envs.retrieval import Passage, Retriever, load_retriever
from envs.retrieval.base import render_passages, split_contents
from envs.retrieval.bm25 import Bm25Retriever
from envs.retrieval.words import query_words, words


def found(retriever: Retriever, query: str, topk: int = 3) -> list[str]:
    return [passage.title for passage in retriever.search([query], topk)[0]]


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("capital of Poland", "Poland"),
        ("CAPITAL POLAND?", "Poland"),
        ("C++", "C++"),
        ("what is c++?", "C++"),
        ("C language", "C (language)"),
        ("U.S.", "United States"),
        ("the U.S. states", "United States"),
        ("US", "United States"),
        ("Asuncion", "Asunción"),
        ("ASUNCIÓN", "Asunción"),
        ("Lincoln", "Abraham Lincoln"),
        ("lincolns hat", "Abraham Lincoln"),
        ("Lincoln’s hat", "Abraham Lincoln"),
        ("rivers", "Vistula"),
        ("首都", "東京"),
    ],
)
def test_the_right_passage_comes_first(retriever: Bm25Retriever, query: str, first: str) -> None:
    assert found(retriever, query)[0] == first


@pytest.mark.parametrize("query", ["xylophone", "", "   ", "?!", "\x00", "+ - * ( ) : ^ ~ \" '", "\u202e"])
def test_no_match_gives_nothing(retriever: Bm25Retriever, query: str) -> None:
    assert retriever.search([query], 3) == [[]]


@pytest.mark.parametrize(
    "query",
    [
        'title:Poland AND "capital" NOT Berlin~2',
        "(Poland)^4 +capital -zloty",
        "Poland*",
        "<Poland>",
        "\ud800 Poland",
    ],
)
def test_query_syntax_is_plain_text(retriever: Bm25Retriever, query: str) -> None:
    assert "Poland" in found(retriever, query)


def test_k_is_clamped_and_scores_fall(retriever: Bm25Retriever) -> None:
    hits = retriever.search(["Poland capital"], 1000)[0]
    assert [hit.title for hit in hits[:1]] == ["Poland"] and {hit.title for hit in hits} == {
        "Poland",
        "Germany",
        "Vistula",
    }
    scores = [hit.score for hit in hits]
    assert scores == sorted(scores, reverse=True) and min(scores) > 0
    assert [len(retriever.search(["Poland capital"], k)[0]) for k in (1, 2, 3)] == [1, 2, 3]
    with pytest.raises(UserError, match="topk is 0"):
        retriever.search(["x"], 0)


def test_scores_are_the_formula() -> None:
    """Lucene's BM25 worked out with k1 = 1.5, b = 0.75 for every passage."""
    texts = ["red red blue", "blue green", "green green green red yellow", "pink"]
    retriever = Bm25Retriever.from_passages(Passage(str(i), "", text) for i, text in enumerate(texts))
    split = [text.split() for text in texts]
    mean = sum(map(len, split)) / len(split)
    expected = {}
    for number, document in enumerate(split):
        total = 0.0
        for word in ("red", "green"):
            count, containing = document.count(word), sum(word in other for other in split)
            idf = math.log(1 + (len(split) - containing + 0.5) / (containing + 0.5))
            total += idf * count / (count + 1.5 * (1 - 0.75 + 0.75 * len(document) / mean))
        if total:
            expected[str(number)] = total
    hits = retriever.search(["red green"], 10)[0]
    assert {hit.id: hit.score for hit in hits} == pytest.approx(expected, rel=1e-5)


def test_best_of_many_agrees_with_sorting_everything() -> None:
    rng = np.random.default_rng(0)
    vocabulary = [f"w{i}x" for i in range(200)]
    passages = [
        Passage(str(i), "", " ".join(vocabulary[j] for j in rng.zipf(1.4, size=12) % 200))
        for i in range(2000)
    ]
    retriever = Bm25Retriever.from_passages(passages)
    for query in ("w1x w7x w50x", "w1x", "w150x w199x", "w2x w2x w3x", "w1x w2x w3x w4x w5x w6x"):
        everything = retriever.search([query], len(passages))[0]
        wanted = set(query.split())
        assert {hit.id for hit in everything} == {p.id for p in passages if wanted & set(p.text.split())}
        order = sorted(everything, key=lambda hit: (-hit.score, int(hit.id)))
        assert everything == order
        for topk in (1, 3, 10, 100):
            assert retriever.search([query], topk)[0] == order[:topk]


def test_many_queries_at_once_are_many_queries(retriever: Bm25Retriever) -> None:
    queries = ["Poland", "nothing here", "C++"]
    assert retriever.search(queries, 2) == [retriever.search([query], 2)[0] for query in queries]
    assert retriever.search([], 2) == []


def test_words() -> None:
    assert " ".join(words("The U.S. and the U.S.A., P.O.W. e.g. end.")) == "the us and the usa pow eg end"
    assert (
        " ".join(words("C++, C#, F#; a+b A+ 3.14 x_y well-known")) == "c++ c# f# a b a+ 3 14 x y well known"
    )
    assert words("İstanbul Größe naïve ﬁne") == ["istanbul", "grosse", "naive", "fine"]
    assert " ".join(words("rivers glass bus this cities gas")) == "river glass bus this citie gas"
    assert query_words("What is the capital of the capital?") == ["capital"]
    assert query_words("The Who") == ["the", "who"]


def test_passages_as_the_policy_reads_them() -> None:
    passages = [Passage("1", "A", "one\ntwo"), Passage("2", "B\nC", " three  four ")]
    assert render_passages(passages) == "Doc 1(Title: A) one two\nDoc 2(Title: B C) three four"
    assert render_passages([]) == "No passage matches the query."


def test_titles_of_contents() -> None:
    assert split_contents('"A title"\nthe text\nmore') == ("A title", "the text\nmore")
    assert split_contents("A title\ntext") == ("A title", "text")
    assert split_contents('"\ntext') == ('"', "text") and split_contents("alone") == ("alone", "")


def write_corpus(path: Path, rows: list[tuple[str, str]]) -> Path:
    lines = [
        json.dumps({"id": identity, "contents": contents}, ensure_ascii=False) for identity, contents in rows
    ]
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    return path


ROWS = [
    ("a", '"Größe"\nhow large the 東京 tower is'),
    ("b", "Poland\nthe capital is Warsaw"),
    ("7", "C++\na language"),
]


def test_the_index_is_built_once_and_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_corpus(tmp_path / "corpus.jsonl", ROWS)
    first = Bm25Retriever.from_file(path)
    assert first.search(["Warsaw"], 3)[0][0] == Passage(
        "b", "Poland", "the capital is Warsaw", pytest.approx(0.4, abs=0.5)
    )
    assert found(first, "grosse") == ["Größe"] and found(first, "c++") == ["C++"] and len(first) == 3
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["corpus.jsonl", "corpus.jsonl.bm25"]
    monkeypatch.setattr("envs.retrieval.bm25._build", lambda *_: pytest.fail("built twice"))
    again = Bm25Retriever.from_file(path)
    assert again.search(["Warsaw", "tower"], 3) == first.search(["Warsaw", "tower"], 3)
    assert isinstance(again._data, np.memmap), "the index is memory-mapped, not read"
    # Touched but equal: the content decides.
    os.utime(path, ns=(1, 1))
    assert found(Bm25Retriever.from_file(path), "Warsaw") == ["Poland"]


def test_another_content_is_another_index(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "corpus.jsonl", ROWS)
    Bm25Retriever.from_file(path)
    write_corpus(path, [("b", "Poland\nthe capital is Cracow"), *ROWS[2:]])
    changed = Bm25Retriever.from_file(path)
    assert found(changed, "Cracow") == ["Poland"] and found(changed, "Warsaw") == [] and len(changed) == 2


def test_an_interrupted_build_leaves_nothing_that_is_taken_for_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_corpus(tmp_path / "corpus.jsonl", ROWS)

    def fail(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("envs.retrieval.bm25.line_starts", fail)
        with pytest.raises(KeyboardInterrupt):
            Bm25Retriever.from_file(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["corpus.jsonl"]
    # A folder without its last file, as after a loss of power, is built anew.
    (tmp_path / "corpus.jsonl.bm25").mkdir()
    (tmp_path / "corpus.jsonl.bm25" / "vocab.index.json").write_text("{")
    assert found(Bm25Retriever.from_file(path), "Warsaw") == ["Poland"]


def test_a_folder_that_cannot_be_written_puts_the_index_into_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "readonly"
    folder.mkdir()
    path = write_corpus(folder / "corpus.jsonl", ROWS)
    monkeypatch.setenv("MEMPO_CACHE", str(tmp_path / "cache"))
    folder.chmod(0o555)
    assert found(Bm25Retriever.from_file(path), "Warsaw") == ["Poland"]
    assert [entry.name for entry in folder.iterdir()] == ["corpus.jsonl"]
    assert found(Bm25Retriever.from_file(path), "Warsaw") == ["Poland"]
    folder.chmod(0o755)
    assert len(list((tmp_path / "cache" / "bm25").iterdir())) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3: not a line of JSON"),
        ("[1]", "line 3: a corpus row is an object"),
        ('{"contents": "x"}', "line 3: the row has no id"),
        ('{"id": true, "contents": "x"}', "line 3: the row has no id"),
        ('{"id": "x"}', "line 3: the row has no contents"),
        ('{"id": "x", "contents": 3}', "line 3: the row has no contents"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"id": 1, "contents": "a"}\n\n' + line + "\n")
    with pytest.raises(UserError, match=f"bad.jsonl, {message}"):
        Bm25Retriever.from_file(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["bad.jsonl"]


def test_other_row_forms_and_empty_corpora(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"_id": 5, "title": "T", "text": "some words"}\n{"docid": "d", "text": "others"}\n')
    assert Bm25Retriever.from_file(path).search(["words"], 1)[0][0].id == "5"
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(UserError, match=r"empty\.jsonl: nothing to search"):
        Bm25Retriever.from_file(empty)
    with pytest.raises(UserError, match="nothing to search"):
        Bm25Retriever.from_passages([Passage("1", "", "?!")])


def test_load_retriever_names_what_it_knows(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown retriever 'factbok'; did you mean 'factbook'\?"):
        load_retriever("factbok")
    path = write_corpus(tmp_path / "corpus.jsonl", ROWS)
    assert load_retriever(str(path)) is load_retriever(str(path))
    assert isinstance(load_retriever(str(path)), Retriever)
