"""Tokens per second of the local engine against transformers' ``generate``.

A workload like a training step's: questions asked 16 times, prompts of different lengths, completions that end at
different times. ``generate`` gets its cache, the same dtype, the same sampling and the best of several batch sizes
(sorted by prompt length, so that padding costs it as little as possible); it has to decode each batch until its
longest completion ends. Useful tokens (up to the wanted length of each request) per second are compared.

Run: ``python -m benchmarks.engine --threads 1``
"""

from __future__ import annotations

import argparse
import random
import time

import torch
from transformers import Qwen2ForCausalLM

from agent.engines.base import GenerationRequest
from agent.engines.local import LocalEngine
from agent.tiny import build_model, build_tokenizer


def workload(vocabulary: int, groups: int, samples: int, seed: int = 0) -> list[GenerationRequest]:
    """Half first turns (short prompts shared by a group), half later turns (longer, all different)."""
    rng = random.Random(seed)
    requests = []
    for group in range(groups):
        first = tuple(rng.randrange(50, vocabulary) for _ in range(rng.randrange(20, 50)))
        for sample in range(samples):
            later = first + tuple(rng.randrange(50, vocabulary) for _ in range(rng.randrange(60, 220)))
            for prompt in (first, later):
                wanted = min(128, max(8, round(rng.gauss(55, 20))))
                seed = group * 1000 + sample
                requests.append(GenerationRequest(prompt, seed=seed, max_new_tokens=wanted))
    return requests


def time_engine(model: Qwen2ForCausalLM, engine: LocalEngine, requests: list[GenerationRequest]) -> float:
    start = time.process_time()
    completions = engine.generate_all(requests)
    took = time.process_time() - start
    assert sum(len(c.ids) for c in completions) == sum(r.max_new_tokens for r in requests)
    return took


def time_generate(model: Qwen2ForCausalLM, requests: list[GenerationRequest], batch: int) -> float:
    start = time.process_time()
    ordered = sorted(requests, key=lambda request: (len(request.prompt_ids), request.max_new_tokens))
    for first in range(0, len(ordered), batch):
        rows = ordered[first : first + batch]
        width = max(len(row.prompt_ids) for row in rows)
        ids = torch.tensor([[0] * (width - len(r.prompt_ids)) + list(r.prompt_ids) for r in rows])
        mask = torch.tensor([[0] * (width - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in rows])
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                max_new_tokens=max(row.max_new_tokens for row in rows),
                eos_token_id=None,
                pad_token_id=0,
            )
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 128, 256], help="of generate")
    parser.add_argument("--max-batch", type=int, default=256, help="of the engine")
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=2048)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randrange(3, 9))) for _ in range(4000)]
    tokenizer = build_tokenizer([" ".join(words)], options.vocabulary)
    model = build_model(tokenizer, kv_heads=options.kv_heads)
    # Nothing ends by chance: every request runs to its wanted length in both systems.
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    requests = workload(len(tokenizer), options.groups, options.samples)
    useful = sum(request.max_new_tokens for request in requests)
    prompts = sum(len(request.prompt_ids) for request in requests)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{size:,} parameters, {len(requests)} requests, {prompts:,} prompt and {useful:,} new tokens")
    engine = LocalEngine(model, tokenizer, max_batch=options.max_batch)
    time_engine(model, engine, requests[:64])
    ours = min(time_engine(model, engine, requests) for _ in range(2))
    print(f"local engine: {useful / ours:,.0f} new tokens/s ({ours:.2f} s)")
    for batch in options.batches:
        theirs = time_generate(model, requests, batch)
        print(
            f"generate, batch {batch}: {useful / theirs:,.0f} new tokens/s ({theirs / ours:.2f} times our time)"
        )


if __name__ == "__main__":
    main()
