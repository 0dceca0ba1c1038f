"""How the time of a decoded token grows with the context, from rows of `kvplus bench`.

A step has a part that depends on the context and one that doesn't; the shortest context stands for the latter. A cache
that is read once a step costs the same for each token it holds, however many there are, and no step is much slower
than the others: amortized growth of a buffer must not show as a pause.

The `growth` part of a row (kind `bench-growth`, in `growth.jsonl`):

    contexts                  the lengths, in tokens; the first is the one subtracted
    context_ms                what the longest context adds to a token, in ms
    us_per_1k_tokens          what each length but the first adds, per 1024 tokens of context
    linearity                 the last of these over the first: 1 if the time is in proportion to the context
    off_line                  distance of the times at all lengths but the first from the straight line that fits them
                              best, the largest as a share of `context_ms`; none with fewer than three such lengths
    steps, slowest_of_median  steps timed at the longest context, and the slowest over their median
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import linear_regression, median

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvplus_eval.results import Row

SHARED = ("schema", "run", "date", "model", "versions", "device", "git_commit", "strategy", "status", "reason")
LEAST_CONTEXTS = 3


def require_contexts(contexts: Sequence[int]) -> None:
    """Checks that growth can be told.

    Raises:
        ValueError: If there are fewer than three contexts.
    """
    if len(contexts) < LEAST_CONTEXTS:
        raise ValueError(
            f"`--growth` needs three `--context` lengths or more, got {len(contexts)}; for example 16,2048,8192"
        )


def growth_rows(rows: Sequence[Row]) -> list[Row]:
    """Tells how each strategy's time grows.

    Args:
        rows: Rows of one run of `kvplus bench`, three contexts or more. The first, which stands for what a step costs
            without a context, is subtracted from the others.

    Returns:
        A row for each strategy, in order; without figures where a context lacks them.
    """
    strategies = dict.fromkeys(row["strategy"] for row in rows)
    return [_growth_row([row for row in rows if row["strategy"] == name]) for name in strategies]


def _growth_row(rows: Sequence[Row]) -> Row:
    """Makes the row of one strategy from its rows, in order of context."""
    last = rows[-1]
    row = {name: last[name] for name in SHARED if name in last} | {"kind": "bench-growth", "growth": {}}
    if all(one["status"] == "ok" for one in rows):
        row["growth"] = _figures([one["bench"] for one in rows])
    return row


def _figures(points: Sequence[Row]) -> Row:
    """Computes the figures from the `bench` parts of all contexts."""
    lengths = [point["context_tokens"] for point in points]
    times = [point["decode_ms_per_token"] for point in points]
    steps = points[-1]["decode_ms"]
    slopes = [
        1000 * 1024 * (time - times[0]) / (length - lengths[0])
        for time, length in zip(times[1:], lengths[1:], strict=True)
    ]
    return {
        "fused": points[-1]["fused"],
        "contexts": lengths,
        "context_ms": times[-1] - times[0],
        "us_per_1k_tokens": slopes,
        # A cache whose time doesn't depend on the context has no slope to compare.
        "linearity": slopes[-1] / slopes[0] if slopes[0] > 0 else None,
        "off_line": _off_line(lengths[1:], times[1:], times[-1] - times[0]),
        "steps": len(steps),
        "slowest_of_median": max(steps) / median(steps),
    }


def _off_line(lengths: Sequence[int], times: Sequence[float], context_ms: float) -> float | None:
    """Tells how far from a straight line the times are, as a share of the longest context's cost."""
    if len(lengths) < LEAST_CONTEXTS or context_ms <= 0:
        return None
    slope, start = linear_regression(lengths, times)
    return max(abs(start + slope * length - time) for length, time in zip(lengths, times, strict=True)) / context_ms


def growth_table(rows: Sequence[Row]) -> Table:
    """Makes the table of how times grow, one line for each strategy."""
    table = Table(title="Growth of the time of a token", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("strategy", no_wrap=True)
    for head in ("context costs ms", "us per 1024 tokens", "linearity", "off the line", "steps", "slowest of median"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        growth = row["growth"]
        if not growth:
            table.add_row(row["strategy"], row["status"], *["-"] * 5, style="dim")
            continue
        slopes = " -> ".join(f"{slope:.0f}" for slope in growth["us_per_1k_tokens"])
        linearity, off_line = growth["linearity"], growth["off_line"]
        table.add_row(
            f"{row['strategy']} fused" if growth["fused"] else row["strategy"],
            f"{growth['context_ms']:.2f}",
            slopes,
            "-" if linearity is None else f"{linearity:.2f}",
            "-" if off_line is None else f"{off_line:.1%}",
            str(growth["steps"]),
            f"{growth['slowest_of_median']:.2f}",
        )
    return table
