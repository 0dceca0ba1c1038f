"""Pictures drawn from result rows: bytes and times against context length, and loss against bits.

Strategies are named beside their lines and points, with no legend to look up; labels are moved apart until none
covers another. matplotlib is imported when a picture is drawn. Left out: interactive pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

Row = dict[str, Any]

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#a6761d", "#7b3294", "#e6ab02", "#66a61e", "#c2185b")
REFERENCE_COLOR = "#222222"
HOST_COLOR = "#8a8f98"
LABEL_POINTS = 9
KL_FLOOR_NATS = 1e-7
FULL_PRECISION_BITS = 16
TICK_BITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def plot_bytes(rows: Sequence[Row], path: Path) -> None:
    """Draws cache bytes against context length, one line a strategy, named at its right end.

    Args:
        rows: Result rows with status `ok`.
        path: The PNG file to write.
    """
    figure, axes = _figure()
    ends: list[tuple[float, str, str]] = []
    for row, color in zip(rows, _colors(rows), strict=True):
        tokens, sizes = zip(*row["curve"], strict=True)
        mebibytes = [size / 1024**2 for size in sizes]
        axes.plot(tokens, mebibytes, color=color, linewidth=1.8, linestyle="--" if _is_host(row) else "-")
        ends.append((mebibytes[-1], row["strategy"], color))
    axes.set_xlim(0, max(row["curve"][-1][0] for row in rows))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("context length (tokens)")
    axes.set_ylabel("cache (MiB, all tensors)")
    axes.set_title("Cache bytes against context length", loc="left")
    _label_ends(figure, axes, ends)
    figure.savefig(path, bbox_inches="tight")


def plot_decode(rows: Sequence[Row], path: Path) -> None:
    """Draws milliseconds per decoded token against context length, one line a strategy, named at its right end.

    Args:
        rows: Rows of one run of `kvplus bench` with status `ok`, of two contexts or more.
        path: The PNG file to write.
    """
    figure, axes = _figure()
    names = list(dict.fromkeys(row["strategy"] for row in rows))
    firsts = [next(row for row in rows if row["strategy"] == name) for name in names]
    ends: list[tuple[float, str, str]] = []
    for first, color in zip(firsts, _colors(firsts), strict=True):
        points = [row["bench"] for row in rows if row["strategy"] == first["strategy"]]
        tokens = [point["context_tokens"] for point in points]
        times = [point["decode_ms_per_token"] for point in points]
        style = "--" if _is_host(first) else "-"
        axes.plot(tokens, times, style, color=color, linewidth=1.8, marker="o", markersize=4)
        fused = " fused" if points[-1]["fused"] else ""
        ends.append((times[-1], first["strategy"] + fused, color))
    axes.set_xlim(0, max(row["bench"]["context_tokens"] for row in rows))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("context length (tokens)")
    axes.set_ylabel("ms per decoded token (median)")
    axes.set_title("Time of a token against context length", loc="left")
    _label_ends(figure, axes, ends)
    figure.savefig(path, bbox_inches="tight")


def plot_loss(rows: Sequence[Row], path: Path) -> None:
    """Draws KL divergence against stored bits, both logarithmic, one point a strategy.

    The reference itself isn't drawn, its divergence is zero unless another model is the reference. Points below the
    floor are drawn on it, as triangles, and rows whose bits nobody knows not at all.

    Args:
        rows: Result rows with status `ok`.
        path: The PNG file to write.
    """
    figure, axes = _figure()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    colored = zip(rows, _colors(rows), strict=True)
    shown = [(row, color) for row, color in colored if row.get("reference_model") or not _is_reference(row)]
    points: list[tuple[float, float, str, str]] = []
    for row, color in shown:
        bits, loss = row["metrics"]["stored_bits_per_element"], row["metrics"]["kl_mean_nats"]
        if bits is None:
            continue
        marker = "v" if loss < KL_FLOOR_NATS else "s" if _is_host(row) else "o"
        axes.plot(bits, max(loss, KL_FLOOR_NATS), marker, color=color, markersize=9, markeredgecolor="white", zorder=3)
        below = " (below 1e-7)" if loss < KL_FLOOR_NATS else ""
        points.append((bits, max(loss, KL_FLOOR_NATS), row["strategy"] + below, color))
    widths = [bits for bits, *_ in points] or [FULL_PRECISION_BITS]
    axes.set_xlim(0.75 * min(widths), 1.5 * max(widths))
    axes.set_xticks([width for width in TICK_BITS if 0.75 * min(widths) <= width <= 1.5 * max(widths)])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_ylim(KL_FLOOR_NATS / 2, max([loss for _, loss, *_ in points], default=1) * 6)
    axes.set_xlabel("stored bits per element (codes, scales, sinks, recent tokens: everything)")
    axes.set_ylabel("KL to the full cache (nats, mean)")
    axes.set_title("Loss against stored bits (lower left is better)", loc="left")
    _label_points(figure, axes, points)
    figure.savefig(path, bbox_inches="tight")


def spread(values: Sequence[float], gap: float) -> list[float]:
    """Moves values apart until neighbours differ by at least `gap`, keeping their order and each group's centre.

    Args:
        values: Where labels would like to be.
        gap: The least distance.

    Returns:
        Where they go, in the order of `values`.
    """
    order = sorted(range(len(values)), key=lambda index: values[index])
    groups: list[list[int]] = []
    centres: list[float] = []
    for index in order:
        groups.append([index])
        centres.append(values[index])
        while len(groups) > 1 and centres[-1] - centres[-2] < gap * (len(groups[-1]) + len(groups[-2])) / 2:
            last, last_centre = groups.pop(), centres.pop()
            weight = len(groups[-1]) / (len(groups[-1]) + len(last))
            centres[-1] = weight * centres[-1] + (1 - weight) * last_centre
            groups[-1] += last
    placed = [0.0] * len(values)
    for group, centre in zip(groups, centres, strict=True):
        for place, index in enumerate(group):
            placed[index] = centre + gap * (place - (len(group) - 1) / 2)
    return placed


def _figure() -> tuple[Figure, Axes]:
    """Makes a figure with light axes, without touching matplotlib's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 5.2), dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(color="#e4e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _is_reference(row: Row) -> bool:
    return row["strategy"] == "dynamic"


def _is_host(row: Row) -> bool:
    return row["strategy"].startswith("hf-")


def _colors(rows: Sequence[Row]) -> list[str]:
    """Gives the reference black, transformers' own caches grey, and each other strategy a color of its own."""
    colors = []
    for row in rows:
        if _is_reference(row):
            colors.append(REFERENCE_COLOR)
        elif _is_host(row):
            colors.append(HOST_COLOR)
        else:
            colors.append(COLORS[sum(color in COLORS for color in colors) % len(COLORS)])
    return colors


def _label_ends(figure: Figure, axes: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Writes names to the right of line ends, spread vertically, each tied to its line by a thin stroke."""
    to_pixels, right = axes.transData, axes.get_xlim()[1]
    wanted = [to_pixels.transform((right, value))[1] for value, *_ in ends]
    gap = 1.35 * LABEL_POINTS * figure.dpi / 72
    for (value, name, color), height in zip(ends, spread(wanted, gap), strict=True):
        shift = (height - to_pixels.transform((right, value))[1]) * 72 / figure.dpi
        axes.annotate(
            name,
            xy=(right, value),
            xytext=(16, shift),
            textcoords="offset points",
            va="center",
            color=color,
            fontsize=LABEL_POINTS,
            arrowprops=_leader(color, relpos=(0, 0.5)),
            annotation_clip=False,
        )


def _label_points(figure: Figure, axes: Axes, points: list[tuple[float, float, str, str]]) -> None:
    """Writes names near points, each at the nearest place that covers no other label or point."""
    from matplotlib.transforms import Bbox

    renderer = figure.canvas.get_renderer()
    pixels = [axes.transData.transform((bits, loss)) for bits, loss, *_ in points]
    taken = [Bbox.from_bounds(x - 9, y - 9, 18, 18) for x, y in pixels]
    for bits, loss, name, color in points:
        label = axes.annotate(
            name,
            xy=(bits, loss),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=color,
            fontsize=LABEL_POINTS,
        )
        for offset in _offsets():
            label.set_position(offset)
            label.set_ha("left" if offset[0] > 0 else "right" if offset[0] < 0 else "center")
            box = label.get_window_extent(renderer)
            if _is_free(box, taken, axes):
                break
        taken.append(box.padded(2))
        if max(abs(offset[0]), abs(offset[1])) > 14:
            leader = _leader(color, shrinkB=4)
            axes.annotate("", xy=(bits, loss), xytext=offset, textcoords="offset points", arrowprops=leader)


def _leader(color: str, **changes: Any) -> dict[str, Any]:
    """Returns the style of a thin stroke from a label to what it names."""
    return {"arrowstyle": "-", "color": color, "linewidth": 0.7, "shrinkA": 1, "shrinkB": 0, **changes}


def _offsets() -> list[tuple[float, float]]:
    """Returns places for a label around its point in points, nearest first."""
    directions = [(1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1)]
    return [
        (8 * reach * x, (11 if x == 0 else 9) * reach * y) for reach, (x, y) in product((1, 2, 3, 4, 5), directions)
    ]


def _is_free(box: Bbox, taken: list[Bbox], axes: Axes) -> bool:
    """Tells whether a label's box lies inside the axes and covers nothing."""
    frame = axes.bbox
    inside = box.x0 >= frame.x0 and box.y0 >= frame.y0 and box.y1 <= frame.y1 and box.x1 <= frame.x1
    return inside and not any(box.overlaps(other) for other in taken)
