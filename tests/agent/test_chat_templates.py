"""Prompts of the families people train, as literal strings and as ids; templates as their makers publish them, without
the parts for tools."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from agent.engines.base import Completion, GenerationRequest
from agent.prompts import PromptBuilder
from agent.rollout import Sampling, play_episode
from agent.spans import token_bytes
from agent.tiny import build_tokenizer
from envs.registry import make

QWEN25 = (
    "{%- if messages[0]['role'] == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}"
    "{%- else %}"
    "{{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) or message.role == 'assistant' %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
QWEN3 = (
    "{%- if messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
# The thinking-only models of the family open the thought for the model.
QWEN3_THINKING = QWEN3.rpartition("{%- if enable_thinking")[0] + "{{- '<think>\\n' }}{%- endif %}"
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
GEMMA2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
GEMMA3 = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}"
    "{%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}{%- set loop_messages = messages[1:] -%}"
    "{%- else -%}{%- set first_user_prefix = '' -%}{%- set loop_messages = messages -%}{%- endif -%}"
    "{%- for message in loop_messages -%}"
    "{%- if (message['role'] == 'assistant') -%}{%- set role = 'model' -%}{%- else -%}"
    "{%- set role = message['role'] -%}{%- endif -%}"
    "{{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else '') }}"
    "{{ message['content'] | trim }}{{ '<end_of_turn>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"
)
MARKERS = {
    QWEN25: ["<|im_start|>", "<|im_end|>"],
    QWEN3: ["<|im_start|>", "<|im_end|>"],
    QWEN3_THINKING: ["<|im_start|>", "<|im_end|>"],
    LLAMA3: ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    GEMMA2: ["<bos>", "<start_of_turn>", "<end_of_turn>"],
    GEMMA3: ["<bos>", "<start_of_turn>", "<end_of_turn>"],
}
RULES, SEEN = "Keep a memory.", "Question: Who?\n<mem>Ann</mem>\n<information>b </information>"
DEFAULT = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


def tokenizer_for(template: str) -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer(["Who was it? The capital of Poland."] * 20, 320)
    markers = MARKERS[template]
    bos = {"bos_token": markers[0]} if "bos_token" in template else {}
    tokenizer.add_special_tokens({"additional_special_tokens": markers, "eos_token": markers[-1], **bos})
    tokenizer.chat_template = template
    return tokenizer


CASES: list[Any] = [
    pytest.param(
        QWEN25,
        RULES,
        {},
        f"<|im_start|>system\n{RULES}<|im_end|>\n<|im_start|>user\n{SEEN}<|im_end|>\n<|im_start|>assistant\n",
        id="qwen2.5",
    ),
    pytest.param(
        QWEN25,
        "",
        {},
        f"<|im_start|>system\n{DEFAULT}<|im_end|>\n<|im_start|>user\n{SEEN}<|im_end|>\n<|im_start|>assistant\n",
        id="qwen2.5-its-own-rules",
    ),
    pytest.param(
        QWEN3,
        RULES,
        {},
        f"<|im_start|>system\n{RULES}<|im_end|>\n<|im_start|>user\n{SEEN}<|im_end|>\n<|im_start|>assistant\n",
        id="qwen3-thinks",
    ),
    pytest.param(
        QWEN3,
        "",
        {"enable_thinking": False},
        f"<|im_start|>user\n{SEEN}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        id="qwen3-does-not",
    ),
    pytest.param(
        QWEN3_THINKING,
        RULES,
        {},
        f"<|im_start|>system\n{RULES}<|im_end|>\n<|im_start|>user\n{SEEN}<|im_end|>\n<|im_start|>assistant\n<think>\n",
        id="qwen3-thinking-only",
    ),
    pytest.param(
        LLAMA3,
        RULES,
        {},
        f"<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{RULES}<|eot_id|>"
        f"<|start_header_id|>user<|end_header_id|>\n\n{SEEN}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        id="llama-3",
    ),
    pytest.param(
        GEMMA2,
        RULES,
        {},
        f"<bos><start_of_turn>user\n{RULES}\n\n{SEEN}<end_of_turn>\n<start_of_turn>model\n",
        id="gemma-2-has-no-system-role",
    ),
    pytest.param(
        GEMMA3,
        RULES,
        {},
        f"<bos><start_of_turn>user\n{RULES}\n\n{SEEN}<end_of_turn>\n<start_of_turn>model\n",
        id="gemma-3",
    ),
    pytest.param(
        GEMMA3,
        "",
        {},
        f"<bos><start_of_turn>user\n{SEEN}<end_of_turn>\n<start_of_turn>model\n",
        id="gemma-3-bare",
    ),
]


@pytest.mark.parametrize(("template", "rules", "options", "expected"), CASES)
def test_the_prompt_literally(template: str, rules: str, options: dict[str, Any], expected: str) -> None:
    tokenizer = tokenizer_for(template)
    builder = PromptBuilder(tokenizer, rules, template_options=options)
    assert builder.render(SEEN) == expected
    ids = builder.build(SEEN)
    assert tokenizer.decode(ids) == expected
    # Each marker is one token, and the text begins with exactly one beginning.
    for marker in MARKERS[template]:
        index = tokenizer.convert_tokens_to_ids(marker)
        assert ids.count(index) == expected.count(marker)
    if tokenizer.bos_token is not None:
        assert ids[0] == tokenizer.bos_token_id != ids[1]


@pytest.mark.parametrize("template", [LLAMA3, GEMMA3])
def test_a_template_that_trims_is_rendered_whole_each_time(template: str) -> None:
    builder = PromptBuilder(tokenizer_for(template), RULES)
    assert SEEN in builder.render(f"\n {SEEN} \n")
    assert f"\n {SEEN}" not in builder.render(f"\n {SEEN} \n").replace("\n\n", "")


def test_markers_in_what_the_environment_shows_end_no_turn() -> None:
    """The environment makes them harmless; what stands in a prompt's text would be tokens otherwise."""
    tokenizer = tokenizer_for(QWEN25)
    env: Any = make("mempo/SearchQA-v0", tasks="factbook-tiny:train", retriever="factbook-tiny")
    env.reset(seed=0)
    observation, *_ = env.step("<mem>a <|im_end|> b</mem><search>capital</search>")
    ids = PromptBuilder(tokenizer).build(observation)
    # The template's own: after its default rules, and after the observation.
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2
    assert "im_end" in observation and "<|im_end|>" not in observation


@pytest.mark.parametrize("bos", [False, True])
def test_a_base_model_without_a_template_gets_a_plain_prompt(bos: bool) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tokenizer_for(GEMMA3)
    tokenizer.chat_template = None
    if bos:
        number = tokenizer.bos_token_id
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", number)]
        )
    ids = PromptBuilder(tokenizer, RULES).build(SEEN)
    assert tokenizer.decode(ids) == ("<bos>" if bos else "") + f"{RULES}\n\n{SEEN}\n"


class Speaking:
    """An engine that says a text, token by token as the tokenizer cuts it, up to where it was asked to stop."""

    weight_version, max_context = 0, 4096

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> None:
        self.tokenizer, self.texts, self.prompts = tokenizer, texts, []  # type: ignore[var-annotated]

    async def generate(self, request: GenerationRequest) -> Completion:
        self.prompts.append(self.tokenizer.decode(request.prompt_ids))
        ids: list[int] = []
        for index in self.tokenizer.encode(self.texts.pop(0), add_special_tokens=False):
            ids.append(index)
            said = token_bytes(self.tokenizer).text(ids)
            if any(stop in said for stop in request.stop):
                break
        return Completion(tuple(ids), (-0.5,) * len(ids), "stop", 0)

    async def close(self) -> None:
        return


@pytest.mark.parametrize("template", list(MARKERS))
def test_an_episode_stops_at_the_first_closed_action(template: str) -> None:
    tokenizer = tokenizer_for(template)
    opened = template == QWEN3_THINKING
    start = "plan <answer>no" if opened else "<think>plan <answer>no"
    first = f"{start}</think><mem>m 1</mem><search>capital</search>"
    second = "<mem>m 2</mem><answer>Warsaw</answer>"
    engine = Speaking(tokenizer, [f"{first} and <answer>never</answer>", f"{second}<search>more</search>"])
    env = make("mempo/SearchQA-v0", tasks="factbook-tiny:train", retriever="factbook-tiny")
    trajectory = asyncio.run(
        play_episode(env, engine, PromptBuilder(tokenizer, RULES), seed_key=(0,), sampling=Sampling())
    )
    assert [turn.text for turn in trajectory.turns] == [first, second]
    assert [turn.memory for turn in trajectory.turns] == ["m 1", "m 2"]
    assert [turn.query for turn in trajectory.turns] == ["capital", None] and trajectory.answer == "Warsaw"
    for turn, block in zip(trajectory.turns, ("<mem>m 1</mem>", "<mem>m 2</mem>"), strict=True):
        assert turn.memory_span is not None
        assert token_bytes(tokenizer).text(turn.completion_ids[slice(*turn.memory_span)]) == block
    # The next prompt carries the step as the environment tells it.
    carried = engine.prompts[1].partition("<mem>m 1</mem>")[2]
    assert carried.partition("</think>")[2].startswith("<search>capital</search>")
    assert engine.prompts[0].endswith("<think>\n") == opened
