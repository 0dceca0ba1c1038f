"""What is made of the rows of `kvplus_eval.streaming`: comparisons with the yardstick, summaries, the picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
# Tokens whose mean loss is published, and those that a comparison takes for one sample of the text.
BLOCK_TOKENS, SAMPLE_TOKENS = 64, 128


def compare(row: Row, yardstick: Row, boundary: int) -> Iterator[Row]:
    """Compares two rows token by token, before and from `boundary` on.

    Yields:
        The perplexities over the tokens that both scored, their difference in percent, and its standard error, with
        `SAMPLE_TOKENS` tokens next to each other taken for one sample.
    """
    losses = [dict(zip(places(one), one["losses"], strict=True)) for one in (row, yardstick)]
    shared = sorted(losses[0].keys() & losses[1].keys())
    for name, chosen in (
        (f"tokens before {boundary}", [place for place in shared if place < boundary]),
        (f"tokens from {boundary} on", [place for place in shared if place >= boundary]),
    ):
        if not chosen:
            continue
        own, other = (torch.tensor([values[place] for place in chosen], dtype=torch.float64) for values in losses)
        size = SAMPLE_TOKENS if "positions" not in yardstick else 1
        samples = [part.mean().item() for part in (own - other).split(size) if len(part) == size]
        yield {
            "strategy": row["strategy"],
            "against": f"{yardstick['strategy']}, stride {yardstick['stride']}",
            "where": name,
            "tokens": len(chosen),
            "perplexity": own.mean().exp().item(),
            "yardstick": other.mean().exp().item(),
            "percent": 100 * torch.expm1((own - other).mean()).item(),
            "standard_error": 100 * statistics.stdev(samples) / math.sqrt(len(samples)) if len(samples) > 1 else None,
        }


def pool(rows: Sequence[Row]) -> Iterator[Row]:
    """Compares strategies with the yardstick over all pieces of a text that rows are of.

    Args:
        rows: As published; a piece is told by its text, `skip`, `tokens` and `bos`, and its latest rows count.

    Yields:
        For each strategy a comparison of each piece, as of `compare`, then one over all of them, with the standard
        error that the spread of the pieces gives beside that of their samples.
    """
    pieces: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row["kind"] == "streaming" and "block_losses" in row:
            piece = (row["text"]["sha256"], row["bos"], row["tokens"], row["skip"])
            pieces.setdefault(piece, {})[row["strategy"]] = row
    for strategy in sorted({name for piece in pieces.values() for name, row in piece.items() if "stride" not in row}):
        found = []
        for key in sorted(pieces):
            yardstick = next((row for row in pieces[key].values() if "stride" in row), None)
            if yardstick is not None and strategy in pieces[key]:
                samples = _shared_samples(pieces[key][strategy], yardstick)
                if not len(samples[0]):
                    continue
                found.append(samples)
                yield {"strategy": strategy, "skip": key[-1]} | _difference(*found[-1])
        if len(found) > 1:
            whole = _difference(*(torch.cat(samples) for samples in zip(*found, strict=True)))
            means = [(own - other).mean().item() for own, other in found]
            by_piece = 100 * statistics.stdev(means) / math.sqrt(len(means))
            yield {"strategy": strategy, "pieces": len(found)} | whole | {"standard_error_by_piece": by_piece}


def _shared_samples(row: Row, yardstick: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the mean losses of the samples of `SAMPLE_TOKENS` that two published rows share."""
    losses = []
    for one in (row, yardstick):
        begins = (one["first"] + one["block_tokens"] * index for index in range(len(one["block_losses"])))
        losses.append(dict(zip(begins, one["block_losses"], strict=True)))
    size = SAMPLE_TOKENS // row["block_tokens"]
    shared = sorted(losses[0].keys() & losses[1].keys())
    shared = shared[len(shared) % size :]
    own, other = (torch.tensor([values[begin] for begin in shared], dtype=torch.float64) for values in losses)
    return own.unflatten(0, (-1, size)).mean(1), other.unflatten(0, (-1, size)).mean(1)


def _difference(own: torch.Tensor, other: torch.Tensor) -> Row:
    """Returns how two lists of samples differ."""
    return {
        "tokens": SAMPLE_TOKENS * len(own),
        "perplexity": own.mean().exp().item(),
        "yardstick": other.mean().exp().item(),
        "percent": 100 * torch.expm1((own - other).mean()).item(),
        "standard_error": 100 * (own - other).std().item() / math.sqrt(len(own)) if len(own) > 1 else None,
    }


def places(row: Row) -> Sequence[int]:
    """Returns the tokens that a row's `losses` are of."""
    return row.get("positions") or range(row["first"], row["first"] + len(row["losses"]))


def published(row: Row, tokens: int = BLOCK_TOKENS) -> Row:
    """Returns a row with mean losses of blocks of tokens in place of each token's; the last block ends the text."""
    if "positions" in row:
        return row | {"losses": [round(loss, 4) for loss in row["losses"]]}
    rest = len(row["losses"]) % tokens
    means = torch.tensor(row["losses"][rest:], dtype=torch.float64).unflatten(0, (-1, tokens)).mean(1)
    kept = {name: value for name, value in row.items() if name != "losses"}
    losses = [round(mean, 5) for mean in means.tolist()]
    return kept | {"first": row["first"] + rest, "block_tokens": tokens, "block_losses": losses}


def summarize(rows: Sequence[Row], last_tokens: int) -> list[Row]:
    """Returns per row the perplexity of the last tokens, the largest loss and the figures of time and bytes."""
    figures = []
    for row in rows:
        tail = row["losses"][-last_tokens:]
        times = {
            f"{name}ms_per_token": {place: round(value, 1) for place, value in row[f"{name}ms_per_token"].items()}
            for name in ("", "cpu_")
            if "ms_per_token" in row
        }
        figures.append(
            {
                "strategy": row["strategy"],
                "perplexity": math.exp(statistics.fmean(tail)),
                "tokens": len(tail),
                "finite": all(map(math.isfinite, row["losses"])),
                **times,
                "recompute_ms": row.get("recompute_ms"),
                "recompute_cpu_ms": row.get("recompute_cpu_ms"),
                "cache_bytes": sorted(set(row.get("cache_bytes", {}).values())),
            }
        )
    return figures


def plot(rows: Sequence[Row], path: Path, smooth: int = 512) -> None:
    """Draws perplexity along the text, and the bytes of the cache beside those of one that keeps every token.

    Raises:
        ValueError: If the rows are of several pieces or texts; one picture shows one.
        ImportError: If matplotlib isn't installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    rows = latest_rows(rows)
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 1.3))
    for row in rows:
        blocks = smooth // row["block_tokens"]
        losses = torch.tensor(row["block_losses"])
        losses = losses[len(losses) % blocks :]
        means = losses.unflatten(0, (-1, blocks)).mean(1)
        end = row["first"] + row["block_tokens"] * len(row["block_losses"])
        ends = end - smooth * torch.arange(len(means) - 1, -1, -1)
        recomputed = "stride" in row
        (line,) = above.plot(
            ends, means.exp(), "k:" if recomputed else "-", label=_meaning(row), zorder=2 + recomputed
        )
        if not recomputed:
            sizes = {int(place): size / 2**20 for place, size in row["cache_bytes"].items()}
            below.plot(list(sizes), list(sizes.values()), marker=".", color=line.get_color())
    above.set(ylabel=f"perplexity, {smooth} tokens at a time", yscale="log")
    above.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    above.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    above.yaxis.set_minor_formatter(ticker.NullFormatter())
    tokens, trained = rows[0]["tokens"], rows[0].get("trained_tokens")
    if trained and trained < tokens:
        for axes in (above, below):
            axes.axvline(trained, color="gray", linestyle="--", linewidth=1)
        above.annotate("trained length", (trained, 0.02), xycoords=("data", "axes fraction"), color="gray",
                       xytext=(4, 0), textcoords="offset points")  # fmt: skip
    if "bytes_per_token" in rows[0]:
        full = rows[0]["bytes_per_token"] * tokens / 2**20
        below.plot([0, tokens], [0, full], "--", color="gray", label="a cache of every token")
        below.legend(fontsize="small")
    above.set_title(f"{rows[0]['model']['name']}: {tokens:,} tokens of {rows[0]['text']['name']}", fontsize="medium")
    above.legend(fontsize="small")
    below.set(ylabel="cache, MiB", xlabel="tokens read")
    below.set_ylim(bottom=0)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def latest_rows(rows: Sequence[Row]) -> list[Row]:
    """Returns the latest row of each strategy that can be drawn, the first strategy that was measured first.

    Raises:
        ValueError: If they are of several pieces or texts.
    """
    rows = [row for row in rows if row["kind"] == "streaming" and "block_losses" in row]
    found = {(row["text"]["sha256"], row["skip"], row["tokens"], row["bos"]) for row in rows}
    if len(found) != 1:
        raise ValueError(
            f"`--plot` needs a file with rows of one piece of one text, got {len(found)}; draw them from files of "
            "their own"
        )
    return list({row["strategy"]: row for row in rows}.values())


def _meaning(row: Row) -> str:
    """Returns a row's strategy and what it stands for."""
    name = row["strategy"]
    if "stride" in row:
        return f"{name}: the latest tokens read anew, without cache"
    if "sinks=0" in name:
        return f"{name}: no sinks"
    place = "moved up to the window" if "positions=shifted" in name else "left where they were"
    return f"{name}: sinks {place}"
