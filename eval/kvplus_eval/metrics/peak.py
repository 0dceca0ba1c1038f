"""The most memory that a process needs beside the model."""

from __future__ import annotations

from kvplus_eval.measured import Measured
from kvplus_eval.metrics.base import METRICS, Column, Metric


@METRICS.register("peak")
class PeakMemory(Metric):
    """Peak resident memory above that of the loaded model, while a window is read and some tokens decoded.

    Measured in a process of its own for each strategy, see `kvplus_eval.peak`. On CUDA `peak_device_bytes` is exact.
    """

    columns = {"peak_host_bytes": Column("bytes", "lower")}

    @staticmethod
    def summarize(measured: Measured) -> dict[str, float | int | None]:
        """Returns the peak, None where not measured; argument as in `Metric`."""
        return {"peak_host_bytes": measured.peak_host_bytes}
