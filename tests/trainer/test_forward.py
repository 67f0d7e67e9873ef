"""Log-probs: a bigram model whose probabilities are known, every layout, every way to the head."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
)

from tests.trainer import toy
from tests.trainer.test_packing import random_rows
from tests.trainer.toy import row
from trainer import forward as forward_module
from trainer.forward import Forward
from trainer.packing import micro_batches


class Bigram(nn.Module):
    """Logits depend on the current token alone: row ``i`` of the table, written by hand."""

    def __init__(self, table: list[list[float]]) -> None:
        super().__init__()
        size = len(table)
        self.embedding = nn.Embedding(size, size)
        self.head = nn.Linear(size, size, bias=False)
        self.embedding.weight.data = torch.eye(size)
        self.head.weight.data = torch.tensor(table).T.contiguous()
        self.config = SimpleNamespace(_attn_implementation="sdpa")
        self.dtype = torch.float32

    def get_decoder(self) -> Any:
        return lambda input_ids, **_: SimpleNamespace(last_hidden_state=self.embedding(input_ids))

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=self.head(self.embedding(input_ids)))


def logprobs(
    model: Any, rows: list[Any], budget: int = 10_000, temperature: float = 1.0, **layout: Any
) -> Any:
    """By row index."""
    result: dict[int, list[float]] = {}
    run = Forward(model, temperature=temperature)
    with torch.no_grad():
        for batch in micro_batches(rows, budget, **layout):
            flat = run(batch).logprobs.tolist()
            for index in batch.rows:
                count = sum(rows[index].sampled)
                result[index], flat = flat[:count], flat[count:]
    return result


def test_a_token_is_predicted_by_the_position_before_it():
    """P(next | 0) = (1/2, 1/4, 1/4), P(next | 1) = (1/8, 1/8, 3/4)."""
    table = [
        [math.log(p) for p in line] for line in ([0.5, 0.25, 0.25], [0.125, 0.125, 0.75], [0.2, 0.2, 0.6])
    ]
    # Prompt [2, 1]: the first completion token follows 1, whatever stands before; token 2 -> 0 is not scored.
    [found] = logprobs(Bigram(table), [row([2, 1], [2, 0, 1])]).values()
    assert found == pytest.approx([math.log(0.75), math.log(0.2), math.log(0.25)])


def test_a_model_that_is_certain_of_the_next_token_scores_zero():
    table = [[0.0, 100.0, 0.0], [0.0, 0.0, 100.0], [100.0, 0.0, 0.0]]
    assert logprobs(Bigram(table), [row([0, 1], [2, 0, 1, 2])]) == {0: [0, 0, 0, 0]}


def test_temperature_divides_the_logits():
    model = Bigram([[2.0, 0.0], [0.0, 0.0]])
    [[found]] = logprobs(model, [row([0], [0])], temperature=0.5).values()
    assert found == pytest.approx(-0.0181, abs=1e-4)  # log(1 / (1 + exp(-4)))


def test_entropy_is_that_of_the_distribution():
    model = Bigram([[0.0, 0.0, 0.0, 0.0], [100.0, 0.0, 0.0, 0.0], [0, 0, 0, 0], [0, 0, 0, 0]])
    [batch] = micro_batches([row([0], [1, 2])], 10)
    scores = Forward(model)(batch, entropy=True)
    assert scores.entropy is not None
    assert scores.entropy.tolist() == pytest.approx([math.log(4), 0.0], abs=1e-6)
    assert not scores.entropy.requires_grad and scores.logprobs.requires_grad
    with_gradient = Forward(model, entropy_gradient=True)(batch, entropy=True)
    assert with_gradient.entropy is not None and with_gradient.entropy.requires_grad


@pytest.mark.parametrize("make", [toy.qwen, toy.gpt2])
@pytest.mark.parametrize(
    "layout", [{}, {"share_prompts": True}, {"layout": "packed"}, {"budget": 40}, {"budget": 1}]
)
def test_no_layout_changes_a_log_prob(make, layout):
    """Against the model's own logits, one row at a time; learned positions too."""
    model, rows = make(), random_rows()
    found = logprobs(model, rows, **layout)
    assert len(found) > 30
    for index, values in found.items():
        r = rows[index]
        with torch.no_grad():
            own = model(torch.tensor([[*r.prompt_ids, *r.completion_ids]])).logits[0].log_softmax(-1)
        place = len(r.prompt_ids) - 1
        expected = [
            own[place + i, token].item()
            for i, (token, sampled) in enumerate(zip(r.completion_ids, r.sampled, strict=True))
            if sampled
        ]
        assert values == pytest.approx(expected, abs=1e-12)


def test_padding_is_invisible():
    """A row alone, beside a longer one, and with seven more tokens of padding."""
    model, short = toy.gpt2(), row([3, 4], [5, 6])
    alone = logprobs(model, [short])[0]
    for extra in (1, 7):
        longer = row([7] * (2 + extra), [8, 9], trajectory=1)
        assert logprobs(model, [short, longer])[0] == pytest.approx(alone, abs=1e-13)


def test_chunks_of_the_head_change_nothing(monkeypatch):
    model = toy.qwen()
    [batch] = micro_batches(random_rows(), 10_000)

    def run() -> tuple[torch.Tensor, ...]:
        scores = Forward(model, entropy_gradient=True)(batch, entropy=True)
        assert scores.entropy is not None
        model.zero_grad()
        (scores.logprobs.sum() + scores.entropy.sum()).backward()
        return scores.logprobs.detach(), scores.entropy.detach(), model.lm_head.weight.grad.clone()

    whole = run()
    sizes: list[int] = []
    model.lm_head.register_forward_hook(lambda _m, _i, output: sizes.append(output.numel()))
    monkeypatch.setattr(forward_module, "_KEPT_LOGITS", 10 * toy.VOCABULARY)
    for one, other in zip(whole, run(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert len(sizes) > 10 and max(sizes) <= 10 * toy.VOCABULARY


def _small(config: Any) -> dict[str, Any]:
    return {
        "vocab_size": toy.VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": 0.5,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def soft_capped() -> Any:
    torch.manual_seed(0)
    settings = _small(Gemma2Config)
    return Gemma2ForCausalLM(
        Gemma2Config(**settings, head_dim=8, final_logit_softcapping=2.0, attn_logit_softcapping=None)
    ).eval()


def scaled() -> Any:
    torch.manual_seed(0)
    return CohereForCausalLM(CohereConfig(**_small(CohereConfig), logit_scale=0.25)).eval()


@pytest.mark.parametrize("make", [soft_capped, scaled])
def test_what_a_model_does_after_its_head_is_kept(make):
    model, rows = make(), random_rows(12)
    for index, values in logprobs(model, rows).items():
        r = rows[index]
        with torch.no_grad():
            logits = model(torch.tensor([[*r.prompt_ids, *r.completion_ids]])).logits[0]
            plain = model.lm_head(model.model(torch.tensor([[*r.prompt_ids]])).last_hidden_state[0])
        own = logits.log_softmax(-1)
        picked = [(i, t) for i, (t, s) in enumerate(zip(r.completion_ids, r.sampled, strict=True)) if s]
        assert values == pytest.approx(
            [own[len(r.prompt_ids) - 1 + i, t].item() for i, t in picked], abs=1e-5
        )
        assert not torch.allclose(plain, logits[: len(plain)], atol=0.1)  # it does do something


def test_packed_rows_keep_a_sliding_window():
    """Gemma 3: windows of four tokens in most layers, within each row on its own."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        **_small(Gemma3TextConfig) | {"num_hidden_layers": 3},
        head_dim=8,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    model, rows = Gemma3ForCausalLM(config).eval(), random_rows(20)
    assert Forward(model).agrees("packed") and not Forward(model).agrees("branches")
    alone = logprobs(model, rows, budget=1)
    for layout in ({"layout": "packed"}, {"layout": "padded"}):
        for index, values in logprobs(model, rows, **layout).items():
            assert values == pytest.approx(alone[index], abs=2e-4)
    config.layer_types = ["full_attention"] * 3
    torch.manual_seed(0)
    wide = logprobs(Gemma3ForCausalLM(config).eval(), rows, budget=1)
    assert max(abs(a - b) for i in alone for a, b in zip(alone[i], wide[i], strict=True)) > 0.01


def test_sliding_windows_do_not_share_prompts():
    """One explicit mask cannot stand for layers of two kinds."""
    assert not Forward(soft_capped()).agrees("branches")
    assert "sliding-window" in str(Forward(soft_capped()).why_not("branches"))
    assert Forward(toy.qwen()).agrees("branches") and Forward(toy.qwen()).agrees("packed")
    assert Forward(toy.gpt2()).agrees("branches") and Forward(toy.gpt2()).agrees("packed")


def test_a_model_blind_to_masks_is_noticed():
    """A running mean over everything before: no positions, no mask."""

    class Decoder(nn.Module):
        config, dtype = SimpleNamespace(_attn_implementation="sdpa"), torch.float32

        def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
            return SimpleNamespace(last_hidden_state=torch.eye(12)[input_ids].cumsum(1))

    class Mean(Bigram):
        def get_decoder(self) -> Any:
            return Decoder()

        def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
            return SimpleNamespace(logits=self.head(Decoder()(input_ids).last_hidden_state))

    torch.manual_seed(0)
    model = Mean(torch.randn(12, 12).tolist())
    assert not Forward(model).agrees("branches")
    assert not Forward(model).agrees("packed")
