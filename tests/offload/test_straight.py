"""Whole runs of states come from their files straight into dense states, to the same bits, or not at all."""

from __future__ import annotations

import copy
import os
import threading

import pytest
import torch

from conftest import tiny_llama_config
from hf_kvplus import OffloadedCache, OffloadError, build_cache
from hf_kvplus.codecs.identity import IdentityCodec
from hf_kvplus.compat import cache_keyword
from hf_kvplus.stores import PackedStore, blockfile, offloaded, straight
from hf_kvplus.stores.blockfile import BlockFile, Trash
from hf_kvplus.stores.offloaded import OffloadedStore
from hf_kvplus.stores.space import Offload, Shelves, Space

NO_BUDGET = Offload("disk", budget_bytes=0)


@pytest.fixture
def scattered(monkeypatch):
    """Makes runs of five blocks; returns the names of the files that were read straight, one for each run."""
    names: list[str] = []
    scatter = BlockFile.scatter
    monkeypatch.setattr(OffloadedStore, "run_blocks", lambda self, batch: 5)
    monkeypatch.setattr(
        BlockFile, "scatter", lambda self, *arguments: (names.append(self.path.name), scatter(self, *arguments))[1]
    )
    return names


def make_store(offload: Offload = NO_BUDGET) -> OffloadedStore:
    return OffloadedStore(IdentityCodec(), Shelves(Space(offload)), (0, "keys"))


def random_states(
    blocks: int, batch: int = 2, heads: int = 3, channels: int = 32, dtype=torch.float32
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(blocks)
    return torch.randn(batch, heads, 64 * blocks, channels, generator=generator).to(dtype)


def decode(store: PackedStore, like: torch.Tensor, tokens: int, first_block: int = 0) -> torch.Tensor:
    """Decodes into states with room for more tokens behind, as a layer's recent ones need it."""
    out = torch.full((*like.shape[:2], tokens + 7, like.shape[3]), torch.nan, dtype=like.dtype)
    store.decode(out, first_block)
    return out[:, :, :tokens]


@pytest.mark.parametrize(
    ("batch", "heads", "channels", "dtype"),
    [(1, 1, 1, torch.float32), (2, 3, 32, torch.float32), (3, 2, 5, torch.bfloat16), (1, 40, 16, torch.float16)],
)
def test_the_bits_are_those_that_were_stored(scattered, batch, heads, channels, dtype):
    """With heads of which a row ends between two multiples of 16 bytes, and more pieces than one call takes."""
    store, states = make_store(), random_states(13, batch, heads, channels, dtype)
    store.append_states(states)
    assert torch.equal(decode(store, states, 64 * 13), states)
    assert len(scattered) == 3
    assert torch.equal(decode(store, states, 64 * 8, 5), states[:, :, 64 * 5 :])
    assert len(scattered) == 5


def test_a_call_takes_only_so_many_pieces(scattered, monkeypatch):
    monkeypatch.setattr(blockfile, "MOST_PARTS", 7)
    store, states = make_store(), random_states(5)
    store.append_states(states)
    assert torch.equal(decode(store, states, 64 * 5), states)
    assert scattered


def test_runs_that_grow_are_read_as_they_are(scattered):
    store, states = make_store(), random_states(12)
    for block in range(12):
        store.append_states(states[:, :, 64 * block : 64 * block + 64])
        assert torch.equal(decode(store, states, 64 * block + 64), states[:, :, : 64 * block + 64])
    assert len(scattered) == 5 * 1 + 5 * 2 + 2 * 3


def test_what_isnt_a_whole_run_as_it_was_written_goes_another_way(scattered):
    store, states = make_store(), random_states(10)
    store.append_states(states)
    store.drop_front(2)
    store.drop_back(1)
    assert torch.equal(decode(store, states, 64 * 7), states[:, :, 64 * 2 : 64 * 9])
    assert not scattered
    store.select(torch.tensor([1, 0]))
    store.append_states(states[:, :, :64])
    expected = torch.cat([states[[1, 0], :, 64 * 2 : 64 * 9], states[:, :, :64]], 2)
    assert torch.equal(decode(store, states, 64 * 8), expected)
    assert len(scattered) == 1


def test_what_fits_the_budget_is_kept_and_read_no_more(scattered):
    store, states = make_store(Offload("disk", budget_bytes=1 << 30)), random_states(10)
    store.append_states(states)
    for entry in store.entries:
        entry.run.data = None
    for _ in range(2):
        assert torch.equal(decode(store, states, 64 * 10), states)
        assert store.used_bytes == states.nbytes
    assert not scattered


def test_without_the_system_call_slots_are_used(scattered, monkeypatch):
    monkeypatch.setattr(offloaded, "CAN_SCATTER", False)
    store, states = make_store(), random_states(6)
    store.append_states(states)
    assert torch.equal(decode(store, states, 64 * 6), states)
    assert not scattered


def test_bytes_that_arrive_wrong_once_are_read_again(monkeypatch):
    store, states = make_store(), random_states(6)
    store.append_states(states)
    scatter, damaged = BlockFile.scatter, []

    def garbled(self, offset, parts):
        found = scatter(self, offset, parts)
        parts[1][5] ^= 1
        damaged.append(self)
        return found

    monkeypatch.setattr(BlockFile, "scatter", garbled)
    assert torch.equal(decode(store, states, 64 * 6), states)
    monkeypatch.setattr(BlockFile, "scatter", lambda self, *arguments: False)
    assert torch.equal(decode(store, states, 64 * 6), states)
    assert damaged


def test_blocks_that_are_whole_but_never_were_written_here_are_told(scattered):
    """Another file with right checksums for every place, such as a backup that somebody puts back."""
    store = make_store()
    store.append_states(random_states(5))
    file = store.entries[0].run.file
    other = BlockFile(file.path.with_name("other"), file.number, Trash())
    records = memoryview(bytearray(file.size))
    other.append(records, store.entries[0].run.record_bytes)
    os.replace(other.path, file.path)
    with pytest.raises(OffloadError, match="block 0 of the 5 held of the keys of layer 0.*this cache didn't write"):
        decode(store, random_states(5), 64 * 5)


@pytest.mark.parametrize("threads", [0, 1, 5])
def test_it_matters_not_who_reads(scattered, monkeypatch, threads):
    monkeypatch.setattr(straight, "THREADS", threads)
    store, states = make_store(), random_states(40)
    store.append_states(states)
    for _ in range(20):
        assert torch.equal(decode(store, states, 64 * 40), states)


def test_a_damaged_block_that_another_thread_reads_is_named_too(monkeypatch):
    """And nobody writes into the states any more once the error is out."""
    monkeypatch.setattr(OffloadedStore, "run_blocks", lambda self, batch: 5)
    store, states, readers = make_store(), random_states(40), set()
    store.append_states(states)
    read = straight.Read.__call__

    def slowly(self):
        threading.Event().wait(0.01)
        readers.add(threading.current_thread().name)
        read(self)

    monkeypatch.setattr(straight.Read, "__call__", slowly)
    content = bytearray(store.entries[0].run.file.path.read_bytes())
    content[100] ^= 1
    store.entries[0].run.file.path.write_bytes(content)
    with pytest.raises(OffloadError, match="block 0 of the 40 held"):
        decode(store, states, 64 * 40)
    assert len(readers) > 1


def test_a_copy_of_a_cache_reads_straight_as_well(scattered):
    cache = build_cache("fp+offload:disk,budget=0", tiny_llama_config())
    states = random_states(6, 1, 2, 16)
    for layer in range(2):
        cache.update(states, -states, layer)
    twin = copy.deepcopy(cache)
    assert torch.equal(twin.layers[1].dense()[1], -states)
    assert scattered


def test_a_reopened_cache_reads_straight_once_its_blocks_have_been_checked(scattered, tmp_path):
    cache = build_cache(f"fp+offload:disk,budget=0,dir={tmp_path}", tiny_llama_config())
    states = random_states(6, 1, 2, 16)
    for layer in range(2):
        cache.update(states, -states, layer)
    cache.flush()
    cache.space.trash.deferred = True
    cache.space.directory.give_up()
    again, tokens = OffloadedCache.reopen(tiny_llama_config(), tmp_path)
    assert tokens == 320
    again.space.in_host.budget_bytes = 0
    assert not scattered
    for _ in range(2):
        assert torch.equal(again.layers[1].dense()[0], states[:, :, :320])
    assert scattered


def test_the_system_is_asked_for_the_next_layer(llama, monkeypatch):
    asked = []
    advise = BlockFile.advise
    monkeypatch.setattr(
        BlockFile, "advise", lambda self, *span: (asked.append((self.path.name[13:22], *span)), advise(self, *span))[1]
    )
    for prefetch in (1, 0):
        cache = build_cache(f"fp+offload:disk,budget=0,prefetch={prefetch}", llama.config)
        with torch.no_grad():
            for tokens in (300, 1):
                llama(torch.ones(1, tokens, dtype=torch.long), **{cache_keyword(llama): cache})
        shelves = cache.layers[0].shelf.shelves
        shelves.ahead.threads().shutdown(wait=True)
    size = cache.layers[0].packed["keys"].disk_bytes
    assert sorted(asked) == [(f"{layer:04d}-{name}", 0, size) for layer in (0, 1) for name in ("keys", "valu")]
