"""Texts of different lengths in one left-padded batch, with one quantized cache; the bytes grow with the batch.

python examples/batch_summarization.py --strategy int4 first.txt second.txt
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hf_kvplus import build_cache, estimate_memory, measure_memory
from hf_kvplus.loading import load_model
from hf_kvplus.units import format_bytes


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", nargs="*", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--strategy", default="int4")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    options = parser.parse_args(arguments)

    model, tokenizer, _ = load_model(options.model)
    texts = [path.read_text(encoding="utf-8") for path in options.texts] or ["A short text.", "A longer text. " * 20]
    prompts = [f"{text}\n\nIn one sentence:" for text in texts]
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    batch = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)
    cache = build_cache(options.strategy, model.config)
    ids = model.generate(
        batch.input_ids,
        attention_mask=batch.attention_mask,
        past_key_values=cache,
        max_new_tokens=options.max_new_tokens,
        do_sample=False,
    )
    for row in ids[:, batch.input_ids.shape[1] :]:
        print("-", tokenizer.decode(row, skip_special_tokens=True).strip())
    full = estimate_memory(model.config, int(cache.get_seq_length()), len(texts), dtype=model.dtype)
    held = format_bytes(measure_memory(cache).total_bytes)
    print(f"[{len(texts)} rows: {held} instead of {format_bytes(full.cache_bytes)}]")


if __name__ == "__main__":
    main()
