"""Perplexity, and its change against the full cache with a confidence interval."""

from __future__ import annotations

import math

import torch

from kvplus_eval.measured import Measured
from kvplus_eval.metrics.base import METRICS, Column, Metric

BOOTSTRAP_DRAWS = 2000
CONFIDENCE = 0.95


@METRICS.register("perplexity")
class Perplexity(Metric):
    """Perplexity over predicted tokens, and its change with a paired bootstrap interval over windows.

    Both caches saw the same tokens, so the interval is of the mean difference in loss, which varies far less than the
    loss. Windows are what is drawn: with few of them the interval is rough, with one there is none.
    """

    columns = {
        "perplexity": Column("1", "lower"),
        "perplexity_change_percent": Column("%", "lower"),
        "perplexity_change_low_percent": Column("%", "neither"),
        "perplexity_change_high_percent": Column("%", "neither"),
    }

    @staticmethod
    def score(log_probs: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the loss in nats with the cache under test and with the reference; arguments as in `Metric`."""
        picked = targets[:, None]
        return {
            "loss_nats": -log_probs.gather(1, picked)[:, 0],
            "reference_loss_nats": -reference.gather(1, picked)[:, 0],
        }

    @staticmethod
    def summarize(measured: Measured) -> dict[str, float | int | None]:
        """Returns perplexity, change and interval; argument as in `Metric`."""
        differences = [
            float((loss - reference).mean())
            for loss, reference in zip(
                measured.positions["loss_nats"], measured.positions["reference_loss_nats"], strict=True
            )
        ]
        low, high = paired_interval(differences)
        return {
            "perplexity": math.exp(float(measured.joined("loss_nats").mean())),
            "perplexity_change_percent": _percent(sum(differences) / len(differences)),
            "perplexity_change_low_percent": None if low is None else _percent(low),
            "perplexity_change_high_percent": None if high is None else _percent(high),
        }


def paired_interval(differences: list[float], draws: int = BOOTSTRAP_DRAWS) -> tuple[float | None, float | None]:
    """Bootstraps the mean of paired differences.

    Args:
        differences: One difference a window.
        draws: How many resamples.

    Returns:
        Lower and upper end of the 95 % percentile interval, or None twice when there are fewer than two windows.
    """
    if len(differences) < 2:
        return None, None
    values = torch.tensor(differences, dtype=torch.float64)
    # Seeded, so that the same measurements always give the same interval
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(values), (draws, len(values)), generator=generator)
    means = values[picks].mean(dim=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


def _percent(loss_difference: float) -> float:
    """Turns a difference of mean losses in nats into a change of perplexity in percent."""
    return 100 * math.expm1(loss_difference)
