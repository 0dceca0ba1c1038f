"""Host memory that goes back to the system as soon as it is free, in pages of its own.

Blocks that stay and dense states that come and go, one layer after the other and longer each time, would tear holes
into the heap that nothing fits into: a cache of 256 MiB with a budget of 64 MiB took 580 MiB that way. Mapped memory
has no neighbours. And pages that were never touched take nothing, so buffers may be larger than what they hold.
"""

from __future__ import annotations

import math
import mmap
import sys

import torch

# Below, a page of its own would waste too much.
SMALLEST_MAPPED_BYTES = 1 << 16
# How much longer than asked for a reused buffer is, so that growing states find room for a while.
HEADROOM = 1.25


def empty_bytes(size: int, device: torch.device, pinned: bool = False) -> torch.Tensor:
    """Returns `size` bytes without content, uint8; on a CPU mapped ones unless they are pinned or few."""
    if device.type != "cpu" or pinned or size < SMALLEST_MAPPED_BYTES:
        return torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


class DensePool:
    """Buffers for dense states, each used again as soon as no tensor reads it any more.

    A tensor over mapped memory holds a reference to the mapping, and all its views share that one; so Python's count
    of references tells whether anybody still has them.
    """

    def __init__(self) -> None:
        self._mappings: list[mmap.mmap] = []

    def __deepcopy__(self, memo: dict[int, object]) -> DensePool:
        """A copy has buffers of its own."""
        return DensePool()

    def __reduce__(self) -> tuple[type[DensePool], tuple[()]]:
        """Likewise what was pickled."""
        return DensePool, ()

    def empty_like(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns a tensor without content of the dtype and device of `tensor`."""
        size = math.prod(shape) * tensor.element_size()
        if tensor.device.type != "cpu" or size < SMALLEST_MAPPED_BYTES:
            return tensor.new_empty(shape)
        mapping = self._take(size)
        return torch.frombuffer(mapping, dtype=tensor.dtype, count=math.prod(shape)).view(shape)

    def _take(self, size: int) -> mmap.mmap:
        """Returns a free mapping of at least `size` bytes; free ones that are too small are given back."""
        kept, found = [], None
        for index in range(len(self._mappings)):
            mapping = self._mappings[index]
            # The list, the name here and the argument of the call.
            free = sys.getrefcount(mapping) <= 3
            if free and len(mapping) < size:
                continue
            kept.append(mapping)
            if free and found is None:
                found = mapping
        self._mappings = kept
        if found is None:
            found = mmap.mmap(-1, int(size * HEADROOM))
            self._mappings.append(found)
        return found

    @property
    def held_bytes(self) -> int:
        """Bytes of the buffers, touched or not."""
        return sum(map(len, self._mappings))
