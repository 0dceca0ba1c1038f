"""Time of prefill, to the first token, and of one decoded token, all strategies taking turns in one run."""

from __future__ import annotations

from statistics import median

from kvplus_eval.measured import Measured
from kvplus_eval.metrics.base import METRICS, Column, Metric


@METRICS.register("timing")
class Timing(Metric):
    """Median milliseconds to prefill one window, to its first token, and of one token decoded greedily after it."""

    columns = {
        "prefill_ms": Column("ms", "lower"),
        "ttft_ms": Column("ms", "lower"),
        "decode_ms_per_token": Column("ms", "lower"),
    }

    @staticmethod
    def summarize(measured: Measured) -> dict[str, float | int | None]:
        """Returns the medians; argument as in `Metric`."""
        return {
            "prefill_ms": median(measured.prefill_ms) if measured.prefill_ms else None,
            "ttft_ms": median(measured.ttft_ms) if measured.ttft_ms else None,
            "decode_ms_per_token": median(measured.decode_ms) if measured.decode_ms else None,
        }
