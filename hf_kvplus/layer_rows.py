"""The rows of a layer and where it lives: codes and scales are moved as they are, so nothing gets worse."""

from __future__ import annotations

from typing import Any

import torch


class LayerRows:
    """The part of a `KVLayer` that selects, repeats and moves what its stores hold."""

    def reorder_cache(self: Any, beam_idx: torch.LongTensor) -> None:
        """Reorders the rows for beam search; codes and scales move as they are."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self: Any, indices: torch.Tensor) -> None:
        """Keeps the batch rows `indices` (integers, from the end if negative, or a boolean mask), in that order."""
        if not self.is_initialized:
            return
        self.check_both_assigned()
        indices = row_indices(indices, self.batch_size)
        for store in self._stores():
            store.select(indices)
        # Rows that are alike need no list of indices, hence no wait for the device.
        self.padding.select([0] * len(indices) if self.padding.uniform else indices.tolist())
        self.batch_size = len(indices)

    def batch_repeat_interleave(self: Any, repeats: int) -> None:
        """Repeats every batch row `repeats` times in place."""
        if not self.is_initialized:
            return
        self.check_both_assigned()
        for store in self._stores():
            store.repeat_interleave(repeats)
        self.padding.select([row for row in range(self.batch_size) for _ in range(repeats)])
        self.batch_size *= repeats

    def to(self: Any, device: torch.device | str) -> None:
        """Moves everything to `device`; later states must come from there."""
        for store in self._stores():
            store.to(torch.device(device))
        self.device = torch.device(device)

    def offload(self: Any) -> None:
        """Moves everything to host memory."""
        for store in self._stores():
            store.to(torch.device("cpu"))

    def prefetch(self: Any) -> None:
        """Moves everything back to the layer's device."""
        for store in self._stores() if self.is_initialized else ():
            store.to(self.device)


def row_indices(indices: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Returns row numbers from 0 up for integers (from the end if negative) or a mask over `batch_size` rows."""
    indices = torch.as_tensor(indices)
    if indices.dtype == torch.bool:
        return indices.nonzero()[:, 0]
    return torch.where(indices < 0, indices + batch_size, indices)
