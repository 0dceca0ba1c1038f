"""A document of any length in constant memory: sinks and a window, fed in chunks, positions shifted.

python examples/long_document.py --text book.txt --window 1024
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from hf_kvplus import MemoryRecorder, build_cache
from hf_kvplus.loading import load_model
from hf_kvplus.units import format_bytes


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=20_000)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    options = parser.parse_args(arguments)

    model, tokenizer, _ = load_model(options.model)
    ids = tokenizer(options.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids
    ids = ids[:, : options.max_tokens].to(model.device)
    strategy = f"window:{options.window},sinks=4,positions=shifted"
    cache = build_cache(strategy, model.config)
    recorder = MemoryRecorder(cache)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        prefill_chunk_size=256,
        streamer=recorder,
        max_new_tokens=options.max_new_tokens,
        do_sample=False,
    )
    print(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    first, last = recorder.steps[0], recorder.steps[-1]
    print(f"[after {first.tokens} tokens {format_bytes(first.cache_bytes)}]")
    print(f"[after {last.tokens} tokens {format_bytes(last.cache_bytes)}]")


if __name__ == "__main__":
    main()
