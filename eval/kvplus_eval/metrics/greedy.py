"""How long greedy text stays the same as the full cache's."""

from __future__ import annotations

from kvplus_eval.measured import Measured
from kvplus_eval.metrics.base import METRICS, Column, Metric


@METRICS.register("greedy")
class GreedyAgreement(Metric):
    """Tokens of the greedy continuation of the first window that equal the full cache's, up to the first difference.

    After one different token the texts are different texts, so nothing behind it is counted.
    """

    columns = {"greedy_agreement_tokens": Column("tokens", "higher"), "greedy_tokens": Column("tokens", "neither")}

    @staticmethod
    def summarize(measured: Measured) -> dict[str, float | int | None]:
        """Returns the agreeing length and the length compared; argument as in `Metric`."""
        if not measured.reference_greedy_ids:
            return dict.fromkeys(GreedyAgreement.columns)
        pairs = list(zip(measured.greedy_ids, measured.reference_greedy_ids, strict=True))
        agreeing = next((length for length, (left, right) in enumerate(pairs) if left != right), len(pairs))
        return {"greedy_agreement_tokens": agreeing, "greedy_tokens": len(pairs)}
