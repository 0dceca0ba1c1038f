"""What all attention kernels have in common: the call, and what of a layer is seen.

A kernel is called after the new states were put behind the layer's recent ones, and before anything of them is packed.
A layer is read in parts, whose columns don't overlap:

    packed blocks   columns from `first_stored` to `packed_tokens`, without the columns that each row's sinks stand for
    sinks           columns `padding[row]` to `padding[row] + num_sink_tokens`, up to `packed_tokens`
    recent          columns from `packed_tokens` on

A window with sinks has one more, `layer.lead`: the sinks that lie before the window, as the queries see them (turned
along RoPE, perhaps once per query). They have the mask's first slots, before that of column `visible`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from transformers.utils import logging

from hf_kvplus.layer import KVLayer

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Scoring:
    """How scores come about, beyond the product of query and key.

    Args:
        scaling: Factor of every score.
        softcap: Scores become `softcap * tanh(score / softcap)`.
        sink_logits: `(heads,)`, a score per head that takes part in the softmax and has no value (gpt-oss).
    """

    scaling: float
    softcap: float | None = None
    sink_logits: torch.Tensor | None = None


class Kernel(Protocol):
    """Attends to a layer without building its dense states.

    A kernel with a true attribute `reads_pieces` reads offloaded blocks some at a time; in the place of others the
    reference kernel reads them. One with an attribute `encoder` also encodes the states that a fused model stores, as
    their codec would; one with an attribute `mover` copies new states into a layer's buffers, see `GrowingStore`.
    """

    def refuses(self, layer: KVLayer) -> str | None:
        """Returns why this kernel can't read `layer`, or `None` if it can."""
        ...

    def attend(
        self, layer: KVLayer, query: torch.Tensor, scoring: Scoring, mask: torch.Tensor | None, visible: int
    ) -> torch.Tensor:
        """Attends.

        Args:
            layer: Its last `queries` recent tokens are those of the queries.
            query: `(batch, heads, queries, head_dim)`, in the dtype of the layer.
            scoring: How scores come about.
            mask: `(batch or 1, 1, queries, layer.lead_tokens + total - visible)` bool, `True` where a token is seen;
                `None` if each query sees `layer.lead` and all columns from `visible` to its own.
            visible: First column that any query sees, `layer.lead` aside.

        Returns:
            `(batch, queries, heads, value_head_dim)`, in the dtype of the query; 0 for a query that sees nothing.
        """
        ...


def heads_per_group(layer: KVLayer, query: torch.Tensor) -> int:
    """Returns how many query heads share a KV head.

    Raises:
        ValueError: If the heads don't divide.
    """
    kv_heads = layer.shapes["keys"][0]
    if query.shape[1] % kv_heads:
        raise ValueError(f"`query` must have a multiple of the cache's {kv_heads} heads, got {query.shape[1]}")
    return query.shape[1] // kv_heads


def say_decoded(reason: str) -> None:
    """Tells a user once that states are decoded before they are read, and why."""
    logger.warning_once(f"fused attention isn't used everywhere: {reason}. The states are decoded there instead.")


def say_uncompiled(what: str, reason: str) -> None:
    """Tells a user once what is read packed, but by plain PyTorch and not by a compiled kernel, and why.

    Args:
        what: What is read.
        reason: A clause that names what doesn't fit; the same in every step, since each new one is told.
    """
    logger.warning_once(f"fused attention reads {what} by plain PyTorch products where {reason}.")
