"""Loss on the text that recipes were tuned on beside loss on text that they weren't: `python -m kvplus_eval.heldout`.

The recipes of this package were tuned within the first 16,384 tokens of the text, 8 windows of 2048; windows behind
them are held out, and a plan that was found on them is refused. Both sets are measured in one pass a window, which
equals a pass in chunks through a real cache (`hf_kvplus.plans.onepass`). Each strategy's figures of each window are a
row, appended as soon as they are known; a run that was stopped goes on where it was, and the page is made from rows
alone. Windows of both sets come in turns, so an early stop leaves some of each.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hf_kvplus import build_cache
from hf_kvplus.layer_plan import load_plan
from hf_kvplus.loading import load_model
from hf_kvplus.plans.onepass import OnePass
from hf_kvplus.report import markdown_table
from kvplus_eval.ablation import PIECE_POSITIONS, head_dim_of, measure, stored_bits, window_figures
from kvplus_eval.data import cut_windows, load_text
from kvplus_eval.metrics.perplexity import paired_interval
from kvplus_eval.protocol import choose_strategies
from kvplus_eval.results import read_rows, run_facts

SCHEMA = "kvplus-heldout/3"
TUNED_TOKENS = 8 * 2048
TUNED, HELD_OUT = "tuned", "held out"
PROTOCOL = ("text", "sha256", "window_tokens", "chunk_tokens", "stride")

PAGE_HEAD = f"""# Text that the recipes weren't tuned on

Made by `python -m kvplus_eval.heldout`; don't edit. The recipes were tuned within the first {TUNED_TOKENS:,}
tokens of the text. Held-out windows lie behind those and before the text that plans were found on; what was seen of
some of them all the same, [the log](log/recipes.md) tells. *KL* is the mean divergence to the full cache in nats,
*perplexity* its change; in parentheses 95 % over pieces of {PIECE_POSITIONS} compared positions. Behind them KL by
window, in thousandths.
"""


def heldout(
    text: Annotated[str, typer.Option(help="Text, as for `kvplus eval`.")],
    strategies: Annotated[str, typer.Option(help="Comma-separated strategies.")] = "int8,k6v6,k5v4,int4,int3,int2",
    model: Annotated[str, typer.Option(help="Model, as for `kvplus eval`.")] = "smollm2-135m",
    tuned: Annotated[str, typer.Option(help="Windows that recipes were tuned on: a range.")] = "0-7",
    others: Annotated[str, typer.Option(help="Windows that they weren't.")] = "8-15",
    window_tokens: Annotated[int, typer.Option(min=128, help="Tokens in a window.")] = 2048,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens fed at a time.")] = 64,
    stride: Annotated[int, typer.Option(min=1, help="Every so many positions are compared.")] = 1,
    rows: Annotated[Path, typer.Option(help="Rows, appended.")] = Path("heldout.jsonl"),
    page: Annotated[Path | None, typer.Option(help="Markdown page to write from all of the rows.")] = None,
) -> None:
    """Measure strategies on tuned and on held-out windows."""
    sets = {TUNED: _range("tuned", tuned), HELD_OUT: _range("others", others)}
    first = math.ceil(TUNED_TOKENS / window_tokens)
    if set(sets[TUNED]) & set(sets[HELD_OUT]) or min(sets[HELD_OUT]) < first:
        raise ValueError(
            f"`others` must begin at window {first} of {window_tokens} tokens or later, behind the {TUNED_TOKENS} "
            f"tokens that recipes were tuned on, got {others!r}"
        )
    names = choose_strategies(strategies)
    chosen = load_text(text)
    for name in names:
        require_unseen(name, chosen.sha256, (max(sets[HELD_OUT]) + 1) * window_tokens)
    loaded, tokenizer, source = load_model(model)
    cut = cut_windows(chosen, tokenizer, windows=max(map(max, sets.values())) + 1, window_tokens=window_tokens)
    facts = {
        **run_facts(loaded, source),
        "schema": SCHEMA,
        "text": chosen.name,
        "sha256": chosen.sha256,
        "window_tokens": window_tokens,
        "chunk_tokens": chunk_tokens,
        "stride": stride,
    }
    positions = torch.arange(0, window_tokens - 1, stride)
    console = Console(stderr=True)
    plans = {name: _plan_digest(name) for name in names}
    known = {_key(row) for row in read_rows(rows, SCHEMA)} if rows.is_file() else set()
    with OnePass(loaded, chunk_tokens) as run, Progress(console=console) as progress:
        order = in_turns(sets)
        task = progress.add_task("windows", total=len(order) * len(names))
        for label, index in order:
            reference = None
            for name in names:
                row = {**facts, "strategy": name, "plan_sha256": plans[name], "set": label, "window": index}
                if _key(row) not in known:
                    with torch.inference_mode():
                        reference = reference or run.reference(cut[index], positions)
                    cache = build_cache(name, loaded.config, max_length=window_tokens, model=loaded)
                    found = measure(run, [reference], cache, [cut[index][positions + 1]])
                    row |= {"stored_bits": stored_bits(cache, head_dim_of(loaded.config)), **window_figures(*found)}
                    with rows.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
                progress.advance(task)
    every = read_rows(rows, SCHEMA)
    console.print(_table([row for row in every if row["strategy"] in names and _protocol(row) == _protocol(facts)]))
    if page is not None:
        page.write_text(write_page(every), encoding="utf-8")
    typer.echo(json.dumps({"rows": str(rows), "strategies": names}))


def require_unseen(strategy: str, sha256: str, tokens: int) -> None:
    """Refuses a plan that was found on the text that it is to be measured on.

    Args:
        strategy: A strategy string; a plan is asked for where it was found, as far as it tells.
        sha256: Names the text.
        tokens: How many of its first tokens are measured.

    Raises:
        ValueError: If the plan was found on some of them.
    """
    path = _plan_path(strategy)
    facts = load_plan(path).facts if path else {}
    first = facts.get("first_token")
    if first is not None and facts.get("text_sha256") == sha256 and first < tokens:
        raise ValueError(
            f"strategy `{strategy}`: the plan was found on this text from token {first} on, and `others` reach to "
            f"{tokens}; give earlier windows, or a plan found on other text"
        )


def in_turns(sets: dict[str, Sequence[int]]) -> list[tuple[str, int]]:
    """Returns label and index of every window, the first of each set first."""
    columns = [[(label, index) for index in windows] for label, windows in sets.items()]
    return [pair for pairs in zip_longest(*columns) for pair in pairs if pair is not None]


def summarize_windows(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Takes the windows of one strategy and one set together.

    Args:
        rows: Rows of windows of equal length.

    Returns:
        Mean KL in nats and change of perplexity in percent, each with both ends of its 95 % interval.
    """
    kl_low, kl_high = paired_interval([piece for row in rows for piece in row["kl_pieces"]])
    ends = paired_interval([piece for row in rows for piece in row["loss_change_pieces"]])
    low, high = (None if end is None else 100 * math.expm1(end) for end in ends)
    return {
        "windows": [row["window"] for row in rows],
        "kl": sum(row["kl"] for row in rows) / len(rows),
        "kl_low": kl_low,
        "kl_high": kl_high,
        "perplexity_percent": 100 * math.expm1(sum(row["loss_change"] for row in rows) / len(rows)),
        "perplexity_low_percent": low,
        "perplexity_high_percent": high,
    }


def write_page(rows: Sequence[dict[str, Any]]) -> str:
    """Writes docs/heldout.md from rows."""
    lines = [PAGE_HEAD]
    for protocol in dict.fromkeys(map(_protocol, rows)):
        lines += _section([row for row in rows if _protocol(row) == protocol])
    return "\n".join(lines)


def _section(rows: Sequence[dict[str, Any]]) -> list[str]:
    first = rows[0]
    title = (
        f"{first['window_tokens']} tokens a window of {first['text']} (SHA-256 `{first['sha256'][:12]}`), chunks of "
        f"{first['chunk_tokens']}, {_every(first['stride'])}."
    )
    cells = []
    for name, sets in _by_strategy(rows).items():
        bits = next(iter(sets.values()))[0]["stored_bits"]
        line = [f"`{name}`", "–" if bits is None else f"{bits:.3f}"]
        for label in (TUNED, HELD_OUT):
            found = sets.get(label)
            line += [*_cells(summarize_windows(found)), by_window(found)] if found else ["–"] * 3
        cells.append(line)
    header = ("strategy", "bits", *(f"{label}: {what}" for label in (TUNED, HELD_OUT) for what in FIGURES))
    return [f"## {first['model']['name']}", "", title, "", markdown_table(header, cells), ""]


FIGURES = ("KL", "perplexity", "by window")


def _every(stride: int) -> str:
    return "every position" if stride == 1 else f"one position of {stride}"


def by_window(rows: Iterable[dict[str, Any]]) -> str:
    """Returns the KL of each window in thousandths, with the windows' indices."""
    return ", ".join(f"{row['window']}: {1000 * row['kl']:.3g}" for row in sorted(rows, key=lambda row: row["window"]))


def _cells(figures: dict[str, Any]) -> list[str]:
    kl, change = f"{figures['kl']:.3g}", f"{figures['perplexity_percent']:+.2f} %"
    if figures["kl_low"] is not None:
        kl += f" ({figures['kl_low']:.2g} to {figures['kl_high']:.2g})"
        change += f" ({figures['perplexity_low_percent']:+.2f} to {figures['perplexity_high_percent']:+.2f})"
    return [kl, change]


def _by_strategy(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Returns strategy -> set -> rows, in the order in which they came."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        found.setdefault(row["strategy"], {}).setdefault(set_of(row), []).append(row)
    return found


def set_of(row: dict[str, Any]) -> str:
    """Tells by its tokens which set a window belongs to; rows of before went by its number, however long it was."""
    return HELD_OUT if row["window"] * row["window_tokens"] >= TUNED_TOKENS else TUNED


def _protocol(row: dict[str, Any]) -> tuple[Any, ...]:
    """Returns what rows must share to stand in one table."""
    return row["model"]["name"], row["model"]["revision"], *(row[name] for name in PROTOCOL)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Tells a measurement from others."""
    return *_protocol(row), row["strategy"], row["plan_sha256"], row["window"]


def _plan_path(strategy: str) -> Path | None:
    """Returns the file of a strategy's plan."""
    return Path(strategy.removeprefix("plan:").partition("+")[0]) if strategy.startswith("plan:") else None


def _plan_digest(strategy: str) -> str | None:
    """Returns the digest of a plan's file, so that another plan under the same name is measured anew."""
    path = _plan_path(strategy)
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path else None


def _range(name: str, text: str) -> list[int]:
    """Reads `0-7` or `3`."""
    first, _, last = text.partition("-")
    try:
        found = list(range(int(first), int(last or first) + 1))
    except ValueError:
        found = []
    if not found:
        raise ValueError(f"`{name}` must be a range of windows such as 0-7, got {text!r}")
    return found


def _table(rows: list[dict[str, Any]]) -> Table:
    """Puts both sets side by side; intervals are drawn over pieces of positions."""
    table = Table(title=f"KL to the full cache, 95 % over pieces of {PIECE_POSITIONS} positions", title_justify="left")
    for column in ("strategy", TUNED, "perplexity", HELD_OUT, "perplexity"):
        table.add_column(column)
    for name, sets in _by_strategy(rows).items():
        cells = [_cells(summarize_windows(sets[label])) if label in sets else ["–"] * 2 for label in (TUNED, HELD_OUT)]
        table.add_row(name, *cells[0], *cells[1])
    return table


def main() -> None:
    """Runs the command."""
    typer.run(heldout)


if __name__ == "__main__":
    main()
