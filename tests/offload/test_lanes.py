"""The order of copies and computation on a CUDA device, played with streams and events that only take notes."""

from __future__ import annotations

import contextlib

import pytest
import torch

from hf_kvplus.codecs.identity import IdentityCodec
from hf_kvplus.stores import readahead, space
from hf_kvplus.stores import runs as offloaded_runs
from hf_kvplus.stores.offloaded import OffloadedStore
from hf_kvplus.stores.readahead import CudaLane, ReadAhead, Slot, make_lane
from hf_kvplus.stores.runs import Layout, Run
from hf_kvplus.stores.space import Offload, Shelves, Space

CPU, DEVICE, SECOND = (torch.device(name) for name in ("cpu", "cuda:0", "cuda:1"))


@pytest.fixture
def notes(monkeypatch):
    """Replaces streams and events; returns what happens to them, in order."""
    happened: list[tuple[str, ...]] = []

    class Event:
        count = 0

        def __init__(self):
            Event.count += 1
            self.name = f"event {Event.count}"

        def record(self, stream):
            happened.append((stream.name, "records", self.name))

        def synchronize(self):
            happened.append(("host", "waits", self.name))

    class Stream:
        def __init__(self, device=None, name="side"):
            self.name = name

        def wait_event(self, event):
            happened.append((self.name, "waits", event.name))

    @contextlib.contextmanager
    def stream(one):
        happened.append((one.name, "begins"))
        yield
        happened.append((one.name, "ends"))

    def hold(tensor, stream):
        happened.append((stream.name, "holds"))

    monkeypatch.setattr(torch.Tensor, "record_stream", hold)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(name="main"))
    return happened


def test_a_slot_is_filled_when_its_last_reader_is_done_and_read_when_it_is_full(notes):
    lane, slot, source = CudaLane(CPU), Slot(64, CPU), torch.arange(64, dtype=torch.uint8)
    lane.fill(slot, source)
    lane.use(slot)
    lane.release(slot)
    lane.fill(slot, source.flip(0))
    lane.landed(slot)
    assert notes == [
        ("side", "begins"),
        ("side", "holds"),
        ("side", "records", "event 1"),
        ("side", "ends"),
        ("main", "waits", "event 1"),
        ("main", "records", "event 2"),
        ("side", "begins"),
        ("side", "waits", "event 2"),
        ("side", "holds"),
        ("side", "records", "event 3"),
        ("side", "ends"),
        ("host", "waits", "event 3"),
    ]
    assert torch.equal(slot.device[:64], source.flip(0))


def run_in_memory(size: int) -> Run:
    layout = Layout((("states", (1, size - 16), torch.uint8),))
    return Run((0, "keys"), layout, 1, 1, torch.arange(size).to(torch.uint8))


def test_a_new_slot_isnt_filled_before_what_was_queued_when_it_was_made(notes, monkeypatch):
    """Its memory may have been that of states which an attention still on its way reads."""
    monkeypatch.setattr(readahead, "make_lane", CudaLane)
    ahead, run = ReadAhead(1), run_in_memory(256)
    slot = ahead.take(run, CPU)
    assert notes[:3] == [("main", "records", "event 1"), ("side", "begins"), ("side", "waits", "event 1")]
    assert torch.equal(slot.device[:256], run.data)


class SlotBesideHost(Slot):
    """A slot whose device isn't host memory, so that files are read beside it."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(size, device)
        self._staging = torch.empty(self.device.numel(), dtype=torch.uint8)


@pytest.mark.parametrize("tier", [Offload("cpu"), Offload("disk", budget_bytes=0)], ids=lambda offload: offload.tier)
def test_a_whole_cache_is_read_through_that_lane(notes, monkeypatch, tier):
    """The next layer's copies begin before this layer's are read."""
    monkeypatch.setattr(readahead, "make_lane", CudaLane)
    monkeypatch.setattr(readahead, "Slot", SlotBesideHost)
    monkeypatch.setattr(OffloadedStore, "goes_straight", lambda self, *arguments: False)
    monkeypatch.setattr(OffloadedStore, "run_blocks", lambda self, batch: 2)
    shelves = Shelves(Space(tier))
    stores = [OffloadedStore(IdentityCodec(), shelves, (layer, "keys")) for layer in range(2)]
    states = [torch.randn(1, 2, 64 * 5, 32) for _ in stores]
    for store, one in zip(stores, states, strict=True):
        store.append_states(one)
    for _ in range(2):
        for store, one in zip(stores, states, strict=True):
            out = torch.empty_like(one)
            store.decode(out)
            assert torch.equal(out, one)
    waits = [note for note in notes if note[:2] == ("main", "waits")]
    assert len(waits) == 2 * 2 * 3
    if tier.tier == "cpu":
        before = notes[: notes.index(waits[0])]
        assert before.count(("side", "begins")) == 6  # three runs of each layer are on their way


class OnDevice(torch.Tensor):
    """Host memory that says it is a device's."""

    device = property(lambda self: DEVICE)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        made = super().__torch_function__(function, types, arguments, options)
        return arguments[0] if function is torch.Tensor.copy_ else made


class OnSecond(OnDevice):
    """The same of another device."""

    device = property(lambda self: SECOND)  # type: ignore[assignment]


KINDS = {DEVICE: OnDevice, SECOND: OnSecond, CPU: torch.Tensor}


def empty_somewhere(size: int, device: torch.device, pinned: bool = False) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8).as_subclass(KINDS[device])


@pytest.mark.parametrize("tier", [Offload("cpu"), Offload("disk", budget_bytes=0)], ids=lambda offload: offload.tier)
def test_layers_on_several_devices_have_lanes_and_slots_of_their_own(notes, monkeypatch, tier):
    """As `device_map` spreads them: what is fetched ahead goes to the device of the layer that will read it."""
    for module in (offloaded_runs, readahead, space):
        monkeypatch.setattr(module, "empty_bytes", empty_somewhere)
    monkeypatch.setattr(readahead, "make_lane", CudaLane)
    monkeypatch.setattr(OffloadedStore, "run_blocks", lambda self, batch: 2)
    shelves = Shelves(Space(tier))
    devices = [DEVICE, DEVICE, SECOND, SECOND]
    stores = [OffloadedStore(IdentityCodec(), shelves, (layer, "keys")) for layer in range(4)]
    states = [torch.randn(1, 2, 64 * 5, 32).as_subclass(KINDS[device]) for device in devices]
    for store, one in zip(stores, states, strict=True):
        store.append_states(one)
    for _ in range(2):
        for store, one, device in zip(stores, states, devices, strict=True):
            out = torch.zeros(1, 2, 64 * 5, 32).as_subclass(KINDS[device])
            store.decode(out)
            assert torch.equal(out.as_subclass(torch.Tensor), one.as_subclass(torch.Tensor))
    assert {device: lane.device for device, lane in shelves.ahead._lanes.items()} == {DEVICE: DEVICE, SECOND: SECOND}
    for device in (DEVICE, SECOND):
        assert {slot.device.device for slot in shelves.ahead._free[device]} == {device}


def test_blocks_beyond_the_budgets_go_from_the_device_to_host_memory_to_files(notes, monkeypatch):
    """Oldest first; what is read back is what was stored, from wherever it comes."""
    for module in (offloaded_runs, readahead, space):
        monkeypatch.setattr(module, "empty_bytes", empty_somewhere)
    monkeypatch.setattr(readahead, "make_lane", CudaLane)
    monkeypatch.setattr(OffloadedStore, "run_blocks", lambda self, batch: 2)
    block_bytes = 64 * 32 * 4 + 16
    shelves = Shelves(Space(Offload("auto", budget_bytes=4 * block_bytes, host_bytes=6 * block_bytes)))
    store = OffloadedStore(IdentityCodec(), shelves, (0, "keys"))
    states = torch.randn(1, 1, 64 * 20, 32).as_subclass(OnDevice)
    for block in range(0, 20, 2):
        store.append_states(states[:, :, 64 * block : 64 * block + 128])
        out = torch.zeros(1, 1, 64 * (block + 2), 32).as_subclass(OnDevice)
        store.decode(out)
        assert torch.equal(out.as_subclass(torch.Tensor), states[:, :, : 64 * (block + 2)].as_subclass(torch.Tensor))
    places = [None if one.run.data is None else one.run.data.device.type for one in store.entries]
    assert places == [None] * 5 + ["cpu"] * 3 + ["cuda"] * 2
    assert [one.run.file is not None for one in store.entries] == [True] * 5 + [False] * 5


def test_a_run_that_grows_again_is_counted_where_it_is(notes, monkeypatch):
    """Blocks that are added to a run in host memory bring it back to the device, which no file is written from."""
    for module in (offloaded_runs, readahead, space):
        monkeypatch.setattr(module, "empty_bytes", empty_somewhere)
    monkeypatch.setattr(readahead, "make_lane", CudaLane)
    shelves = Shelves(Space(Offload("auto", budget_bytes=0, host_bytes=1 << 30)))
    store = OffloadedStore(IdentityCodec(), shelves, (0, "keys"))
    states = torch.randn(1, 1, 64 * 2, 32).as_subclass(OnDevice)
    store.append_states(states[:, :, :64])
    assert shelves.space.in_host.held_bytes == store.allocated_bytes
    shelves.space.on_device.budget_bytes = 1 << 30
    store.append_states(states[:, :, 64:])
    assert store.entries[0].run.data.device == DEVICE
    assert shelves.space.in_host.held_bytes == 0
    assert shelves.space.on_device.held_bytes == store.allocated_bytes


def test_a_copy_has_slots_of_its_own():
    import copy

    ahead = ReadAhead(2)
    assert copy.deepcopy(ahead) is not ahead
    assert copy.deepcopy(ahead).layers == 2


def test_other_devices_are_refused_before_anything_is_stored():
    with pytest.raises(NotImplementedError, match="works with models on CUDA devices and CPUs, got states on meta"):
        make_lane(torch.device("meta"))
    store = OffloadedStore(IdentityCodec(), Shelves(Space(Offload("cpu"))), (0, "keys"))
    with pytest.raises(NotImplementedError, match="leave `offload` out"):
        store.append_states(torch.empty(1, 2, 64, 16, device="meta"))
