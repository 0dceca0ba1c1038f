"""Is run B worse than run A? A regression gate over two results files, for whoever ships models or caches.

Rows are matched by strategy. Loss is compared window by window, since both runs saw the same windows: a strategy is
worse when the paired interval of the difference lies above zero and its mean beyond the tolerance, so neither noise
nor trifles fail a build. Bytes and bits are exact and get a tolerance alone. Times are compared only when a tolerance
for them is given, and only between equal machines. Left out: judging improvements, which are shown and pass.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from hf_kvplus.units import MISSING, format_number
from kvplus_eval.metrics.perplexity import bootstrap_interval
from kvplus_eval.results import SCHEMA, Row, read_rows

RESULTS_NAME = "results.jsonl"
SAME = ("model.name", "model.revision", "model.dtype", "text.sha256", "protocol.windows", "protocol.window_tokens")
SAME += ("protocol.chunk_tokens", "reference_model.name", "reference_model.revision")
# What else has to be the same where planted facts were asked for, and where times are compared
SAME_FACTS = ("protocol.tasks", "protocol.task_lengths", "protocol.task_depths", "protocol.task_samples")
SAME_TIMES = ("protocol.prefill_chunk_tokens", "protocol.decode_tokens")
# What a mean KL must exceed before it counts at all: below, float32 rounding decides
FLOOR_NATS = 1e-9


@dataclass(frozen=True)
class Tolerances:
    """How much worse is still accepted.

    Args:
        kl: Relative rise of the mean KL, 0.05 for 5 %.
        perplexity: Rise of perplexity in percent.
        size: Relative rise of cache bytes.
        agreement: Fall of a share (top-1, retrieval), 0.01 for one point of a hundred.
        time: Relative rise of times, None to leave them out.
    """

    kl: float = 0.05
    perplexity: float = 0.1
    size: float = 0.01
    agreement: float = 0.02
    time: float | None = None

    def __post_init__(self) -> None:
        """Checks that none is negative."""
        for name, value in asdict(self).items():
            if value is not None and value < 0:
                raise ValueError(f"`{name}` must be at least 0, got {value}")


@dataclass(frozen=True)
class Finding:
    """One figure of one strategy in both runs.

    Args:
        strategy: The strategy.
        figure: Name of the figure.
        before: Its value in A.
        after: Its value in B.
        low: Lower end of the paired interval of the difference per window, None without one.
        high: Upper end.
        worse: Whether it is a regression.
        why: The reason where a value is missing.
    """

    strategy: str
    figure: str
    before: float | None
    after: float | None
    low: float | None = None
    high: float | None = None
    worse: bool = False
    why: str | None = None


def latest_run(place: Path) -> list[Row]:
    """Reads the rows of the last run in a results file.

    Args:
        place: The file, or the folder that holds it.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it has no rows of `kvplus eval`.
    """
    path = place / RESULTS_NAME if place.is_dir() else place
    if not path.is_file():
        raise FileNotFoundError(f"results `{path}`: no such file; give a {RESULTS_NAME} or the folder that holds it")
    rows = [row for row in read_rows(path) if row["kind"] == "eval"]
    if not rows:
        raise ValueError(f"results `{path}` has no rows of `kvplus eval`")
    return [row for row in rows if row["run"] == rows[-1]["run"]]


def compare_runs(before: Sequence[Row], after: Sequence[Row], tolerances: Tolerances) -> list[Finding]:
    """Compares two runs, strategy by strategy.

    Args:
        before: Rows of run A, the yardstick.
        after: Rows of run B.
        tolerances: How much worse is accepted.

    Returns:
        The findings, in the order of A's strategies; those that only B has are left out.

    Raises:
        ValueError: If the runs don't measure the same, share no strategy, or the first has no figures.
    """
    asked = any(rows[0]["protocol"].get("tasks") for rows in (before, after))
    timed = tolerances.time is not None
    for name in (*SAME, *(SAME_FACTS if asked else ()), *(SAME_TIMES if timed else ())):
        part, key = name.split(".")
        # Older rows have no reference model, and most newer ones have null there
        mine, theirs = ((rows[0].get(part) or {}).get(key) for rows in (before, after))
        if mine != theirs:
            raise ValueError(f"the runs differ in {name}, {mine!r} and {theirs!r}, so they can't be compared")
    rows = {row["strategy"]: row for row in after}
    if not any(row["strategy"] in rows for row in before):
        raise ValueError("the runs have no strategy in common")
    findings: list[Finding] = []
    for row in before:
        findings += _compare(row, rows.get(row["strategy"]), tolerances)
    if not findings:
        raise ValueError("the first run has no figures to compare with: none of its strategies ended well")
    return findings


def _compare(before: Row, after: Row | None, tolerances: Tolerances) -> list[Finding]:
    """Compares one strategy."""
    name = before["strategy"]
    if before["status"] != "ok":
        return []
    if after is None or after["status"] != "ok":
        why = "B doesn't have it" if after is None else f"B: {after['status']}: {after['reason']}"
        return [Finding(name, "status", None, None, worse=True, why=why)]
    findings = [
        _paired(name, before, after, "kl_nats", "kl_mean_nats", tolerances),
        _paired(name, before, after, "loss_nats", "perplexity", tolerances),
        _relative(name, before, after, "cache_bytes", tolerances.size),
    ]
    shares = [figure for figure, meaning in before["units"].items() if _is_agreement(figure, meaning)]
    findings += [_agreement(name, before, after, figure, tolerances.agreement) for figure in shares]
    if tolerances.time is not None:
        if before["device"] != after["device"]:
            raise ValueError("the runs come from different machines or threads, so times can't be compared")
        if before["metrics"].get("decode_ms_per_token") is None:
            raise ValueError("the first run has no times; run it with --timing-rounds, or leave out --time-tolerance")
        findings += [
            _relative(name, before, after, figure, tolerances.time) for figure in ("prefill_ms", "decode_ms_per_token")
        ]
    # What the yardstick lacks judges nothing; what only it has is lost
    return [
        one if one.after is not None else replace(one, worse=True, why="B doesn't have it")
        for one in findings
        if one.before is not None
    ]


def _is_agreement(figure: str, meaning: Row) -> bool:
    return meaning == {"unit": "share", "better": "higher"} and figure.endswith(("agreement", "accuracy"))


def _paired(name: str, before: Row, after: Row, column: str, figure: str, tolerances: Tolerances) -> Finding:
    """Compares a loss window by window; rows that lack their windows are compared by their means alone."""
    old, new = before["metrics"].get(figure), after["metrics"].get(figure)
    mine, theirs = before.get("windows", {}).get(column, []), after.get("windows", {}).get(column, [])
    low = high = None
    if mine and len(mine) == len(theirs):
        low, high = bootstrap_interval([b - a for a, b in zip(mine, theirs, strict=True)])
    if old is None or new is None:
        return Finding(name, figure, old, new)
    if figure == "perplexity":
        beyond = 100 * (new / old - 1) > tolerances.perplexity
    else:
        beyond = new > FLOOR_NATS and new > old * (1 + tolerances.kl)
    return Finding(name, figure, old, new, low, high, worse=beyond and (low is None or low > 0))


def _relative(name: str, before: Row, after: Row, figure: str, tolerance: float) -> Finding:
    """Compares a figure where less is better."""
    old, new = before["metrics"].get(figure), after["metrics"].get(figure)
    return Finding(name, figure, old, new, worse=None not in (old, new) and new > old * (1 + tolerance))


def _agreement(name: str, before: Row, after: Row, figure: str, tolerance: float) -> Finding:
    """Compares a share where more is better."""
    old, new = before["metrics"].get(figure), after["metrics"].get(figure)
    return Finding(name, figure, old, new, worse=None not in (old, new) and new < old - tolerance)


def compare_table(findings: Sequence[Finding]) -> Table:
    """Makes the table of a comparison: every change, and regressions marked."""
    table = Table(title="B against A", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("strategy", no_wrap=True)
    table.add_column("figure", no_wrap=True)
    for head in ("A", "B", "interval of B - A"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("")
    for one in findings:
        interval = MISSING if one.low is None else f"{format_number(one.low)} to {format_number(one.high)}"
        mark = "[red]worse[/red]" if one.worse else ""
        cells = (
            format_number(one.before, 5),
            format_number(one.after, 5),
            interval,
            f"{mark} {one.why or ''}".strip(),
        )
        table.add_row(one.strategy, one.figure, *cells)
    return table


def compare_summary(findings: Sequence[Finding], before: Row, after: Row) -> str:
    """Returns the last line of `kvplus compare`: one JSON object."""
    worse = [asdict(finding) for finding in findings if finding.worse]
    facts = {"schema": SCHEMA, "kind": "compare", "a": before["run"], "b": after["run"]}
    return json.dumps({**facts, "compared": len(findings), "worse": worse})
