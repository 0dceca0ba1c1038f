"""A `PackedStore` whose blocks live elsewhere: in host memory or in files, read a slab at a time.

    entries   [ run of a slab | run of a slab | ... | last run, growing ]
    read      run -> its bytes on the device -> fields of a slab, contiguous, in scratch -> codec or kernel

Slabs are those of `PackedStore`, so a codec decodes the same tensors as it would without offloading, to the same bits.
Rows are told by a list beside each run: reordering, selecting and repeating rows touches no byte of a block.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hf_kvplus.codecs.base import Codec, Packed
from hf_kvplus.stores.blockfile import CAN_SCATTER, BlockError, OffloadError
from hf_kvplus.stores.growing import Mover
from hf_kvplus.stores.packed import SLAB_ELEMENTS, Encode, PackedStore
from hf_kvplus.stores.runs import Entry, Layout, Run
from hf_kvplus.stores.space import CPU, DISK, Shelves
from hf_kvplus.stores.straight import decode_together

# Of a run whose states nobody has seen, because it came from a file.
RUN_BYTES = 1 << 20


class OffloadedStore(PackedStore):
    """Holds the packed blocks of the keys or values of one layer.

    Args:
        codec: How blocks become bytes.
        shelves: The cache's stores.
        key: Layer, and `"keys"` or `"values"`.
        bound: Ignored: a window drops whole runs.
    """

    in_buffers = False

    def __init__(self, codec: Codec, shelves: Shelves, key: tuple[int, str], bound: int = 0) -> None:
        super().__init__(codec, bound)
        self.shelves, self.key = shelves, key
        self.entries: list[Entry] = []
        # A `Layout` once there are blocks.
        self.layout: Any = None
        self.device = torch.device("cpu")
        self.dropped = 0
        # Elements of one row of a block of states, 0 while unknown.
        self.row_elements = 0
        shelves.stores[key] = self

    # Copies

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadedStore:
        """Returns a store that shares the blocks; both add new ones to runs of their own."""
        twin = OffloadedStore(self.codec, copy.deepcopy(self.shelves, memo), self.key, self.bound)
        twin.entries = copy.deepcopy(self.entries, memo)
        for name in ("layout", "device", "dropped", "length", "row_elements"):
            setattr(twin, name, getattr(self, name))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Returns everything that makes an equal store, the blocks as tensors."""
        names = ("codec", "shelves", "key", "bound", "device", "dropped", "row_elements")
        held = self.fields() if self.layout is not None else {}
        return {**{name: getattr(self, name) for name in names}, "held": held}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Stores the blocks anew."""
        self.__init__(state["codec"], state["shelves"], state["key"], state["bound"])  # type: ignore[misc]
        self.device, self.row_elements = state["device"], state["row_elements"]
        if state["held"]:
            self.append(state["held"])
        self.dropped = state["dropped"]

    # Writing

    def append(self, fields: Packed, upcoming: int = 0, mover: Mover | None = None) -> None:
        """Writes blocks behind those held.

        Args:
            fields: A payload `(batch, kv_heads, added, ...)`.
            upcoming: Ignored; runs take what they need.
            mover: Ignored.

        Raises:
            OffloadError: If they can't be written.
            NotImplementedError: If blocks can't be brought back to the device that the states are on.
        """
        some = next(iter(fields.values()))
        batch, added, self.device = some.shape[0], some.shape[2], some.device
        if self.layout is None:
            self.layout = Layout.of(fields)
            self.shelves.ahead.lane(self.device)  # refuses what couldn't be read back
        at = 0
        while at < added:
            run = self._open_run(batch)
            count = min(self.run_blocks(batch) - run.count, added - at)
            self._add(run, {name: tensor.narrow(2, at, count) for name, tensor in fields.items()}, count)
            at += count

    def append_states(
        self, states: torch.Tensor, valid: torch.Tensor | None = None, encode: Encode | None = None
    ) -> None:
        """Encodes whole blocks and appends them; see `PackedStore.append_states`."""
        self.row_elements = self.codec.block_tokens * states.shape[1] * states.shape[3]
        super().append_states(states, valid, encode)

    def run_blocks(self, batch: int) -> int:
        """Returns the most blocks of a run: as many as are decoded at a time."""
        if not self.row_elements:
            return max(1, RUN_BYTES // (batch * self.layout.row_bytes))
        return max(1, SLAB_ELEMENTS // (batch * self.row_elements))

    def _open_run(self, batch: int) -> Run:
        """Returns the last run if it takes more blocks, or else a new one."""
        last = self.entries[-1] if self.entries else None
        if last is not None and last.rows is None and not last.run.sealed and last.run.batch == batch:
            whole = last.first + last.count == last.run.count
            file = last.run.file
            behind = file is None or last.run.offset + last.run.nbytes == file.size
            if whole and behind and last.run.count < self.run_blocks(batch):
                return last.run
        run = Run(self.key, self.layout, batch)
        self.entries.append(Entry(run, 0, 0))
        return run

    def _add(self, run: Run, fields: Packed, count: int) -> None:
        """Adds blocks to the last run, in memory and, on tier `"disk"`, in its file."""
        space = self.shelves.space
        place = space.place_of(self.device)
        pinned = self.device.type == "cuda" and place.type == "cpu"
        what = f"blocks {self.length} to {self.length + count - 1}"
        if run.data is None and run.count:
            # The run's earlier blocks are in its file only: these follow them there.
            piece = Run(self.key, self.layout, run.batch)
            space.write(run, piece.add(fields, place, False, count), what)
            run.count += count
        else:
            records = run.add(fields, place, pinned, self.run_blocks(run.batch))
            if space.options.tier == DISK:
                space.write(run, records, what)
        self.entries[-1].count += count
        self.length += count
        space.settle(run, self.dropped + self.length - run.count, self.device)

    def drop_front(self, count: int) -> None:
        """Forgets the first `count` blocks; runs that nobody needs any more are given up."""
        count = min(count, self.length)
        self.length -= count
        self.dropped += count
        while count:
            entry = self.entries[0]
            taken = min(count, entry.count)
            entry.first, entry.count, count = entry.first + taken, entry.count - taken, count - taken
            if not entry.count:
                self.entries.pop(0)

    def drop_back(self, count: int) -> None:
        """Forgets the last `count` blocks."""
        count = min(count, self.length)
        self.length -= count
        while count:
            entry = self.entries[-1]
            taken = min(count, entry.count)
            entry.count, count = entry.count - taken, count - taken
            entry.run.sealed = True
            if not entry.count:
                self.entries.pop()

    def replace(self, fields: Packed) -> None:
        """Forgets what is held and holds copies of `fields` instead."""
        self.clear()
        self.append(fields)

    def clear(self) -> None:
        """Forgets everything and gives memory and files back."""
        super().clear()
        self.entries, self.layout, self.dropped = [], None, 0

    def select(self, indices: torch.Tensor) -> None:
        """Keeps the batch rows `indices`, in that order; rows may repeat. No block is touched."""
        rows = indices.tolist()
        for entry in self.entries:
            entry.select(rows)

    def repeat_interleave(self, repeats: int) -> None:
        """Repeats every batch row `repeats` times in place."""
        for entry in self.entries:
            entry.select([row for row in range(entry.batch) for _ in range(repeats)])

    def to(self, device: torch.device) -> None:
        """Reads on `device` from now on; blocks that are on another one are moved."""
        self.device = device
        for entry in self.entries:
            if entry.run.data is not None and entry.run.data.device.type != "cpu":
                entry.run.data = entry.run.data.to(device)

    # Reading

    @property
    def names(self) -> list[str]:
        """The names of the fields held."""
        return [name for name, _, _ in self.layout.fields] if self.layout else []

    def get(self, name: str) -> torch.Tensor:
        """Returns all blocks of a field, `(batch, kv_heads, blocks, ...)`, a copy."""
        return self.fields()[name]

    def fields(self, first: int = 0, last: int | None = None) -> Packed:
        """Returns copies of blocks `first` to `last` (exclusive) of every field.

        Raises:
            OffloadError: If a block can't be read.
        """
        last = self.length if last is None else last
        if self.layout is None:
            return {}
        out = self.layout.empty(self._batch(), last - first, self.device)
        with _Reader(self) as reader:
            self._copy_blocks(reader, first, last, out)
        return out

    def decode(self, out: torch.Tensor, first_block: int = 0, last_block: int | None = None) -> None:
        """Decodes blocks into the front of `out`, `(batch, kv_heads, tokens, head_dim)`.

        Raises:
            OffloadError: If a block can't be read.
        """
        decode_together([(self, out)], first_block, last_block)

    def decode_copied(
        self, out: torch.Tensor, first_block: int, last_block: int | None, straight: Sequence[Entry]
    ) -> None:
        """Decodes blocks but those of `straight`, which somebody else reads into their place; see `decode`.

        Raises:
            OffloadError: If a block can't be read.
        """
        last_block = self.length if last_block is None else last_block
        tokens, slab = self.codec.block_tokens, self._slab_blocks(out.shape)
        if last_block <= first_block:
            return
        left_out = set(map(id, straight))
        # Whoever reads a part of the blocks reads the same part of keys and values, then the next.
        self.shelves.announce(self.key, first_block, last_block, alternating=last_block < self.length)
        with _Reader(self) as reader:
            if self.codec.lossless:
                for entry, first, count, block in self.parts(first_block, last_block):
                    if id(entry) in left_out:
                        continue
                    target = out.narrow(2, (block - first_block) * tokens, count * tokens).unflatten(2, (-1, tokens))
                    plain = entry.rows is None
                    packed = reader.views(entry, first, count) if plain else self._gather(reader, block, block + count)
                    self.codec.decode(packed, out.shape[3], target)
                return
            for start in range(first_block, last_block, slab):
                stop = min(start + slab, last_block)
                target = out[:, :, (start - first_block) * tokens : (stop - first_block) * tokens]
                packed = self._gather(reader, start, stop)
                self.codec.decode(packed, out.shape[3], target.unflatten(2, (-1, tokens)))

    def entries_from(self, block: int) -> list[Entry]:
        """Returns the entries that hold blocks from `block` on."""
        return [entry for begin, entry in self._begins() if begin + entry.count > block]

    def goes_straight(self, entry: Entry, room_bytes: float) -> bool:
        """Whether an entry can be read from its file into dense states, see `straight`.

        Args:
            entry: One of this store's.
            room_bytes: Bytes that are still free in memory: what fits there is read so that it can be kept.
        """
        run = entry.run
        whole = entry.rows is None and entry.first == 0 and entry.count == run.count
        known = run.file is not None and run.digests is not None and run.digests.count == run.count
        away = run.data is None and run.nbytes > room_bytes and self.device.type == "cpu"
        return CAN_SCATTER and self.codec.lossless and whole and known and away

    def boundaries(self, first: int, last: int) -> list[tuple[int, int]]:
        """Splits blocks `first` to `last` into pieces that `pieces` can read one at a time."""
        return [(block, block + count) for _, _, count, block in self.parts(first, last)]

    def pieces(self, ranges: list[tuple[int, int]]) -> Iterator[Packed]:
        """Yields the fields of some ranges of blocks, in scratch that the next one overwrites.

        Args:
            ranges: First block and the one behind the last, each.

        Raises:
            OffloadError: If a block can't be read.
        """
        if ranges:
            self.shelves.announce(self.key, *ranges[0], alternating=True)
        with _Reader(self) as reader:
            for first, last in ranges:
                yield self._gather(reader, first, last)

    def _batch(self) -> int:
        return self.entries[0].batch if self.entries else 0

    def _gather(self, reader: _Reader, first: int, last: int) -> Packed:
        """Returns the fields of some blocks in scratch that all layers share."""
        size = self.layout.scratch_bytes(self._batch(), last - first)
        scratch = self.shelves.scratch_for(self.device, self.key[1], size)
        out = self.layout.carve(scratch, self._batch(), last - first)
        self._copy_blocks(reader, first, last, out)
        return out

    def _copy_blocks(self, reader: _Reader, first: int, last: int, out: Packed) -> None:
        for entry, start, count, block in self.parts(first, last):
            entry.copy_blocks(reader.data(entry), start, count, out, block - first)

    def parts(self, first: int, last: int) -> Iterator[tuple[Entry, int, int, int]]:
        """Yields what blocks `first` to `last` consist of: entry, first block of its run, count, block held."""
        begin = 0
        for entry in self.entries:
            low, high = max(first, begin), min(last, begin + entry.count)
            if low < high:
                yield entry, entry.first + low - begin, high - low, low
            begin += entry.count

    def fail(self, error: BlockError, entry: Entry) -> OffloadError:
        """Returns the error for users of a record that can't be read, and remembers it."""
        begin = next(begin for begin, one in self._begins() if one is entry)
        layer, name = self.key
        block = begin + error.record - entry.first
        self.shelves.space.broken = OffloadError(
            f"block {block} of the {self.length} held of the {name} of layer {layer} can't be read: {error.reason}. "
            "What is stored is lost; `reset()` the cache and let the model read its prompt again"
        )
        return self.shelves.space.broken

    def _begins(self) -> Iterator[tuple[int, Entry]]:
        begin = 0
        for entry in self.entries:
            yield begin, entry
            begin += entry.count

    # Sizes

    @property
    def used_bytes(self) -> int:
        """Bytes of payload that are in memory, wherever that is."""
        return sum(
            entry.count * entry.run.batch * entry.run.layout.payload_bytes()
            for entry in self.entries
            if entry.run.data is not None
        )

    @property
    def away_bytes(self) -> int:
        """Bytes of payload that are in files alone."""
        return sum(
            entry.count * entry.run.batch * entry.run.layout.payload_bytes()
            for entry in self.entries
            if entry.run.data is None
        )

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffers behind that payload."""
        return sum(entry.run.data.nbytes for entry in self.entries if entry.run.data is not None)

    @property
    def host_bytes(self) -> int:
        """Bytes of those buffers in host memory, if that isn't where they are read; tier `"cpu"` counts as if."""
        apart = self.device.type != "cpu" or self.shelves.space.options.tier == CPU
        held = [entry.run.data for entry in self.entries if entry.run.data is not None]
        return sum(data.nbytes for data in held if data.device.type == "cpu") if apart else 0

    @property
    def disk_bytes(self) -> int:
        """Bytes of the runs that are in files."""
        return sum(entry.run.nbytes for entry in self.entries if entry.run.file is not None)


class _Reader:
    """Brings one run after another to the device; a run that is asked for again is still there.

    Args:
        store: The store that is read.
    """

    def __init__(self, store: OffloadedStore) -> None:
        self.store = store
        self.run: Run | None = None
        self.slot: Any = None
        store.shelves.space.check()

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *reason: Any) -> None:
        self._release()

    def _release(self) -> None:
        if self.slot is not None:
            self.store.shelves.ahead.release(self.slot)
        self.run = self.slot = None

    def data(self, entry: Entry) -> Any:
        """Returns the records of an entry's run, on the device of the store.

        Raises:
            OffloadError: If they can't be read.
        """
        shelves, run = self.store.shelves, entry.run
        if shelves.is_near(run, self.store.device):
            shelves.space.touch(run)
            return run.data
        if run is not self.run:
            self._release()
            try:
                slot = shelves.ahead.take(run, self.store.device)
            except BlockError as error:
                raise self.store.fail(error, entry) from error
            self.run, self.slot = run, slot
            if run.file is not None and run.data is None:
                shelves.space.keep(run, slot.staging)
        return self.slot.device

    def views(self, entry: Entry, first: int, count: int) -> Packed:
        """Returns blocks of an entry as they lie in its run, `(batch, kv_heads, blocks, ...)`."""
        run, data = entry.run, self.data(entry)
        views = run.layout.views(data[first * run.record_bytes :], run.batch, count)
        return {name: view.movedim(0, 2) for name, view in views.items()}
