"""Writes the README's table from result rows, so that no figure there is typed by hand.

python -m kvplus_eval.readme [results.jsonl ...] [README.md]

Without arguments it takes every results file below eval/results/cpu, the one in that folder itself first. Of a file
the latest run of each model counts; models that were compared with the same one stand in one table.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_kvplus.report import markdown_table
from hf_kvplus.units import format_bytes, format_count, format_number, format_percent
from kvplus_eval.results import Row, read_rows

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
RESULTS, README = Path("eval/results/cpu/results.jsonl"), Path("README.md")


def results_section(rows: Sequence[Row]) -> str:
    """Returns what stands between the markers: what was measured, then a line per strategy, and model if several.

    Raises:
        ValueError: If no row has figures, or they compare with different models.
    """
    good = [row for row in rows if row["status"] == "ok"]
    if not good:
        raise ValueError("no row has figures; run `kvplus eval` first")
    reference, text, protocol = good[0].get("reference_model"), good[0]["text"], good[0]["protocol"]
    if any(row.get("reference_model") != reference for row in good):
        raise ValueError("the rows differ in `reference_model`, so they can't be compared; choose rows of one")
    figures = good[0]["metrics"]
    # Of the model itself the first row is its full cache
    full_bytes = figures["cache_bytes"] / figures["share_of_full_cache"] if reference else figures["cache_bytes"]
    head = ("strategy", "stored bits", "packed bits", "cache of full", "KL to full", "perplexity", "same top token")
    caption = (
        f"{_subject(good[0])}, {format_count(protocol['windows'], 'window')} of {protocol['window_tokens']} tokens of "
        f"{text['name']} (SHA-256 `{text['sha256'][:12]}`), fed in chunks of {protocol['chunk_tokens']}; full cache "
        f"{format_bytes(full_bytes)}."
    )
    if not reference:
        return f"{caption}\n\n{markdown_table(head, [_cells(row) for row in good])}"
    body = [[row["model"]["name"], *_cells(row), f"{row['metrics']['perplexity']:.2f}"] for row in good]
    return f"{caption}\n\n{markdown_table(('model', *head, 'perplexity itself'), body)}"


def latest_rows(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of the latest run, and of other models that were compared with the same one their latest."""
    last = rows[-1]
    reference = last.get("reference_model")
    if not reference:
        return [row for row in rows if row["run"] == last["run"]]
    alike = [row for row in rows if row.get("reference_model") == reference]
    latest = {row["model"]["name"]: row["run"] for row in alike}
    return [row for row in alike if row["run"] == latest[row["model"]["name"]]]


def _subject(row: Row) -> str:
    """Names whose figures these are, or what they compare with."""
    reference = row.get("reference_model")
    return f"Against the full cache of {reference['name']}" if reference else str(row["model"]["name"])


def _cells(row: Row) -> list[str]:
    figures = row["metrics"]
    share = figures["share_of_full_cache"]
    return [
        f"`{row['strategy']}`",
        format_number(figures["stored_bits_per_element"]),
        format_number(figures["packed_bits_per_element"]),
        format_percent(None if share is None else 100 * share),
        format_number(figures["kl_mean_nats"]),
        format_percent(figures["perplexity_change_percent"], signed=True),
        format_percent(100 * figures["top1_agreement"]),
    ]


def replace_section(document: str, section: str) -> str:
    """Puts `section` between the markers and leaves everything else as it is.

    Raises:
        ValueError: If the markers are missing.
    """
    if BEGIN not in document or END not in document:
        raise ValueError(f"the document must hold the markers `{BEGIN}` and `{END}`")
    pattern = f"{re.escape(BEGIN)}.*?{re.escape(END)}"
    return re.sub(pattern, lambda _: f"{BEGIN}\n{section}\n{END}", document, count=1, flags=re.DOTALL)


def main(arguments: Sequence[str]) -> None:
    """Rewrites the section of a README from the latest run in each results file."""
    files = [Path(argument) for argument in arguments if argument.endswith(".jsonl")]
    files = files or [RESULTS, *sorted(RESULTS.parent.glob(f"*/{RESULTS.name}"))]
    documents = [Path(argument) for argument in arguments if not argument.endswith(".jsonl")]
    readme = documents[0] if documents else README
    sections = []
    for rows in map(read_rows, files):
        sections.append(results_section(latest_rows(rows)))
    section = "\n\n".join(sections)
    readme.write_text(replace_section(readme.read_text(encoding="utf-8"), section), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
