"""Writes the page from a results file: python -m kvplus_eval.html results.jsonl report.html."""

import sys
from pathlib import Path

from kvplus_eval.compare import latest_run
from kvplus_eval.html.page import write_page

if __name__ == "__main__":
    write_page(latest_run(Path(sys.argv[1])), Path(sys.argv[2]))
