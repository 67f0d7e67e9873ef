"""The local engine against plain forward passes, one sequence at a time, and models with a known next token."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from agent.engines import local
from agent.engines.base import Completion, EngineError, GenerationRequest
from agent.engines.local import LocalEngine
from agent.engines.sampling import sample
from agent.tiny import build_tokenizer

CONTEXT = 192
TOKENIZER: PreTrainedTokenizerFast = build_tokenizer([".Then"] * 50, 300)
VOCABULARY = len(TOKENIZER)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": CONTEXT,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def make(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model: Any
    if kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    elif kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    elif kind == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=2,
                bos_token_id=None, eos_token_id=None,
            )
        )  # fmt: skip
    else:
        kinds = ["sliding_attention", "full_attention"]
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=8, layer_types=kinds))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.generation_config.eos_token_id = None
    return model.eval()


def plain_logprobs(model: Any, request: GenerationRequest, completion: Completion) -> np.ndarray:
    """One forward pass over prompt and completion, log-softmax in float64."""
    ids = torch.tensor([[*request.prompt_ids, *completion.ids]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].double() / (request.temperature or 1.0)
    rows = logits.log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
    return rows[torch.arange(len(rows)), torch.tensor(completion.ids)].numpy()


def prompts(count: int, longest: int, seed: int, head: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [
        (*head, *(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, longest)))) for _ in range(count)
    ]


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gpt2", "gemma3"])
def test_logprobs_are_those_of_a_plain_forward(kind: str) -> None:
    model = make(kind)
    head = tuple(range(3, 73))
    batches = [prompts(10, 120, 1), prompts(6, 40, 2, head), prompts(2, 3, 3)]
    batches[2] += batches[2][:1] * 2  # the same prompt more than once
    engine = LocalEngine(model, TOKENIZER)
    longest = 0
    for number, batch in enumerate(batches):
        requests = [
            GenerationRequest(
                prompt, seed=100 * number + place, temperature=(1.0, 0.6)[place % 2], max_new_tokens=30
            )
            for place, prompt in enumerate(batch)
        ]
        for request, completion in zip(requests, engine.generate_all(requests), strict=True):
            assert len(completion.ids) == len(completion.logprobs)
            np.testing.assert_allclose(
                completion.logprobs, plain_logprobs(model, request, completion), atol=1e-5
            )
            longest = max(longest, len(request.prompt_ids) + len(completion.ids))
    assert longest > 100


def test_batching_changes_nothing() -> None:
    model = make("qwen2")
    rng = random.Random(9)
    requests = [
        GenerationRequest(prompt, seed=rng.getrandbits(63), temperature=1.0, max_new_tokens=rng.randint(1, 8))
        for prompt in prompts(300, 40, 4)
    ]
    reference = LocalEngine(model, TOKENIZER, max_batch=1).generate_all(requests)
    order = list(range(300))
    rng.shuffle(order)
    back = LocalEngine(model, TOKENIZER).generate_all([requests[place] for place in order])
    shuffled = {place: completion for place, completion in zip(order, back, strict=True)}
    ways = {
        "at once": LocalEngine(model, TOKENIZER, max_batch=300).generate_all(requests),
        "seven": LocalEngine(model, TOKENIZER, max_batch=7).generate_all(requests),
        "shuffled": [shuffled[place] for place in range(300)],
    }
    assert len({completion.ids for completion in reference}) > 250
    for way, completions in ways.items():
        same = [(a, b) for a, b in zip(reference, completions, strict=True) if a.ids == b.ids]
        assert len(same) >= 0.999 * 300, way
        gaps = [abs(x - y) for a, b in same for x, y in zip(a.logprobs, b.logprobs, strict=True)]
        assert max(gaps) <= 1e-5, way


def test_temperature_by_hand() -> None:
    """softmax([2, 0] / 0.5) = softmax([4, 0]): -log(1 + e^-4) = -0.01815 and 4 more."""
    count = 2000
    ids, logprobs = sample(
        torch.tensor([[2.0, 0.0]]).repeat(count, 1),
        np.full(count, 0.5),
        np.arange(count, dtype=np.uint64),
        np.zeros(count),
    )
    assert set(ids.tolist()) == {0, 1}
    np.testing.assert_allclose(logprobs[ids == 0], -0.0181499, atol=1e-6)
    np.testing.assert_allclose(logprobs[ids == 1], -4.0181499, atol=1e-6)


def test_greedy_takes_the_likeliest() -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(3))
    ids, logprobs = sample(logits, np.zeros(50), np.arange(50, dtype=np.uint64), np.zeros(50))
    assert ids.tolist() == [max(range(300), key=row.__getitem__) for row in logits.tolist()]
    expected = [max(row) - math.log(sum(map(math.exp, row))) for row in logits.tolist()]
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("vary", ["seeds", "positions"])
def test_frequencies_follow_the_softmax(vary: str) -> None:
    count = 20_000
    logits = torch.randn(37, generator=torch.Generator().manual_seed(1))
    running, fixed = np.arange(count), np.full(count, 5)
    seeds, positions = (running, fixed) if vary == "seeds" else (fixed, running)
    ids, _ = sample(logits.repeat(count, 1), np.full(count, 0.7), seeds.astype(np.uint64), positions)
    weights = np.exp(logits.double().numpy() / 0.7)
    result = chisquare(np.bincount(ids, minlength=37), count * weights / weights.sum())
    assert result.pvalue > 1e-3


def chain(pieces: list[str]) -> tuple[Any, list[int]]:
    """A model that follows a list of tokens: attention and MLP add nothing, the head knows the successor."""
    ids = [int(TOKENIZER.convert_tokens_to_ids(piece)) for piece in pieces]
    assert len(set(ids)) == len(ids)
    model = make("qwen2")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        embeddings = model.model.embed_tokens.weight
        embeddings /= embeddings.norm(dim=-1, keepdim=True)
        for now, after in itertools.pairwise(ids):
            model.lm_head.weight[after] = 100 * embeddings[now]
    return model, ids


def follow(pieces: list[str], **options: Any) -> tuple[Completion, list[int]]:
    model, ids = chain(pieces)
    request = GenerationRequest((ids[0],), seed=1, **options)
    return LocalEngine(model, TOKENIZER).generate_all([request])[0], ids[1:]


def test_the_token_that_completes_a_stop_is_kept() -> None:
    stops = ("</tool_call>", "</answer>")
    done, ids = follow(["x", "<answer>", "y", "</answer>", "z"], stop=stops)
    assert (list(done.ids), done.finish) == (ids[:3], "stop")
    np.testing.assert_allclose(done.logprobs, 0.0, atol=1e-6)


def test_a_stop_over_several_tokens() -> None:
    done, ids = follow(["x", *"</answer>", "y", "z"], stop=("</answer>",))
    assert (list(done.ids), done.finish) == (ids[:9], "stop")


def test_a_stop_inside_a_longer_token() -> None:
    done, ids = follow(["x", "y", ".Then", "z"], stop=(".",))
    assert (list(done.ids), done.finish) == (ids[:2], "stop")
    done, ids = follow(["x", "y", ".Then", "z", "w"], stop=("y.", "henz"))
    assert (list(done.ids), done.finish) == (ids[:2], "stop")
    done, ids = follow(["x", "y", ".Then", "z", "w"], stop=("henz",))
    assert (list(done.ids), done.finish) == (ids[:3], "stop")


def test_a_stop_in_the_prompt_does_not_count() -> None:
    model, ids = chain(["x", "y", "z"])
    request = GenerationRequest(
        (*TOKENIZER.encode("</answe", add_special_tokens=False), ids[0]),
        seed=1,
        max_new_tokens=2,
        stop=("xy", "ex"),
    )
    done = LocalEngine(model, TOKENIZER).generate_all([request])[0]
    assert (list(done.ids), done.finish) == (ids[1:], "length")


def test_length_and_ends() -> None:
    done, ids = follow(["x", "a", "b", "c", "d"], max_new_tokens=3)
    assert (list(done.ids), done.finish) == (ids[:3], "length")
    done, ids = follow(["x", "a", "<|im_end|>", "c"], max_new_tokens=3)
    assert (list(done.ids), done.finish) == (ids[:2], "stop")
    end = int(TOKENIZER.convert_tokens_to_ids("b"))
    done, ids = follow(["x", "a", "b", "c"], max_new_tokens=3, stop_token_ids=(end,))
    assert (list(done.ids), done.finish) == (ids[:2], "stop")


def test_the_window_ends_a_completion() -> None:
    request = GenerationRequest((5,) * (CONTEXT - 4), seed=1, max_new_tokens=50)
    done = LocalEngine(make("gpt2"), TOKENIZER).generate_all([request])[0]
    assert (done.finish, len(done.ids)) == ("length", 4)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerationRequest((), seed=1), "empty prompt"),
        (GenerationRequest((1, VOCABULARY), seed=1), "outside"),
        (GenerationRequest((1, -1), seed=1), "outside"),
        (GenerationRequest((1,) * CONTEXT, seed=1), "no room"),
        (GenerationRequest((1,), seed=1, max_new_tokens=0), "max_new_tokens"),
        (GenerationRequest((1,), seed=1, temperature=-1.0), "temperature"),
    ],
)
def test_what_cannot_be_served_is_refused(request_: GenerationRequest, message: str) -> None:
    engine = LocalEngine(make("qwen2"), TOKENIZER)
    good = GenerationRequest((1,), seed=1, max_new_tokens=1)
    with pytest.raises(ValueError, match=message):
        engine.generate_all([good, request_])
    with pytest.raises(ValueError, match=message):
        asyncio.run(engine.generate(request_))
    assert len(engine.generate_all([good])[0].ids) == 1


def test_new_weights() -> None:
    head = tuple(range(3, 73))
    requests = [GenerationRequest(prompt, seed=7, max_new_tokens=10) for prompt in prompts(4, 9, 5, head)]
    engine = LocalEngine(make("qwen2", 0), TOKENIZER, weight_version=4)
    before = engine.generate_all(requests)
    assert {completion.weight_version for completion in before} == {4}
    for version in (4, 3):
        with pytest.raises(ValueError, match="version"):
            engine.load_weights(make("qwen2", 1), version)
    assert engine.generate_all(requests) == before
    with pytest.raises(ValueError, match="do not fit"):
        engine.load_weights({"nonsense": torch.zeros(1)}, 5)
    assert engine.weight_version == 4
    for version, source in ((5, make("qwen2", 1)), (9, make("qwen2", 2).state_dict())):
        engine.load_weights(source, version)
        expected = LocalEngine(make("qwen2", 1 if version == 5 else 2), TOKENIZER, weight_version=version)
        after = engine.generate_all(requests)
        assert after == expected.generate_all(requests)
        assert engine.weight_version == version
        assert [completion.ids for completion in after] != [completion.ids for completion in before]


def test_new_weights_in_the_middle_of_a_request() -> None:
    request = GenerationRequest((5, 6, 7), seed=7, max_new_tokens=40)
    expected = LocalEngine(make("qwen2", 1), TOKENIZER, weight_version=1).generate_all([request])[0]
    engine = LocalEngine(make("qwen2", 0), TOKENIZER)
    old = engine.generate_all([request])[0]

    async def play() -> Completion:
        pending = asyncio.ensure_future(engine.generate(request))
        for _ in range(6):
            await asyncio.sleep(0)
        assert not pending.done()
        engine.load_weights(make("qwen2", 1), 1)
        return await pending

    assert asyncio.run(play()) == expected
    assert old.ids != expected.ids


def test_the_model_is_left_as_it_was() -> None:
    model = make("gpt2")  # dropout 0.1 in its configuration
    request = GenerationRequest((5, 6, 7), seed=7, max_new_tokens=10)
    expected = LocalEngine(model, TOKENIZER).generate_all([request])
    attention = model.config._attn_implementation
    model.train()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert LocalEngine(model, TOKENIZER).generate_all([request]) == expected
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == attention
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad and torch.equal(parameter, weights[name])
        assert parameter.grad is not None and bool((parameter.grad == 0.5).all())
    model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert not bool((model.transformer.wte.weight.grad == 0.5).all())


def test_parts_in_another_mode_stay_in_it() -> None:
    model = make("gpt2")
    request = GenerationRequest((5, 6, 7), seed=7, max_new_tokens=10)
    expected = LocalEngine(model, TOKENIZER).generate_all([request])
    for training, part in ((True, False), (False, True)):
        model.train(training)
        model.transformer.h[0].train(part)
        modes = [module.training for module in model.modules()]
        assert True in modes and False in modes
        assert LocalEngine(model, TOKENIZER).generate_all([request]) == expected
        assert [module.training for module in model.modules()] == modes


def test_a_finished_request_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of logits that are sampled from, over all steps: one for each token of each completion."""
    rows: list[int] = []

    def counting(logits: torch.Tensor, *rest: Any) -> Any:
        rows.append(logits.shape[0])
        return sample(logits, *rest)

    monkeypatch.setattr(local, "sample", counting)
    requests = [
        GenerationRequest(prompt, seed=place, max_new_tokens=1 + 5 * (place % 4))
        for place, prompt in enumerate(prompts(12, 9, 6))
    ]
    done = LocalEngine(make("qwen2"), TOKENIZER).generate_all(requests)
    assert sum(rows) == sum(len(completion.ids) for completion in done)
    assert max(rows) == 12 and rows[-1] < 12


def test_concurrent_coroutines_and_close() -> None:
    engine = LocalEngine(make("qwen2"), TOKENIZER, max_batch=3)
    requests = [GenerationRequest(p, seed=n, max_new_tokens=5) for n, p in enumerate(prompts(9, 9, 8))]
    expected = [completion.ids for completion in engine.generate_all(requests)]

    async def play() -> list[Completion]:
        return await asyncio.gather(*map(engine.generate, requests))

    assert [completion.ids for completion in asyncio.run(play())] == expected

    async def closed() -> None:
        pending = asyncio.ensure_future(engine.generate(requests[0]))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await pending
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(requests[0])

    asyncio.run(closed())
