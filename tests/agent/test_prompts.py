"""Prompts as literal strings, and what gives way when the window is full."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from agent.prompts import PromptBuilder, WindowExceeded, system_prompt
from agent.tiny import build_tokenizer
from envs.errors import UserError

OBSERVATION = "Question: Who?\n<mem>Ann</mem>\n<information>Doc 1(Title: A) b</information>"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(["The capital of Poland is Warsaw."] * 20, 300)


def text_of(tokenizer: PreTrainedTokenizerFast, ids: tuple[int, ...]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def test_chat_prompt_literally(tokenizer: PreTrainedTokenizerFast) -> None:
    builder = PromptBuilder(tokenizer, " Be brief.\n")
    assert builder.render(OBSERVATION) == text_of(tokenizer, builder.build(OBSERVATION))
    assert builder.render(OBSERVATION) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nQuestion: Who?\n<mem>Ann</mem>\n<information>Doc 1(Title: A) b</information><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("system", ["", "  \n"])
def test_no_system_turn_without_rules(tokenizer: PreTrainedTokenizerFast, system: str) -> None:
    chat = PromptBuilder(tokenizer, system)
    assert (
        text_of(tokenizer, chat.build("Who?\n"))
        == "<|im_start|>user\nWho?\n<|im_end|>\n<|im_start|>assistant\n"
    )
    plain = PromptBuilder(tokenizer, system, style="plain")
    assert text_of(tokenizer, plain.build("Who?")) == "Who?\n"


def test_plain_prompt_literally(tokenizer: PreTrainedTokenizerFast) -> None:
    builder = PromptBuilder(tokenizer, "Be brief.", style="plain")
    assert text_of(tokenizer, builder.build("Who?\n<mem>Ann</mem>")) == "Be brief.\n\nWho?\n<mem>Ann</mem>\n"


def test_template_without_a_system_role(tokenizer: PreTrainedTokenizerFast) -> None:
    other = build_tokenizer(["a b c"], 271)
    other.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "[{{ m['role'] }}]{{ m['content'] | trim }}{% endfor %}[model]"
    )
    assert PromptBuilder(other, "Be brief.").render(" Who? ") == "[user]Be brief.\n\n Who?[model]"
    assert PromptBuilder(other).render("Who?") == "[user]Who?[model]"
    other.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(UserError, match="never"):
        PromptBuilder(other)
    other.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        PromptBuilder(other, style="chat")
    assert PromptBuilder(other, "S").render("x") == "S\n\nx\n"


def test_template_options_reach_the_template() -> None:
    other = build_tokenizer(["a b c"], 271)
    other.chat_template = "{{ messages[-1]['content'] }}|{{ '<think>' if think else 'none' }}"
    assert PromptBuilder(other, template_options={"think": True}).render("q") == "q|<think>"
    assert PromptBuilder(other).render("q") == "q|none"


def step(memory: str, information: str) -> str:
    return f"<mem>{memory}</mem><search>q</search>\n<information>{information}</information>"


def shown(question: str, steps: list[str]) -> tuple[str, dict[str, Any]]:
    return "\n".join([f"Question: {question}", *steps]), {"question": question, "carried": steps, "hint": ""}


def test_information_gives_way_and_nothing_else(tokenizer: PreTrainedTokenizerFast) -> None:
    builder = PromptBuilder(tokenizer, "RULES", max_prompt_tokens=260)
    observation, parts = shown("Where is it?", [step("old memory", "o" * 60), step("new memory", "n" * 900)])
    prompt = builder.prompt(observation, parts)
    kept = len(prompt.observation.split("<information>")[2].partition(" […")[0])
    assert prompt.shortened
    # The oldest information is whole while cutting the newest is enough.
    assert prompt.observation == (
        f"Question: Where is it?\n{step('old memory', 'o' * 60)}\n"
        f"<mem>new memory</mem><search>q</search>\n<information>{'n' * kept} […shortened]</information>"
    )
    assert 0 < len(prompt.ids) <= 260
    text = text_of(tokenizer, prompt.ids)
    assert text == (
        f"<|im_start|>system\nRULES<|im_end|>\n<|im_start|>user\n{prompt.observation}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    # As much is kept as fits: one letter more would be one token too many.
    with pytest.raises(WindowExceeded, match="261 tokens"):
        builder.build(prompt.observation.replace("n […", "nn […"))
    assert parts["carried"][1] == step("new memory", "n" * 900)


def test_older_information_goes_next(tokenizer: PreTrainedTokenizerFast) -> None:
    observation, parts = shown("Where?", [step("m1", "o" * 300), step("m2", "n" * 300)])
    builder = PromptBuilder(tokenizer)
    full = len(builder.build(observation))
    bare = len(builder.build(shown("Where?", [step("m1", ""), step("m2", "")])[0]))
    mark = len(tokenizer.encode(" […shortened]", add_special_tokens=False))
    prompt = builder.prompt(observation, parts, limit=bare + 2 * mark + 20)
    assert len(prompt.ids) <= bare + 2 * mark + 20 < full
    assert prompt.observation.count("[…shortened]") == 2
    assert "n" * 3 not in prompt.observation and "ooo" in prompt.observation
    assert "<mem>m1</mem>" in prompt.observation and "<mem>m2</mem>" in prompt.observation
    assert prompt.observation.startswith("Question: Where?\n")


def test_question_and_memory_are_never_cut(tokenizer: PreTrainedTokenizerFast) -> None:
    builder = PromptBuilder(tokenizer)
    for question, memory in (("w" * 500, "m"), ("w", "m" * 500)):
        observation, parts = shown(question, [step(memory, "n" * 500)])
        with pytest.raises(WindowExceeded, match="200"):
            builder.prompt(observation, parts, limit=200)
    observation, parts = shown("w", [step("m", "n" * 500)])
    with pytest.raises(WindowExceeded):
        builder.prompt(observation, None, limit=200)
    assert builder.prompt(observation, parts, limit=200).shortened


def test_a_memory_that_spells_the_tag_is_not_cut(tokenizer: PreTrainedTokenizerFast) -> None:
    memory = "<information>" + "k" * 40 + "</information>"
    observation, parts = shown("w", [step(memory, "n" * 500)])
    prompt = PromptBuilder(tokenizer).prompt(observation, parts, limit=260)
    assert prompt.observation.startswith(
        f"Question: w\n<mem>{memory}</mem><search>q</search>\n<information>n"
    )


def test_what_fits_is_left_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    builder = PromptBuilder(tokenizer)
    observation, parts = shown("w", [step("m", "n" * 50)])
    length = len(builder.build(observation))
    assert builder.prompt(observation, parts, limit=length).ids == builder.build(observation)
    assert not builder.prompt(observation, parts, limit=length).shortened
    assert builder.prompt(observation, parts, limit=length - 1).shortened


def test_system_styles() -> None:
    assert system_prompt("TOOLS", "compact") == ""
    paper = system_prompt("TOOLS", "paper", max_turns=7)
    assert "at most 7 turns" in paper and "\n\nTOOLS\n\n" in paper
    assert '<tool_call>{"name": "search", "arguments": {"query": "what to look for"}}</tool_call>' in paper
    few = system_prompt("TOOLS", "few-shot", max_turns=7, call_style="search")
    assert "<search>what to look for</search>" in few and "<tool_call>" not in few
    assert few.endswith("Now your turn:") and "<answer>Vellenfirth</answer>" in few
    with pytest.raises(UserError, match="did you mean 'paper'"):
        system_prompt("TOOLS", "papers")  # type: ignore[arg-type]
