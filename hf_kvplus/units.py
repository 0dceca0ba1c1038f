"""How figures are written for people: powers of 1024 for bytes, few digits, a dash for what wasn't measured."""

from __future__ import annotations

KIB = 1024
MISSING = "–"


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
