"""Bits that one stored number takes, measured from live tensors and never from a nominal width."""

from __future__ import annotations

from kvplus_eval.measured import Measured
from kvplus_eval.metrics.base import METRICS, Column, Metric


@METRICS.register("stored_bits")
class StoredBits(Metric):
    """Bits per key or value element at the end of a window.

    `stored` counts everything: codes, scales, zero points, sinks, recent tokens and room to grow. `packed` counts the
    packed part alone, wherever it lies: the value that `stored` approaches as the context grows, unless blocks leave
    memory. Neither is known of a cache that evicts and keeps what is left in a way of its own.
    """

    columns = {
        "stored_bits_per_element": Column("bits", "lower"),
        "packed_bits_per_element": Column("bits", "lower"),
    }

    @staticmethod
    def summarize(measured: Measured) -> dict[str, float | int | None]:
        """Returns both; argument as in `Metric`."""
        memory = measured.memory
        if memory is None:
            return dict.fromkeys(StoredBits.columns)
        packed = memory.packed_bits_per_element if memory.packed_bytes + memory.away_bytes else None
        stored = memory.bits_per_element if memory.elements else None
        return {"stored_bits_per_element": stored, "packed_bits_per_element": packed}
