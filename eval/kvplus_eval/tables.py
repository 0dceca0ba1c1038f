"""Tables on the screen, and the one JSON line that ends every command's output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hf_kvplus.units import MISSING, format_bytes, format_number, format_percent
from kvplus_eval.results import SCHEMA, Row

# Wide enough for the widest table with the names of this package's strategies
TABLE_COLUMNS = 128
# When output goes to a file or a pipe, where there is no screen to ask, and a strategy may name files
PIPE_COLUMNS = 400
SUMMARY_FIGURES = (
    "perplexity",
    "perplexity_change_percent",
    "kl_mean_nats",
    "top1_agreement",
    "stored_bits_per_element",
    "packed_bits_per_element",
    "cache_bytes",
    "share_of_full_cache",
    "greedy_agreement_tokens",
    "prefill_ms",
    "decode_ms_per_token",
)
QUALITY_HEADS = ("perplexity", "change", "KL nats", "top-1", "greedy")
EVAL_HEADS = ("bits", "packed", "cache", "of full", *QUALITY_HEADS, "prefill", "ms/token")


def make_console() -> Console:
    """Returns a console that is as wide as the screen, or wide enough for the tables where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_COLUMNS)


def eval_tables(rows: Sequence[Row], columns: int) -> list[Table]:
    """Makes the comparison of an evaluation: one table, or two where the screen is too narrow for one.

    Args:
        rows: Rows of one evaluation.
        columns: Characters in a line of the screen.

    Returns:
        The tables; strategies without figures show what became of them instead.
    """
    other = rows[0].get("reference_model")
    against = f", against the full cache of {other['name']}" if other else ""
    if columns >= TABLE_COLUMNS:
        return [_figure_table(f"What each cache costs and saves{against}", rows, EVAL_HEADS)]
    return [
        _figure_table(f"What each cache costs{against}", rows, QUALITY_HEADS),
        _figure_table("What each cache takes", rows, [head for head in EVAL_HEADS if head not in QUALITY_HEADS]),
    ]


def complaints(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each strategy without figures, `int4: failed: why`, and for each fault of the others."""
    failed = [f"{row['strategy']}: {row['status']}: {row['reason']}" for row in rows if row["status"] != "ok"]
    return failed + [f"{row['strategy']}: {finding}" for row in rows for finding in row.get("findings", [])]


def eval_summary(rows: Sequence[Row], folder: Path) -> str:
    """Returns the last line of `kvplus eval`: one JSON object with the main figures of every strategy."""
    return json.dumps(
        {
            "schema": SCHEMA,
            "kind": "eval-summary",
            "run": rows[0]["run"],
            "model": rows[0]["model"]["name"],
            "reference_model": (rows[0].get("reference_model") or {}).get("name"),
            "text_sha256": rows[0]["text"]["sha256"],
            "out": str(folder),
            "strategies": [
                {
                    "strategy": row["strategy"],
                    "status": row["status"],
                    "reason": row["reason"],
                    **{name: row["metrics"][name] for name in SUMMARY_FIGURES if name in row["metrics"]},
                }
                for row in rows
            ],
        }
    )


def bench_table(rows: Sequence[Row]) -> Table:
    """Makes the comparison of a benchmark, one line for each strategy and context length."""
    table = Table(title="Decoding one token, strategies in turns", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("context", justify="right")
    table.add_column("strategy", no_wrap=True)
    for head in ("ms per token", "of dynamic", "fastest to slowest", "prefill s", "cache", "KL to dynamic"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        context = str(row["bench"]["context_tokens"])
        if row["status"] == "ok":
            name = f"{row['strategy']} fused" if row["bench"]["fused"] else row["strategy"]
            table.add_row(context, name, *_bench_cells(row["bench"]))
        else:
            table.add_row(context, row["strategy"], row["status"], *[MISSING] * 5, style="dim")
    return table


def bench_summary(rows: Sequence[Row]) -> str:
    """Returns the last line of `kvplus bench`: one JSON object with every median and ratio."""
    names = ("context_tokens", "decode_ms_per_token", "ratio_to_dynamic", "prefill_ms", "cache_bytes", "kl_mean_nats")
    return json.dumps(
        {
            "schema": SCHEMA,
            "kind": "bench-summary",
            "run": rows[0]["run"],
            "model": rows[0]["model"]["name"],
            "strategies": [
                {
                    "strategy": row["strategy"],
                    "status": row["status"],
                    "reason": row["reason"],
                    **{name: row["bench"].get(name) for name in names},
                }
                for row in rows
            ],
        }
    )


def _figure_table(title: str, rows: Sequence[Row], heads: Sequence[str]) -> Table:
    """Makes a table of the figures named in `heads`."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("strategy", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        if row["status"] == "ok":
            cells = _eval_cells(row["metrics"])
            table.add_row(row["strategy"], *(cells[head] for head in heads))
        else:
            table.add_row(row["strategy"], row["status"], *[MISSING] * (len(heads) - 1), style="dim")
    return table


def _eval_cells(figures: Row) -> dict[str, str]:
    """Writes one strategy's figures, each under the head of its column."""
    share, prefill_ms = figures["share_of_full_cache"], figures["prefill_ms"]
    greedy, decode_ms = figures["greedy_agreement_tokens"], figures["decode_ms_per_token"]
    return {
        "bits": format_number(figures["stored_bits_per_element"]),
        "packed": format_number(figures["packed_bits_per_element"]),
        "cache": format_bytes(figures["cache_bytes"]),
        "of full": MISSING if share is None else f"{100 * share:.1f} %",
        "perplexity": f"{figures['perplexity']:.3f}",
        "change": format_percent(figures["perplexity_change_percent"], signed=True),
        "KL nats": format_number(figures["kl_mean_nats"]),
        "top-1": f"{figures['top1_agreement']:.3f}",
        "greedy": MISSING if greedy is None else f"{greedy}/{figures['greedy_tokens']}",
        "prefill": MISSING if prefill_ms is None else f"{prefill_ms / 1000:.2f} s",
        "ms/token": MISSING if decode_ms is None else f"{decode_ms:.1f}",
    }


def _bench_cells(bench: Row) -> list[str]:
    ratio = bench["ratio_to_dynamic"]
    return [
        f"{bench['decode_ms_per_token']:.2f}",
        MISSING if ratio is None else f"{ratio:.2f}",
        f"{bench['decode_ms_fastest']:.1f} to {bench['decode_ms_slowest']:.1f}",
        f"{bench['prefill_ms'] / 1000:.2f}",
        format_bytes(bench["cache_bytes"]),
        format_number(bench["kl_mean_nats"]),
    ]
