"""Axes: from values to places in a drawing, and the values at which an axis is marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WANTED_TICKS = 5


@dataclass(frozen=True)
class Scale:
    """A straight or logarithmic axis.

    Args:
        low: Value at its beginning.
        high: Value at its end.
        begin: Place of the beginning in the drawing.
        end: Place of the end.
        log: Whether it is logarithmic; `low` must then be positive.
    """

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        """Returns where a value lies."""
        low, high, value = (
            (math.log(v) for v in (self.low, self.high, value))
            if self.log
            else (
                self.low,
                self.high,
                value,
            )
        )
        share = (value - low) / (high - low) if high > low else 0.5
        return self.begin + share * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Returns round values inside the axis."""
        return _log_ticks(self.low, self.high) if self.log else _straight_ticks(self.low, self.high)


def _straight_ticks(low: float, high: float) -> list[float]:
    """Returns multiples of 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]
    raw = (high - low) / WANTED_TICKS
    power = 10 ** math.floor(math.log10(raw))
    width = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first = math.ceil(low / width)
    return [number * width for number in range(first, math.floor(high / width + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Returns powers of ten over many decades; over few, powers of two."""
    if high / low > 100:
        powers = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
        every = max(1, -(-len(powers) // (WANTED_TICKS + 2)))
        return [10.0**power for power in powers if power % every == 0]
    powers = range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1)
    return [2.0**power for power in powers]


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the indices of the points that no other beats in both coordinates, by the first coordinate.

    Args:
        points: Pairs of which both should be small.
    """
    front: list[int] = []
    best = math.inf
    for index in sorted(range(len(points)), key=lambda number: points[number]):
        if points[index][1] < best:
            front.append(index)
            best = points[index][1]
    return front
