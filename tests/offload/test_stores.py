"""An offloaded store holds what `PackedStore` holds, bit for bit, whatever is done to either."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import time

import pytest
import torch

from conftest import tiny_llama_config
from hf_kvplus import build_cache
from hf_kvplus.codecs import Codec
from hf_kvplus.recipes import Quantization
from hf_kvplus.stores import PackedStore, readahead, space
from hf_kvplus.stores.hostmemory import DensePool, trim_heap
from hf_kvplus.stores.offloaded import OffloadedStore
from hf_kvplus.stores.residency import LEAST_RECENTLY_USED, OLDEST, Residency
from hf_kvplus.stores.runs import Layout, Run
from hf_kvplus.stores.space import Offload, Shelves, Space

TIERS = {
    "cpu": Offload("cpu"),
    "cpu, nothing ahead": Offload("cpu", prefetch_layers=0),
    "disk": Offload("disk"),
    "disk, no budget": Offload("disk", budget_bytes=0),
    "disk, some budget": Offload("disk", budget_bytes=60_000, prefetch_layers=3),
    "auto": Offload("auto", budget_bytes=60_000),
}
CODECS = {
    "identity": Quantization(16, 16),
    "4 bits": Quantization(4, 4),
    "3 bits affine": Quantization(3, 3, recipe="affine"),
}


def make_store(codec: Codec, offload: Offload) -> OffloadedStore:
    store = OffloadedStore(codec, Shelves(Space(offload)), (0, "keys"))
    return store


def assert_same(store: PackedStore, expected: PackedStore) -> None:
    assert len(store) == len(expected)
    batch = expected.get(expected.names[0]).shape[0]
    for name in expected.names:
        assert torch.equal(store.get(name), expected.get(name)), name
    shape = (batch, 2, len(expected) * expected.codec.block_tokens, 32)
    ours, theirs = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    store.decode(ours)
    expected.decode(theirs)
    assert torch.equal(ours, theirs)


STEPS = {
    "reorder": lambda store, new: store.select(torch.tensor([1, 0, 1])),
    "append": lambda store, new: store.append_states(new(3, 2)),
    "drop front": lambda store, new: store.drop_front(7),
    "drop back": lambda store, new: store.drop_back(3),
    "append one": lambda store, new: store.append_states(new(3, 1)),
    "repeat": lambda store, new: store.repeat_interleave(2),
    "append more": lambda store, new: store.append_states(new(6, 9)),
    "select": lambda store, new: store.select(torch.tensor([5, 2])),
}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("codec", CODECS)
def test_it_is_a_packed_store(tier, codec, monkeypatch):
    monkeypatch.setattr(OffloadedStore, "run_blocks", lambda self, batch: 5)
    codec = CODECS[codec].codecs()[0]
    store, expected = make_store(codec, TIERS[tier]), PackedStore(codec)
    generator = torch.Generator().manual_seed(0)

    def new(batch: int, blocks: int) -> torch.Tensor:
        generator.manual_seed(batch + blocks)
        return torch.randn(batch, 2, blocks * codec.block_tokens, 32, generator=generator)

    for one in (store, expected):
        one.append_states(new(2, 11))
        one.append_states(new(2, 1))
    assert_same(store, expected)
    for step in STEPS.values():
        for one in (store, expected):
            step(one, new)
        assert_same(store, expected)
    assert_same(pickle.loads(pickle.dumps(store)), expected)


@pytest.mark.parametrize("tier", TIERS)
def test_a_copy_shares_the_blocks_and_goes_its_own_way(tier):
    codec = CODECS["4 bits"].codecs()[0]
    store, expected = make_store(codec, TIERS[tier]), PackedStore(codec)
    for one in (store, expected):
        one.append_states(torch.ones(1, 2, 3 * codec.block_tokens, 32))
    twin, expected_twin = copy.deepcopy(store), copy.deepcopy(expected)
    assert twin.entries[0].run is store.entries[0].run
    for ours, theirs, number in ((store, expected, 2.0), (twin, expected_twin, 3.0), (store, expected, 4.0)):
        for one in (ours, theirs):
            one.append_states(torch.full((1, 2, codec.block_tokens, 32), number))
    assert_same(store, expected)
    assert_same(twin, expected_twin)
    del store
    assert_same(twin, expected_twin)


def test_files_go_when_nobody_needs_them_and_the_folder_with_the_last():
    store = make_store(CODECS["identity"].codecs()[0], TIERS["disk, no budget"])
    folder = store.shelves.space.directory.path
    store.append_states(torch.ones(1, 2, 64 * 40, 32))
    assert [path.name for path in folder.glob("*.blocks")] == ["kvplus-layer-0000-keys-000001.blocks"]
    twin = copy.deepcopy(store)
    store.clear()
    assert list(folder.glob("*.blocks"))
    twin.clear()
    assert not list(folder.glob("*.blocks"))
    del store, twin
    assert not folder.exists()


def test_reordering_writes_nothing():
    store = make_store(CODECS["identity"].codecs()[0], TIERS["disk, no budget"])
    store.append_states(torch.randn(4, 2, 64 * 10, 32))
    before = {path: path.stat().st_mtime_ns for path in store.shelves.space.directory.path.iterdir()}
    for _ in range(50):
        store.select(torch.tensor([2, 2, 0, 1]))
    assert {path: path.stat().st_mtime_ns for path in store.shelves.space.directory.path.iterdir()} == before


def run_of(size: int) -> Run:
    layout = Layout((("states", (1, size - 16), torch.uint8),))
    return Run((0, "keys"), layout, 1, 1, torch.zeros(size, dtype=torch.uint8))


def test_the_least_recently_used_leaves_first_and_the_oldest_first():
    runs = [run_of(1024) for _ in range(4)]
    for order, first_out in ((LEAST_RECENTLY_USED, runs[1]), (OLDEST, runs[2])):
        residency = Residency(3 * 1024, order)
        for run, position in zip(runs[:3], (5, 6, 0), strict=True):
            assert residency.admit(run, position) == []
        residency.touch(runs[0])
        residency.touch(runs[2])
        assert residency.admit(runs[3], 7) == [first_out]
        assert residency.held_bytes == 3 * 1024


def test_the_budget_holds_over_all_layers(monkeypatch):
    monkeypatch.setattr(OffloadedStore, "run_blocks", lambda self, batch: 2)
    shelves = Shelves(Space(Offload("disk", budget_bytes=100_000)))
    stores = [OffloadedStore(CODECS["identity"].codecs()[0], shelves, (layer, "keys")) for layer in range(4)]
    for _ in range(12):
        for store in stores:
            store.append_states(torch.randn(1, 2, 64, 32))
            assert sum(one.allocated_bytes for one in stores) <= 100_000
    assert sum(one.allocated_bytes for one in stores) > 50_000
    assert sum(one.disk_bytes for one in stores) > 700_000


def test_slots_are_used_again(monkeypatch):
    """A decoded token allocates no slot once there are enough."""
    monkeypatch.setattr(OffloadedStore, "run_blocks", lambda self, batch: 2)
    shelves = Shelves(Space(Offload("disk", budget_bytes=0)))
    stores = [OffloadedStore(CODECS["4 bits"].codecs()[0], shelves, (layer, "keys")) for layer in range(3)]
    made = []
    build = readahead.Slot.__init__
    monkeypatch.setattr(
        readahead.Slot, "__init__", lambda self, *arguments: (made.append(1), build(self, *arguments))[1]
    )
    for store in stores:
        store.append_states(torch.randn(1, 2, 48 * 8, 32))
    counts = []
    for _ in range(4):
        for store in stores:
            store.decode(torch.empty(1, 2, 48 * 8, 32))
        counts.append(len(made))
    assert counts[0] > 0
    assert counts[1:] == [counts[1]] * 3


def test_a_forked_process_reads_with_threads_of_its_own(monkeypatch):
    """Those of its parent, and what they had begun, aren't there."""
    monkeypatch.setattr(OffloadedStore, "run_blocks", lambda self, batch: 2)
    shelves, codec = Shelves(Space(Offload("disk", budget_bytes=0))), CODECS["4 bits"].codecs()[0]
    stores = [OffloadedStore(codec, shelves, (layer, "keys")) for layer in range(2)]
    outs = [torch.empty(1, 2, 48 * 8, 32) for _ in range(3)]
    for store in stores:
        store.append_states(torch.randn(1, 2, 48 * 8, 32))
        store.decode(outs[store.key[0]])
    child = os.fork()
    if child == 0:
        for store in stores:
            store.decode(outs[2])
        os._exit(0 if torch.equal(outs[2], outs[1]) else 1)
    deadline, ended = time.monotonic() + 20, 0
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended
    assert status == 0
    stores[0].decode(outs[2])
    assert torch.equal(outs[2], outs[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tier": "tape"}, "`tier` must be one of cpu, disk, auto, memory, got 'tape'"),
        ({"tier": "auto"}, "`budget_bytes` must be given for tier 'auto'"),
        ({"tier": "cpu", "directory": "x"}, "`directory` isn't for tier 'cpu'"),
        ({"tier": "disk", "host_bytes": 5}, "`host_bytes` isn't for tier 'disk'"),
        ({"tier": "disk", "budget_bytes": -1}, "`budget_bytes` must be at least 0, got -1"),
        ({"prefetch_layers": -1}, "`prefetch_layers` must be at least 0, got -1"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        Offload(**options)


def test_dense_buffers_are_used_again_but_never_while_somebody_reads_them():
    pool, like = DensePool(), torch.empty(0)
    first, second = (pool.empty_like(like, (1, 300, 400)) for _ in range(2))
    addresses = {first.data_ptr(), second.data_ptr()}
    assert len(addresses) == 2
    view = first[:, 5:]
    del first, second
    again = pool.empty_like(like, (1, 300, 410))
    assert again.data_ptr() in addresses
    assert again.data_ptr() != view.data_ptr() - 5 * 400 * 4
    del view
    assert {again.data_ptr(), pool.empty_like(like, (1, 300, 400)).data_ptr()} == addresses
    before = pool.held_bytes
    del again
    pool.empty_like(like, (1, 3000, 400))  # what is too small goes back
    assert pool.held_bytes < before + 1.3 * 3000 * 400 * 4 - 300 * 400 * 4


def test_the_heap_is_trimmed_once_for_a_part_of_a_prompt_and_not_while_decoding(monkeypatch):
    trimmed = []
    monkeypatch.setattr(space, "trim_heap", lambda: trimmed.append(1))
    cache = build_cache("fp+offload:disk,budget=0", tiny_llama_config())
    for tokens, times in ((400, 1), (1, 1), (400, 2), (70, 2)):
        for layer in range(2):
            cache.update(torch.ones(1, 2, tokens, 16), torch.ones(1, 2, tokens, 16), layer)
        assert len(trimmed) == times


def test_trimming_the_heap_does_no_harm():
    held = torch.arange(1000)
    trim_heap()
    assert torch.equal(held, torch.arange(1000))
