"""Ids of a text are those of `tokenizer.encode`, whatever the tokenizer does and whatever was asked of it before."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from agent import text_ids as module
from agent.text_ids import text_ids
from agent.tiny import build_tokenizer

OBSERVATION = "Question: Who?\n<mem>Ann</mem>\n<information>Doc 1(Title: A) b</information>"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(["The capital of Poland is Warsaw."] * 20, 300)


TEXTS = (
    "",
    " ",
    OBSERVATION,
    "<|im_start|>user\n<mem>naïve 日本 🙂</mem><|im_end|>\n",
    "a" * 500,
    "\ud55c\u0301 \u200b\x00 <|pad|>",
)


def test_ids_of_a_text_are_those_of_encode(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in TEXTS:
        assert text_ids(tokenizer, text) == tokenizer.encode(text, add_special_tokens=False)


def test_ids_of_a_text_whatever_a_call_before_switched_on(tokenizer: PreTrainedTokenizerFast) -> None:
    expected = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    for left_over in (
        {"truncation": True, "max_length": 3},
        {"padding": "max_length", "max_length": 900},
        {"split_special_tokens": True},
    ):
        for text, ids in zip(TEXTS, expected, strict=True):
            tokenizer("one two three four five", **left_over)  # type: ignore[arg-type]
            assert text_ids(tokenizer, text) == ids


def test_ids_of_a_text_follow_the_tokenizers_own_rules() -> None:
    class Infilling(PreTrainedTokenizerFast):
        def _encode_plus(self, text: Any, *arguments: Any, **options: Any) -> Any:
            return super()._encode_plus(text.replace("<FILL>", "Warsaw"), *arguments, **options)

    backend = build_tokenizer(["The capital of Poland is Warsaw."] * 20, 300).backend_tokenizer
    filling = Infilling(tokenizer_object=backend, eos_token="<|im_end|>")
    assert filling.decode(text_ids(filling, "is <FILL>.")) == "is Warsaw."
    splitting = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", split_special_tokens=True
    )
    asked = splitting.encode("<|im_end|>", add_special_tokens=False)
    assert len(asked) > 1 and text_ids(splitting, "<|im_end|>") == asked


NORMALIZERS = (
    None,
    normalizers.NFC(),
    normalizers.Lowercase(),
    normalizers.Strip(),
    normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
)
PRE_TOKENIZERS = (
    pre_tokenizers.ByteLevel(add_prefix_space=False),
    pre_tokenizers.ByteLevel(add_prefix_space=True),
    pre_tokenizers.Metaspace(prepend_scheme="first"),
    pre_tokenizers.Metaspace(prepend_scheme="always"),
    pre_tokenizers.Metaspace(prepend_scheme="never"),
    pre_tokenizers.Whitespace(),
    None,
)
FLAGS: tuple[dict[str, bool], ...] = (
    {},
    {"normalized": True},
    {"lstrip": True},
    {"rstrip": True},
    {"single_word": True},
)
ADDED = ("<mem>", "</mem>", "<me", "<|end|>", "Warsaw")
WORDS = (
    "<mem>", "</mem>", "<me", "<|end|>", "Warsaw", "warsaw", " ", "  ", "\n", "\n\n", "the capital", "is", "é",
    "e\u0301", "日本", "🙂", "\x00", "▁", "<", ">", "m>", "a<", "Ａ", "ﬁ", "'s", "don't", "12", "_", "-",
)  # fmt: skip


def tokenizers_of_all_kinds() -> Iterator[tuple[str, PreTrainedTokenizerFast]]:
    corpus = ["the capital of Poland is Warsaw <mem>", "日本 🙂 naïve don't 12"] * 20
    kinds: tuple[tuple[Any, Any], ...] = (
        (models.BPE(unk_token="<unk>"), trainers.BpeTrainer),
        (models.BPE(unk_token="<unk>", byte_fallback=True), trainers.BpeTrainer),
        (models.Unigram(), trainers.UnigramTrainer),
        (models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer),
    )
    for number, (normalizer, cut) in enumerate(itertools.product(NORMALIZERS, PRE_TOKENIZERS)):
        for kind, (model, trainer) in enumerate(kinds):
            backend = Tokenizer(model)
            if normalizer is not None:
                backend.normalizer = normalizer
            if cut is not None:
                backend.pre_tokenizer = cut
            special = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256 if kind == 1 else 0))]
            options = {"unk_token": "<unk>"} if kind == 2 else {}
            backend.train_from_iterator(
                corpus, trainer(vocab_size=600, special_tokens=special, show_progress=False, **options)
            )
            backend = Tokenizer.from_str(_without_added(backend))
            backend.decoder = decoders.ByteLevel()
            flags = {"normalized": False, **FLAGS[(number + kind) % len(FLAGS)]}
            backend.add_tokens([AddedToken(text, **flags) for text in ADDED[:-1]])
            backend.add_tokens([AddedToken(ADDED[-1], **{"normalized": False, **flags})])
            if number % 2:
                backend.post_processor = processors.TemplateProcessing(
                    single="<s> $A", special_tokens=[("<s>", 1)]
                )
            yield f"{normalizer} {cut} {model} {flags}", PreTrainedTokenizerFast(tokenizer_object=backend)


def _without_added(backend: Tokenizer) -> str:
    """Bytes of the fallback are pieces of the model, and no added tokens."""
    import json

    layout = json.loads(backend.to_str())
    layout["added_tokens"] = []
    return json.dumps(layout)


def test_ids_of_random_texts_for_tokenizers_of_all_kinds() -> None:
    rng = random.Random(0)
    cutting: list[bool] = []
    for name, each in tokenizers_of_all_kinds():
        for _ in range(100):
            text = "".join(rng.choice(WORDS) for _ in range(rng.randint(0, 14)))
            assert text_ids(each, text) == each.encode(text, add_special_tokens=False), (name, text)
        cutting.append(module._KNOWN[each]._cuts)
    # Both ways are taken: pieces where they give the ids of the whole, the whole where they do not.
    assert len(cutting) == 140 and sum(cutting) > 15 and cutting.count(False) > 15


def test_ids_follow_a_token_that_is_added_later(tokenizer: PreTrainedTokenizerFast) -> None:
    own = build_tokenizer(["The capital of Poland is Warsaw."] * 20, 300)
    before = text_ids(own, "is <x>Warsaw")
    own.add_tokens([AddedToken("<x>", normalized=False)])
    after = text_ids(own, "is <x>Warsaw")
    assert before != after == own.encode("is <x>Warsaw", add_special_tokens=False)


def test_a_result_is_the_callers(tokenizer: PreTrainedTokenizerFast) -> None:
    text_ids(tokenizer, "The capital").append(-1)
    assert -1 not in text_ids(tokenizer, "The capital")
