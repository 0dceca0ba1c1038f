"""What one run of the compiled CPU kernel is given, beside the layer that it reads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hf_kvplus.attention.base import Scoring

MOST_ROWS = 8


@dataclass(frozen=True)
class Run:
    """Queries, and where outputs go.

    Args:
        query: `(batch, heads, queries, key_channels)`.
        output: Where outputs go, `(batch, heads, queries, value_channels)`, channels side by side.
        kv_heads: Heads of what is read.
        scoring: How scores come about.
        mask: As of `Kernel.attend`.
        pass_rows: Query vectors that the kernel takes at a time, as it was compiled.
        log_sums: Where the logarithms of the sums of weights go, float32 `(batch, heads, queries)`.
        earlier: Outputs that were found elsewhere, float32 and in the shape of `output`, and the logarithms of the
            sums of their weights; both are added up with what is found here.
    """

    query: torch.Tensor
    output: torch.Tensor
    kv_heads: int
    scoring: Scoring
    mask: torch.Tensor | None
    pass_rows: int
    log_sums: torch.Tensor | None = None
    earlier: tuple[torch.Tensor, torch.Tensor] | None = None


def rows_per_pass(rows: int, queries: int, most: int = MOST_ROWS) -> int:
    """Returns how many rows a kernel takes at a time, at most `most`.

    One token's queries get a kernel of their own size; several tokens share two sizes, so that few are compiled.
    """
    if queries > 1:
        return 4 if rows <= 4 else most
    return math.ceil(rows / math.ceil(rows / most))
