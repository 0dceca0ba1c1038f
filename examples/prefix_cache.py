"""One document, read once into a quantized cache and saved; many questions answered from copies of it.

python examples/prefix_cache.py --text document.txt --question "Who is it about?" --file document.kvplus
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from hf_kvplus import PrefixCache, build_cache
from hf_kvplus.loading import load_model


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--strategy", default="int4")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--question", action="append", required=True)
    parser.add_argument("--file", type=Path, required=True, help="where the filled cache is kept")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    options = parser.parse_args(arguments)

    model, tokenizer, _ = load_model(options.model)
    if options.file.exists():
        prefix = PrefixCache.load(options.file, model, tokenizer=tokenizer)
        print(f"[{len(prefix)} tokens loaded]")
    else:
        ids = tokenizer(options.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids.to(model.device)
        prefix = PrefixCache.fill(model, build_cache(options.strategy, model.config), ids)
        prefix.save(options.file, model=model, tokenizer=tokenizer)
        print(f"[{len(prefix)} tokens read and saved]")
    for question in options.question:
        more = tokenizer(f"\n{question}", return_tensors="pt", add_special_tokens=False).input_ids.to(model.device)
        ids = torch.cat([prefix.input_ids, more], dim=1)
        cache, reused = prefix.reuse(ids)
        mask = torch.ones_like(ids)
        out = model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=options.max_new_tokens, do_sample=False
        )
        print(f"> {question}\n{tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)}\n[{reused}]")


if __name__ == "__main__":
    main()
