"""Loss with a bias planted into the keys of a real model: `python -m kvplus_eval.planted_bias --text FILE`.

The bias goes into one pair of channels of the first KV head of every layer, and the weights with which queries look
at that pair are set to 0. So the model without quantization computes the same whatever the bias, and all that a bias
costs is what it does to codes. Compared are strategies that take turning means out of keys (see
`hf_kvplus.codecs.rotary_mean`) and the same without.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import PreTrainedModel

from hf_kvplus import build_cache
from hf_kvplus.loading import load_model
from hf_kvplus.plans.onepass import OnePass
from kvplus_eval.ablation import head_dim_of, measure, stored_bits, window_figures
from kvplus_eval.data import cut_windows, load_text
from kvplus_eval.results import append_rows, git_commit, library_versions

SCHEMA = "kvplus-planted-bias/1"


@contextmanager
def planted_bias(model: PreTrainedModel, pair: int, size: float) -> Iterator[None]:
    """Gives the keys of every layer a bias that no query looks at, and takes it back at the end.

    Args:
        model: A Llama-like model without biases: layers with `self_attn.q_proj` and `k_proj`, heads turned in halves.
        pair: Which pair of channels of the first KV head; 0 turns fastest.
        size: The bias of its first channel.

    Raises:
        ValueError: If the model is built in another way.
    """
    config = model.config.get_text_config(decoder=True)
    head_dim = head_dim_of(config)
    group = config.num_attention_heads // config.num_key_value_heads
    layers = [getattr(layer, "self_attn", None) for layer in model.get_decoder().layers]
    if not all(hasattr(layer, "q_proj") and getattr(layer.k_proj, "bias", 0) is None for layer in layers):
        raise ValueError(
            f"`model` must have `q_proj` and an unbiased `k_proj` in every layer, not {config.model_type}"
        )
    kept = [layer.q_proj.weight.detach().clone() for layer in layers]
    try:
        with torch.no_grad():
            for layer in layers:
                layer.k_proj.bias = torch.nn.Parameter(layer.k_proj.weight.new_zeros(layer.k_proj.out_features))
                layer.k_proj.bias[pair] = size
                weight = layer.q_proj.weight.view(-1, head_dim, layer.q_proj.in_features)
                weight[:group, [pair, pair + head_dim // 2]] = 0.0
        yield
    finally:
        with torch.no_grad():
            for layer, weight in zip(layers, kept, strict=True):
                layer.k_proj.bias = None
                layer.q_proj.weight.copy_(weight)


def run_planted_bias(
    text: Annotated[str, typer.Option(help="Text to measure on, as for `kvplus eval`.")],
    model: Annotated[
        str, typer.Option(help="Model, as for `kvplus eval`; without biases in its keys.")
    ] = "smollm2-135m",
    widths: Annotated[str, typer.Option(help="Bits, comma-separated.")] = "8,4,2",
    pairs: Annotated[str, typer.Option(help="Pairs of channels, comma-separated; 0 turns fastest.")] = "0,8",
    sizes: Annotated[str, typer.Option(help="Sizes of the bias.")] = "0,50,200",
    windows: Annotated[int, typer.Option(min=1, help="Windows.")] = 2,
    window_tokens: Annotated[int, typer.Option(min=128, help="Tokens in a window.")] = 1024,
    stride: Annotated[int, typer.Option(min=1, help="Every so many positions are compared.")] = 2,
    rows: Annotated[Path, typer.Option(help="Rows, appended.")] = Path("planted-bias.jsonl"),
) -> None:
    """Measure what a bias in keys costs, with and without taking it out."""
    chosen = load_text(text)
    loaded, tokenizer, source = load_model(model)
    cut = cut_windows(chosen, tokenizer, windows=windows, window_tokens=window_tokens)
    positions = torch.arange(min(127, window_tokens // 2), window_tokens - 1, stride)
    targets = [window[positions + 1] for window in cut]
    facts = {
        "schema": SCHEMA,
        "model": source.name,
        "revision": source.revision,
        "text": chosen.name,
        "sha256": chosen.sha256,
        "window_tokens": window_tokens,
        "windows": windows,
        "stride": stride,
        "git_commit": git_commit(),
        "versions": library_versions(),
    }
    means = max(1, head_dim_of(loaded.config) // 16)  # what a model with biases gets by default
    found: dict[tuple[int, float, int, int], float] = {}
    cases = [(int(pair), float(size)) for pair in pairs.split(",") for size in sizes.split(",")]
    ways = [(int(nbits), taken) for nbits in widths.split(",") for taken in (0, means)]
    with OnePass(loaded) as run, Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("biases", total=len(cases) * len(ways))
        for pair, size in cases:
            with planted_bias(loaded, pair, size):
                with torch.inference_mode():
                    references = [run.reference(window, positions) for window in cut]
                for nbits, taken in ways:
                    cache = build_cache(f"int{nbits},means={taken}", loaded.config)
                    figures = window_figures(*measure(run, references, cache, targets))
                    row: dict[str, Any] = {"pair": pair, "size": size, "nbits": nbits, "means": taken}
                    row["stored_bits"] = stored_bits(cache, head_dim_of(loaded.config))
                    append_rows(rows, [{**facts, **row, **figures}])
                    found[pair, size, nbits, taken] = figures["kl"]
                    progress.advance(task)
    table = Table("bits", "means", *(f"pair {pair}, {size:g}" for pair, size in cases), title="KL to the full cache")
    for nbits, taken in ways:
        table.add_row(str(nbits), str(taken), *(f"{found[pair, size, nbits, taken]:.3g}" for pair, size in cases))
    Console(stderr=True).print(table)
    typer.echo(json.dumps({"rows": str(rows), "count": len(found)}))


def main() -> None:
    """Runs the command."""
    typer.run(run_planted_bias)


if __name__ == "__main__":
    main()
