"""Scales in one byte: a logarithm in even steps.

Codes are chosen after the scale was rounded, so they make up for the rounding; for channels a step of 9 %, an eighth
of an octave, is fine enough and reaches from 2**-15.875 to 2**15.875. Token scales are relative to their block, need
less range and get twice the resolution. Float8 formats either stop at 2**9 or resolve only a quarter of an octave.

    byte   0          1 ... 128 ... 255
    scale  exactly 0  2 ** ((byte - 128) / steps)
"""

from __future__ import annotations

import torch

CHANNEL_STEPS = 8
TOKEN_STEPS = 16
ONE = 128


def to_log_scale(scale: torch.Tensor, steps: int = CHANNEL_STEPS) -> torch.Tensor:
    """Rounds scales to the nearest byte in the log domain.

    Args:
        scale: Any shape, float32, not negative.
        steps: Steps in an octave.

    Returns:
        The same shape, uint8. Zero stays zero; other values are clamped to the range.
    """
    codes = (scale.clamp_min(smallest(steps)).log2() * steps + ONE).round().clamp(1, 255)
    return torch.where(scale > 0, codes, 0.0).to(torch.uint8)


def from_log_scale(codes: torch.Tensor, steps: int = CHANNEL_STEPS) -> torch.Tensor:
    """Returns the float32 scales of bytes, any shape."""
    scale = torch.exp2((codes.float() - ONE) / steps)
    return torch.where(codes > 0, scale, 0.0)


def smallest(steps: int) -> float:
    """Returns the smallest scale that isn't zero."""
    return 2.0 ** ((1 - ONE) / steps)


def largest(steps: int) -> float:
    """Returns the largest scale."""
    return 2.0 ** ((255 - ONE) / steps)
