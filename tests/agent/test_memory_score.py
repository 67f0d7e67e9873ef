"""P_mem and P_full against a brute force that shares no code with them: whole strings, one by one."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from agent.memory_score import MemoryScorer
from agent.prompts import PromptBuilder
from agent.score_context import frame
from agent.tiny import build_tokenizer
from agent.trajectory import Group, Trajectory, Turn
from envs.errors import UserError
from envs.tasks.task import Task

SENTENCES = [
    "What is the capital of Peru? Lima is the capital and largest city of Peru.",
    "Which river flows through Cairo? The Nile flows through Cairo, the capital of Egypt.",
    "Sucre; La Paz; Quito; Bogota. Searching for the source: found two documents, kept one!",
]
DOCUMENT = "Doc 1(Title: Peru) Lima is the capital.\nDoc 2(Title: Nile) It flows through Cairo."


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(SENTENCES, vocab_size=330)


def turn(
    memory: str | None, query: str | None, information: str = f"<information>{DOCUMENT}</information>"
) -> Turn:
    block = "" if memory is None else f"<mem>{memory}</mem>"
    action = "<answer>Lima</answer>" if query is None else f"<search>{query}</search>"
    return Turn(
        prompt_ids=(1,),
        completion_ids=(2, 3, 4),
        logprobs=(-1.0, -1.0, -1.0),
        sampled=(True, True, True),
        memory_span=None if memory is None else (0, 2),
        memory=memory,
        text=f"{block}<think>step</think>{action}",
        observation="",
        information="" if query is None else information,
        query=query,
    )


def trajectory(sample: int, *turns: Turn) -> Trajectory:
    return Trajectory(sample, turns, 1.0, "answer", terminated=True, truncated=False)


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    peru = Task("peru", ("What is the capital of Peru?",), (("Lima", "the city of Lima", "Lima, Peru"),))
    both = Task("both", ("Capital of Peru?", "River of Cairo?"), (("Lima",), ("Nile", "The Nile")))
    return [
        Group(
            peru,
            (
                trajectory(0, turn("nothing", "Peru"), turn("Lima is it", "Nile"), turn("Lima", None)),
                trajectory(1, turn("nothing", "Peru"), turn(None, "Peru again"), turn("Lima is it", None)),
                trajectory(2, turn("1) unknown, look for the capital", None)),
            ),
        ),
        Group(
            both,
            (
                trajectory(
                    3,
                    turn("Quito", "Cairo"),
                    turn("Quito", "Cairo"),
                    turn("Quito", "x"),
                    turn("La Paz; Nile", None),
                ),
                trajectory(4, turn(None, None)),
            ),
        ),
    ]


def alone(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    text: str,
    golds: Sequence[str],
    system: str = "",
) -> float:
    """Brute force: the best gold's geometric mean, each gold in a forward pass over the whole string."""
    messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    context = tokenizer.encode(prompt + "<answer>", add_special_tokens=False)
    best = 0.0
    for gold in golds:
        whole = tokenizer.encode(f"{prompt}<answer>{gold}", add_special_tokens=False)
        answer = whole[len(context) :]
        assert whole[: len(context)] == context
        with torch.no_grad():
            logits = model(torch.tensor([whole])).logits[0].double()
        total = 0.0
        for index, token in enumerate(answer):
            row = logits[len(context) + index - 1]
            total += float(row[token]) - math.log(float(row.exp().sum()))
        best = max(best, math.exp(total / len(answer)))
    return best


Expected = list[list[list[tuple[float | None, float]]]]


def brute_force(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, groups: Sequence[Group], system: str = ""
) -> Expected:
    golds = {"peru": ["Lima", "the city of Lima", "Lima, Peru"], "both": ["Lima; Nile", "Lima; The Nile"]}
    questions = {"peru": "What is the capital of Peru?", "both": "Capital of Peru?; River of Cairo?"}
    table: Expected = []
    for group in groups:
        name = group.task.id
        rows = []
        for played in group.trajectories:
            row = []
            history: list[str] = []
            for step in played.turns:
                start = f"Question: {questions[name]}\n"
                mem = None
                if step.memory is not None:
                    text = f"{start}<mem>{step.memory}</mem>"
                    mem = alone(model, tokenizer, text, golds[name], system)
                row.append((mem, alone(model, tokenizer, start + "\n".join(history), golds[name], system)))
                history.append(f"{step.text}\n{step.information}")
            rows.append(row)
        table.append(rows)
    return table


def values(scores: list) -> Expected:
    return [[[(turn.p_mem, turn.p_full) for turn in row] for row in group] for group in scores]


def assert_equal(found: Expected, expected: Expected, tolerance: float) -> None:
    flat_found = [pair for group in found for row in group for pair in row]
    flat_expected = [pair for group in expected for row in group for pair in row]
    assert [len(row) for group in found for row in group] == [len(row) for group in expected for row in group]
    for got, right in zip(flat_found, flat_expected, strict=True):
        assert (got[0] is None) == (right[0] is None)
        if right[0] is not None:
            assert got[0] == pytest.approx(right[0], abs=tolerance)
        assert got[1] == pytest.approx(right[1], abs=tolerance)
    assert len({round(pair[1], 8) for pair in flat_expected}) > 4, "a reference that is the same everywhere"


SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, pad_token_id=0)
HEADS = dict(num_key_value_heads=2, head_dim=8)


def build(kind: str, vocabulary: int) -> torch.nn.Module:
    """A tiny random model in float64 whose attention matters: its weights are larger than a fresh model's."""
    wide = dict(vocab_size=vocabulary, max_position_embeddings=2048)
    torch.manual_seed(11)
    if kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SMALL, num_key_value_heads=2, **wide))
    elif kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SMALL, **HEADS, **wide))
    elif kind == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=vocabulary, n_positions=1024, n_embd=32, n_layer=3, n_head=4, pad_token_id=0
            )
        )
    elif kind.startswith("gemma3"):
        window = int(kind.removeprefix("gemma3-"))
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        config = Gemma3TextConfig(
            **SMALL, **HEADS, **wide, sliding_window=window, layer_types=kinds, query_pre_attn_scalar=8
        )
        model = Gemma3ForCausalLM(config)
    elif kind == "mistral-24":
        model = MistralForCausalLM(MistralConfig(**SMALL, **HEADS, **wide, sliding_window=24))
    elif kind == "gptneo":  # looks 24 columns back, whatever the mask says
        shape = dict(hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]])
        config = GPTNeoConfig(vocab_size=vocabulary, window_size=24, **shape)
        model = GPTNeoForCausalLM(config)
    elif kind == "bloom":
        model = BloomForCausalLM(BloomConfig(vocab_size=vocabulary, hidden_size=32, n_layer=3, n_head=4))
    else:
        model = MambaForCausalLM(
            MambaConfig(vocab_size=vocabulary, hidden_size=32, state_size=8, num_hidden_layers=3)
        )
    if kind != "mamba":
        for parameter in model.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.25)
    return model.double()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["qwen2", "llama", "gpt2", "gemma3-512", "gemma3-24", "mistral-24"])
def test_trees_equal_brute_force(kind, implementation, tokenizer, groups):
    model = build(kind, len(tokenizer))
    model.set_attn_implementation(implementation)
    scorer = MemoryScorer(tokenizer, token_budget=700)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = values(scorer.score(model.train(), groups))
    assert model.training
    # transformers' eager attention takes its softmax in float32, whatever the weights are.
    assert_equal(
        found, brute_force(model.eval(), tokenizer, groups), 1e-10 if implementation == "sdpa" else 1e-7
    )
    assert scorer.report.fallback is None
    assert scorer.report.tokens < 0.55 * scorer.report.tokens_apart


@pytest.mark.parametrize("kind", ["mamba", "bloom", "gptneo"])
def test_other_models_fall_back_and_say_so_once(kind, tokenizer, groups):
    model = build(kind, len(tokenizer)).eval()
    scorer = MemoryScorer(tokenizer, token_budget=700)
    with pytest.warns(RuntimeWarning, match="one context at a time"):
        found = values(scorer.score(model, groups))
    # They hold parts of their state or attention in float32, whatever the weights are.
    assert_equal(found, brute_force(model, tokenizer, groups), 1e-7)
    assert scorer.report.fallback is not None and scorer.report.tokens == scorer.report.tokens_apart
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert values(scorer.score(model, groups)) == found


def test_bigram_probabilities_worked_out_by_hand(tokenizer):
    """A model that only knows the last token: P is made of known numbers, the context does not matter."""
    task = Task("bigram", ("Q?",), (("ab",),))
    ids = tokenizer.encode("ab", add_special_tokens=False)
    opening = tokenizer.encode("<answer>", add_special_tokens=False)[-1]
    table = torch.zeros(len(tokenizer), len(tokenizer), dtype=torch.float64)
    chance = [0.5, 0.125, 0.25][: len(ids)]
    for before, after, p in zip([opening, *ids], ids, chance, strict=False):
        table[before] = math.log((1 - p) / (len(tokenizer) - 1))
        table[before, after] = math.log(p)
    model = build("gpt2", len(tokenizer))
    model.forward = lambda input_ids, position_ids=None, **_: type("Out", (), {"logits": table[input_ids]})()
    scores = MemoryScorer(tokenizer).score(model, [Group(task, (trajectory(0, turn("m", None)),))])
    expected = math.prod(chance) ** (1 / len(ids))
    assert scores[0][0][0].p_mem == pytest.approx(expected, abs=1e-12)
    assert scores[0][0][0].p_full == pytest.approx(expected, abs=1e-12)


def test_system_prompt_is_part_of_the_context(tokenizer, groups):
    model = build("qwen2", len(tokenizer)).eval()
    found = values(MemoryScorer(tokenizer, system="Be brief.").score(model, groups))
    assert_equal(found, brute_force(model, tokenizer, groups, system="Be brief."), 1e-10)
    assert found != values(MemoryScorer(tokenizer).score(model, groups))


@pytest.mark.parametrize(("token_budget", "row_tokens"), [(1, 1), (4096, 60), (300, 250), (100_000, 100_000)])
def test_batching_changes_nothing(token_budget, row_tokens, tokenizer, groups):
    model = build("llama", len(tokenizer)).eval()
    scorer = MemoryScorer(tokenizer, token_budget=token_budget, row_tokens=row_tokens)
    found = values(scorer.score(model, groups))
    assert_equal(found, values(MemoryScorer(tokenizer, token_budget=900).score(model, groups)), 1e-12)
    apart = MemoryScorer(tokenizer, token_budget=token_budget, trees=False)
    assert_equal(found, values(apart.score(model, groups)), 1e-12)
    assert apart.report.tokens == apart.report.tokens_apart > scorer.report.tokens


def test_no_gradient_and_no_dropout(tokenizer, groups):
    model = build("gpt2", len(tokenizer)).train()
    assert model.config.attn_pdrop > 0
    first = values(MemoryScorer(tokenizer).score(model, groups))
    assert values(MemoryScorer(tokenizer).score(model, groups)) == first
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    with torch.enable_grad():
        MemoryScorer(tokenizer).score(model, groups)
        assert torch.is_grad_enabled()


def test_float32_agrees(tokenizer, groups):
    exact = build("qwen2", len(tokenizer)).eval()
    expected = brute_force(exact, tokenizer, groups)
    assert_equal(values(MemoryScorer(tokenizer).score(exact.float(), groups)), expected, 1e-5)


def test_transcripts_over_the_window_lose_their_oldest_steps(tokenizer):
    task = Task("peru", ("What is the capital of Peru?",), (("Lima",),))
    turns = [
        turn(f"step {index} Lima", f"query {index}", f"<information>{'Nile ' * index}</information>")
        for index in range(6)
    ]
    group = Group(task, (trajectory(0, *turns),))
    model = build("qwen2", len(tokenizer)).eval()
    start = "Question: What is the capital of Peru?\n"
    steps = [f"{step.text}\n{step.information}" for step in turns]

    def tokens(text: str) -> int:
        prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n<answer>Lima"
        return (
            len(tokenizer.encode(prompt, add_special_tokens=False)) - 1
        )  # the last answer token is never read

    window = tokens(start + "\n".join(steps[1:3]))
    scorer = MemoryScorer(tokenizer, window=window)
    scores = scorer.score(model, [group])[0][0]
    lost = 0
    for index, score in enumerate(scores):
        kept = steps[:index]
        while tokens(start + "\n".join(kept)) > window:
            kept = kept[1:]
        lost += index - len(kept)
        assert score.cut == (len(kept) < index)
        assert score.p_full == pytest.approx(
            alone(model, tokenizer, start + "\n".join(kept), ["Lima"]), abs=1e-10
        )
    assert [score.cut for score in scores] == [False, False, False, True, True, True]
    assert (scorer.report.transcripts, scorer.report.transcripts_cut, scorer.report.steps_lost) == (
        6,
        3,
        lost,
    )
    assert lost >= 6


def test_the_model_s_own_window_counts(tokenizer):
    model = build("gpt2", len(tokenizer)).eval()
    steps = [turn("Lima", "Nile " * 60) for _ in range(12)]
    group = Group(Task("long", ("Q?",), (("Lima",),)), (trajectory(0, *steps),))
    scorer = MemoryScorer(tokenizer)
    scores = scorer.score(model, [group])[0][0]
    assert scorer.report.transcripts_cut == sum(score.cut for score in scores) > 0
    assert all(0 < score.p_full < 1 for score in scores)


def test_a_memory_over_the_window_is_cut_and_counted(tokenizer):
    model = build("qwen2", len(tokenizer)).eval()
    group = Group(Task("q", ("Q?",), (("Lima",),)), (trajectory(0, turn("Lima Nile " * 40, None)),))
    scorer = MemoryScorer(tokenizer, window=60)
    score = scorer.score(model, [group])[0][0][0]
    assert scorer.report.memories_cut == 1 and score.p_mem is not None
    prompt = tokenizer.encode("<|im_start|>user\nQuestion: Q?\n", add_special_tokens=False)
    end = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n<answer>", add_special_tokens=False)
    gold = tokenizer.encode("Lima", add_special_tokens=False)
    memory = tokenizer.encode("<mem>" + "Lima Nile " * 40, add_special_tokens=False)
    room = 60 - len(prompt) - len(end) - (len(gold) - 1)
    ids = prompt + memory[: room - 1] + tokenizer.encode("</mem>", add_special_tokens=False) + end
    with torch.no_grad():
        logits = model(torch.tensor([ids + gold])).logits[0].log_softmax(-1)
    expected = np.exp(np.mean([float(logits[len(ids) + i - 1, token]) for i, token in enumerate(gold)]))
    assert score.p_mem == pytest.approx(expected, abs=1e-10)


def test_unscorable_tasks_are_refused(tokenizer):
    model = build("qwen2", len(tokenizer)).eval()
    played = (trajectory(0, turn("m", None)),)
    with pytest.raises(UserError, match=r"'blank'.*gold"):
        MemoryScorer(tokenizer).score(model, [Group(Task("blank", ("Q?",), ((" ",),)), played)])
    with pytest.raises(UserError, match=r"'wide'.*window has 20"):
        MemoryScorer(tokenizer, window=20).score(
            model, [Group(Task("wide", ("Q? " * 30,), (("a",),)), played)]
        )
    for name in ("token_budget", "row_tokens"):
        with pytest.raises(UserError, match=f"{name} is 0"):
            MemoryScorer(tokenizer, **{name: 0})


def test_nothing_to_score(tokenizer):
    model = build("qwen2", len(tokenizer)).eval()
    empty = Trajectory(0, (), 0.0, "window", terminated=False, truncated=True)
    group = Group(Task("q", ("Q?",), (("a",),)), (empty,))
    assert MemoryScorer(tokenizer).score(model, [group]) == [[[]]]
    assert MemoryScorer(tokenizer).score(model, []) == []


def test_control_tokens_the_policy_wrote_are_harmless(tokenizer):
    model = build("qwen2", len(tokenizer)).eval()
    task = Task("q", ("Q?",), (("Lima",),))

    def score(*turns: Turn) -> tuple[float | None, float]:
        last = MemoryScorer(tokenizer).score(model, [Group(task, (trajectory(0, *turns),))])[0][0][-1]
        return last.p_mem, last.p_full

    dirty = score(turn("a<|im_end|>", "q<|im_start|>"), turn("b<|im_end|></mem>", None))
    carried = alone(model, tokenizer, "Question: Q?\n<mem>b‹|im_end¦>‹/mem></mem>", ["Lima"])
    step = "<mem>a</mem><think>step</think><search>q</search>\n<information>" + DOCUMENT + "</information>"
    assert dirty == pytest.approx(
        (carried, alone(model, tokenizer, f"Question: Q?\n{step}", ["Lima"])), abs=1e-10
    )


@pytest.mark.parametrize(
    ("observation", "shown", "before"),
    [
        ("Question: 1) Q? 2) R?\n", "1) Q? 2) R?", ""),
        ("Question: Q?; R?\nTurns left: 16", "Q?; R?", ""),
        ("Question: two\nlines\n", "two\nlines", ""),
        (
            "Question: Q?; R?\n<information>page 1</information>\nTurns left: 3",
            "Q?; R?",
            "<information>page 1</information>",
        ),
        ("an observation of another form", "Q?; R?", ""),
    ],
)
def test_the_question_is_the_one_that_the_policy_read(observation, shown, before, tokenizer):
    task = Task("q", ("Q?", "R?"), (("Lima",), ("Nile",)))
    turns = (replace(turn("Lima", "Peru"), observation=observation), turn("Quito", None))
    model = build("qwen2", len(tokenizer)).eval()
    first, second = MemoryScorer(tokenizer).score(model, [Group(task, (trajectory(0, *turns),))])[0][0]
    start = f"Question: {shown}\n"
    step = f"<mem>Lima</mem><think>step</think><search>Peru</search>\n<information>{DOCUMENT}</information>"
    expected = [
        f"{start}{before}",
        f"{start}<mem>Quito</mem>",
        start + "\n".join(filter(None, [before, step])),
    ]
    found = [first.p_full, second.p_mem, second.p_full]
    assert found == pytest.approx(
        [alone(model, tokenizer, text, ["Lima; Nile"]) for text in expected], abs=1e-10
    )


def test_contexts_of_a_base_model_without_a_chat_template():
    tokenizer = gpt2_like()
    tokenizer.chat_template = None
    model = build("qwen2", len(tokenizer)).eval()
    prompts = PromptBuilder(tokenizer, "Rules.")
    group = Group(Task("q", ("Q?",), (("Lima",),)), (trajectory(0, turn("Lima", None)),))
    scorer = MemoryScorer(tokenizer, prompts=prompts)
    text = "Rules.\n\nQuestion: Q?\n<mem>Lima</mem>\n"
    ids = tokenizer.encode(text, add_special_tokens=False) + tokenizer.encode("<answer>Lima")
    gold = len(tokenizer.encode("Lima"))
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    mean = sum(float(logprobs[i - 1, ids[i]]) for i in range(len(ids) - gold, len(ids))) / gold
    assert scorer.score(model, [group])[0][0][0].p_mem == pytest.approx(math.exp(mean), abs=1e-10)


def test_ids_that_a_tokenizer_puts_first_stay_first():
    """Gemma's and Llama's <bos>: in the plain prompt it stands before everything, as in the rollouts."""
    tokenizer = gpt2_like()
    tokenizer.chat_template = None
    inner = tokenizer.backend_tokenizer
    inner.post_processor = processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 0)])
    prompts = PromptBuilder(tokenizer, "Rules.")
    assert prompts.build("x")[0] == 0
    assert frame(prompts).leading == (0,)
    assert frame(prompts).before == "Rules.\n\n"


def test_the_cost_is_linear_in_turns(tokenizer):
    task = Task("q", ("Q?",), (("Lima",),))
    model = build("qwen2", len(tokenizer)).eval()
    scorer = MemoryScorer(tokenizer)
    tree, apart = [], []
    for count in (4, 8, 16):
        turns = [turn(f"memory number {index}", f"query {index}") for index in range(count)]
        scorer.score(model, [Group(task, (trajectory(0, *turns),))])
        tree.append(scorer.report.tokens)
        apart.append(scorer.report.tokens_apart)
    assert tree[2] - tree[1] == pytest.approx(2 * (tree[1] - tree[0]), rel=0.1)
    assert apart[2] - apart[1] > 3 * (apart[1] - apart[0])
    assert tree[2] < apart[2] / 4


def test_equal_contexts_of_a_group_are_computed_once(tokenizer):
    task = Task("q", ("Q?",), (("Lima",),))
    model = build("qwen2", len(tokenizer)).eval()
    scorer = MemoryScorer(tokenizer)
    turns = (turn("m", "q"), turn("n", "r"), turn("m", None))
    scorer.score(model, [Group(task, tuple(trajectory(sample, *turns) for sample in range(5)))])
    assert scorer.report.contexts == 2 + 3  # memories m and n; transcripts of 0, 1 and 2 steps
    other = Group(Task("other", ("Q?",), (("Nile",),)), (trajectory(0, *turns),))
    scores = scorer.score(model, [Group(task, (trajectory(0, *turns),)), other])
    assert scores[0][0][0].p_mem != scores[1][0][0].p_mem  # another gold: another context


def gpt2_like() -> PreTrainedTokenizerFast:
    """Byte-level BPE without the tags as tokens: segments end inside what could be one piece."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    text = [
        DOCUMENT,
        "<mem></mem><think></think><search></search><information></information><answer></answer>",
    ]
    inner.train_from_iterator(
        (SENTENCES + text) * 9,
        trainers.BpeTrainer(vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
    )
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return with_template(inner)


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Puts a space before whatever it encodes, as Llama 2's tokenizer does."""
    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.train_from_iterator(
        [*SENTENCES, DOCUMENT, "<mem></mem> <answer></answer> user assistant\n"] * 9,
        trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<|im_start|>", "<|im_end|>"]),
    )
    return with_template(inner)


def with_template(inner: Tokenizer) -> PreTrainedTokenizerFast:
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|im_end|>", chat_template=template
    )


@pytest.mark.parametrize("make", [gpt2_like, sentencepiece_like])
def test_segments_are_split_as_the_whole_text_is(make, groups):
    tokenizer = make()
    model = build("qwen2", len(tokenizer)).eval()
    found = values(MemoryScorer(tokenizer).score(model, groups))
    assert_equal(found, brute_force(model, tokenizer, groups), 1e-10)
