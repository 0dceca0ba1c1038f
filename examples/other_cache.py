"""A cache of another package in the same tables: an adapter, and the command that measures it.

kvplus eval --strategies dynamic,int4,adapter:examples/other_cache.py,bits=24

Whatever `make_cache` returns is fed, read back, refused or measured like any other strategy. Here: a cache of one's
own that keeps values in half precision and keys as they are. `bits` is what it claims, and is held to.
"""

import argparse

import torch
from transformers import DynamicCache, PretrainedConfig

from hf_kvplus import build_cache, measure_memory
from hf_kvplus.loading import load_model


class HalfValuesCache(DynamicCache):
    """Keeps values in bfloat16."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        kept = values.to(torch.bfloat16)
        self.layers[layer_idx].values = kept
        return keys, kept.to(values.dtype)


def make_cache(config: PretrainedConfig, max_length: int | None) -> DynamicCache:
    """What `adapter:` calls; `max_length` is for caches of fixed size."""
    return HalfValuesCache(config=config)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args(arguments)
    model, tokenizer, _ = load_model(options.model)
    prompt = tokenizer("w1 w2 w3 " * 40, return_tensors="pt").input_ids.to(model.device)
    for strategy in ("dynamic", f"adapter:{__file__}"):
        cache = build_cache(strategy, model.config)
        model.generate(prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, max_new_tokens=8)
        print(f"[{strategy.partition(':')[0]}: {measure_memory(cache).total_bytes} bytes]")


if __name__ == "__main__":
    main()
