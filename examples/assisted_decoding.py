"""Prompt-lookup decoding on a quantized cache: rejected drafts are cropped, packed blocks stay untouched.

python examples/assisted_decoding.py --strategy int4
"""

from __future__ import annotations

import argparse

import torch

from hf_kvplus import build_cache, measure_memory
from hf_kvplus.loading import load_model
from hf_kvplus.units import format_bytes


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--strategy", default="int4")
    parser.add_argument("--prompt", default="one two three four one two three four one two three")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    options = parser.parse_args(arguments)

    model, tokenizer, _ = load_model(options.model)
    ids = tokenizer(options.prompt, return_tensors="pt").input_ids.to(model.device)
    texts = {}
    for drafted in (None, 5):
        cache = build_cache(options.strategy, model.config)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=options.max_new_tokens,
            do_sample=False,
            prompt_lookup_num_tokens=drafted,
        )
        texts[drafted] = tokenizer.decode(out[0], skip_special_tokens=True)
        print(f"drafts of {drafted or 0}: {format_bytes(measure_memory(cache).total_bytes)}")
    print(texts[5])
    print("[the same text]" if texts[None] == texts[5] else "[the texts differ]")


if __name__ == "__main__":
    main()
