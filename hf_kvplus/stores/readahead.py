"""Brings runs to the device before they are needed: from files by threads, from host memory on a stream of its own.

A reader announces what it will read, in order; the next layers come behind the present one. As many runs as fit into
the slots are on their way at any time. A slot is scratch on the device (with pinned scratch beside it where the bytes
come from a file); slots are used again and again, so that a decoded token allocates nothing.

    file --thread--> pinned host scratch --side stream--> device slot --event--> the stream that computes
    host memory ------------------------ side stream--> device slot --event--> the stream that computes

On a CPU "device" and host are the same memory and streams are none; everything else is the same code.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from hf_kvplus.stores.blockfile import BlockFile
from hf_kvplus.stores.hostmemory import empty_bytes
from hf_kvplus.stores.runs import Run

# Bytes on their way per layer of prefetching; small layers fit as a whole, of large ones their beginning.
AHEAD_BYTES = 1 << 24
THREADS = 2


class Lane(Protocol):
    """How bytes get into a slot of one device, beside its other work."""

    def fill(self, slot: Slot, source: torch.Tensor) -> None:
        """Starts to copy `source` into the front of the slot, once nobody reads the slot any more."""
        ...

    def landed(self, slot: Slot) -> None:
        """Waits, on the calling thread, until `fill` is done with its source."""
        ...

    def use(self, slot: Slot) -> None:
        """Lets the stream that computes wait for the slot's content."""
        ...

    def release(self, slot: Slot) -> None:
        """Marks the point in the computation up to which the slot is read."""
        ...


class HostLane:
    """Copies within host memory, at once."""

    def fill(self, slot: Slot, source: torch.Tensor) -> None:
        """Copies."""
        slot.device[: source.numel()].copy_(source)

    def landed(self, slot: Slot) -> None:
        """Everything is done already."""

    def use(self, slot: Slot) -> None:
        """Everything is there already."""

    def release(self, slot: Slot) -> None:
        """Nobody reads later than the call that reads."""


class CudaLane:
    """Copies on a side stream, ordered with the computation by events.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.device = device

    def fill(self, slot: Slot, source: torch.Tensor) -> None:
        """Queues a copy on the side stream; `source` should be pinned."""
        with torch.cuda.stream(self.stream):
            if slot.freed is not None:
                self.stream.wait_event(slot.freed)
            # Given back meanwhile, its memory waits for this copy before it serves anything else.
            slot.device.record_stream(self.stream)
            slot.device[: source.numel()].copy_(source, non_blocking=True)
            slot.ready = torch.cuda.Event()
            slot.ready.record(self.stream)

    def landed(self, slot: Slot) -> None:
        """Waits for the copy."""
        slot.ready.synchronize()

    def use(self, slot: Slot) -> None:
        """Lets the current stream wait for the copy."""
        torch.cuda.current_stream(self.device).wait_event(slot.ready)

    def release(self, slot: Slot) -> None:
        """Records an event on the current stream."""
        slot.freed = torch.cuda.Event()
        slot.freed.record(torch.cuda.current_stream(self.device))


def make_lane(device: torch.device) -> Lane:
    """Returns the lane of a device.

    Raises:
        NotImplementedError: If there is none for its type.
    """
    if device.type == "cpu":
        return HostLane()
    if device.type == "cuda":
        return CudaLane(device)
    raise NotImplementedError(
        f"offloading works with models on CUDA devices and CPUs, got states on {device}; leave `offload` out"
    )


class Slot:
    """Scratch for one run.

    Args:
        size: Bytes.
        device: Where it is read.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        # Runs grow; sizes are rounded up so that a slot fits a while.
        self.device = empty_bytes(1 << (size - 1).bit_length(), device)
        self._staging = self.device if device.type == "cpu" else None
        self.count = 0
        self.ready: Any = None
        self.freed: Any = None

    @property
    def staging(self) -> torch.Tensor:
        """Host memory that a file is read into; on a CPU the slot itself."""
        if self._staging is None:
            self._staging = empty_bytes(self.device.numel(), torch.device("cpu"), pinned=True)
        return self._staging


class ReadAhead:
    """The slots of one cache and what is on its way into them.

    Args:
        layers: Layers that are fetched ahead; with 0 everything is fetched when it is needed.
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self._lanes: dict[torch.device, Lane] = {}
        self._free: dict[torch.device, list[Slot]] = {}
        self._pending: dict[Run, Slot | Future[Slot]] = {}
        self._wanted: deque[tuple[Run, torch.device]] = deque()
        self._threads: ThreadPoolExecutor | None = None
        self._finalizer: Any = None
        self._process = os.getpid()

    def __deepcopy__(self, memo: dict[int, Any]) -> ReadAhead:
        """A copy of a cache has slots of its own."""
        return ReadAhead(self.layers)

    def __reduce__(self) -> tuple[Any, ...]:
        """Nothing on its way is pickled."""
        return ReadAhead, (self.layers,)

    def announce(self, runs: Iterable[tuple[Run, torch.device]]) -> None:
        """Tells what will be taken next, in order; what was announced before and isn't among it is forgotten."""
        if not self.layers:
            return
        self._leave_parent()
        self._wanted = deque(runs)
        coming = {run for run, _ in self._wanted}
        for run in [run for run in self._pending if run not in coming]:
            self._give_back(self._pending.pop(run))
        self._pump()

    def _pump(self) -> None:
        """Starts what is wanted next, as much as may be on its way."""
        ahead = sum(run.nbytes for run in self._pending)
        while self._wanted and ahead < AHEAD_BYTES * self.layers:
            run, device = self._wanted.popleft()
            if run not in self._pending:
                self._pending[run] = self._start(run, device)
                ahead += run.nbytes

    def _start(self, run: Run, device: torch.device) -> Slot | Future[Slot]:
        """Sends a run on its way."""
        slot = self._take_slot(run.nbytes, device)
        slot.count = run.count
        data = run.data
        if data is not None:
            self.lane(device).fill(slot, data[: run.nbytes])
            return slot
        return self.threads().submit(load, slot, run, run.count, self.lane(device))

    def advise(self, runs: Iterable[Run]) -> None:
        """Lets the system read files ahead that will go straight into dense states, on a thread: the call may wait."""
        spans = _joined((run.file, run.offset, run.nbytes) for run in runs if run.file is not None)
        if spans and hasattr(os, "posix_fadvise"):
            self.threads().submit(_advise, spans)

    def threads(self) -> ThreadPoolExecutor:
        """Returns the threads that read files."""
        self._leave_parent()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvplus-read")
            self._finalizer = weakref.finalize(self, self._threads.shutdown, wait=False)
        return self._threads

    def take(self, run: Run, device: torch.device) -> Slot:
        """Returns a slot with the bytes of a run, ready for the calling stream; give it back with `release`.

        Raises:
            BlockError: If the run can't be read from its file.
        """
        self._leave_parent()
        started = self._pending.pop(run, None)
        while self._wanted and self._wanted[0][0] is run:
            self._wanted.popleft()
        slot = started.result() if isinstance(started, Future) else started
        if slot is not None and slot.count != run.count:  # blocks have been added since
            self._give_back(slot)
            slot = None
        lane = self.lane(device)
        if slot is None:
            slot = self._take_slot(run.nbytes, device)
            if run.data is not None:
                slot.count = run.count
                lane.fill(slot, run.data[: run.nbytes])
            else:
                slot = load(slot, run, run.count, lane)
        lane.use(slot)
        self._pump()
        return slot

    def release(self, slot: Slot) -> None:
        """Gives a slot back whose content has been read, as far as the calling stream is concerned."""
        self.lane(slot.device.device).release(slot)
        self._free.setdefault(slot.device.device, []).append(slot)

    def forget(self) -> None:
        """Drops everything that is on its way, and the slots."""
        self._leave_parent()
        for run in list(self._pending):
            started = self._pending.pop(run)
            if isinstance(started, Future) and not started.cancel():
                started.exception()  # waits; an error of something that nobody wants any more is none
        self._wanted.clear()
        self._free.clear()

    def _leave_parent(self) -> None:
        """Forgets, in a forked process, what its parent began: threads aren't copied, so it would never end here."""
        if self._process == os.getpid():
            return
        self._process, self._threads = os.getpid(), None
        self._pending.clear()
        self._wanted.clear()
        if self._finalizer is not None:
            self._finalizer.detach()

    def _give_back(self, started: Slot | Future[Slot]) -> None:
        """Puts the slot of something unwanted back; a read that has begun ends first."""
        if isinstance(started, Future):
            if started.cancel() or started.exception() is not None:
                return
            started = started.result()
        self._free.setdefault(started.device.device, []).append(started)

    def lane(self, device: torch.device) -> Lane:
        """Returns how bytes get to a device.

        Raises:
            NotImplementedError: If they can't.
        """
        if device not in self._lanes:
            self._lanes[device] = make_lane(device)
        return self._lanes[device]

    def _take_slot(self, size: int, device: torch.device) -> Slot:
        """Returns a free slot of at least `size` bytes; one that is too small makes way for a new one."""
        free = self._free.setdefault(device, [])
        for index, slot in enumerate(free):
            if slot.device.numel() >= size:
                return free.pop(index)
        if free:
            free.pop()
        slot = Slot(size, device)
        # Its memory may be what work that is only queued still reads.
        self.lane(device).release(slot)
        return slot


def _joined(spans: Iterable[tuple[BlockFile, int, int]]) -> list[tuple[BlockFile, int, int]]:
    """Joins what follows each other in a file, as far as may be on its way at a time."""
    joined: list[tuple[BlockFile, int, int]] = []
    room = AHEAD_BYTES
    for file, offset, size in spans:
        if room <= 0:
            break
        room -= size
        if joined and joined[-1][0] is file and sum(joined[-1][1:]) == offset:
            offset, size = joined[-1][1], joined[-1][2] + size
            joined.pop()
        joined.append((file, offset, size))
    return joined


def _advise(spans: list[tuple[BlockFile, int, int]]) -> None:
    """Asks the system for parts of files. It starts no more than a device's largest transfer at a time."""
    for file, offset, size in spans:
        file.advise(offset, size)


def load(slot: Slot, run: Run, count: int, lane: Lane) -> Slot:
    """Reads a run from its file into a slot and returns it.

    Raises:
        BlockError: If it can't be read.
    """
    size = count * run.record_bytes
    run.read(slot.staging.numpy().data[:size], count)
    slot.count = count
    if slot.staging is not slot.device:
        lane.fill(slot, slot.staging[:size])
        lane.landed(slot)
    return slot
