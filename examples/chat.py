"""A chat that keeps one quantized cache over all turns: each turn reads only what is new.

python examples/chat.py --strategy int4 --turn "What is a key/value cache?" --turn "And in one sentence?"
"""

from __future__ import annotations

import argparse

import torch

from hf_kvplus import build_cache, measure_memory, reuse_prefix
from hf_kvplus.loading import load_model
from hf_kvplus.units import format_bytes


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--strategy", default="int4")
    parser.add_argument("--turn", action="append", default=[])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args(arguments)

    model, tokenizer, _ = load_model(options.model)
    cache = build_cache(options.strategy, model.config)
    messages, cached_ids = [], None
    for turn in options.turn or ["What is a key/value cache?", "And in one sentence?"]:
        messages.append({"role": "user", "content": turn})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids.to(model.device)
        # The template may write an answer differently than the model did; what differs leaves the cache.
        reused = reuse_prefix(cache, ids, cached_ids) if cached_ids is not None else None
        mask = torch.ones_like(ids)
        cached_ids = model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=options.max_new_tokens, do_sample=False
        )
        answer = tokenizer.decode(cached_ids[0, ids.shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
        held = format_bytes(measure_memory(cache).total_bytes)
        print(f"> {turn}\n{answer}\n[{reused or 'a new cache'}; {held}]")


if __name__ == "__main__":
    main()
