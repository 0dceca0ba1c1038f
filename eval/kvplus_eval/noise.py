"""The model against itself, fed in other chunks or computed in another number type: what rounding alone does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from kvplus_eval.protocol import REFERENCE_STRATEGY, Protocol
from kvplus_eval.reference import ReferenceStore
from kvplus_eval.runner import score_window


def other_chunk_tokens(protocol: Protocol) -> int:
    """Returns a chunk length that cuts the text elsewhere: three quarters of the protocol's, at least one token."""
    return max(1, protocol.chunk_tokens * 3 // 4)


def other_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the type to compare with: bfloat16, or float32 for a model that is in half precision already."""
    return torch.bfloat16 if dtype == torch.float32 else torch.float32


def measure_noise(
    kind: str,
    index: int,
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    protocol: Protocol,
    store: ReferenceStore,
    advance: Callable[[int], None],
) -> float:
    """Compares the reference with itself on one window.

    Args:
        kind: `chunking` or `dtype`; the latter takes a second copy of the model for a while.
        index: Number of the window.
        model: The model.
        token_ids: The window, shape (window_tokens,).
        protocol: How the reference was fed.
        store: The reference, which has this window.
        advance: Called with the number of tokens done.

    Returns:
        Mean KL in nats.
    """
    if kind == "chunking":
        protocol = replace(protocol, chunk_tokens=other_chunk_tokens(protocol))
    else:
        model = copy.deepcopy(model).to(other_dtype(model.dtype))
    scores = score_window(REFERENCE_STRATEGY, index, model, token_ids, protocol, store, advance)
    return float(scores.positions["kl_nats"].mean())
