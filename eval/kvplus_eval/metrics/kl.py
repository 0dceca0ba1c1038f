"""Kullback-Leibler divergence to the full cache: how far the whole next-token distribution moved."""

from __future__ import annotations

import torch

from kvplus_eval.measured import Measured
from kvplus_eval.metrics.base import METRICS, Column, Metric


@METRICS.register("kl")
class KLDivergence(Metric):
    """KL(reference || cache under test) of a position, in nats: mean, percentiles and the worst.

    It sees every token of the vocabulary, so it moves before perplexity does, and can't gain from luck on the tokens
    that came. Float64 keeps the sum exact far below 1e-6.
    """

    columns = {
        "kl_mean_nats": Column("nats", "lower"),
        "kl_median_nats": Column("nats", "lower"),
        "kl_p90_nats": Column("nats", "lower"),
        "kl_p99_nats": Column("nats", "lower"),
        "kl_worst_nats": Column("nats", "lower"),
    }

    @staticmethod
    def score(log_probs: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the divergence of each position; arguments as in `Metric`."""
        divergence = torch.nn.functional.kl_div(log_probs, reference, reduction="none", log_target=True)
        return {"kl_nats": divergence.sum(dim=1)}

    @staticmethod
    def summarize(measured: Measured) -> dict[str, float | int | None]:
        """Returns all of them; argument as in `Metric`."""
        divergence = measured.joined("kl_nats").sort().values
        return {
            "kl_mean_nats": float(divergence.mean()),
            "kl_median_nats": float(divergence[len(divergence) // 2]),
            "kl_p90_nats": float(divergence[int(0.9 * (len(divergence) - 1))]),
            "kl_p99_nats": float(divergence[int(0.99 * (len(divergence) - 1))]),
            "kl_worst_nats": float(divergence[-1]),
        }
