"""Writes the measured tables of the pages in docs/strategies from result rows, as `kvplus_eval.readme` does for one.

A page names its strategies in a comment, `<!-- rows: int8 int4 -->`; the yardstick `dynamic` is added by itself.

python -m kvplus_eval.pages [results.jsonl] [docs/strategies]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

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
    if named is None:
        raise ValueError("the page must name its strategies: `<!-- rows: int8 int4 -->`")
    names = named[1].split()
    own = [row for row in rows if row["status"] == "ok" and _belongs(row["strategy"], names)]
    if not own:
        return page
    yardstick = [row for row in rows if row["strategy"] == YARDSTICK and row not in own]
    return replace_section(page, results_section([*yardstick, *own]))


def _belongs(strategy: str, names: Sequence[str]) -> bool:
    """Whether a strategy is one of `names`, options aside."""
    return re.split(r"[:,+]", strategy)[0] in names


def main(arguments: Sequence[str]) -> None:
    """Fills every page from the latest run in a results file."""
    rows = read_rows(Path(arguments[0]) if arguments else RESULTS)
    latest = [row for row in rows if row["run"] == rows[-1]["run"]]
    for path in sorted((Path(arguments[1]) if len(arguments) > 1 else PAGES).glob("*.md")):
        path.write_text(fill_page(path.read_text(encoding="utf-8"), latest), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
