"""Writes the measured tables of the pages in docs/strategies from result rows, as `kvplus_eval.readme` does for one.

A page names its strategies in a comment, `<!-- rows: int8 int4 -->`; the yardstick `dynamic` is added by itself. Where
quality isn't the question, `<!-- bench rows: fp fp+offload:disk -->` takes times from the latest run of `kvplus bench`
that has all of them, in `bench.jsonl` beside the results; one with `+offload` is compared with the same without.

python -m kvplus_eval.pages [results.jsonl] [docs/strategies]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_kvplus.report import markdown_table
from hf_kvplus.units import MISSING, format_bytes
from kvplus_eval.readme import RESULTS, replace_section, results_section
from kvplus_eval.results import Row, read_rows

PAGES = Path("docs/strategies")
YARDSTICK = "dynamic"


def fill_page(page: str, rows: Sequence[Row]) -> str:
    """Returns a page with its table made from rows; a page without rows of its own stays as it is.

    Args:
        page: The page's text.
        rows: Rows of one run.

    Raises:
        ValueError: If the page doesn't name its strategies, or lacks the markers.
    """
    named = re.search(r"<!-- rows: (.+?) -->", page)
    if named is None and "<!-- bench rows: " in page:
        return page
    if named is None:
        raise ValueError("the page must name its strategies: `<!-- rows: int8 int4 -->`")
    names = named[1].split()
    own = [row for row in rows if row["status"] == "ok" and _belongs(row["strategy"], names)]
    if not own:
        return page
    yardstick = [row for row in rows if row["strategy"] == YARDSTICK and row not in own]
    return replace_section(page, results_section([*yardstick, *own]))


def fill_bench_page(page: str, rows: Sequence[Row]) -> str:
    """Returns a page with its table of times; one whose strategies no run has together stays as it is.

    Args:
        page: The page's text; without `<!-- bench rows: ... -->` it is returned as it is.
        rows: Rows of `kvplus bench`, of any number of runs.
    """
    named = re.search(r"<!-- bench rows: (.+?) -->", page)
    if named is None:
        return page
    names = named[1].split()
    runs: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        if row["status"] == "ok" and not row["bench"]["fused"]:
            runs.setdefault((row["run"], row["bench"]["context_tokens"]), {})[row["strategy"]] = row
    fitting = [run for run in runs.values() if set(names) <= set(run)]
    return replace_section(page, _bench_section([fitting[-1][name] for name in names])) if fitting else page


def _bench_section(rows: Sequence[Row]) -> str:
    """Returns what was timed, then a line per strategy."""
    bench, device, model = rows[0]["bench"], rows[0]["device"], rows[0]["model"]
    caption = (
        f"{model['name']} at {bench['context_tokens']} tokens, {model['attention']} attention, medians of "
        f"{len(bench['decode_ms'])} tokens in turns, {device['name']} with {device['threads']} threads, files in the "
        "page cache."
    )
    times = {row["strategy"]: row["bench"]["decode_ms_per_token"] for row in rows}
    lines = [_bench_cells(row, times.get(row["strategy"].partition("+offload")[0])) for row in rows]
    return f"{caption}\n\n{markdown_table(('strategy', 'a token', 'of the same without', 'memory', 'files'), lines)}"


def _bench_cells(row: Row, base_ms: float | None) -> list[str]:
    """Returns the cells of one strategy."""
    bench, offloaded = row["bench"], "+offload" in row["strategy"]
    return [
        f"`{row['strategy']}`",
        f"{bench['decode_ms_per_token']:.1f} ms",
        f"{bench['decode_ms_per_token'] / base_ms:.2f}" if base_ms and offloaded else MISSING,
        format_bytes(bench["cache_bytes"]),
        format_bytes(bench.get("disk_bytes")) if offloaded else MISSING,
    ]


def _belongs(strategy: str, names: Sequence[str]) -> bool:
    """Whether a strategy is one of `names`, options aside."""
    return re.split(r"[:,+]", strategy)[0] in names


def main(arguments: Sequence[str]) -> None:
    """Fills every page from the latest run in a results file."""
    results = Path(arguments[0]) if arguments else RESULTS
    rows = read_rows(results)
    latest = [row for row in rows if row["run"] == rows[-1]["run"]]
    times = results.with_name("bench.jsonl")
    timed = read_rows(times) if times.exists() else []
    for path in sorted((Path(arguments[1]) if len(arguments) > 1 else PAGES).glob("*.md")):
        page = fill_bench_page(path.read_text(encoding="utf-8"), timed)
        path.write_text(fill_page(page, latest), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
