"""Runs the suite; writes docs/conformance.md and the table in the README: `python tests/conformance/table.py`.

With the path of a report that `pytest tests/conformance --junitxml=PATH` has written, that one is read instead.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

import torch
import transformers
import zoo
from modes import MODES
from suite import CELLS, STRATEGIES

HERE = Path(__file__).parent
TARGET = HERE.parents[1] / "docs" / "conformance.md"
README = HERE.parents[1] / "README.md"
BEGIN, END = "<!-- conformance: begin -->", "<!-- conformance: end -->"
Cell = tuple[str, str, str]
ANOTHER_WAY = """Some cells are run in another way, since the model or `generate` wants it so:

- padded batch: rows on the left, and the encoder's input of T5 and BART on the right; BART's decoder isn't padded,
  since it counts positions from the first column
- right continuation: a row says what it says alone; with windows, and in T5 and BART, where padding between tokens
  counts as distance, what the model says without a cache to the same padded row
- custom 4D mask: one mask for each kind of layer where some have windows; T5 and BART are compared with themselves
  without a cache under the same mask
- chunked prefill: with an encoder by several calls of the model, else by `prefill_chunk_size`
- inputs_embeds: to the model instead of `generate` for Gemma 3n, Falcon-H1 and models with an encoder
- Jamba takes one token at a time behind a prompt, without gradients
- Qwen2-VL: text alone for prompt lookup, chunked prefill, right continuation, custom masks and inputs_embeds, else
  with an image
"""


def run_suite(processes: int = 2) -> dict[Cell, bool]:
    """Runs every cell and returns whether it passed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", str(HERE / "test_modes.py"), "-n", str(processes), "--tb=line"]
        subprocess.run([*command, f"--junitxml={report}"], check=False)
        return read_report(report)


def read_report(report: Path) -> dict[Cell, bool]:
    """Reads pytest's report; a cell passes when its test neither failed nor broke off nor was skipped."""
    results = {}
    for test in ElementTree.parse(report).iter("testcase"):
        for entry in test.iter("property"):
            if entry.get("name") == "conformance":
                passed = not any(test.find(tag) is not None for tag in ("failure", "error", "skipped"))
                results[tuple(entry.get("value").split(" | "))] = passed
    return results


def symbol(results: dict[Cell, bool], cells: Iterable[Cell], reasons: list[str]) -> str:
    """Returns what the table shows for one architecture and mode under several strategies."""
    cells = [cell for cell in cells if cell in CELLS]
    if CELLS[cells[0]] is not None:
        return str(reasons.index(CELLS[cells[0]]) + 1)
    missing = [cell for cell in cells if CELLS[cell] is None and cell not in results]
    failed = [cell[1] for cell in cells if results.get(cell) is False]
    return "**not run**" if missing else f"**fails: {', '.join(failed)}**" if failed else "✓"


def render(results: dict[Cell, bool]) -> str:
    """Returns the page."""
    reasons = list(dict.fromkeys(reason for reason in CELLS.values() if reason))
    everywhere = [strategy.text for strategy in STRATEGIES if len(strategy.architectures) == len(zoo.ZOO)]
    passed = sum(results.values())
    lines = [
        "# Conformance",
        "",
        "Written by `python tests/conformance/table.py` from the results of the suite; don't edit it by hand.",
        f"transformers {transformers.__version__}, torch {torch.__version__}: {passed} cells pass, "
        f"{len(results) - passed} fail; {len(zoo.ZOO)} architectures, {len(MODES)} modes, "
        f"{len(STRATEGIES)} strategies.",
        "",
        "A cell is one mode on one tiny random model. It passes when every step's logits are those that the model",
        "computes without a cache, up to the loss that the strategy is allowed, and for `fp` when the text is that of",
        "`DynamicCache`. In each run a layer packs two blocks or more, one with a window; that is checked too.",
        "",
        f"✓ passes with {', '.join(f'`{text}`' for text in everywhere)}. A number: doesn't apply, see below.",
        "",
        "| mode | " + " | ".join(zoo.ZOO) + " |",
        "|---|" + "---|" * len(zoo.ZOO),
    ]
    for mode in MODES:
        row = [symbol(results, [(name, text, mode) for text in everywhere], reasons) for name in zoo.ZOO]
        lines.append(f"| {mode} | " + " | ".join(row) + " |")
    lines += ["", ANOTHER_WAY, "Not applicable, because", ""]
    lines += [f"{number}. {reason}" for number, reason in enumerate(reasons, start=1)]
    lines += [
        "",
        "## Strategies on some architectures",
        "",
        "| strategy | architectures | cells that pass | not applicable |",
    ]
    lines.append("|---|---|---|---|")
    for strategy in STRATEGIES:
        cells = [cell for cell in CELLS if cell[1] == strategy.text]
        good = sum(results.get(cell, False) for cell in cells)
        due = sum(CELLS[cell] is None for cell in cells)
        names = "all" if strategy.text in everywhere else ", ".join(strategy.architectures)
        lines.append(f"| `{strategy.text}` | {names} | {good} of {due} | {len(cells) - due} |")
    lines += ["", "## Architectures", "", "| model | what it adds |", "|---|---|"]
    lines += [f"| {architecture.name} | {architecture.trait} |" for architecture in zoo.ZOO.values()]
    return "\n".join(lines) + "\n"


def summarize(results: dict[Cell, bool]) -> str:
    """Returns the table of the README: modes by strategies, each with the architectures that pass of those it fits."""
    columns = [strategy for strategy in STRATEGIES if len(strategy.architectures) == len(zoo.ZOO)]
    lines = [
        "| mode | " + " | ".join(f"`{strategy.text}`" for strategy in columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for mode in MODES:
        row = []
        for strategy in columns:
            due = [(name, strategy.text, mode) for name in strategy.architectures]
            due = [cell for cell in due if CELLS[cell] is None]
            row.append(f"{sum(results.get(cell, False) for cell in due)} of {len(due)}")
        lines.append(f"| {mode} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def put_into_readme(document: str, table: str) -> str:
    """Replaces what stands between the markers.

    Raises:
        ValueError: If there are none.
    """
    head, begin, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the README must hold the markers `{BEGIN}` and `{END}`")
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


if __name__ == "__main__":
    outcome = read_report(Path(sys.argv[1])) if sys.argv[1:] else run_suite()
    TARGET.write_text(render(outcome), encoding="utf-8")
    README.write_text(put_into_readme(README.read_text(encoding="utf-8"), summarize(outcome)), encoding="utf-8")
    print(f"{TARGET.name}: {sum(outcome.values())} of {len(outcome)} cells pass")
    sys.exit(0 if all(outcome.values()) and outcome else 1)
