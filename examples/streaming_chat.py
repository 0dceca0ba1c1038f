"""A chat without an end: sinks and a window keep the cache's bytes constant, however many turns there are.

python examples/streaming_chat.py --turns 40 --window 508
"""

from __future__ import annotations

import argparse
import time
from itertools import cycle, islice

import torch

from hf_kvplus import SlidingWindowCache, estimate_memory, measure_memory
from hf_kvplus.loading import load_model
from hf_kvplus.units import format_bytes

QUESTIONS = (
    "Tell me something about the sea.",
    "What lives in it?",
    "Name one of them and describe it.",
    "How deep can it dive?",
    "Make a short rhyme of that.",
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--window", type=int, default=508)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args(arguments)

    model, tokenizer, _ = load_model(options.model)
    cache = SlidingWindowCache(model.config, options.window, positions="shifted")
    ids = torch.empty(1, 0, dtype=torch.long, device=model.device)
    for question in islice(cycle(QUESTIONS), options.turns):
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        asked = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids.to(model.device)
        ids = torch.cat([ids, asked], dim=1)
        begin, length = time.perf_counter(), ids.shape[1]
        # Only what the cache hasn't seen is read; the ids before it are a list of numbers, nothing more.
        ids = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=options.max_new_tokens
        )
        ms = 1000 * (time.perf_counter() - begin) / (ids.shape[1] - length)
        answer = tokenizer.decode(ids[0, length:], skip_special_tokens=True).strip()
        held = measure_memory(cache).total_bytes
        full = estimate_memory(model.config, ids.shape[1], strategy="dynamic", dtype=model.dtype).cache_bytes
        bar = "#" * round(20 * held / max(held, full)) + "." * round(20 - 20 * held / max(held, full))
        print(f"> {question}\n{answer}")
        print(f"[{ids.shape[1]} tokens, {ms:.0f} ms each; cache {format_bytes(held)} of {format_bytes(full)} {bar}]\n")


if __name__ == "__main__":
    main()
