"""Budgets of memory as people write them: bits per element, or bytes at a length of context."""

from __future__ import annotations

import re
from dataclasses import dataclass

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}
THOUSANDS = {"": 1, "k": 1 << 10, "m": 1 << 20}


@dataclass(frozen=True)
class Budget:
    """What a cache may take: one of the two is set.

    Args:
        bits: Stored bits per element of the packed part, scales counted, on average over layers.
        bytes: Bytes of the whole cache, sinks and recent tokens counted.
        tokens: Context length at which `bytes` holds.
    """

    bits: float | None = None
    bytes: int | None = None
    tokens: int | None = None


def parse_budget(text: str) -> Budget:
    """Reads `3.0bits`, or `2.5GiB@32k` (32k are 32768 tokens).

    Raises:
        ValueError: If it is neither.
    """
    bits = re.fullmatch(r"(\d+(?:\.\d+)?) ?bits?", text.strip())
    if bits and float(bits[1]) > 0:
        return Budget(bits=float(bits[1]))
    size = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(UNITS)})@(\d+(?:\.\d+)?)([km]?)", text.strip())
    if size and float(size[1]) > 0 and float(size[3]) > 0:
        return Budget(bytes=int(float(size[1]) * UNITS[size[2]]), tokens=int(float(size[3]) * THOUSANDS[size[4]]))
    raise ValueError(f"`budget` must be like 3.0bits or 2.5GiB@32k, got {text!r}")
