"""What each part of the default recipe is worth at each width: one part changed at a time, on the same windows.

Run as `python -m kvplus_eval.ablation --text FILE`. Each variant goes through the windows in one pass that equals a
pass in chunks through a real cache (`hf_kvplus.plans.onepass`; a test holds the two together). Differences to the
recipe are paired: both saw the same positions, and the interval is drawn over pieces of text, since neighbouring
positions aren't independent. Each variant's figures of each window are a row, appended as soon as they are known; a
run that was stopped goes on where it was, more windows can be added, and the page is written from rows alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from hf_kvplus.caches import KVPlusCache
from hf_kvplus.checks import require_choice
from hf_kvplus.layer import KVLayer
from hf_kvplus.loading import load_model
from hf_kvplus.plans.onepass import OnePass, Reference
from kvplus_eval.data import cut_windows, load_text
from kvplus_eval.metrics.perplexity import paired_interval
from kvplus_eval.results import append_rows, git_commit, library_versions, read_rows
from kvplus_eval.variants import MEANS_VARIANTS, RECIPE, VARIANTS, Variant, same, variant_cache

SCHEMA = "kvplus-ablation/2"
# Positions that are taken together when intervals are drawn.
PIECE_POSITIONS = 128

PARTS = {"recipe": VARIANTS, "means": MEANS_VARIANTS}
INTRODUCTIONS = {
    "recipe": """# What each part of the recipe is worth

Made by `python -m kvplus_eval.ablation`; don't edit. One part of `recipe="auto"` is changed at a time.""",
    "means": """# How many turning means, and how long

Made by `python -m kvplus_eval.ablation --parts means`; don't edit. Keys have a few turning means taken out of each
block and head, those at least so many deviations long (see [codecs](design/codecs.md)).""",
}

PAGE_HEAD = f"""{{introduction}} *KL* is the
mean divergence to the full cache in nats; its change is against the recipe at the same positions, with a paired
95 % interval over pieces of {PIECE_POSITIONS} positions. A positive change is what the part gains; a negative one says
that the recipe would be better without it here.
"""


def measure(
    run: OnePass, references: Sequence[Reference], cache: KVPlusCache, targets: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the divergence and the change of loss of every position of all windows, each `(positions,)`."""
    divergences, changes = [], []
    with torch.inference_mode():
        for reference, target in zip(references, targets, strict=True):
            found = run.log_probs(reference, cache)
            gap = reference.log_probs - found
            divergences.append((reference.log_probs.exp() * gap).sum(-1, dtype=torch.float64))
            changes.append(gap.gather(1, target[:, None].to(gap.device))[:, 0].double())
    return torch.cat(divergences).cpu(), torch.cat(changes).cpu()


def stored_bits(cache: KVPlusCache, head_dim: int) -> float | None:
    """Returns the mean stored bits per packed element, `None` where nothing is packed."""
    bits = [
        codec.bits_per_element(head_dim)
        for layer in cache.layers
        if isinstance(layer, KVLayer)
        for codec in layer.codecs.values()
    ]
    return sum(bits) / len(bits) if bits else None


def window_figures(divergences: torch.Tensor, changes: torch.Tensor) -> dict[str, Any]:
    """Makes the figures of one window.

    Args:
        divergences: Nats, `(positions,)`.
        changes: Change of loss in nats, likewise.

    Returns:
        Means over all positions and over pieces, in nats.
    """
    return {
        "kl": float(divergences.mean()),
        "loss_change": float(changes.mean()),
        "kl_pieces": [float(piece.mean()) for piece in divergences.split(PIECE_POSITIONS)],
        "loss_change_pieces": [float(piece.mean()) for piece in changes.split(PIECE_POSITIONS)],
    }


def summarize(rows: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compares a variant with the recipe on the windows that both went through.

    Args:
        rows: Rows of the variant, one a window.
        base: Rows of the recipe, likewise.

    Returns:
        Mean KL, its change against the recipe in percent with a paired interval, and the change of perplexity.

    Raises:
        ValueError: If there is no such window.
    """
    known = {row["window"]: row for row in base}
    pairs = [(row, known[row["window"]]) for row in rows if row["window"] in known]
    if not pairs:
        raise ValueError(f"`rows` of {rows[0]['variant']!r} have no window that the recipe went through as well")
    whole = sum(other["kl"] for _, other in pairs) / len(pairs)
    kl = sum(row["kl"] for row, _ in pairs) / len(pairs)
    differences = [
        piece - recipe
        for row, other in pairs
        for piece, recipe in zip(*(r["kl_pieces"] for r in (row, other)), strict=True)
    ]
    low, high = (None if end is None else 100 * end / whole for end in paired_interval(differences))
    return {
        "kl": kl,
        "change_percent": 100 * (kl / whole - 1),
        "change_low_percent": low,
        "change_high_percent": high,
        "perplexity_change_percent": 100 * math.expm1(sum(row["loss_change"] for row, _ in pairs) / len(pairs)),
    }


def run_ablation(
    text: Annotated[str, typer.Option(help="Text to measure on, as for `kvplus eval`.")],
    model: Annotated[str, typer.Option(help="Model, as for `kvplus eval`.")] = "smollm2-135m",
    widths: Annotated[str, typer.Option(help="Bits, comma-separated.")] = "8,4,3,2",
    parts: Annotated[
        str, typer.Option(help="`recipe`, every part; `means`, number and length of turning means.")
    ] = "recipe",
    first_window: Annotated[int, typer.Option(min=0, help="Windows before it are left out.")] = 0,
    windows: Annotated[int, typer.Option(min=1, help="Windows.")] = 2,
    window_tokens: Annotated[int, typer.Option(min=128, help="Tokens in a window.")] = 2048,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens fed at a time.")] = 64,
    stride: Annotated[int, typer.Option(min=1, help="Every so many positions are compared.")] = 3,
    calibration: Annotated[str | None, typer.Option(help="Metrics that `kvplus plan --calibrate` made.")] = None,
    rows: Annotated[Path, typer.Option(help="Rows, appended.")] = Path("ablation.jsonl"),
    page: Annotated[Path | None, typer.Option(help="Markdown page to write from the rows.")] = None,
) -> None:
    """Measure what each part of the recipe is worth."""
    console = Console(stderr=True)
    require_choice("parts", parts, tuple(PARTS))
    chosen_widths = [int(nbits) for nbits in widths.split(",")]
    todo = [(nbits, variant) for nbits in chosen_widths for variant in PARTS[parts] if nbits in variant.widths]
    if calibration is not None:
        metric = Variant("recipe with calibrated keys", {"calibration": calibration}, same)
        todo += [(nbits, metric) for nbits in chosen_widths if nbits < 8]
    chosen = load_text(text)
    loaded, tokenizer, source = load_model(model)
    chosen_windows = range(first_window, first_window + windows)
    cut = cut_windows(chosen, tokenizer, windows=first_window + windows, window_tokens=window_tokens)
    protocol = {
        "model": source.name,
        "revision": source.revision,
        "text": chosen.name,
        "sha256": chosen.sha256,
        "window_tokens": window_tokens,
        "chunk_tokens": chunk_tokens,
        "stride": stride,
    }
    facts = {"schema": SCHEMA, "protocol": protocol, "git_commit": git_commit(), "versions": library_versions()}
    done = _done(rows, protocol)
    positions = torch.arange(min(127, window_tokens // 2), window_tokens - 1, stride)
    with OnePass(loaded, chunk_tokens) as run, Progress(console=console) as progress:
        task = progress.add_task("variants", total=len(todo) * windows)
        for index in chosen_windows:
            reference = None
            for nbits, variant in sorted(todo, key=lambda item: item[1].name != RECIPE):
                if (nbits, variant.name, index) not in done:
                    with torch.inference_mode():
                        reference = reference or run.reference(cut[index], positions)
                    cache = variant_cache(loaded.config, nbits, variant)
                    figures = window_figures(*measure(run, [reference], cache, [cut[index][positions + 1]]))
                    bits = stored_bits(cache, head_dim_of(loaded.config))
                    row = {"nbits": nbits, "variant": variant.name, "window": index, "stored_bits": bits}
                    append_rows(rows, [{**facts, **row, **figures}])
                progress.advance(task)
    if page is not None:
        page.write_text(write_page(read_rows(rows, SCHEMA), parts), encoding="utf-8")
    typer.echo(json.dumps({"rows": str(rows), "variants": len(todo)}))


def head_dim_of(config: Any) -> int:
    """Returns the channels of a head of the text decoder."""
    decoder = config.get_text_config(decoder=True)
    return getattr(decoder, "head_dim", None) or decoder.hidden_size // decoder.num_attention_heads


def _done(path: Path, protocol: dict[str, Any]) -> set[tuple[int, str, int]]:
    """Returns what rows of the same protocol tell already."""
    found = read_rows(path, SCHEMA) if path.is_file() else []
    return {(row["nbits"], row["variant"], row["window"]) for row in found if row["protocol"] == protocol}


def write_page(rows: Sequence[dict[str, Any]], parts: str = "recipe") -> str:
    """Writes docs/ablation.md, or docs/ablation-means.md, from rows."""
    lines = [PAGE_HEAD.format(introduction=INTRODUCTIONS[parts])]
    protocols = []
    for row in rows:
        if row["protocol"] not in protocols:
            protocols.append(row["protocol"])
    for protocol in protocols:
        lines += _section(protocol, [row for row in rows if row["protocol"] == protocol])
    return "\n".join(lines)


def _section(protocol: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    windows = ", ".join(map(str, sorted({row["window"] for row in rows})))
    lines = [
        f"{protocol['model']}, windows of {protocol['window_tokens']} tokens of {protocol['text']} (SHA-256 "
        f"`{protocol['sha256'][:12]}`), number {windows}, chunks of {protocol['chunk_tokens']}, one "
        f"position of {protocol['stride']}.",
        "",
    ]
    for nbits in sorted({row["nbits"] for row in rows}, reverse=True):
        lines += [f"## {nbits} bits", "", "| variant | stored bits | KL | change of KL | perplexity |"]
        lines += ["|---|---:|---:|---:|---:|"]
        named: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            if row["nbits"] == nbits:
                named.setdefault(row["variant"], []).append(row)
        for name, own in named.items():
            lines.append(_line(name, own[0]["stored_bits"], summarize(own, named.get(RECIPE, []))))
        lines.append("")
    return lines


def _line(name: str, bits: float, figures: dict[str, Any]) -> str:
    change = "–"
    if name != RECIPE:
        change = f"{figures['change_percent']:+.0f} %"
        if figures["change_low_percent"] is not None:
            change += f" ({figures['change_low_percent']:+.0f} to {figures['change_high_percent']:+.0f})"
    return f"| {name} | {bits:.2f} | {figures['kl']:.3g} | {change} | {figures['perplexity_change_percent']:+.2f} % |"


def main() -> None:
    """Runs the command."""
    typer.run(run_ablation)


if __name__ == "__main__":
    main()
