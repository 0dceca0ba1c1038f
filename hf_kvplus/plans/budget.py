"""Budgets of memory as people write them: bits per element, or bytes at a length of context."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hf_kvplus.units import parse_bytes, parse_tokens


@dataclass(frozen=True)
class Budget:
    """What a cache may take: bits, or bytes and tokens, are set.

    Args:
        bits: Stored bits per element of the packed part, scales counted, on average over layers.
        bytes: Bytes of the whole cache, sinks and recent tokens counted.
        tokens: Context length at which `bytes` holds.
    """

    bits: float | None = None
    bytes: int | None = None
    tokens: int | None = None

    def __str__(self) -> str:
        return f"{self.bits:g} bits" if self.bits is not None else f"{self.bytes} bytes at {self.tokens} tokens"


def parse_budget(text: str) -> Budget:
    """Reads `3.0bits`, or `2.5GiB@32k` (32k are 32768 tokens).

    Raises:
        ValueError: If it is neither.
    """
    bits = re.fullmatch(r"(\d+(?:\.\d+)?) ?bits?", text.strip())
    if bits and float(bits[1]) > 0:
        return Budget(bits=float(bits[1]))
    size, _, length = text.partition("@")
    try:
        return Budget(bytes=parse_bytes(size), tokens=parse_tokens(length))
    except ValueError as error:
        raise ValueError(f"`budget` must be like 3.0bits or 2.5GiB@32k, got {text!r}") from error
