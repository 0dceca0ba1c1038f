"""Checksums of whole runs, kept in memory: one look at megabytes instead of one at each record.

A record's own checksum, in its file, is for whoever opens that file later and for saying which block is damaged. While
a cache lives it knows what it wrote. Both come from the same bytes, so either may be asked first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hf_kvplus.stores.blockfile import import_xxhash

if TYPE_CHECKING:
    from hf_kvplus.stores.runs import Run


@dataclass(frozen=True)
class Digests:
    """Checksums of the first blocks of a run.

    Args:
        count: Blocks.
        whole: Of their records, headers included.
        heads: Of each head of each row, its bytes in all blocks one behind the other; none unless a block is just
            states as they are.
        spans: First and last byte (exclusive) in a record of each of these.
        hashes: What they were taken with, the whole first; they go on where more blocks follow.
    """

    count: int
    whole: int
    heads: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    hashes: tuple[Any, ...]

    @classmethod
    def empty(cls, run: Run) -> Digests:
        """Returns those of no blocks."""
        spans = tuple(run.layout.head_spans(run.batch))
        return cls(0, 0, (), spans, tuple(import_xxhash().xxh3_64() for _ in range(1 + len(spans))))

    def grown(self, records: memoryview, added: int) -> Digests:
        """Returns those of `added` more blocks, whose records follow; this object can't grow again."""
        whole, *heads = self.hashes
        whole.update(records)
        for begin in range(0, len(records), len(records) // added):
            for (first, last), one in zip(self.spans, heads, strict=True):
                one.update(records[begin + first : begin + last])
        digests = tuple(one.intdigest() for one in heads)
        return replace(self, count=self.count + added, whole=whole.intdigest(), heads=digests)
