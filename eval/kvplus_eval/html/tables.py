"""Tables of the page: sortable ones, and heat maps of planted facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from hf_kvplus.units import MISSING

# From nothing found to everything found; both ends are told apart in grey as well
COLD, HOT = (252, 233, 217), (0, 104, 150)


@dataclass(frozen=True)
class Cell:
    """One cell.

    Args:
        text: What is read.
        value: What is sorted by; empty sorts last.
        tip: What hovering tells.
    """

    text: str
    value: str
    tip: str = ""

    @classmethod
    def of(cls, text: str) -> Cell:
        """Makes a cell that is sorted by its text."""
        return cls(text, text)


def sortable_table(heads: Sequence[str], body: Sequence[tuple[str | None, Sequence[Cell]]]) -> str:
    """Writes a table whose heads sort it.

    Args:
        heads: The heads.
        body: For each line its strategy, or None, and its cells, the first of which names the line.
    """
    head = "".join(f'<th scope="col"><button type="button">{escape(one)}</button></th>' for one in heads)
    lines = "".join(_line(strategy, cells) for strategy, cells in body)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _line(strategy: str | None, cells: Sequence[Cell]) -> str:
    named = "" if strategy is None else f' data-strategy="{escape(strategy)}"'
    first, *others = cells
    written = f'<th scope="row" data-value="{escape(first.value)}">{escape(first.text)}</th>'
    for cell in others:
        tip = f' title="{escape(cell.tip)}"' if cell.tip else ""
        written += f'<td data-value="{escape(cell.value)}"{tip}>{escape(cell.text)}</td>'
    return f"<tr{named}>{written}</tr>"


def heat_table(task: str, rows: Sequence[dict[str, Any]]) -> str:
    """Writes the heat map of one task: strategies down, depths within lengths across.

    Args:
        task: The task.
        rows: Result rows with figures.
    """
    answers = {row["strategy"]: [one for one in row.get("tasks", []) if one["task"] == task] for row in rows}
    places = sorted({(one["length_tokens"], one["depth"]) for found in answers.values() for one in found})
    lengths = list(dict.fromkeys(length for length, _ in places))
    depths = [len([place for place in places if place[0] == length]) for length in lengths]
    above = "".join(
        f'<th colspan="{count}">{length} tokens</th>' for length, count in zip(lengths, depths, strict=True)
    )
    below = "".join(f"<th>{100 * depth:.0f} %</th>" for _, depth in places)
    lines = "".join(
        f'<tr data-strategy="{escape(strategy)}"><th scope="row">{escape(strategy)}</th>'
        + "".join(_heat(found, *place) for place in places)
        + "</tr>"
        for strategy, found in answers.items()
    )
    head = f'<tr><th rowspan="2">strategy</th>{above}</tr><tr>{below}</tr>'
    return f'<div class="scroll"><table class="heat"><thead>{head}</thead><tbody>{lines}</tbody></table></div>'


def _heat(answers: Sequence[dict[str, Any]], length: int, depth: float) -> str:
    """Writes one cell, with the answers' loss in its tip."""
    here = [one for one in answers if (one["length_tokens"], one["depth"]) == (length, depth)]
    if not here:
        return f"<td>{MISSING}</td>"
    share = sum(one["exact"] for one in here) / len(here)
    nats = sum(one["nats"] for one in here) / len(here)
    color = ",".join(str(round(cold + share * (hot - cold))) for cold, hot in zip(COLD, HOT, strict=True))
    ink = "#fff" if share > 0.55 else "#1d2126"
    tip = f"{len(here)} asked, {nats:.3g} nats a token of the answer"
    return f'<td class="heat" style="background:rgb({color});color:{ink}" title="{tip}">{100 * share:.0f} %</td>'
