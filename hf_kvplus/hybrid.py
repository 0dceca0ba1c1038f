"""Layers that keep a recurrent state, alone or beside keys and values (Mamba, gated delta rule, short convolutions).

The state is transformers' own and stays as it is; it has no length, so there is nothing to pack. What is added here is
what that class leaves out: rows can be selected and repeated, `reset` allows another batch size, gradients aren't
retained, and a layer that runs attention and a recurrence side by side (Falcon-H1, Zamba 2) stores its keys and values
like any other.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from hf_kvplus.layer import KVLayer
from hf_kvplus.layer_rows import row_indices


class RecurrentLayer(LinearAttentionLayer):
    """Holds the convolution and recurrent states of a layer, as they are.

    Args:
        number_of_states: States of each sort in the layer.
        **options: Ignored, as by transformers' layer.
    """

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **options: Any) -> torch.Tensor:
        """Stores the newest inputs of a convolution, detached, and returns all it reads, `(batch, channels, seq)`."""
        self._take_new_storage(self.conv_states, state_idx)
        states = super().update_conv_state(conv_states, state_idx, **options)
        self.conv_states[state_idx] = self.conv_states[state_idx].detach()
        return states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **options: Any
    ) -> torch.Tensor:
        """Stores a recurrent state, detached, and returns it."""
        self._take_new_storage(self.recurrent_states, state_idx)
        states = super().update_recurrent_state(recurrent_states, state_idx, **options)
        self.recurrent_states[state_idx] = states.detach()
        return states

    def _take_new_storage(self, states: dict[int, torch.Tensor | None], state_idx: int) -> None:
        """Leaves what an earlier graph may still need untouched by the copy that follows."""
        if torch.is_grad_enabled() and states[state_idx] is not None:
            states[state_idx] = torch.empty_like(states[state_idx]).copy_(states[state_idx])

    def check_crop(self, tokens_to_remove: int) -> None:
        """Refuses a `crop` that this layer can't do.

        Raises:
            RuntimeError: If a recurrent state has taken the tokens in.
        """
        if tokens_to_remove and any(self.is_recurrent_states_initialized.values()):
            raise RuntimeError(
                "a recurrent state holds all tokens at once, so the last ones can't be cropped; keep a copy of the "
                "cache from before them"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the newest tokens, if only a convolution has seen them.

        Args:
            tokens_to_remove: Minus the number of tokens; 0 removes none.

        Raises:
            RuntimeError: If a recurrent state has taken the tokens in, or inputs weren't kept for this.
        """
        self.check_crop(tokens_to_remove)
        if (tokens_to_remove or self.record_past) and self._rows() is not None:
            LinearAttentionLayer.crop(self, tokens_to_remove)

    def describe(self) -> str:
        """Returns what this layer does with its states, in a few words."""
        return "recurrent state as it is"

    def reset(self) -> None:
        """Forgets everything and gives the memory back."""
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorders the rows for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the batch rows `indices` (integers or a boolean mask), in that order."""
        rows = self._rows()
        if rows is not None:
            LinearAttentionLayer.reorder_cache(self, row_indices(indices, rows))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every batch row `repeats` times in place."""
        rows = self._rows()
        if rows is not None:
            LinearAttentionLayer.reorder_cache(self, torch.arange(rows).repeat_interleave(repeats))

    def _rows(self) -> int | None:
        """Returns the batch rows held, or `None` before the first forward."""
        states = (*self.conv_states.values(), *self.recurrent_states.values())
        return next((state.shape[0] for state in states if state is not None), None)

    def to(self, device: torch.device | str) -> None:
        """Moves everything to `device`; later states must come from there."""
        for states in (self.conv_states, self.recurrent_states):
            states.update({index: state.to(device) for index, state in states.items() if state is not None})
        self.device = torch.device(device)


class HybridKVLayer(RecurrentLayer, KVLayer):
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

    def check_crop(self, tokens_to_remove: int) -> None:
        """Refuses a `crop` that the recurrent state or the keys and values can't do."""
        RecurrentLayer.check_crop(self, tokens_to_remove)
        KVLayer.check_crop(self, tokens_to_remove)

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the newest tokens, where the recurrent state allows it; see `KVLayer.crop`."""
        RecurrentLayer.crop(self, tokens_to_remove)
        KVLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        """Forgets everything."""
        RecurrentLayer.reset(self)
        KVLayer.reset(self)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the batch rows `indices`, in that order."""
        RecurrentLayer.batch_select_indices(self, indices)
        KVLayer.batch_select_indices(self, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every batch row `repeats` times in place."""
        RecurrentLayer.batch_repeat_interleave(self, repeats)
        KVLayer.batch_repeat_interleave(self, repeats)

    def to(self, device: torch.device | str) -> None:
        """Moves everything to `device`."""
        RecurrentLayer.to(self, device)
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
        return f"{KVLayer.describe(self)}; {RecurrentLayer.describe(self)}"
