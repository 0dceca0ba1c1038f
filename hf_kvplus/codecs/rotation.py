"""Hadamard rotations of the channels of a head.

A rotation spreads a channel that is far above the rest over all channels, so that every channel looks Gaussian and one
table of levels fits them all. Scores don't change when queries are rotated like keys, `(q H)(k H)^T = q k^T`, and an
output of rotated values is rotated back once per query; so a kernel never has to undo it on what is stored.

    head_dim 64    one Hadamard matrix of 64
    head_dim 80    five of 16 on the diagonal, the largest power of two that divides
    head_dim 5     nothing to rotate: the identity

Left out: random signs (a mean per channel is stored, so no fixed pattern has to be broken up) and butterflies (a
product with 64 x 64 is no slower here).
"""

from __future__ import annotations

from functools import lru_cache

import torch


def hadamard_order(head_dim: int) -> int:
    """Returns the largest power of two that divides `head_dim`."""
    return head_dim & -head_dim


@lru_cache(maxsize=64)
def hadamard(head_dim: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Returns the rotation of `head_dim` channels.

    Args:
        head_dim: Channels, any positive number.
        device: Where the matrix lives.

    Returns:
        `(head_dim, head_dim)` float32, symmetric and orthonormal, hence its own inverse. Shared: don't write to it.
    """
    order = hadamard_order(head_dim)
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.block_diag(*[matrix / order**0.5] * (head_dim // order)).to(device)
