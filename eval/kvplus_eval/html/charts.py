"""Charts as inline SVG: lines named at their ends, and points named where there is room.

Each chart is drawn twice, for a wide and for a narrow screen, and the style sheet shows one: letters keep their size,
which scaling a single drawing would not. Hovering tells the figure. Left out: zooming.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from hf_kvplus.plots import COLORS, HOST_COLOR, REFERENCE_COLOR, spread
from kvplus_eval.html.scale import Scale, pareto_front

LABEL_HEIGHT, LETTER_WIDTH = 14, 6.3
POINT_RADIUS = 5


@dataclass(frozen=True)
class Frame:
    """Sizes of a drawing in pixels."""

    name: str
    width: int
    height: int
    left: int = 58
    right: int = 96
    top: int = 12
    bottom: int = 44


FRAMES = (Frame("wide", 600, 380, right=108), Frame("narrow", 372, 330, left=50, right=88))


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Args:
        strategy: Its name.
        color: Its color.
        points: (x, y) in order.
        dashed: Whether it is drawn dashed.
    """

    strategy: str
    color: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """What an axis says.

    Args:
        title: Its words, with the unit.
        write: Writes a value of a mark.
        log: Whether it is logarithmic.
    """

    title: str
    write: Callable[[float], str] = "{:g}".format
    log: bool = False


def color_strategies(strategies: Sequence[str]) -> dict[str, str]:
    """Gives the reference black, transformers' own caches grey, and each other strategy a color of its own."""
    colors, used = {}, 0
    for strategy in strategies:
        if strategy == "dynamic":
            colors[strategy] = REFERENCE_COLOR
        elif strategy.startswith("hf-"):
            colors[strategy] = HOST_COLOR
        else:
            colors[strategy] = COLORS[used % len(COLORS)]
            used += 1
    return colors


def line_chart(series: Sequence[Series], x_axis: Axis, y_axis: Axis) -> str:
    """Draws lines, each named at its right end.

    Args:
        series: The lines, none empty.
        x_axis: The horizontal axis.
        y_axis: The vertical axis, from 0 where it is straight.

    Returns:
        Two `svg` elements.
    """
    return "".join(_lines(series, x_axis, y_axis, frame) for frame in FRAMES)


def scatter_chart(points: Sequence[Series], x_axis: Axis, y_axis: Axis) -> str:
    """Draws one point a strategy, with a stroke along those that none beats in both coordinates.

    Args:
        points: Series of one point each.
        x_axis: The horizontal axis.
        y_axis: The vertical axis.

    Returns:
        Two `svg` elements.
    """
    return "".join(_scatter(points, x_axis, y_axis, frame) for frame in FRAMES)


def _scales(series: Sequence[Series], x_axis: Axis, y_axis: Axis, frame: Frame, room: float) -> tuple[Scale, Scale]:
    """Chooses ranges that hold all points with some room."""
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points]
    x_room, y_room = (room, 1 + 3 * (room - 1)) if room > 1 else (1.0, 1.0)
    x_low, x_high = (min(xs) / x_room, max(xs) * x_room) if x_axis.log else (min(0, *xs), max(xs))
    y_low, y_high = (min(ys) / y_room, max(ys) * y_room) if y_axis.log else (min(0, *ys), 1.06 * max(ys) or 1)
    return (
        Scale(x_low, x_high, frame.left, frame.width - frame.right, x_axis.log),
        Scale(y_low, y_high, frame.height - frame.bottom, frame.top, y_axis.log),
    )


def _open(frame: Frame, title: str) -> str:
    size = f'viewBox="0 0 {frame.width} {frame.height}" width="{frame.width}" height="{frame.height}"'
    return f'<svg class="{frame.name}" {size} role="img" aria-label="{escape(title)}">'


def _axes(x: Scale, y: Scale, x_axis: Axis, y_axis: Axis, frame: Frame) -> str:
    """Draws the grid, the marks' values and the axes' words."""
    parts = []
    right, bottom = frame.width - frame.right, frame.height - frame.bottom
    for value in y.ticks():
        place = y.place(value)
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{right}" y1="{place:.1f}" y2="{place:.1f}"/>')
        parts.append(f'<text x="{frame.left - 6}" y="{place + 4:.1f}" text-anchor="end">{y_axis.write(value)}</text>')
    for value in x.ticks():
        place = x.place(value)
        parts.append(f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{frame.top}" y2="{bottom}"/>')
        parts.append(f'<text x="{place:.1f}" y="{bottom + 17}" text-anchor="middle">{x_axis.write(value)}</text>')
    middle = (frame.left + right) / 2
    parts.append(
        f'<text class="word" x="{middle:.0f}" y="{bottom + 36}" text-anchor="middle">{escape(x_axis.title)}</text>'
    )
    return "".join(parts)


def _lines(series: Sequence[Series], x_axis: Axis, y_axis: Axis, frame: Frame) -> str:
    x, y = _scales(series, x_axis, y_axis, frame, 1.0)
    parts = [_open(frame, f"{y_axis.title} against {x_axis.title}"), _axes(x, y, x_axis, y_axis, frame)]
    right = frame.width - frame.right
    ends = [y.place(one.points[-1][1]) for one in series]
    floor = frame.height - frame.bottom
    heights = spread(ends, LABEL_HEIGHT)
    shift = min(0.0, floor - max(heights)) if heights else 0.0
    for one, end, height in zip(series, ends, heights, strict=True):
        height += shift
        path = " ".join(f"{x.place(a):.1f},{y.place(b):.1f}" for a, b in one.points)
        dash = ' stroke-dasharray="6 4"' if one.dashed else ""
        parts.append(f'<g data-strategy="{escape(one.strategy)}" style="color:{one.color}">')
        parts.append(f'<polyline class="curve" points="{path}"{dash}/>')
        last = one.points[-1]
        # What ends early is no line that goes on to its name
        begin = x.place(last[0])
        far = " far" if begin < right - 1 else ""
        parts.append(
            f'<line class="leader{far}" x1="{begin:.1f}" y1="{end:.1f}" x2="{right + 12}" y2="{height:.1f}"/>'
        )
        for a, b in one.points:
            tip = f"{one.strategy}: {y_axis.write(b)} at {x_axis.write(a)}"
            parts.append(f'<circle class="dot" cx="{x.place(a):.1f}" cy="{y.place(b):.1f}" r="3">{_tip(tip)}</circle>')
        parts.append(f'<text class="name" x="{right + 15}" y="{height + 4:.1f}">{escape(_short(one.strategy, frame))}')
        parts.append(f"{_tip(one.strategy)}</text></g>")
    return "".join([*parts, "</svg>"])


def _short(name: str, frame: Frame) -> str:
    """Cuts a name that is longer than the margin; the whole of it is in the tip and in the tables."""
    letters = int((frame.right - 16) / LETTER_WIDTH)
    return name if len(name) <= letters else name[: letters - 1] + "…"


def _tip(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def _scatter(points: Sequence[Series], x_axis: Axis, y_axis: Axis, frame: Frame) -> str:
    # Names lie beside their points, so the margin on the right isn't needed for them
    frame = Frame(frame.name, frame.width, frame.height, frame.left, 14, frame.top, frame.bottom)
    x, y = _scales(points, x_axis, y_axis, frame, 1.25)
    places = [(x.place(one.points[0][0]), y.place(one.points[0][1])) for one in points]
    front = pareto_front([one.points[0] for one in points])
    path = " ".join(f"{places[index][0]:.1f},{places[index][1]:.1f}" for index in front)
    parts = [_open(frame, f"{y_axis.title} against {x_axis.title}"), _axes(x, y, x_axis, y_axis, frame)]
    parts.append(f'<polyline class="front" points="{path}"/>')
    taken = [(a - 7, b - 7, a + 7, b + 7) for a, b in places]
    for number, (one, (a, b)) in enumerate(zip(points, places, strict=True)):
        bits, loss = one.points[0]
        tip = f"{one.strategy}: {y_axis.write(loss)} at {x_axis.write(bits)}"
        bold = number in front
        left, middle = _free_place(LETTER_WIDTH * (1 + 0.12 * bold) * len(one.strategy) + 2, a, b, taken, frame)
        weight = ' font-weight="700"' if bold else ""
        parts.append(f'<g data-strategy="{escape(one.strategy)}" style="color:{one.color}">')
        parts.append(f'<circle class="point" cx="{a:.1f}" cy="{b:.1f}" r="{POINT_RADIUS}">{_tip(tip)}</circle>')
        parts.append(
            f'<text class="name" x="{left:.1f}" y="{middle + 4:.1f}"{weight}>{escape(one.strategy)}</text></g>'
        )
    return "".join([*parts, "</svg>"])


def _free_place(
    width: float, a: float, b: float, taken: list[tuple[float, float, float, float]], frame: Frame
) -> tuple[float, float]:
    """Finds the nearest place for a name of some width that covers no other name or point, and takes it."""
    best = (a + 9, b)
    for reach in range(6):
        rise = 9 * reach
        candidates = [(a + 9, b), (a - 9 - width, b)] if reach == 0 else []
        candidates += [(a + 9, b - rise), (a + 9, b + rise), (a - 9 - width, b - rise), (a - 9 - width, b + rise)]
        candidates += [(a - width / 2, b - 8 - rise), (a - width / 2, b + 8 + rise)]
        for left, middle in candidates:
            box = (left, middle - 7, left + width, middle + 7)
            inside = box[0] >= frame.left and box[2] <= frame.width - 2 and box[1] >= 0
            inside = inside and box[3] <= frame.height - frame.bottom
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                return left, middle
    taken.append((best[0], best[1] - 7, best[0] + width, best[1] + 7))
    return best


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
