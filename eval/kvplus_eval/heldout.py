"""Loss on the text that recipes were tuned on beside loss on text that they weren't: `python -m kvplus_eval.heldout`.

The recipes of this package were tuned on the first 8 windows of the text; any other window is held out. Both are
measured in one pass a window, which equals a pass in chunks through a real cache (`hf_kvplus.plans.onepass`). Rows are
printed and appended as they come.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from hf_kvplus import build_cache
from hf_kvplus.loading import load_model
from hf_kvplus.plans.onepass import OnePass
from kvplus_eval.ablation import PIECE_POSITIONS, head_dim_of, measure, stored_bits, summarize
from kvplus_eval.data import cut_windows, load_text
from kvplus_eval.protocol import choose_strategies
from kvplus_eval.results import run_facts

SCHEMA = "kvplus-heldout/2"
TUNED_WINDOWS = 8


def heldout(
    text: Annotated[str, typer.Option(help="Text, as for `kvplus eval`.")],
    strategies: Annotated[str, typer.Option(help="Comma-separated strategies.")] = "int8,k6v6,k5v4,int4,int3,int2",
    model: Annotated[str, typer.Option(help="Model, as for `kvplus eval`.")] = "smollm2-135m",
    tuned: Annotated[str, typer.Option(help="Windows that recipes were tuned on: a range.")] = "0-7",
    others: Annotated[str, typer.Option(help="Windows that they weren't.")] = "8-15",
    window_tokens: Annotated[int, typer.Option(min=128, help="Tokens in a window.")] = 2048,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens fed at a time.")] = 64,
    stride: Annotated[int, typer.Option(min=1, help="Every so many positions are compared.")] = 1,
    rows: Annotated[Path, typer.Option(help="Rows, appended.")] = Path("heldout.jsonl"),
) -> None:
    """Measure strategies on tuned and on held-out windows."""
    sets = {"tuned": _range("tuned", tuned), "held out": _range("others", others)}
    if set(sets["tuned"]) & set(sets["held out"]) or min(sets["held out"]) < TUNED_WINDOWS:
        raise ValueError(f"`others` must begin at window {TUNED_WINDOWS} or later, got {others!r}")
    names = choose_strategies(strategies)
    chosen = load_text(text)
    loaded, tokenizer, source = load_model(model)
    last = max(map(max, sets.values()))
    cut = cut_windows(chosen, tokenizer, windows=last + 1, window_tokens=window_tokens)
    facts = {
        **run_facts(loaded, source),
        "schema": SCHEMA,
        "text": chosen.name,
        "sha256": chosen.sha256,
        "window_tokens": window_tokens,
        "chunk_tokens": chunk_tokens,
        "stride": stride,
    }
    positions = torch.arange(0, window_tokens - 1, stride)
    found = []
    with OnePass(loaded, chunk_tokens) as run:
        for label, chosen_windows in sets.items():
            scores: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {name: [] for name in names}
            bits = {}
            for index in chosen_windows:
                with torch.inference_mode():
                    reference = run.reference(cut[index], positions)
                for name in names:
                    cache = build_cache(name, loaded.config, max_length=window_tokens, model=loaded)
                    scores[name].append(measure(run, [reference], cache, [cut[index][positions + 1]]))
                    bits[name] = stored_bits(cache, head_dim_of(loaded.config))
            for name, parts in scores.items():
                divergences, changes = (torch.cat(column) for column in zip(*parts, strict=True))
                figures = summarize(divergences, changes, divergences)
                row = {**facts, "strategy": name, "stored_bits": bits[name], "set": label, "windows": chosen_windows}
                row |= _kept(figures)
                found.append(row)
                with rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    Console(stderr=True).print(_table(found, names))
    typer.echo(json.dumps({"rows": str(rows), "strategies": names}))


def _kept(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: figures[name] for name in ("kl", "kl_low", "kl_high", "perplexity_change_percent")}


def _range(name: str, text: str) -> list[int]:
    """Reads `0-7` or `3`."""
    first, _, last = text.partition("-")
    try:
        found = list(range(int(first), int(last or first) + 1))
    except ValueError:
        found = []
    if not found:
        raise ValueError(f"`{name}` must be a range of windows such as 0-7, got {text!r}")
    return found


def _table(rows: list[dict[str, Any]], names: list[str]) -> Table:
    """Puts both sets side by side; intervals are drawn over pieces of positions."""
    table = Table(title=f"KL to the full cache, 95 % over pieces of {PIECE_POSITIONS} positions", title_justify="left")
    for column in ("strategy", "tuned", "perplexity", "held out", "perplexity"):
        table.add_column(column)
    for name in names:
        cells = []
        for row in (row for row in rows if row["strategy"] == name):
            interval = "" if row["kl_low"] is None else f" ({row['kl_low']:.2g} to {row['kl_high']:.2g})"
            cells += [f"{row['kl']:.3g}{interval}", f"{row['perplexity_change_percent']:+.2f} %"]
        table.add_row(name, *cells)
    return table


def main() -> None:
    """Runs the command."""
    typer.run(heldout)


if __name__ == "__main__":
    main()
