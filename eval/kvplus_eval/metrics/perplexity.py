"""Perplexity, and its change against the full cache with a confidence interval."""

from __future__ import annotations

import functools
import math

import torch

from kvplus_eval.measured import Measured
from kvplus_eval.metrics.base import METRICS, Column, Metric

BOOTSTRAP_DRAWS = 2000
# Below, an interval inside the range of the windows is too short
FEWEST_RESAMPLED = 8
CONFIDENCE = 0.95


@METRICS.register("perplexity")
class Perplexity(Metric):
    """Perplexity over predicted tokens, and its change with a paired bootstrap interval over windows.

    Both caches saw the same tokens, so the interval is of the mean difference in loss, which varies far less than the
    loss. Windows are what is drawn: fewer than 8 are too few for that and get Student's interval, one has none.
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
    """Returns the 95 % interval of the mean of paired differences: bootstrapped, or Student's where they are few.

    Resamples of fewer than `FEWEST_RESAMPLED` windows can't spread as far as such an interval has to reach: of 2 it
    would hold the truth in half of all cases.

    Args:
        differences: One difference a window.
        draws: How many resamples.

    Returns:
        Lower and upper end, or None twice when there are fewer than two windows.
    """
    if not 1 < len(differences) < FEWEST_RESAMPLED:
        return bootstrap_interval(differences, draws)
    values = torch.tensor(differences, dtype=torch.float64)
    reach = _student_quantile(1 - (1 - CONFIDENCE) / 2, len(values) - 1) * float(values.std()) / math.sqrt(len(values))
    return float(values.mean()) - reach, float(values.mean()) + reach


def bootstrap_interval(differences: list[float], draws: int = BOOTSTRAP_DRAWS) -> tuple[float | None, float | None]:
    """Bootstraps the mean of paired differences.

    Resamples of few values vary too little, so a plain percentile interval is too narrow: of 4 windows it holds the
    truth in 81 % of cases, of 8 in 91 %. The percentiles are therefore moved outwards as far as Student's distribution
    lies beyond the normal one, which makes it 86 % and 95 %; an interval can't reach beyond its windows.

    Source: Hesterberg, What Teachers Should Know about the Bootstrap, https://arxiv.org/abs/1411.5279 (expanded
    percentile interval).

    Args:
        differences: One difference a window.
        draws: How many resamples.

    Returns:
        Lower and upper end of the 95 % interval, or None twice when there are fewer than two windows.
    """
    if len(differences) < 2:
        return None, None
    values = torch.tensor(differences, dtype=torch.float64)
    # Seeded, so that the same measurements always give the same interval
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(values), (draws, len(values)), generator=generator)
    means = values[picks].mean(dim=1)
    tail = expanded_tail(len(values))
    low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


@functools.cache
def expanded_tail(count: int) -> float:
    """Returns the share of resamples to leave out at each end so that few values get the interval they deserve.

    Args:
        count: How many values there are, at least 2.
    """
    quantile = _student_quantile(1 - (1 - CONFIDENCE) / 2, count - 1)
    return math.erfc(math.sqrt(count / (count - 1)) * quantile / math.sqrt(2)) / 2


@functools.cache
def _student_quantile(share: float, freedom: int) -> float:
    """Returns the value below which a share above one half of Student's distribution lies, by bisection."""
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_share(middle, freedom) < share else (low, middle)
    return low


def _student_share(value: float, freedom: int, steps: int = 2000) -> float:
    """Returns the share of Student's distribution below a positive value, integrated over the angle of its tangent."""
    # With x = sqrt(freedom) tan(angle) the density becomes cos(angle) ** (freedom - 1), smooth and bounded
    factor = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    end = math.atan(value / math.sqrt(freedom))
    width = end / steps
    middles = (math.cos((step + 0.5) * width) ** (freedom - 1) for step in range(steps))
    return 0.5 + factor * width * sum(middles)


def _percent(loss_difference: float) -> float:
    """Turns a difference of mean losses in nats into a change of perplexity in percent."""
    return 100 * math.expm1(loss_difference)
