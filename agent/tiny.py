"""A tokenizer and a small Qwen2 model made on the spot, from given texts and a seed, in seconds.

The tokenizer is byte-level BPE: lossless, without an unknown token, the same for the same texts. The turn
grammar's tags are single added tokens (not special: they are text the policy writes), ChatML's markers are
special.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TAGS = tuple(
    tag
    for name in ("mem", "think", "search", "tool_call", "answer", "information")
    for tag in (f"<{name}>", f"</{name}>")
)
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"

# Rendered whole for every prompt; no system turn when the system prompt is empty.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] or message['role'] != 'system' %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# Qwen2's own pre-tokenizer: whatever loads a folder of model type qwen2 may put it in place of the saved one.
QWEN2_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
WORDS_ALONE = r"\p{L}+|\p{N}|[^\p{L}\p{N}]"


def build_tokenizer(
    texts: Iterable[str], vocab_size: int = 2048, split_spaces: bool = False, context: int = 4096
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer.

    Args:
        texts: what the model will read and write; tags in them are cut out before training.
        vocab_size: upper bound on the whole vocabulary, tags and markers included; at least 271.
        split_spaces: no token joins a word with the space or the punctuation before it, so that a word has
            one spelling wherever it stands (easier to copy for a small model, more tokens a text).
        context: the window in tokens that the tokenizer declares.

    Raises:
        ValueError: a vocabulary too small for 256 bytes, the tags and the markers.
    """
    reserved = len(TAGS) + 3
    if vocab_size < 256 + reserved:
        raise ValueError(f"vocab_size is {vocab_size}; {256 + reserved} are taken by bytes, tags and markers")
    tokenizer = Tokenizer(models.BPE())
    # Merges learned on finer pieces never cross them, so only training needs to know about the finer ones.
    tags = pre_tokenizers.Split(Regex("|".join(TAGS)), behavior="removed")
    learned_on = WORDS_ALONE if split_spaces else QWEN2_PIECES
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([tags, *_pieces(learned_on)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - reserved,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    roles = [f"{role}\n" for role in ("system", "user", "assistant")] * 100
    tokenizer.train_from_iterator([*roles, *texts], trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_pieces(QWEN2_PIECES))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (PAD, START, END)]
    )
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    make: Any = PreTrainedTokenizerFast
    built: PreTrainedTokenizerFast = make(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        # Never produced; named so that Qwen2's tokenizer class does not add one beyond the model's
        # vocabulary.
        unk_token=PAD,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )
    return built


def _pieces(pattern: str) -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def build_model(
    tokenizer: PreTrainedTokenizerFast,
    hidden: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int | None = None,
    intermediate: int | None = None,
    context: int = 4096,
    seed: int = 0,
) -> Qwen2ForCausalLM:
    """A Qwen2 model with random weights that `seed` alone decides; embeddings tied, float32, on the CPU.

    Args:
        hidden: width; a multiple of `heads`.
        kv_heads: key/value heads (grouped queries: fewer make generation faster); all `heads` when None.
        intermediate: width of the MLP; 3 x hidden when None.
        context: positions the model can take, prompt and completion together.
    """
    if hidden % heads or (hidden // heads) % 2:
        raise ValueError(f"hidden size {hidden} needs to be an even multiple of {heads} heads")
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate or 3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
        # Tied embeddings of norm about 1: at the usual 0.02 a token copied perfectly into the last layer
        # would get a probability under 1 % of a few thousand, and learning to copy would wait for every
        # embedding to grow.
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=hidden**-0.5)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    torch.nn.Module.eval(model)
    return model
