"""Everything that can only be measured on a GPU, in one run: `make bench-gpu`, or `python -m kvplus_eval.gpu_bench`.

1. Attention of one token at large shapes: share of the copy bandwidth, and SDPA over dense states. Each kernel's
   output is compared with the reference on the device first.
2. The same for other numbers of warps and stages, to see whether the defaults are right.
3. Decoding with a model of random weights in the shape of Llama 3 8B, fused, against `DynamicCache`.

Rows go to `kernels.jsonl` and `bench.jsonl` below the folder of the device, and `lines.json` says which lines hold.
`--tiny` runs all of it at a size for any machine, where times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from hf_kvplus.attention.triton import Launch
from hf_kvplus.loading import ModelSource
from kvplus_eval.bench import BenchPlan, run_bench
from kvplus_eval.kernel_bench import Shape, kernel_table, run_kernel_bench
from kvplus_eval.results import Row, append_rows, run_facts
from kvplus_eval.tables import bench_table, make_console

STRATEGIES = ("fp", "int8", "int4", "int3", "int2")
MODEL_STRATEGIES = ("dynamic", "fp", "int8", "int4")
# What int4 decoding has to reach on a GPU.
LEAST_SHARE, LEAST_TIMES_SDPA, LEAST_TIMES_DYNAMIC = 0.6, 2.5, 1.5
LAUNCHES = tuple(Launch(warps=warps, stages=stages) for warps in (2, 4, 8) for stages in (1, 2, 3, 4))


@dataclass(frozen=True)
class Size:
    """How large everything is.

    Args:
        shapes: Of the kernel benchmark; lines are read off the first.
        rounds: Rounds of the kernel benchmark.
        model: Name of the model.
        config: Of the model.
        context_tokens: Context of the model.
        decoded_tokens: Tokens that it decodes in a round.
    """

    shapes: tuple[Shape, ...]
    rounds: int
    model: str
    config: LlamaConfig
    context_tokens: int
    decoded_tokens: int


def full_size() -> Size:
    """Returns the sizes that lines are about."""
    llama_3_8b = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=65536,
        rope_theta=500000.0,
    )
    shapes = (Shape(batch=8), Shape(), Shape(tokens=4096), Shape(batch=32, tokens=8192))
    return Size(shapes, 50, "llama-3-8b-shaped", llama_3_8b, 32768, 16)


def tiny_size() -> Size:
    """Returns sizes that run anywhere in seconds."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    return Size((Shape(batch=2, kv_heads=2, queries=2, head_dim=64, tokens=500),), 2, "tiny-llama", config, 320, 2)


def random_model(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    """Returns a model of random weights, made where it stays."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def kernel_rows(size: Size, device: torch.device, dtype: torch.dtype, console: Console) -> list[Row]:
    """Times the kernels at all shapes, then int4 at the first with other launches."""
    rows: list[Row] = []
    for shape in size.shapes:
        found = run_kernel_bench(STRATEGIES, shape, device=device, dtype=dtype, rounds=size.rounds)
        console.print(kernel_table(found))
        rows += found
    if device.type != "cuda":
        return rows
    for launch in LAUNCHES:
        found = run_kernel_bench(
            ("int4",), size.shapes[0], device=device, dtype=dtype, rounds=size.rounds, launch=launch
        )
        row = next(one for one in found if one["strategy"] == "int4")
        console.print(f"warps {launch.warps}, stages {launch.stages}: {row['kernel'].get('ms', row['reason'])} ms")
        rows.append(row)
    return rows


def model_rows(size: Size, device: torch.device, dtype: torch.dtype, console: Console) -> list[Row]:
    """Times decoding with all strategies in turns, caches of this package read packed."""
    model = random_model(size.config, device, dtype)
    plan = BenchPlan((size.context_tokens,), tokens=size.decoded_tokens, fused=True)
    token_ids = torch.randint(size.config.vocab_size, (plan.longest_tokens,))
    found = run_bench(model, token_ids, MODEL_STRATEGIES, plan, lambda: None)
    source = ModelSource(size.model, "seed 0", "random weights")
    rows = [{**run_facts(model, source), "kind": "bench", "text": None, **row} for row in found]
    console.print(bench_table(rows))
    return rows


def judge(kernels: list[Row], models: list[Row]) -> list[Row]:
    """Compares int4 with the lines: what, the least, what was measured (or null), and whether it holds."""
    int4 = next(row for row in kernels if row["strategy"] == "int4")["kernel"]
    model = next(row for row in models if row["strategy"] == "int4")["bench"]
    ratio = model.get("ratio_to_dynamic")
    lines = [
        ("int4 attention, share of the bandwidth", LEAST_SHARE, int4.get("share")),
        ("int4 attention, times faster than SDPA in bfloat16", LEAST_TIMES_SDPA, int4.get("times_sdpa_bfloat16")),
        ("int4 decoding, times the tokens per second of dynamic", LEAST_TIMES_DYNAMIC, 1 / ratio if ratio else None),
    ]
    return [
        {"line": line, "least": least, "measured": found, "holds": found is not None and found >= least}
        for line, least, found in lines
    ]


def main(arguments: list[str] | None = None) -> int:
    """Runs everything; returns 1 if a strategy has no figures."""
    parser = argparse.ArgumentParser(prog="python -m kvplus_eval.gpu_bench", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("eval/results"), help="folder of all devices' results")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu with --tiny")
    parser.add_argument("--tiny", action="store_true", help="sizes for any machine; times mean nothing")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("`--device` is cuda, but PyTorch finds no GPU; try --tiny --device cpu")
    if device.type != "cuda" and not given.tiny:
        parser.error(f"`--device` is {given.device}, where only --tiny is of use")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    folder = given.out / (name.lower().replace(" ", "-") + ("-tiny" if given.tiny else ""))
    size = tiny_size() if given.tiny else full_size()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    console = make_console()
    kernels = kernel_rows(size, device, dtype, console)
    append_rows(folder / "kernels.jsonl", kernels)
    models = model_rows(size, device, dtype, console)
    append_rows(folder / "bench.jsonl", models)
    lines = judge(kernels, models)
    (folder / "lines.json").write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")
    for line in lines:
        console.print(
            f"{'holds' if line['holds'] else 'fails'}: {line['line']}, {line['measured']} of {line['least']}"
        )
    return int(any(row["status"] != "ok" for row in (*kernels, *models)))


if __name__ == "__main__":
    sys.exit(main())
