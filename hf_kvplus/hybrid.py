"""Layers that keep a recurrent state, alone or beside keys and values (Mamba, gated delta rule, short convolutions).

The state is transformers' own and stays as it is; it has no length, so there is nothing to pack. What is added here is
what that class leaves out: rows can be selected and repeated, and a layer that runs attention and a recurrence side by
side (Falcon-H1, Zamba 2) stores its keys and values like any other.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from hf_kvplus.layer import KVLayer, row_indices


class HybridKVLayer(LinearAttentionLayer, KVLayer):
    """A `KVLayer` with a recurrent state beside it.

    Args:
        *codecs: Key codec and value codec, or none; see `KVLayer`.
        number_of_states: Recurrent states in the layer.
        **options: Options of `KVLayer`.
    """

    is_compileable = False

    def __init__(self, *codecs: Any, number_of_states: int = 1, **options: Any) -> None:
        KVLayer.__init__(self, *codecs, **options)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *states: torch.Tensor, **recurrent: Any) -> None:
        """Learns sizes from the first keys and values, or from the first recurrent states (given by keyword)."""
        if states:
            KVLayer.lazy_initialization(self, *states)
        else:
            LinearAttentionLayer.lazy_initialization(self, **recurrent)

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the newest tokens, where the recurrent state allows it; see `KVLayer.crop`."""
        LinearAttentionLayer.crop(self, tokens_to_remove)
        KVLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        """Forgets everything."""
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)
        KVLayer.reset(self)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorders the rows for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the batch rows `indices`, in that order."""
        select_recurrent_rows(self, indices)
        KVLayer.batch_select_indices(self, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every batch row `repeats` times in place."""
        repeat_recurrent_rows(self, repeats)
        KVLayer.batch_repeat_interleave(self, repeats)

    def to(self, device: torch.device | str) -> None:
        """Moves everything to `device`."""
        self.conv_states, self.recurrent_states = (
            {index: None if state is None else state.to(device) for index, state in states.items()}
            for states in (self.conv_states, self.recurrent_states)
        )
        KVLayer.to(self, device)

    def offload(self) -> None:
        """Moves everything to host memory."""
        LinearAttentionLayer.offload(self)
        KVLayer.offload(self)

    def prefetch(self) -> None:
        """Moves everything back to the layer's device."""
        LinearAttentionLayer.prefetch(self)
        KVLayer.prefetch(self)

    def describe(self) -> str:
        """Returns what this layer does with its states, in a few words."""
        return f"{KVLayer.describe(self)}; recurrent state as it is"


def recurrent_batch_size(layer: LinearAttentionCacheLayerMixin) -> int | None:
    """Returns the batch rows of a recurrent state, or `None` before the first forward."""
    states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return next((state.shape[0] for state in states if state is not None), None)


def select_recurrent_rows(layer: LinearAttentionCacheLayerMixin, indices: torch.Tensor) -> None:
    """Keeps the batch rows `indices` of the recurrent states, in that order."""
    batch_size = recurrent_batch_size(layer)
    if batch_size is not None:
        LinearAttentionCacheLayerMixin.reorder_cache(layer, row_indices(indices, batch_size))


def repeat_recurrent_rows(layer: LinearAttentionCacheLayerMixin, repeats: int) -> None:
    """Repeats every batch row of the recurrent states `repeats` times."""
    batch_size = recurrent_batch_size(layer)
    if batch_size is not None:
        rows = torch.arange(batch_size).repeat_interleave(repeats)
        LinearAttentionCacheLayerMixin.reorder_cache(layer, rows)
