"""What a metric is: figures with a unit and a direction, from scores of positions or from other measurements.

A metric has two chances to work. `score` sees the log-probabilities of one chunk, which are too large to keep, and
returns a value a position; `summarize` sees everything that a strategy's runs left behind. Left out: state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_kvplus.registry import Registry
from kvplus_eval.measured import Measured


@dataclass(frozen=True)
class Column:
    """One figure of a metric.

    Args:
        unit: Unit in words, for example `nats`.
        better: `lower`, `higher`, or `neither` where the figure only describes.
    """

    unit: str
    better: str


class Metric:
    """Base of all metrics; `columns` names the figures that `summarize` returns."""

    columns: ClassVar[dict[str, Column]]

    @staticmethod
    def score(log_probs: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Scores the positions of one chunk.

        Args:
            log_probs: Log-probabilities with the cache under test, shape (positions, vocab), float64.
            reference: The same with the reference cache.
            targets: The tokens that came, shape (positions,).

        Returns:
            Column of positions -> values, shape (positions,). Empty by default.
        """
        return {}

    @staticmethod
    def summarize(measured: Measured) -> dict[str, float | int | None]:
        """Turns measurements into figures.

        Args:
            measured: Everything measured for one strategy.

        Returns:
            One figure for each of `columns`, None where it wasn't measured.
        """
        raise NotImplementedError


METRICS: Registry[type[Metric]] = Registry("metric")


def score_positions(
    log_probs: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Runs the `score` of every metric; arguments and result as there."""
    scores: dict[str, torch.Tensor] = {}
    for name in METRICS:
        scores.update(METRICS.get(name).score(log_probs, reference, targets))
    return scores


def summarize(measured: Measured) -> dict[str, float | int | None]:
    """Runs the `summarize` of every metric and joins their figures."""
    figures: dict[str, float | int | None] = {}
    for name in METRICS:
        figures.update(METRICS.get(name).summarize(measured))
    return figures


def column_units() -> dict[str, dict[str, str]]:
    """Returns unit and direction of every figure, as result rows carry them."""
    return {
        column: {"unit": meaning.unit, "better": meaning.better}
        for name in METRICS
        for column, meaning in METRICS.get(name).columns.items()
    }
