"""Agreement of the five most likely next tokens with the full cache's."""

from __future__ import annotations

import torch

from kvplus_eval.measured import Measured
from kvplus_eval.metrics.base import METRICS, Column, Metric

LIKELY = 5


@METRICS.register("top5")
class Top5Agreement(Metric):
    """Share of the full cache's five most likely tokens that are among the five most likely of the cache under test.

    Sampling draws from more than the first token, so their set matters where `top1_agreement` says nothing.
    """

    columns = {"top5_agreement": Column("share", "higher")}

    @staticmethod
    def score(log_probs: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the share at each position; arguments as in `Metric`."""
        likely = min(LIKELY, log_probs.shape[1])
        mine, theirs = log_probs.topk(likely, dim=1).indices, reference.topk(likely, dim=1).indices
        return {"top5_agrees": (mine[:, :, None] == theirs[:, None, :]).any(dim=1).double().mean(dim=1)}

    @staticmethod
    def summarize(measured: Measured) -> dict[str, float | int | None]:
        """Returns the mean share; argument as in `Metric`."""
        return {"top5_agreement": float(measured.joined("top5_agrees").mean())}
