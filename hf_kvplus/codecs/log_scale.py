"""Scales in one byte: a logarithm in steps of an eighth of an octave.

Codes are chosen after the scale was rounded, so they make up for the rounding; a step of 9 % is fine enough. One byte
covers 2**-15.875 to 2**15.875, which every product of two half-precision scales needs; float8 formats either stop at
2**9 or resolve only a quarter of an octave.

    byte   0          1 ... 128 ... 255
    scale  exactly 0  2 ** ((byte - 128) / 8)
"""

from __future__ import annotations

import torch

STEPS_PER_OCTAVE = 8
ONE = 128
# Tokens and channels that carry nothing keep this scale or more, so that dividing by it stays finite.
SMALLEST = 2.0 ** ((1 - ONE) / STEPS_PER_OCTAVE)
LARGEST = 2.0 ** ((255 - ONE) / STEPS_PER_OCTAVE)


def to_log_scale(scale: torch.Tensor) -> torch.Tensor:
    """Rounds scales to the nearest byte in the log domain.

    Args:
        scale: Any shape, float32, not negative.

    Returns:
        The same shape, uint8. Zero stays zero; other values are clamped to the range.
    """
    codes = (scale.clamp_min(SMALLEST).log2() * STEPS_PER_OCTAVE + ONE).round().clamp(1, 255)
    return torch.where(scale > 0, codes, 0.0).to(torch.uint8)


def from_log_scale(codes: torch.Tensor) -> torch.Tensor:
    """Returns the float32 scales of bytes, any shape."""
    scale = torch.exp2((codes.float() - ONE) / STEPS_PER_OCTAVE)
    return torch.where(codes > 0, scale, 0.0)
