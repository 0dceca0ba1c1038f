"""Reads whole runs of states from files straight into the dense states that attention reads, on some threads.

    file     [ header, row 0: head 0, head 1, row 1: ... | header, row 0: ... | ... ]       a record a block
    dense    [ row 0, head 0: its tokens of all blocks   | row 0, head 1: ... | ... ]

One call scatters a run's bytes: there is one copy, from the system's. What arrived is checked where it lies, against
checksums of each head's bytes that were taken when the run was written (a head's blocks lie together there). If they
differ the run is read again, record by record: that names the block that is damaged, or brings the right bytes.

Only states stored as they are can go this way, and only where the CPU reads them. Everything else goes through slots.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_kvplus.stores.blockfile import BlockError
from hf_kvplus.stores.readahead import THREADS

if TYPE_CHECKING:
    from hf_kvplus.stores.offloaded import OffloadedStore
    from hf_kvplus.stores.runs import Entry, Run


@dataclass
class Target:
    """Dense states as bytes.

    Args:
        data: All of them, `(rows, heads, tokens)` of `token_bytes` each.
        lines: Rows times heads.
        tokens: Tokens of each.
        token_bytes: Bytes of one.
    """

    data: memoryview
    lines: int
    tokens: int
    token_bytes: int

    @classmethod
    def of(cls, out: torch.Tensor) -> Target:
        """Returns the bytes of contiguous states `(batch, kv_heads, tokens, head_dim)`."""
        data = out.detach().view(-1).view(torch.uint8).numpy().data
        return cls(data, out.shape[0] * out.shape[1], out.shape[2], out.shape[3] * out.element_size())

    def line(self, number: int, first: int, tokens: int) -> memoryview:
        """Returns some tokens of one head of one row."""
        begin = (number * self.tokens + first) * self.token_bytes
        return self.data[begin : begin + tokens * self.token_bytes]


@dataclass(eq=False)
class Read:
    """A run on its way into dense states.

    Args:
        store: The store that it belongs to.
        entry: The whole run, as the store sees it.
        target: The states.
        first: Its first token there.
    """

    store: OffloadedStore
    entry: Entry
    target: Target
    first: int

    def __call__(self) -> None:
        """Reads and checks it.

        Raises:
            BlockError: If a block is missing or damaged.
        """
        run = self.entry.run
        file, digests, tokens = run.file, run.digests, run.count * self.store.codec.block_tokens
        if file is None or digests is None:
            raise RuntimeError("only what is in a file and was written here goes straight")
        parts = self._parts(run, digests.spans)
        if file.scatter(run.offset, parts) and all(
            file.hash(self.target.line(number, self.first, tokens)) == digest
            for number, digest in enumerate(digests.heads)
        ):
            return
        records, begin = memoryview(bytearray(run.nbytes)), 0
        run.read(records, run.count)
        for part in parts:
            part[:] = records[begin : begin + len(part)]
            begin += len(part)

    def _parts(self, run: Run, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Returns where the bytes of the run's records go, in the order of the file."""
        target, size = self.target, spans[0][1] - spans[0][0]
        # Headers and what aligns a row go where nobody reads them.
        unread = memoryview(bytearray(run.record_bytes - len(spans) * size))
        ends = [0, *(last for _, last in spans)]
        gaps = [unread[: first - end] for end, (first, _) in zip(ends, spans, strict=False)]
        tail = unread[: run.record_bytes - ends[-1]]
        parts = []
        for block in range(run.count):
            for line, gap in enumerate(gaps):
                at = (line * target.tokens + self.first) * target.token_bytes + block * size
                if gap:
                    parts.append(gap)
                parts.append(target.data[at : at + size])
            if tail:
                parts.append(tail)
        return parts


class Pile:
    """Reads that whoever has time takes from: other threads from the front, the one that needs them from the end.

    Args:
        reads: The reads.
    """

    def __init__(self, reads: Iterable[Read]) -> None:
        self.reads = deque(reads)
        self.errors: list[tuple[Read, BlockError]] = []

    def work(self, take: Callable[[], Read]) -> None:
        """Reads until nothing is left."""
        while True:
            try:
                read = take()
            except IndexError:
                return
            try:
                read()
            except BlockError as error:
                self.errors.append((read, error))


def decode_together(
    wanted: Sequence[tuple[OffloadedStore, torch.Tensor]], first_block: int = 0, last_block: int | None = None
) -> None:
    """Decodes blocks of some stores of one layer, each into the front of its `out`; see `OffloadedStore.decode`.

    Args:
        wanted: Stores, and `(batch, kv_heads, tokens, head_dim)` for each.
        first_block: The first block.
        last_block: The one behind the last; by default all are read.

    Raises:
        OffloadError: If a block can't be read.
    """
    straight = [_straight(store, out, first_block, last_block) for store, out in wanted]
    pile = Pile(itertools.chain.from_iterable(straight))
    shelves, layer = wanted[0][0].shelves, wanted[0][0].key[0]
    others = [
        shelves.ahead.threads().submit(pile.work, pile.reads.popleft) for _ in range(min(THREADS, len(pile.reads) - 1))
    ]
    try:
        for (store, out), reads in zip(wanted, straight, strict=True):
            store.decode_copied(out, first_block, last_block, [read.entry for read in reads])
        pile.work(pile.reads.pop)
    finally:
        # Nobody may write into dense states that are given up.
        pile.reads.clear()
        for other in others:
            if not other.cancel():
                other.result()
    for read, error in pile.errors:
        raise read.store.fail(error, read.entry) from error
    if any(straight):
        shelves.advise(layer)


def _straight(store: OffloadedStore, out: torch.Tensor, first_block: int, last_block: int | None) -> list[Read]:
    """Returns the reads of the runs that can go straight into `out`; whoever reads piece by piece uses slots."""
    if last_block is not None and last_block < len(store):
        return []
    if not store.codec.lossless or not out.is_contiguous() or store.layout is None:
        return []
    if out.device.type != "cpu" or out.dtype != store.layout.fields[0][2]:
        return []
    target, room = Target.of(out), store.shelves.space.room_bytes()
    return [
        Read(store, entry, target, (block - first_block) * store.codec.block_tokens)
        for entry, _, count, block in store.parts(first_block, len(store))
        if count == entry.count and store.goes_straight(entry, room)
    ]
