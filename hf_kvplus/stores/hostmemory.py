"""Host memory that goes back to the system as soon as it is free, in pages of its own.

Blocks that stay and dense states that come and go, one layer after the other and longer each time, would tear holes
into the heap that nothing fits into: a cache of 256 MiB with a budget of 64 MiB took 580 MiB that way. Mapped memory
has no neighbours. And pages that were never touched take nothing, so buffers may be larger than what they hold.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import weakref
from functools import cache
from typing import Any

import torch

# Below, a page of its own would waste too much.
SMALLEST_MAPPED_BYTES = 1 << 16
# Of a buffer that stays: half a page is wasted on average, and holes of smaller ones hardly count.
SMALLEST_BUFFER_BYTES = 1 << 14
# How much longer than asked for a reused buffer is, so that growing states find room for a while.
HEADROOM = 1.25


def empty_bytes(size: int, device: torch.device, pinned: bool = False) -> torch.Tensor:
    """Returns `size` bytes without content, uint8; on a CPU mapped ones unless they are pinned or few."""
    if device.type != "cpu" or pinned or size < SMALLEST_MAPPED_BYTES:
        return torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned)
    return torch.frombuffer(map_memory(size), dtype=torch.uint8)


def map_memory(size: int) -> mmap.mmap:
    """Returns mapped memory of this process alone: a forked one gets a copy, as of any other memory."""
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def can_map(tensor: torch.Tensor) -> bool:
    """Whether memory for tensors like this one can be mapped."""
    return tensor.device.type == "cpu" and type(tensor) is torch.Tensor and not torch.compiler.is_compiling()


def empty_buffer(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor without content of the dtype and device of `tensor`, for a buffer that stays.

    On a CPU large ones are mapped: when all layers of a cache outgrow their buffers in one step, what they give up
    would else stay with the process as holes that the next, slightly larger ones don't fit into.
    """
    size = math.prod(shape) * tensor.element_size()
    if size < SMALLEST_BUFFER_BYTES or not can_map(tensor):
        return tensor.new_empty(shape)
    return torch.frombuffer(map_memory(size), dtype=tensor.dtype, count=math.prod(shape)).view(shape)


@cache
def _heap_trimmer() -> Any:
    """Returns the function of the C library that gives free pages of the heap back, or `None` where it has none."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def trim_heap() -> None:
    """Gives pages of the heap back that hold nothing, also those between others; does nothing without glibc.

    What a model computes on the way grows with each chunk of a prompt, so one's holes are too small for the next.
    """
    trim = _heap_trimmer()
    if trim is not None:
        trim(0)


class DensePool:
    """Buffers for dense states, each used again as soon as no tensor reads it any more.

    Every tensor from here is over a `memoryview` of its own, which its storage keeps and all its views share. When the
    last of them is gone, the memoryview is, and a weak reference to it tells.
    """

    def __init__(self) -> None:
        self._leases: list[tuple[mmap.mmap, weakref.ref[memoryview]]] = []

    def __deepcopy__(self, memo: dict[int, object]) -> DensePool:
        """A copy has buffers of its own."""
        return DensePool()

    def __reduce__(self) -> tuple[type[DensePool], tuple[()]]:
        """Likewise what was pickled."""
        return DensePool, ()

    def empty_like(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns a tensor without content of the dtype and device of `tensor`."""
        size = math.prod(shape) * tensor.element_size()
        if size < SMALLEST_MAPPED_BYTES or not can_map(tensor):
            return tensor.new_empty(shape)
        return torch.frombuffer(self._lend(size), dtype=tensor.dtype, count=math.prod(shape)).view(shape)

    def _lend(self, size: int) -> memoryview:
        """Returns a free buffer of at least `size` bytes; free ones that are too small are given back."""
        busy = [one for one in self._leases if one[1]() is not None]
        free = [one for one in self._leases if one not in busy and len(one[0]) >= size]
        mapping = free.pop()[0] if free else map_memory(int(size * HEADROOM))
        lent = memoryview(mapping)
        self._leases = [*busy, *free, (mapping, weakref.ref(lent))]
        return lent

    def let_go(self) -> None:
        """Forgets the buffers: those that are read live as long as the tensors over them, the others go at once."""
        self._leases = []

    @property
    def held_bytes(self) -> int:
        """Bytes of the buffers, touched or not."""
        return sum(len(mapping) for mapping, _ in self._leases)
