"""A cache on disk: memory stays small, text stays the same, and a killed run can be reopened.

python examples/offload.py --text book.txt --strategy int4 --budget 16MiB
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from hf_kvplus import build_cache, estimate_memory, measure_memory
from hf_kvplus.loading import load_model
from hf_kvplus.units import format_bytes


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--strategy", default="fp")
    parser.add_argument("--budget", default="16MiB", help="bytes of blocks that are also kept in memory")
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    options = parser.parse_args(arguments)

    model, tokenizer, _ = load_model(options.model)
    ids = tokenizer(options.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids
    ids = ids[:, : options.max_tokens].to(model.device)
    texts = {}
    for strategy in (options.strategy, f"{options.strategy}+offload:disk,budget={options.budget}"):
        estimate = estimate_memory(model.config, ids.shape[1] + options.max_new_tokens, strategy=strategy)
        cache = build_cache(strategy, model.config)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=options.max_new_tokens,
            do_sample=False,
        )
        texts[strategy] = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        memory = measure_memory(cache)
        print(
            f"[{strategy}: {format_bytes(memory.total_bytes)} in memory, {format_bytes(memory.disk_bytes)} on disk; "
            f"estimated {format_bytes(estimate.disk_bytes)} on disk]"
        )
        cache.close()
    print(*set(texts.values()))
    print("[the same text]" if len(set(texts.values())) == 1 else "[the texts differ]")


if __name__ == "__main__":
    main()
