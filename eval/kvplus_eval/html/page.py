"""Puts the page together from result rows: what was measured, tables, charts, heat maps, provenance.

Everything that rows hold is escaped; nothing on the page is fetched. Parts for which the rows have no figures are left
out. Left out: rows of different runs on one page, which `require_comparable` refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from hf_kvplus.report import require_comparable
from hf_kvplus.units import MISSING, format_bytes, format_number, format_percent
from kvplus_eval.html.charts import Axis, Series, color_strategies, line_chart, scatter_chart
from kvplus_eval.html.scale import pareto_front
from kvplus_eval.html.tables import Cell, heat_table, sortable_table

Row = dict[str, Any]

HERE = Path(__file__).parent
KL_FLOOR_NATS = 1e-7
MIB = 1024**2


def write_page(rows: Sequence[Row], path: Path) -> Path:
    """Writes the page.

    Args:
        rows: Rows of one evaluation.
        path: The file to write.

    Returns:
        `path`.

    Raises:
        ValueError: If there are no rows, or they belong to different evaluations.
    """
    path.write_text(render_page(rows), encoding="utf-8")
    return path


def render_page(rows: Sequence[Row]) -> str:
    """Returns the page as text; arguments and errors as for `write_page`."""
    require_comparable(rows)
    good = [row for row in rows if row["status"] == "ok"]
    title = f"Cache evaluation: {rows[0]['model']['name']}"
    parts = [f"<h1>{escape(title)}</h1>", _head(rows[0])]
    if good:
        colors = color_strategies([row["strategy"] for row in good])
        parts += [_verdict(good), _chips(colors), "<h2>Strategies</h2>", _main_table(good)]
        parts += [_charts(good, colors), _heat_maps(good), _every_figure(good)]
    parts += [_without_figures(rows), _provenance(rows[0])]
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + f"\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _head(row: Row) -> str:
    """Writes what was measured, on what, and how."""
    model, text, protocol, device = row["model"], row["text"], row["protocol"], row["device"]
    suite = f"suite {escape(str(row['suite']))}, " if row.get("suite") else ""
    facts = {
        "Model": f"{escape(model['name'])} ({escape(model['how'])}), {model['dtype']}, "
        f"{model['parameters'] / 1e6:,.0f} million parameters",
        **_compared_with(row),
        "Text": f"{escape(text['name'])}, SHA-256 <code>{text['sha256'][:16]}</code>",
        "Protocol": f"{suite}{_plural(protocol['windows'], 'window')} of {protocol['window_tokens']} tokens, fed in "
        f"chunks of {protocol['chunk_tokens']} through the cache, so that later tokens read what was stored",
        "Machine": f"{escape(device['name'])}, {_plural(device['threads'], 'thread')}",
        "Date": escape(row["date"]),
    }
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts.items()) + "</dl>"


def _compared_with(row: Row) -> dict[str, str]:
    """Names the model whose full cache figures compare with, where it isn't the model's own."""
    other = row.get("reference_model")
    if not other:
        return {}
    words = f"the full cache of {escape(other['name'])} ({escape(other['how'])}), revision"
    return {"Compared with": f"{words} <code>{escape(other['revision'])}</code>"}


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _verdict(rows: Sequence[Row]) -> str:
    """Names the strategies that no other beats in both bits and loss."""
    shown = _with_loss(rows)
    front = pareto_front([(_figure(row, "stored_bits_per_element"), _loss(row)) for row in shown])
    names = ", ".join(f"<b>{escape(shown[index]['strategy'])}</b>" for index in front)
    if not names:
        return ""
    floor = _figure(rows[0], "noise_chunking_nats")
    noise = "" if floor is None else f" Rounding alone moves the output by {format_number(floor)} nats (other chunks)."
    return (
        f"<p>Pareto front, fewest bits first: {names}. No other strategy here stores fewer bits and loses less."
        f"{noise}</p>"
    )


def _with_loss(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows that have a place among losses and bits."""
    figures = ("kl_mean_nats", "stored_bits_per_element")
    return [row for row in rows if not _is_yardstick(row) and None not in (_figure(row, name) for name in figures)]


def _is_yardstick(row: Row) -> bool:
    return row["strategy"] == "dynamic" and not row.get("reference_model")


def _loss(row: Row) -> float:
    return max(row["metrics"]["kl_mean_nats"], KL_FLOOR_NATS)


def _figure(row: Row, name: str) -> Any:
    """Returns a figure, None where it is missing, as in rows of older versions."""
    return row["metrics"].get(name)


def _chips(colors: dict[str, str]) -> str:
    """Writes a button for each strategy, which takes it out of every chart and table."""
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-strategy="{escape(name)}" style="--dot:{color}">'
        f"{escape(name)}</button>"
        for name, color in colors.items()
    )
    return f'<div class="chips" role="group" aria-label="Strategies shown">{buttons}</div>'


MAIN_COLUMNS: dict[str, tuple[str, Any]] = {
    "stored bits": ("stored_bits_per_element", format_number),
    "packed bits": ("packed_bits_per_element", format_number),
    "cache": ("cache_bytes", format_bytes),
    "of full": ("share_of_full_cache", lambda share: format_percent(100 * share)),
    "perplexity": ("perplexity", "{:.3f}".format),
    "change": ("perplexity_change_percent", lambda value: format_percent(value, signed=True)),
    "KL mean": ("kl_mean_nats", format_number),
    "KL 99 %": ("kl_p99_nats", format_number),
    "KL worst": ("kl_worst_nats", format_number),
    "top-1": ("top1_agreement", "{:.3f}".format),
    "top-5": ("top5_agreement", "{:.3f}".format),
    "greedy": ("greedy_agreement_tokens", str),
    "prefill": ("prefill_ms", lambda value: f"{value / 1000:.2f} s"),
    "first token": ("ttft_ms", lambda value: f"{value / 1000:.2f} s"),
    "ms/token": ("decode_ms_per_token", format_number),
    "peak": ("peak_host_bytes", format_bytes),
    "device peak": ("peak_device_bytes", format_bytes),
}


def _main_table(rows: Sequence[Row]) -> str:
    """Writes the comparison; columns without a single figure are left out."""
    heads = {
        head: column
        for head, column in MAIN_COLUMNS.items()
        if any(_figure(row, column[0]) is not None for row in rows)
    }
    body = [
        (row["strategy"], [Cell.of(row["strategy"]), *(_cell(row, *column) for column in heads.values())])
        for row in rows
    ]
    return sortable_table(["strategy", *heads], body)


def _cell(row: Row, figure: str, write: Any) -> Cell:
    value = _figure(row, figure)
    if value is None:
        return Cell(MISSING, "")
    if figure == "perplexity_change_percent" and _figure(row, "perplexity_change_low_percent") is not None:
        low, high = (_figure(row, f"perplexity_change_{end}_percent") for end in ("low", "high"))
        tip = f"95 % interval {format_percent(low, signed=True)} to {format_percent(high, signed=True)}"
        return Cell(write(value), repr(value), tip)
    if figure == "greedy_agreement_tokens":
        return Cell(f"{value} of {_figure(row, 'greedy_tokens')}", repr(value))
    return Cell(write(value), repr(value))


def _charts(rows: Sequence[Row], colors: dict[str, str]) -> str:
    """Draws what the rows have figures for."""
    figures = [
        _chart_of_bytes(rows, colors),
        _chart_of_loss(rows, colors),
        _chart_of_times(rows, colors),
        _chart_of_layers(rows, colors),
    ]
    return f'<div class="charts">{"".join(figures)}</div>'


def _caption(title: str, words: str, drawing: str, kind: str = "") -> str:
    return f'<figure class="{kind}"><figcaption>{title}<small>{words}</small></figcaption>{drawing}</figure>'


def _lines(rows: Sequence[Row], colors: dict[str, str], points: Any) -> list[Series]:
    return [
        Series(row["strategy"], colors[row["strategy"]], found, dashed=row["strategy"].startswith("hf-"))
        for row in rows
        if (found := points(row))
    ]


def _chart_of_bytes(rows: Sequence[Row], colors: dict[str, str]) -> str:
    series = _lines(rows, colors, lambda row: [(tokens, size / MIB) for tokens, size in row["curve"]])
    if not series:
        return ""
    drawing = line_chart(series, Axis("context (tokens)"), Axis("MiB"))
    return _caption("Cache bytes against context", "MiB, every tensor that the cache holds", drawing)


def _chart_of_loss(rows: Sequence[Row], colors: dict[str, str]) -> str:
    points = [
        Series(row["strategy"], colors[row["strategy"]], [(_figure(row, "stored_bits_per_element"), _loss(row))])
        for row in _with_loss(rows)
    ]
    if not points:
        return ""
    drawing = scatter_chart(points, Axis("stored bits per element", log=True), Axis("KL", write=write_loss, log=True))
    words = "mean KL to the full cache in nats, at least 1e-7; the band joins the Pareto front, named in bold"
    return _caption("Loss against stored bits", words, drawing)


def write_loss(value: float) -> str:
    """Writes a power of ten briefly: `1`, `0.01`, `1e-4`."""
    return f"{value:g}" if value >= 0.01 else f"{value:.0e}".replace("e-0", "e-")


def _chart_of_times(rows: Sequence[Row], colors: dict[str, str]) -> str:
    series = _lines(
        rows,
        colors,
        lambda row: [(one["context_tokens"], one["decode_ms_per_token"]) for one in row.get("contexts", [])],
    )
    if not series:
        return ""
    drawing = line_chart(series, Axis("context (tokens)"), Axis("ms"))
    return _caption("Time of one token against context", "milliseconds, medians, all in turns", drawing, "few")


def _chart_of_layers(rows: Sequence[Row], colors: dict[str, str]) -> str:
    """Draws how well each layer gives back its keys, or what each layer alone costs where rows say that."""
    if any(row.get("layer_sensitivity") for row in rows):
        series = _lines(
            rows,
            colors,
            lambda row: [(one["layer"], one["kl_nats"]) for one in row.get("layer_sensitivity", [])],
        )
        title, words = "Sensitivity by layer", "KL in nats when only this layer is quantized"
    else:
        # Full precision gives back everything, and its lines would lie on the axis
        lossy = [row for row in rows if any(one["key_error"] > 0 for one in row.get("layers", []))]
        series = _lines(lossy, colors, lambda row: [(one["layer"], one["key_error"]) for one in row["layers"]])
        title, words = "Error of read-back keys by layer", "relative to how keys differ among tokens"
    if not series:
        return ""
    return _caption(title, words, line_chart(series, Axis("layer"), Axis("error")), "few")


def _heat_maps(rows: Sequence[Row]) -> str:
    """Writes a table for each task: strategies down, lengths and depths across."""
    tasks = list(dict.fromkeys(one["task"] for row in rows for one in row.get("tasks", [])))
    if not tasks:
        return ""
    words = (
        "Share of questions answered exactly, by length of the context and depth of the fact in it (0 % is its "
        "beginning). Hovering tells the loss of the answers."
    )
    tables = "".join(
        f"<h3>{escape(task)}</h3>{_beyond_the_model(task, rows)}{heat_table(task, rows)}" for task in tasks
    )
    return f"<h2>Planted facts found</h2><p>{words}</p>{tables}"


def _beyond_the_model(task: str, rows: Sequence[Row]) -> str:
    """Says so where the model finds nothing even with its full cache, and shares tell nothing of caches."""
    full = [row for row in rows if row["strategy"] == "dynamic"]
    answers = [one["exact"] for row in full for one in row.get("tasks", []) if one["task"] == task]
    return "" if not answers or any(answers) else "<p>Beyond this model: its full cache answers none of these.</p>"


def _every_figure(rows: Sequence[Row]) -> str:
    """Lists every figure of every metric with its unit, metrics down and strategies across."""
    units = rows[0]["units"]
    body = [
        (
            None,
            [
                Cell.of(f"{name} ({meaning['unit']})"),
                *(Cell(format_number(_figure(row, name), digits=5), _plain(_figure(row, name))) for row in rows),
            ],
        )
        for name, meaning in units.items()
    ]
    table = sortable_table(["figure", *(row["strategy"] for row in rows)], body)
    return f"<details><summary>Every figure</summary>{table}</details>"


def _plain(value: Any) -> str:
    return "" if value is None else repr(value)


def _without_figures(rows: Sequence[Row]) -> str:
    """Lists strategies without figures, and faults that others have."""
    lines = [
        f"<li><b>{escape(row['strategy'])}</b>: {escape(row['status'])}: {escape(str(row['reason']))}</li>"
        for row in rows
        if row["status"] != "ok"
    ]
    lines += [
        f"<li><b>{escape(row['strategy'])}</b>: {escape(finding)}</li>"
        for row in rows
        for finding in row.get("findings", [])
    ]
    return f"<h2>Refused, failed, or noted</h2><ul>{''.join(lines)}</ul>" if lines else ""


def _provenance(row: Row) -> str:
    """Writes what somebody needs to repeat this."""
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items() if version)
    model, text = row["model"], row["text"]
    facts = {
        "Versions": escape(versions),
        "Commit": escape(str(row["git_commit"] or "none")),
        "Run": escape(row["run"]),
        "Model revision": f"<code>{escape(model['revision'])}</code>, attention {escape(model['attention'])}",
        "Text": f"SHA-256 <code>{text['sha256']}</code>"
        + (f", of the file <code>{text['file_sha256']}</code>" if text.get("file_sha256") else ""),
        "Protocol": f"<code>{escape(', '.join(f'{key}={value}' for key, value in row['protocol'].items()))}</code>",
    }
    listed = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts.items())
    return f"<h2>How to repeat it</h2><dl>{listed}</dl>"
