"""Tables of levels: what an integer code means before it is scaled.

Equal steps need no table. The levels of the Lloyd-Max quantizer of a unit Gaussian have the least error on Gaussian
data; on the channels of a short block, which are lopsided, they measured better than equal steps at 2 and 3 bits only
(docs/log/recipes.md).
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

LLOYD_MAX = "lloyd_max"
UNIFORM = "uniform"
ITERATIONS = 2000
# Up to so many levels, the edges below a value are counted.
COUNTED_LEVELS = 16


@lru_cache(maxsize=16)
def _lloyd_max(count: int) -> tuple[float, ...]:
    """Returns the levels of the least squared error for a unit Gaussian, ascending and symmetric."""
    normal = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64))
    # Panter and Dite: the best density of many levels is that of a Gaussian three times as wide in variance.
    levels = normal.icdf((torch.arange(count, dtype=torch.float64) + 0.5) / count) * math.sqrt(3)
    infinite = torch.tensor([math.inf], dtype=torch.float64)
    for _ in range(ITERATIONS):
        edges = torch.cat([-infinite, (levels[1:] + levels[:-1]) / 2, infinite])
        density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
        mass = 0.5 * torch.erf(edges / math.sqrt(2))
        levels = (density[:-1] - density[1:]) / (mass[1:] - mass[:-1])
    levels = (levels - levels.flip(0)) / 2
    return tuple(levels.tolist())


@lru_cache(maxsize=64)
def level_table(nbits: int, kind: str, device: torch.device | str = "cpu") -> torch.Tensor:
    """Returns the levels of `nbits`-bit codes, ascending.

    Args:
        nbits: Bits per code.
        kind: `"lloyd_max"` (unit Gaussian) or `"uniform"` (`code - (2**nbits - 1) / 2`).
        device: Where the table lives.

    Returns:
        `(2**nbits,)` float32. Shared: don't write to it.
    """
    count = 2**nbits
    levels = _lloyd_max(count) if kind == LLOYD_MAX else tuple(code - (count - 1) / 2 for code in range(count))
    return torch.tensor(levels, dtype=torch.float32, device=device)


def nearest_codes(values: torch.Tensor, nbits: int, kind: str) -> torch.Tensor:
    """Returns the codes of the nearest levels.

    Args:
        values: Any shape, float32, finite, in units of the table.
        nbits: Bits per code.
        kind: As for `level_table`.

    Returns:
        The same shape, uint8.
    """
    levels = level_table(nbits, kind, values.device)
    if kind == UNIFORM:
        return (values - levels[0]).round_().clamp_(0, len(levels) - 1).to(torch.uint8)
    if len(levels) > COUNTED_LEVELS:
        edges = (levels[1:] + levels[:-1]) / 2
        return torch.bucketize(values.contiguous(), edges, out_int32=True).to(torch.uint8)
    # A comparison with each edge is a few vector instructions; a binary search is a branch per value.
    codes = torch.zeros_like(values, dtype=torch.uint8)
    known = level_table(nbits, kind)  # on the host: nothing waits for a device
    for edge in ((known[1:] + known[:-1]) / 2).tolist():
        codes += values > edge
    return codes
