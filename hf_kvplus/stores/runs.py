"""Runs: up to a slab of consecutive blocks as plain bytes, which can lie on a device, in host memory or in a file.

    run      [ record | record | ... ]              one record a block, as in a file (see `blockfile`)
    record   [ header | row 0 | row 1 | ... ]
    row      [ field | field | ... ]                each field (kv_heads, ...), at a multiple of 16 bytes

Blocks and rows have fixed sizes, so a field of many blocks is one strided view. Which row of a record stands for which
row of the batch is told by whoever reads: reordering beams changes no byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_kvplus.codecs.base import Packed
from hf_kvplus.stores.blockfile import HEADER_BYTES, BlockFile
from hf_kvplus.stores.digests import Digests
from hf_kvplus.stores.hostmemory import empty_bytes

ALIGNMENT = 16


@dataclass(frozen=True)
class Layout:
    """Where the fields of a payload lie in a record.

    Args:
        fields: Name, shape (kv_heads, ...) and dtype of each.
    """

    fields: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]

    @classmethod
    def of(cls, packed: Packed) -> Layout:
        """Returns the layout of what a codec returned, `(batch, kv_heads, blocks, ...)`."""
        return cls(tuple((name, (t.shape[1], *t.shape[3:]), t.dtype) for name, t in packed.items()))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of a block."""
        return sum(_aligned(math.prod(shape) * dtype.itemsize) for _, shape, dtype in self.fields)

    def record_bytes(self, batch: int) -> int:
        """Bytes of a block of `batch` rows, header included."""
        return HEADER_BYTES + batch * self.row_bytes

    def payload_bytes(self) -> int:
        """Bytes of one row of a block without what aligns its fields."""
        return sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in self.fields)

    def head_spans(self, batch: int) -> Iterator[tuple[int, int]]:
        """Yields where each head of each row lies in a record, if a block has one field only; else nothing."""
        if len(self.fields) > 1:
            return
        _, shape, dtype = self.fields[0]
        size = math.prod(shape[1:]) * dtype.itemsize
        for row in range(batch):
            for head in range(shape[0]):
                begin = HEADER_BYTES + row * self.row_bytes + head * size
                yield begin, begin + size

    def views(self, data: torch.Tensor, batch: int, count: int) -> Packed:
        """Returns the fields of `count` records in `data`, each `(blocks, batch, kv_heads, ...)`."""
        record, row, offset = self.record_bytes(batch), self.row_bytes, HEADER_BYTES
        views = {}
        for name, shape, dtype in self.fields:
            size = dtype.itemsize
            strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
            whole = data.view(dtype)
            views[name] = whole.as_strided(
                (count, batch, *shape),
                (record // size, row // size, *strides),
                whole.storage_offset() + offset // size,
            )
            offset += _aligned(math.prod(shape) * size)
        return views

    def empty(self, batch: int, blocks: int, device: torch.device) -> Packed:
        """Returns a payload without content, `(batch, kv_heads, blocks, ...)`."""
        return {
            name: torch.empty((batch, shape[0], blocks, *shape[1:]), dtype=dtype, device=device)
            for name, shape, dtype in self.fields
        }

    def carve(self, scratch: torch.Tensor, batch: int, blocks: int) -> Packed:
        """Returns a payload in the front of `scratch`, bytes that suffice for `scratch_bytes`."""
        offset, packed = 0, {}
        for name, shape, dtype in self.fields:
            size = batch * blocks * math.prod(shape) * dtype.itemsize
            part = scratch.narrow(0, offset, size).view(dtype)
            packed[name] = part.view(batch, shape[0], blocks, *shape[1:])
            offset += -(-size // 64) * 64
        return packed

    def scratch_bytes(self, batch: int, blocks: int) -> int:
        """Bytes that `carve` needs."""
        sizes = (batch * blocks * math.prod(shape) * dtype.itemsize for _, shape, dtype in self.fields)
        return sum(-(-size // 64) * 64 for size in sizes)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(eq=False)
class Run:
    """Blocks that were packed for the same rows, one behind the other.

    Args:
        key: Layer and name of the store that packed them.
        layout: Where their fields lie.
        batch: Rows of each.
        count: Blocks.
        data: Their records, uint8, where they are in memory; room for more blocks may follow.
        file: The file that they are in, if they are in one.
        offset: Of the first record in that file.
        sealed: Whether no more blocks may be added, because a copy shares this run or blocks were cut off.
        digests: Checksums of what is in the file, `None` while unknown.
    """

    key: tuple[int, str]
    layout: Layout
    batch: int
    count: int = 0
    data: torch.Tensor | None = None
    file: BlockFile | None = None
    offset: int = 0
    sealed: bool = False
    digests: Digests | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Run:
        """Copies share a run."""
        self.sealed = True
        return self

    @property
    def record_bytes(self) -> int:
        """Bytes of one record."""
        return self.layout.record_bytes(self.batch)

    @property
    def nbytes(self) -> int:
        """Bytes of the records."""
        return self.count * self.record_bytes

    def note(self, records: memoryview) -> None:
        """Takes note of records that have been written to the file, the first ones if there is none yet."""
        if self.digests is not None or self.file is None:
            added = len(records) // self.record_bytes
            self.digests = (self.digests or Digests.empty(self)).grown(records, added)

    def read(self, into: memoryview, count: int) -> None:
        """Reads the first `count` records from the file and checks them.

        Raises:
            BlockError: If one is missing or damaged.
        """
        if self.file is None:
            raise RuntimeError("a run is neither in memory nor in a file")
        digests = self.digests
        whole = digests.whole if digests is not None and digests.count == count else None
        self.file.read(self.offset, into, self.record_bytes, whole)
        if digests is None:  # a file that an ended process left
            self.digests = Digests.empty(self).grown(into, count)

    def add(self, packed: Packed, device: torch.device, pinned: bool, most: int) -> torch.Tensor:
        """Puts blocks `(batch, kv_heads, blocks, ...)` behind those held, in memory on `device`.

        Args:
            packed: The blocks.
            device: Where this run's bytes are kept.
            pinned: Whether host memory is page-locked, so that a device can copy from it on its own.
            most: Blocks that a run may grow to.

        Returns:
            Their records.
        """
        added = next(iter(packed.values())).shape[2]
        needed = (self.count + added) * self.record_bytes
        if self.data is None or self.data.numel() < needed:
            # A run that grows doubles; one that comes at once takes what it needs.
            blocks = min(most, max(2 * self.count, self.count + added)) if self.count else added
            size = max(needed, blocks * self.record_bytes)
            grown = empty_bytes(size, device, pinned)
            if self.data is not None:
                grown[: self.nbytes].copy_(self.data[: self.nbytes])
            self.data = grown
        fresh = self.data[self.nbytes : needed]
        fresh[: added * self.record_bytes].view(added, -1)[:, :HEADER_BYTES] = 0
        for name, view in self.layout.views(fresh, self.batch, added).items():
            view.copy_(packed[name].movedim(2, 0))
        self.count += added
        return fresh


@dataclass
class Entry:
    """A part of a run, as one cache sees it.

    Args:
        run: The run.
        first: First block of it.
        count: Blocks.
        rows: Row of the run for each row of the batch; `None` if they are the same.
    """

    run: Run
    first: int
    count: int
    rows: list[int] | None = field(default=None)

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return self.run.batch if self.rows is None else len(self.rows)

    def select(self, rows: Sequence[int]) -> None:
        """Keeps rows of the batch, in that order."""
        chosen = list(rows) if self.rows is None else [self.rows[row] for row in rows]
        self.rows = None if chosen == list(range(self.run.batch)) else chosen

    def copy_blocks(self, data: torch.Tensor, first: int, count: int, out: Packed, at: int) -> None:
        """Copies blocks `first` on, of the run's records `data`, to block `at` of a payload."""
        record = self.run.record_bytes
        views = self.run.layout.views(data[first * record :], self.run.batch, count)
        for name, view in views.items():
            target = out[name].narrow(2, at, count)
            if self.rows is None:
                target.copy_(view.movedim(0, 2))
            else:
                for row, source in enumerate(self.rows):
                    target[row].copy_(view[:, source].movedim(0, 1))
