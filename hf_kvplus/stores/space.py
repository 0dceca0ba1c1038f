"""Where offloaded blocks live: what a user asked for, and the memory, folder and budgets that all layers share.

Space    tiers, budgets and the folder; shared by a cache and its copies, whose blocks are the same
Shelves  the stores of one cache in the order of its layers, its scratch and what is read ahead
Shelf    one layer's place in them
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet, WeakValueDictionary

import torch
from transformers.utils import logging

from hf_kvplus.checks import require_at_least, require_choice
from hf_kvplus.codecs.base import Codec
from hf_kvplus.stores.blockfile import BlockFile, OffloadError, Trash, import_xxhash
from hf_kvplus.stores.directory import BlockDirectory, import_fcntl
from hf_kvplus.stores.hostmemory import DensePool, empty_bytes, trim_heap
from hf_kvplus.stores.readahead import ReadAhead
from hf_kvplus.stores.residency import LEAST_RECENTLY_USED, OLDEST, Residency
from hf_kvplus.stores.runs import Run

if TYPE_CHECKING:
    from hf_kvplus.stores.offloaded import OffloadedStore

logger = logging.get_logger(__name__)

CPU, DISK, AUTO, MEMORY = "cpu", "disk", "auto", "memory"
TIERS = (CPU, DISK, AUTO, MEMORY)
NOTHING_SAVED = (
    "`offload:cpu` saves nothing on a CPU, where host memory is all there is; it only copies. Use `offload:disk`, or "
    "leave it out"
)
DEFAULT_DISK_BUDGET_BYTES = 1 << 26
# Whoever packs as much at once has read a part of a prompt, whose computation leaves holes in the heap.
TRIM_TOKENS = 256
# A window drops its oldest blocks file by file.
FILE_BYTES = 1 << 23


@functools.cache
def say_once(message: str) -> None:
    """Warns, the first time."""
    logger.warning(message)


@dataclass(frozen=True)
class Offload:
    """Where blocks go.

    Args:
        tier: `"cpu"`, host memory; `"disk"`, files, at once and all of them, so that a run can be reopened after a
            crash; `"auto"`, where they are until a budget is reached, then the oldest go down a tier, from the device
            to host memory to files; `"memory"` leaves them on the device (what the others are compared with).
        directory: Folder of the files; `None` takes one under the system's temporary folder. One cache at a time has
            it, and what an ended process left in it is removed.
        budget_bytes: `"disk"`: most bytes of blocks that are also kept in memory, 64 MiB by default. `"auto"`: most
            bytes of blocks on the device, needed.
        host_bytes: `"auto"`: most bytes of blocks in host memory beside a device; half of the machine's by default.
        prefetch_layers: Layers that are fetched ahead of the one that is read.

    Raises:
        ValueError: If an option is out of range, missing, or for another tier.
    """

    tier: str = CPU
    directory: str | None = None
    budget_bytes: int | None = None
    host_bytes: int | None = None
    prefetch_layers: int = 1

    def __post_init__(self) -> None:
        """Checks the options once."""
        require_choice("tier", self.tier, TIERS)
        require_at_least("prefetch_layers", self.prefetch_layers, 0)
        given: dict[str, Any] = {name: getattr(self, name) for name in ("directory", "budget_bytes", "host_bytes")}
        fitting = {
            CPU: (),
            MEMORY: (),
            DISK: ("directory", "budget_bytes"),
            AUTO: ("directory", "budget_bytes", "host_bytes"),
        }[self.tier]
        for name, value in given.items():
            if value is not None and name not in fitting:
                raise ValueError(f"`{name}` isn't for tier {self.tier!r}; leave it out, or use tier 'auto' or 'disk'")
            if value is not None and name != "directory":
                require_at_least(name, value, 0)
        if self.directory is not None:
            object.__setattr__(self, "directory", os.fspath(self.directory))
        if self.tier == AUTO and self.budget_bytes is None:
            raise ValueError("`budget_bytes` must be given for tier 'auto', for example 2 * 1024**3")

    def describe(self) -> str:
        """Returns where blocks go, in a few words."""
        ahead = f"{self.prefetch_layers} layers ahead"
        return {
            CPU: f"blocks in host memory, {ahead}",
            DISK: f"blocks on disk, {self.budget_bytes or 0} bytes of them in memory, {ahead}",
            AUTO: f"blocks beyond {self.budget_bytes} bytes in host memory or on disk, {ahead}",
            MEMORY: "blocks in memory",
        }[self.tier]


class Index(Protocol):
    """Writes down what is in the files."""

    def changed(self, shelves: Shelves) -> None:
        """Takes note that a layer of a cache has packed or cut blocks."""
        ...

    def wait(self) -> None:
        """Waits until everything noted is written."""
        ...

    def belongs_to(self, cache: object) -> bool:
        """Whether this is the index of that cache, not of the one that it is a copy of."""
        ...

    def remove(self) -> None:
        """Takes the index away, before the files that it names."""
        ...


class Space:
    """The tiers of a cache and its copies.

    Args:
        options: What the user asked for.
        reopen: Whether files that an ended process left in the folder are kept.

    Raises:
        OffloadError: If the folder can't be used.
        ImportError: If the package for checksums is missing.
        NotImplementedError: If the system has no file locks.
    """

    def __init__(self, options: Offload, *, reopen: bool = False) -> None:
        if options.tier == DISK and options.budget_bytes is None:
            options = replace(options, budget_bytes=DEFAULT_DISK_BUDGET_BYTES)
        self.options = options
        self.trash = Trash()
        self.trash.deferred = reopen
        self.directory: BlockDirectory | None = None
        self.broken: OffloadError | None = None
        self.closed = False
        # Whoever writes what a later process needs to go on puts itself here.
        self.index: Index | None = None
        # Files with bytes that may not have reached the disk yet.
        self.unsynced: WeakSet[BlockFile] = WeakSet()
        self._numbers = itertools.count(1)
        self._files: WeakValueDictionary[tuple[int, str], BlockFile] = WeakValueDictionary()
        if options.tier in (DISK, AUTO):
            import_xxhash(), import_fcntl()
        if options.tier == DISK or options.directory is not None:
            self._open_directory(reopen)
        order = OLDEST if options.tier == AUTO else LEAST_RECENTLY_USED
        self.on_device = Residency(options.budget_bytes, order)
        self.in_host = Residency(self._host_budget(), order)

    def __deepcopy__(self, memo: dict[int, Any]) -> Space:
        """A copied cache shares the blocks, so it shares what holds them."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """An unpickled cache gets a folder of its own."""
        return Space, (replace(self.options, directory=None),)

    def _host_budget(self) -> int | None:
        """Returns the most bytes in host memory; on a CPU `"auto"` counts its budget there, see `settle`."""
        if self.options.tier == DISK:
            return self.options.budget_bytes
        if self.options.tier == AUTO:
            half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
            return half if self.options.host_bytes is None else self.options.host_bytes
        return None

    def _open_directory(self, reopen: bool = False) -> BlockDirectory:
        """Takes the folder; `"auto"` needs none until it spills."""
        if self.directory is None:
            path = self.options.directory
            self.directory = BlockDirectory(None if path is None else Path(path), keep=reopen)
        return self.directory

    def file_for(self, key: tuple[int, str]) -> BlockFile:
        """Returns the file that new blocks of a store go to; one that is long enough is followed by another."""
        file = self._files.get(key)
        if file is None or file.size >= FILE_BYTES:
            number = next(self._numbers)
            path = self._open_directory().path / f"kvplus-layer-{key[0]:04d}-{key[1]}-{number:06d}.blocks"
            file = self._files[key] = BlockFile(path, number, self.trash)
        return file

    def write(self, run: Run, records: torch.Tensor, what: str) -> None:
        """Appends records of a run to its file.

        Raises:
            OffloadError: If they can't be written; `what` says in it which blocks.
        """
        try:
            file = run.file or self.file_for(run.key)
            offset = file.append(records.numpy().data, run.record_bytes)
        except OffloadError as error:  # tier `"auto"` takes its folder only now
            self.broken = OffloadError(f"{what} of the {run.key[1]} of layer {run.key[0]} can't be written: {error}")
            raise self.broken from error
        except OSError as error:
            where = self.directory.path if self.directory else self.options.directory
            self.broken = OffloadError(
                f"{what} of the {run.key[1]} of layer {run.key[0]} can't be written to {where}: {error.strerror}. "
                "This cache can't go on: free some room and `reset()` it, or use another `directory`"
            )
            raise self.broken from error
        self.unsynced.add(file)
        run.note(records.numpy().data)
        if run.file is None:
            run.file, run.offset = file, offset

    def old_file(self, name: str, number: int, size: int) -> BlockFile:
        """Returns a file that an ended process left."""
        self._numbers = itertools.count(max(number + 1, next(self._numbers)))
        return BlockFile(self._open_directory().path / name, number, self.trash, size)

    def place_of(self, device: torch.device) -> torch.device:
        """Returns where new blocks of states on `device` are put."""
        return device if self.options.tier == AUTO else torch.device("cpu")

    def settle(self, run: Run, position: int, device: torch.device) -> None:
        """Lets blocks go down a tier where a budget says so, after `run` was made or grew."""
        if run.data is None:
            return
        if self.options.tier == CPU and device.type == "cpu":
            say_once(NOTHING_SAVED)
        if self.options.tier == AUTO and run.data.device == device:
            self.in_host.forget(run)  # more blocks bring a run back that had left
            for leaving in self.on_device.admit(run, position):
                self._leave_device(leaving)
        elif self.options.tier in (AUTO, DISK):
            self._enter_host(run, position)

    def _enter_host(self, run: Run, position: int) -> None:
        """Takes note of a run in host memory; others may have to leave."""
        for leaving in self.in_host.admit(run, position):
            self._leave_host(leaving)

    def _leave_device(self, run: Run) -> None:
        """Moves a run to host memory; where the device is the CPU, to a file."""
        if run.data is None:
            return
        if run.data.device.type == "cpu":
            self._leave_host(run)
            return
        moved = empty_bytes(run.nbytes, torch.device("cpu"), pinned=True)
        run.data = moved.copy_(run.data[: run.nbytes])
        self._enter_host(run, 0)

    def _leave_host(self, run: Run) -> None:
        """Drops a run's bytes from memory, once they are in a file."""
        if run.file is None and run.data is not None:
            self.write(run, run.data[: run.nbytes], f"{run.count} blocks")
            run.sealed = True
        run.data = None

    def touch(self, run: Run) -> None:
        """Notes that a run in memory was read."""
        (self.on_device if self.options.tier == AUTO else self.in_host).touch(run)

    def keep(self, run: Run, data: torch.Tensor) -> None:
        """Keeps what was read from a file in memory, if there is room."""
        if run.data is None and run.nbytes <= self.room_bytes():
            run.data = empty_bytes(run.nbytes, torch.device("cpu"), data.is_pinned()).copy_(data[: run.nbytes])
            self._enter_host(run, 0)

    def room_bytes(self) -> float:
        """Returns the most bytes of a run that `keep` keeps."""
        return self.in_host.room_bytes if self.options.tier == DISK else 0

    def check(self) -> None:
        """Refuses to go on after an error, or after `close`.

        Raises:
            OffloadError: What happened before.
        """
        if self.closed:
            raise OffloadError("this cache is closed; make a new one")
        if self.broken is not None:
            raise OffloadError(f"this cache broke off earlier: {self.broken}") from self.broken

    def changed(self, shelves: Shelves) -> None:
        """Tells that a layer has packed or cut blocks; of copies nothing is kept for a later process."""
        if self.index is not None:
            self.index.changed(shelves)

    def flush(self) -> None:
        """Waits until what was packed can be reopened.

        Raises:
            OffloadError: If it can't be written.
        """
        if self.index is not None:
            self.index.wait()

    def reset(self, cache: object) -> None:
        """Forgets an earlier error, and what was kept for a later process; the stores of `cache` have been cleared."""
        self.broken = None
        if self.index is not None and self.index.belongs_to(cache):
            self.index.remove()

    def close(self) -> None:
        """Removes the files; whatever was only there is gone, also for copies of the cache."""
        if self.index is not None:
            self.index.remove()
        self.closed, self.index = True, None
        if self.directory is not None:
            self.directory.close()


@dataclass
class Shelves:
    """The stores of one cache.

    Args:
        space: Where their blocks live.
    """

    space: Space
    stores: WeakValueDictionary[tuple[int, str], OffloadedStore] = field(default_factory=WeakValueDictionary)
    ahead: ReadAhead = field(init=False)
    scratch: dict[tuple[torch.device, str], torch.Tensor] = field(default_factory=dict)
    dense: DensePool = field(default_factory=DensePool)

    def __post_init__(self) -> None:
        """Makes the slots."""
        self.ahead = ReadAhead(self.space.options.prefetch_layers)

    def __deepcopy__(self, memo: dict[int, Any]) -> Shelves:
        """A copied cache has stores of its own, which put themselves here."""
        return Shelves(self.space)

    def __reduce__(self) -> tuple[Any, ...]:
        """Likewise an unpickled one."""
        return Shelves, (self.space,)

    def announce(self, key: tuple[int, str], first: int, last: int, alternating: bool) -> None:
        """Starts to fetch what is read from a store on, for as many layers as are fetched ahead.

        Args:
            key: The store that is read now.
            first: The first block of it that is.
            last: The one behind the last.
            alternating: Whether keys and values are read in turns, piece by piece, or all keys first.
        """
        if self.space.options.prefetch_layers:
            self.ahead.announce(self._upcoming(key, first, last, alternating))

    def _upcoming(
        self, key: tuple[int, str], first: int, last: int, alternating: bool
    ) -> list[tuple[Run, torch.device]]:
        """Lists the runs that are read next through slots, in order."""
        runs, room = [], self.space.room_bytes()
        for index in self._from(key[0]):
            begins = {"keys": 0, "values": 0}
            if index == key[0]:
                begins = {"keys": first, "values": first}
                if key[1] == "values":  # these keys have been read
                    begins["keys"] = last if alternating else sys.maxsize
            parts = [
                [
                    (entry.run, store.device)
                    for entry in store.entries_from(begins[name])
                    if alternating or not store.goes_straight(entry, room)
                ]
                for name in begins
                if (store := self.stores.get((index, name))) is not None
            ]
            if alternating:
                turns = itertools.zip_longest(*parts)
                runs += [one for turn in turns for one in turn if one is not None]
            else:
                runs += [one for part in parts for one in part]
        return [(run, device) for run, device in runs if not self.is_near(run, device)]

    def _from(self, layer: int) -> list[int]:
        """Returns a layer and those that are fetched ahead of it; behind the last one comes the first."""
        layers = sorted({index for index, _ in self.stores.keys()})  # noqa: SIM118, not a plain dictionary
        start = layers.index(layer)
        count = min(self.space.options.prefetch_layers + 1, len(layers))
        return [layers[(start + step) % len(layers)] for step in range(count)]

    def advise(self, layer: int) -> None:
        """Lets the system fetch what goes straight from files in the layers behind `layer`."""
        room = self.space.room_bytes()
        stores = [self.stores.get((index, name)) for index in self._from(layer)[1:] for name in ("keys", "values")]
        self.ahead.advise(
            entry.run
            for store in stores
            if store is not None
            for entry in store.entries
            if store.goes_straight(entry, room)
        )

    def is_near(self, run: Run, device: torch.device) -> bool:
        """Whether a run can be read where it is, without a slot."""
        return run.data is not None and run.data.device == device and self.space.options.tier != CPU

    def scratch_for(self, device: torch.device, name: str, size: int) -> torch.Tensor:
        """Returns scratch of at least `size` bytes, shared by all layers; the next call may overwrite it."""
        held = self.scratch.get((device, name))
        if held is None or held.numel() < size:
            held = self.scratch[(device, name)] = empty_bytes(size, device)
        return held

    def forget(self) -> None:
        """Drops what is on its way and the memory that reading used, once nothing is held any more."""
        self.ahead.forget()
        self.scratch.clear()
        self.dense.let_go()


@dataclass
class Shelf:
    """A layer's place in a cache's offloading.

    Args:
        shelves: Those of the cache.
        layer: The layer's index.
        packed_tokens: Tokens that the layer said it has packed.
    """

    shelves: Shelves
    layer: int
    packed_tokens: int = 0

    def store(self, name: str, codec: Codec, bound: int = 0) -> OffloadedStore:
        """Returns an empty store for the layer's `"keys"` or `"values"`."""
        from hf_kvplus.stores.offloaded import OffloadedStore

        return OffloadedStore(codec, self.shelves, (self.layer, name), bound)

    def decode(self, stores: Mapping[str, OffloadedStore], outs: Mapping[str, torch.Tensor], first_block: int) -> None:
        """Decodes all blocks of the layer from `first_block` on, those of `stores[name]` into `outs[name]`.

        Raises:
            OffloadError: If a block can't be read.
        """
        from hf_kvplus.stores.straight import decode_together

        decode_together([(store, outs[name]) for name, store in stores.items()], first_block)

    def check(self) -> None:
        """Refuses to go on after an error, see `Space.check`."""
        self.shelves.space.check()

    def forget(self) -> None:
        """Gives up what reading needs, see `Shelves.forget`."""
        self.shelves.forget()

    @property
    def outlives(self) -> bool:
        """Whether blocks can be reopened after the process was killed."""
        return self.shelves.space.options.tier == DISK

    def changed(self, packed_tokens: int) -> None:
        """Tells how many tokens the layer has packed."""
        if packed_tokens != self.packed_tokens:
            if self.outlives and packed_tokens - self.packed_tokens >= TRIM_TOKENS and self._is_last:
                trim_heap()
            self.packed_tokens = packed_tokens
            self.shelves.space.changed(self.shelves)

    @property
    def _is_last(self) -> bool:
        """Whether no layer behind this one has blocks here."""
        return self.layer == max(layer for layer, _ in self.shelves.stores.keys())  # noqa: SIM118

    def describe(self) -> str:
        """Returns where blocks live, in a few words."""
        return self.shelves.space.options.describe()
