"""How figures are written for people, and read: powers of 1024 for bytes, few digits, a dash for what is missing."""

from __future__ import annotations

import re

KIB = 1024
MISSING = "–"
TOKEN_UNITS = {"": 1, "k": 1024, "m": 1024**2}
BYTE_UNITS = {"b": 1, "kib": 1024, "mib": 1024**2, "gib": 1024**3, "kb": 1000, "mb": 1000**2, "gb": 1000**3}


def format_bytes(count: float | None) -> str:
    """Writes bytes as B, KiB, MiB or GiB with three significant digits or so.

    Args:
        count: Bytes, or None.

    Returns:
        For example `90.2 MiB`.
    """
    if count is None:
        return MISSING
    if count < KIB:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB"):
        count /= KIB
        if count < KIB:
            return f"{count:.1f} {unit}"
    return f"{count / KIB:.2f} GiB"


def format_count(number: int, thing: str) -> str:
    """Writes how many there are of a thing: `1 window`, `4 windows`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def format_number(value: float | int | None, digits: int = 3) -> str:
    """Writes a number plainly where that is readable, in powers of ten where it is tiny or huge.

    Args:
        value: The number, or None.
        digits: Significant digits.

    Returns:
        For example `0.00151`, `3.2e-13`, `24.5`.
    """
    if value is None:
        return MISSING
    if isinstance(value, int):
        return str(value)
    if value and not 1e-5 <= abs(value) < 1e6:
        return f"{value:.{digits - 2}e}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def format_percent(value: float | None, *, signed: bool = False) -> str:
    """Writes a percentage with two decimals, `+0.14 %` when signed."""
    if value is None:
        return MISSING
    # Rounded before it is written, and a zero added, so that a tiny negative change isn't -0.00
    return f"{round(value, 2) + 0.0:{'+' if signed else ''}.2f} %"


def parse_tokens(text: str) -> int:
    """Reads a number of tokens such as `8192`, `8k` or `1m`, in powers of 1024.

    Raises:
        ValueError: If it isn't one.
    """
    match = re.fullmatch(r"(\d+)([km]?)", text.strip().lower())
    if match is None or int(match[1]) == 0:
        raise ValueError(f"a number of tokens is written 8192, 8k or 1m, got {text!r}")
    return int(match[1]) * TOKEN_UNITS[match[2]]


def parse_bytes(text: str) -> int:
    """Reads a number of bytes such as `67108864`, `64MiB` or `2GB`.

    Raises:
        ValueError: If it isn't one.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    unit = BYTE_UNITS.get(match[2] or "b") if match else None
    if match is None or unit is None or float(match[1]) == 0:
        raise ValueError(f"a number of bytes is written 64MiB, 1.5GiB, 2GB or 67108864, got {text!r}")
    return round(float(match[1]) * unit)
