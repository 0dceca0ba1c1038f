"""The noise floor: how far the model is from itself when nothing changes but rounding."""

from __future__ import annotations

from kvplus_eval.measured import Measured
from kvplus_eval.metrics.base import METRICS, Column, Metric


@METRICS.register("noise")
class NoiseFloor(Metric):
    """Mean KL of the full cache to itself, fed in another chunking or computed in another number type.

    The same for every strategy of a run. A loss below it can't be told from rounding.
    """

    columns = {"noise_chunking_nats": Column("nats", "neither"), "noise_dtype_nats": Column("nats", "neither")}

    @staticmethod
    def summarize(measured: Measured) -> dict[str, float | int | None]:
        """Returns both, None where not measured; argument as in `Metric`."""
        return {column: measured.noise.get(column.split("_")[1]) for column in NoiseFloor.columns}
