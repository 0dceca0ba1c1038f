"""Turns result rows into a Markdown report with two pictures; rows are all it needs, so it can be made again later.

Left out: merging runs. Rows of different texts, models or protocols don't belong into one table, and are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_kvplus.plots import plot_bytes, plot_loss
from hf_kvplus.units import format_bytes, format_count, format_number, format_percent

Row = dict[str, Any]

BYTES_PICTURE = "bytes-by-context.png"
LOSS_PICTURE = "kl-by-bits.png"


def write_report(rows: Sequence[Row], folder: Path) -> Path:
    """Writes `report.md` and its pictures.

    Args:
        rows: Rows of one evaluation.
        folder: Where to write.

    Returns:
        The path of the report.

    Raises:
        ValueError: If there are no rows, or they belong to different evaluations.
    """
    require_comparable(rows)
    good = [row for row in rows if row["status"] == "ok"]
    parts = [_head(rows[0])]
    if good:
        plot_bytes(good, folder / BYTES_PICTURE)
        plot_loss(good, folder / LOSS_PICTURE)
        parts += [_main_table(good), _pictures(), _all_figures(good)]
    notes = [f"- `{row['strategy']}`: {finding}" for row in good for finding in row.get("findings", [])]
    if notes:
        parts.append("## Noted\n\n" + "\n".join(notes))
    if len(good) < len(rows):
        parts.append(_without_figures([row for row in rows if row["status"] != "ok"]))
    path = folder / "report.md"
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


def markdown_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Writes a Markdown table, its first column to the left and the others to the right."""
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    return "\n".join(lines + [f"| {' | '.join(cells)} |" for cells in body])


def require_comparable(rows: Sequence[Row]) -> None:
    """Checks that rows can stand in one table."""
    if not rows:
        raise ValueError("a report needs at least one row")
    for key in ("model", "reference_model", "text", "protocol"):
        if any(row.get(key) != rows[0].get(key) for row in rows):
            raise ValueError(f"the rows differ in `{key}`, so they can't be compared; choose rows of one run")


def _head(row: Row) -> str:
    """Writes what was measured, on what, and how."""
    model, text, protocol, device = row["model"], row["text"], row["protocol"], row["device"]
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items() if version)
    commit = f", commit {row['git_commit']}" if row["git_commit"] else ""
    return (
        f"# Cache evaluation: {model['name']}\n\n"
        f"- Model: {model['how']}, revision {model['revision']}, {model['dtype']}, attention `{model['attention']}`\n"
        f"{_reference_line(row)}"
        f"- Text: {text['name']}, SHA-256 `{text['sha256']}`\n"
        f"- Protocol: {format_count(protocol['windows'], 'window')} of {protocol['window_tokens']} tokens, fed in "
        f"chunks of {protocol['chunk_tokens']} through the cache, each window with a fresh one\n"
        f"- Time: prefill of one window in chunks of {protocol['prefill_chunk_tokens']}, then "
        f"{protocol['decode_tokens']} greedy tokens; medians of {protocol['timing_rounds']} rounds in which all "
        f"strategies take turns\n"
        f"- Machine: {device['name']}, {device['threads']} threads; {versions}\n"
        f"- {row['date']}{commit}"
    )


def _reference_line(row: Row) -> str:
    """Writes which model's full cache figures compare with, where it isn't the model's own."""
    other = row.get("reference_model")
    if not other:
        return ""
    return f"- Compared with: the full cache of {other['name']} ({other['how']}, revision {other['revision']})\n"


def _main_table(rows: Sequence[Row]) -> str:
    """Writes the comparison."""
    head = ("strategy", "stored bits", "packed bits", "cache", "of full", "perplexity", "change (95 % interval)")
    head += ("KL mean", "KL 99 %", "top-1", "greedy", "prefill", "decode")
    return "## Strategies\n\n" + markdown_table(head, [_main_cells(row) for row in rows])


def _main_cells(row: Row) -> list[str]:
    """Writes one line of the comparison."""
    figures = row["metrics"]
    low, high = figures["perplexity_change_low_percent"], figures["perplexity_change_high_percent"]
    interval = "" if low is None else f" ({format_percent(low, signed=True)} to {format_percent(high, signed=True)})"
    greedy = figures["greedy_agreement_tokens"]
    share = figures["share_of_full_cache"]
    prefill_ms = figures["prefill_ms"]
    return [
        f"`{row['strategy']}`",
        format_number(figures["stored_bits_per_element"]),
        format_number(figures["packed_bits_per_element"]),
        format_bytes(figures["cache_bytes"]),
        format_percent(None if share is None else 100 * share),
        f"{figures['perplexity']:.3f}",
        format_percent(figures["perplexity_change_percent"], signed=True) + interval,
        format_number(figures["kl_mean_nats"]),
        format_number(figures["kl_p99_nats"]),
        f"{figures['top1_agreement']:.3f}",
        format_number(greedy) if greedy is None else f"{greedy} of {figures['greedy_tokens']}",
        format_number(prefill_ms) if prefill_ms is None else f"{prefill_ms / 1000:.2f} s",
        format_number(figures["decode_ms_per_token"]) + ("" if prefill_ms is None else " ms"),
    ]


def _pictures() -> str:
    """Embeds the pictures."""
    return (
        f"![Cache bytes against context length]({BYTES_PICTURE})\n\n"
        f"![KL divergence against stored bits]({LOSS_PICTURE})\n\n"
        "Stored bits and bytes are summed over every live tensor of the cache. KL is to the full cache, per position."
    )


def _all_figures(rows: Sequence[Row]) -> str:
    """Lists every figure of every metric with its unit, metrics down and strategies across."""
    units = rows[0]["units"]
    body = [
        [f"{name} ({meaning['unit']})", *(format_number(row["metrics"].get(name), digits=5) for row in rows)]
        for name, meaning in units.items()
    ]
    return "## Every figure\n\n" + markdown_table(["figure", *(f"`{row['strategy']}`" for row in rows)], body)


def _without_figures(rows: Sequence[Row]) -> str:
    """Lists the strategies that have no figures, with the reason."""
    lines = [f"- `{row['strategy']}`: {row['status']}: {row['reason']}" for row in rows]
    return "## Without figures\n\n" + "\n".join(lines)
