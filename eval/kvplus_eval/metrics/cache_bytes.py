"""Bytes of the cache by part, and of the device while it worked."""

from __future__ import annotations

from kvplus_eval.measured import Measured
from kvplus_eval.metrics.base import METRICS, Column, Metric


@METRICS.register("cache_bytes")
class CacheBytes(Metric):
    """Bytes of every live tensor of the cache at the end of a window, the largest window counting.

    The share compares with the full cache, measured in the same way at the same length. Of an offloaded cache
    `host_bytes` are part of the bytes, `disk_bytes` come on top of them.
    """

    columns = {
        "cache_bytes": Column("bytes", "lower"),
        "packed_bytes": Column("bytes", "neither"),
        "full_precision_bytes": Column("bytes", "neither"),
        "reserved_bytes": Column("bytes", "neither"),
        "other_bytes": Column("bytes", "neither"),
        "host_bytes": Column("bytes", "neither"),
        "disk_bytes": Column("bytes", "lower"),
        "share_of_full_cache": Column("share", "lower"),
        "peak_device_bytes": Column("bytes", "lower"),
    }

    @staticmethod
    def summarize(measured: Measured) -> dict[str, float | int | None]:
        """Returns the bytes and the share; argument as in `Metric`."""
        memory = measured.memory
        if memory is None:
            return dict.fromkeys(CacheBytes.columns)
        return {
            "cache_bytes": memory.total_bytes,
            "packed_bytes": memory.packed_bytes,
            "full_precision_bytes": memory.full_precision_bytes,
            "reserved_bytes": memory.reserved_bytes,
            "other_bytes": memory.other_bytes,
            "host_bytes": memory.host_bytes,
            "disk_bytes": memory.disk_bytes,
            "share_of_full_cache": memory.total_bytes / measured.full_bytes if measured.full_bytes else None,
            "peak_device_bytes": measured.peak_bytes,
        }
