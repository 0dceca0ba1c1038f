"""Fewer key-value heads: as latents in a cache, and as a converted checkpoint that plain transformers runs.

python examples/gqa_conversion.py --text my.txt --num-key-value-heads 2 --out converted
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from hf_kvplus import GQACache, build_cache, calibrate_gqa, convert_to_gqa, measure_memory
from hf_kvplus.loading import load_model
from hf_kvplus.units import format_bytes


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--num-key-value-heads", type=int, default=2)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--window-tokens", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=Path("converted"))
    options = parser.parse_args(arguments)

    model, tokenizer, _ = load_model(options.model)
    ids = torch.tensor(tokenizer(options.text.read_text(encoding="utf-8"))["input_ids"])
    windows = list(ids.split(options.window_tokens))[: options.windows]
    heads, prompt = options.num_key_value_heads, windows[0][None].to(model.device)

    projection = calibrate_gqa(model, windows, heads)
    converted = convert_to_gqa(model, heads, calibration=windows)
    cases = {
        "as it is": (model, build_cache("dynamic", model.config)),
        "latents in the cache": (model, GQACache(model.config, heads, projection)),
        "converted": (converted, build_cache("dynamic", converted.config)),
        "converted, 4 bits": (converted, build_cache("int4", converted.config)),
    }
    for name, (reader, cache) in cases.items():
        mask = torch.ones_like(prompt)
        reader.generate(prompt, attention_mask=mask, past_key_values=cache, max_new_tokens=8, do_sample=False)
        print(f"{name}: {format_bytes(measure_memory(cache).total_bytes)} for {cache.get_seq_length()} tokens")
    converted.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(f"AutoModelForCausalLM.from_pretrained({str(options.out)!r}) loads it; heal it with `kvplus convert-gqa`")


if __name__ == "__main__":
    main()
