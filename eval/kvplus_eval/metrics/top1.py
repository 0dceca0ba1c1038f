"""Agreement of the most likely next token with the full cache's."""

from __future__ import annotations

import torch

from kvplus_eval.measured import Measured
from kvplus_eval.metrics.base import METRICS, Column, Metric


@METRICS.register("top1")
class Top1Agreement(Metric):
    """Share of positions at which both caches would choose the same token greedily."""

    columns = {"top1_agreement": Column("share", "higher")}

    @staticmethod
    def score(log_probs: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns 1 where the choices agree, else 0; arguments as in `Metric`."""
        return {"top1_agrees": (log_probs.argmax(dim=1) == reference.argmax(dim=1)).double()}

    @staticmethod
    def summarize(measured: Measured) -> dict[str, float | int | None]:
        """Returns the share; argument as in `Metric`."""
        return {"top1_agreement": float(measured.joined("top1_agrees").mean())}
