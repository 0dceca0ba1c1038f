"""An encoder-decoder model (T5, BART): both halves of its cache are quantized.

python examples/encoder_decoder.py --model google-t5/t5-small --text "translate English to German: How old are you?"
"""

from __future__ import annotations

import argparse

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_kvplus import build_cache, estimate_memory, measure_memory
from hf_kvplus.units import format_bytes


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="google-t5/t5-small")
    parser.add_argument("--strategy", default="int8")
    parser.add_argument("--text", default="translate English to German: How old are you?")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    options = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForSeq2SeqLM.from_pretrained(options.model).eval()
    batch = tokenizer(options.text, return_tensors="pt")
    cache = build_cache(options.strategy, model.config)
    ids = model.generate(
        batch.input_ids,
        attention_mask=batch.attention_mask,
        past_key_values=cache,
        max_new_tokens=options.max_new_tokens,
        do_sample=False,
    )
    print(tokenizer.decode(ids[0], skip_special_tokens=True))
    for line in cache.plan:
        print(line)
    tokens, read = int(cache.get_seq_length()), batch.input_ids.shape[1]
    full = estimate_memory(model.config, tokens, dtype=model.dtype, encoder_tokens=read)
    held = format_bytes(measure_memory(cache).total_bytes)
    print(f"[{tokens} tokens and {read} of the encoder: {held}, full precision {format_bytes(full.cache_bytes)}]")


if __name__ == "__main__":
    main()
