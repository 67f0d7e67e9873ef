"""The tokenizer and the model made on the spot: lossless, whole tags, the same for the same input."""

from __future__ import annotations

import random

import pytest
import torch

from agent.tiny import build_model, build_tokenizer

TEXTS = ["The capital of Poland is Warsaw.", "<mem>Nuuk lies in Greenland</mem><think>so</think>"] * 20
TAGS = [
    f"<{slash}{name}>"
    for name in ("mem", "think", "search", "tool_call", "answer", "information")
    for slash in ("", "/")
]
MARKERS = ["<|im_start|>", "<|im_end|>", "<|pad|>"]


@pytest.mark.parametrize("split_spaces", [False, True])
def test_lossless(split_spaces: bool) -> None:
    tokenizer = build_tokenizer(TEXTS, 320, split_spaces=split_spaces)
    rng = random.Random(5)
    alphabet = [
        *"abz Z09\n\t\r.,'\"<>/{}▁",
        "  ",
        "\x00",
        "\x7f",
        "é",
        "e\u0301",
        "ﬁ",
        "漢",
        "🙂",
        "\u200d",
        *TAGS,
    ]
    texts = ["".join(rng.choices(alphabet, k=rng.randint(0, 30))) for _ in range(1000)]
    assert sum("🙂" in text for text in texts) > 100
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text


def test_tags_are_single_tokens_and_no_special_ones() -> None:
    tokenizer = build_tokenizer(TEXTS, 320)
    for tag in TAGS:
        ids = tokenizer.encode(f"a{tag}b", add_special_tokens=False)
        assert len(ids) == 3
        assert tokenizer.convert_ids_to_tokens(ids[1]) == tag
        assert ids[1] not in tokenizer.all_special_ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == f"a{tag}b"
    for marker in MARKERS:
        [index] = tokenizer.encode(marker, add_special_tokens=False)
        assert index in tokenizer.all_special_ids
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|pad|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_no_id_beyond_the_vocabulary() -> None:
    tokenizer = build_tokenizer(TEXTS, 320)
    assert len(tokenizer) <= 320
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


def test_the_same_texts_give_the_same_tokenizer() -> None:
    first, second = build_tokenizer(TEXTS, 320), build_tokenizer(iter(TEXTS), 320)
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()
    other = build_tokenizer(["quite another text"] * 20, 320)
    assert other.backend_tokenizer.to_str() != first.backend_tokenizer.to_str()


def test_a_vocabulary_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="271"):
        build_tokenizer(TEXTS, 270)
    assert len(build_tokenizer(TEXTS, 271)) == 271


def test_the_seed_alone_decides_the_model() -> None:
    tokenizer = build_tokenizer(TEXTS, 300)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = build_model(tokenizer, hidden=32, layers=2, heads=2, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    second = build_model(tokenizer, hidden=32, layers=2, heads=2, seed=3)
    other = build_model(tokenizer, hidden=32, layers=2, heads=2, seed=4)
    for (name, one), (_, two) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(one, two), name
    assert not torch.equal(first.model.embed_tokens.weight, other.model.embed_tokens.weight)
    assert not first.training
    assert first.lm_head.weight is first.model.embed_tokens.weight
    assert first.config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_a_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="33"):
        build_model(build_tokenizer(TEXTS, 300), hidden=33, layers=1, heads=2)
