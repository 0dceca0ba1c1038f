"""Peak memory of offloaded caches, each measured in a process of its own.

    python -m kvplus_eval.offload_memory --context 8192 --strategies dynamic,fp+offload:disk,budget=36MiB
    python -m kvplus_eval.offload_memory --synthetic 65536 --strategies fp+offload:disk,budget=64MiB [--fused]

The first reads a text with a model and decodes some tokens; the second stores random states in a cache of four layers
and reads them back. Peak is the most resident memory of the process (Linux tells it) above what it had once model and
libraries were loaded and warm. `--fused` reads in pieces, without ever building a dense layer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, LlamaConfig

from hf_kvplus import build_cache, measure_memory, use_fused_attention
from hf_kvplus.compat import cache_keyword
from hf_kvplus.handover import handover
from hf_kvplus.layer import KVLayer
from hf_kvplus.strategies import split_list
from hf_kvplus.units import format_bytes
from kvplus_eval.data import load_text

LAYERS, KV_HEADS, HEAD_DIM, CHUNK_TOKENS = 4, {False: 2, True: 8}, 64, 1024


def resident_bytes(which: str) -> int:
    """Returns `VmRSS`, what is resident now, or `VmHWM`, the most since `restart_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which))
    return int(line.split()[1]) * 1024


def restart_peak() -> None:
    """Lets the system begin a new peak."""
    Path("/proc/self/clear_refs").write_text("5")


class Storing:
    """Takes in states without reading those before them, as a fused model's prompt would if it came in pieces."""

    def accepts(self, layer: Any, key_states: torch.Tensor) -> bool:
        """Takes everything."""
        return True

    def encoder(self, codec: Any, head_dim: int, device: torch.device) -> None:
        """Leaves encoding to the codec."""


@torch.no_grad()
def store_synthetic(cache: Cache, tokens: int, heads: int, fused: bool) -> None:
    """Stores random states of `tokens` tokens in every layer, chunk by chunk."""
    generator = torch.Generator().manual_seed(0)
    if fused:
        handover.begin(Storing())
    for _ in range(0, tokens, CHUNK_TOKENS):
        for index, layer in enumerate(cache.layers):
            states = torch.randn(1, heads, CHUNK_TOKENS, HEAD_DIM, generator=generator)
            keys = cache.update(states, states, index)[0]
            if fused and isinstance(layer, KVLayer) and handover.take(keys) is not None:
                layer.finish_update()
            del keys, states  # as a model's layer does on its return
    if fused:
        handover.end()


@torch.no_grad()
def read_synthetic(cache: Cache, heads: int, fused: bool) -> None:
    """Reads every layer once, as the decoding of one token does."""
    from hf_kvplus.attention.base import Scoring
    from hf_kvplus.attention.cpu import CPUKernel

    for index, layer in enumerate(cache.layers):
        new = torch.randn(1, heads, 1, HEAD_DIM)
        if fused:
            layer.recent.append({"keys": new, "values": new})
            layer.cumulative_length += 1
            CPUKernel().attend(layer, new, Scoring(0.125), None, 0)
            layer.finish_update()
        else:
            torch.nn.functional.scaled_dot_product_attention(new, *cache.update(new, new, index))


def measure_synthetic(strategy: str, tokens: int, fused: bool) -> dict[str, Any]:
    """Measures one strategy in this process."""
    heads = KV_HEADS[fused]
    config = LlamaConfig(
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        hidden_size=heads * HEAD_DIM,
    )
    warm = build_cache(strategy, config)
    store_synthetic(warm, 4 * CHUNK_TOKENS, heads, fused)
    read_synthetic(warm, heads, fused)
    del warm
    before = resident_bytes("VmRSS")
    restart_peak()
    cache = build_cache(strategy, config)
    store_synthetic(cache, tokens, heads, fused)
    read_synthetic(cache, heads, fused)
    full = 2 * LAYERS * heads * HEAD_DIM * 4 * tokens
    return {"peak_bytes": resident_bytes("VmHWM") - before, "full_cache_bytes": full, **_places(cache)}


@torch.no_grad()
def measure_model(strategy: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one strategy with a model in this process."""
    from hf_kvplus.loading import load_model

    model, tokenizer, _ = load_model(options.model)
    text = load_text(options.text).text if options.text else "word " * options.context
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : options.context]
    scope = use_fused_attention(model) if options.fused else contextlib.nullcontext()
    with scope:
        read(model, build_cache(strategy, model.config, model=model), ids[:, : CHUNK_TOKENS + 256], 2)
        before = resident_bytes("VmRSS")
        restart_peak()
        cache = build_cache(strategy, model.config, model=model)
        if options.stored:
            decoder = model.config.get_text_config(decoder=True)
            store_synthetic(cache, options.context, decoder.num_key_value_heads, False)
        times = read(model, cache, ids[:, :1] if options.stored else ids, options.tokens)
        peak = resident_bytes("VmHWM") - before
    step_ms = 1000 * sorted(times)[len(times) // 2]
    return {"peak_bytes": peak, "tokens": cache.get_seq_length(), "decode_ms": step_ms, **_places(cache)}


def read(model: Any, cache: Cache, ids: torch.Tensor, decoded: int) -> list[float]:
    """Reads a prompt in chunks and decodes tokens; returns the seconds of each decoded one."""
    keyword = {cache_keyword(model): cache, "use_cache": True, "logits_to_keep": 1}
    for chunk in ids.split(CHUNK_TOKENS, dim=1):
        logits = model(chunk, **keyword).logits
    times = []
    for _ in range(decoded):
        began = time.perf_counter()
        logits = model(logits[:, -1:].argmax(-1), **keyword).logits
        times.append(time.perf_counter() - began)
    return times


def _places(cache: Cache) -> dict[str, int]:
    """Returns the bytes of a cache by place."""
    memory = measure_memory(cache)
    return {"memory_bytes": memory.total_bytes, "disk_bytes": getattr(memory, "disk_bytes", 0)}


def main(arguments: list[str] | None = None) -> None:
    """Measures strategies one after the other and prints a line for each, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", help="as for `kvplus eval`; a word over and over without it")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--synthetic", type=int, default=0, metavar="TOKENS")
    parser.add_argument("--stored", action="store_true", help="store random states instead of reading the text")
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--here", action="store_true", help="measure one strategy in this process")
    options = parser.parse_args(arguments)
    if options.here:
        if options.synthetic:
            result = measure_synthetic(options.strategies, options.synthetic, options.fused)
        else:
            result = measure_model(options.strategies, options)
        print(json.dumps({"strategy": options.strategies, **result}))
        return
    rows = []
    given = sys.argv[1:] if arguments is None else arguments
    for strategy in split_list(options.strategies):
        command = [sys.executable, "-m", "kvplus_eval.offload_memory", *given, "--here", "--strategies", strategy]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows.append(json.loads(output.strip().splitlines()[-1]))
        figures = ", ".join(
            f"{name.removesuffix('_bytes')} {format_bytes(value) if name.endswith('_bytes') else round(value, 1)}"
            for name, value in rows[-1].items()
            if name != "strategy"
        )
        print(f"{strategy}: {figures}", flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
