"""Bytes are counted on live tensors, agree with the allocator, and are as small as promised."""

from __future__ import annotations

import gc
import json
import types
import weakref

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from conftest import tiny_llama_config
from hf_kvplus import build_cache, measure_memory
from hf_kvplus.stores import hostmemory

OURS = ["fp", "int8", "k8v4", "int4", "int3", "int2", "k16v4"]


def fill(cache, config, tokens: int, chunk: int | None = None, batch: int = 1) -> None:
    """Feeds random states of a model of `config` to every layer."""
    shape = (batch, config.num_key_value_heads, tokens, config.head_dim)
    for layer in range(config.num_hidden_layers):
        keys, values = torch.randn(shape), torch.randn(shape)
        for start in range(0, tokens, chunk or tokens):
            stop = start + (chunk or tokens)
            cache.update(keys[:, :, start:stop], values[:, :, start:stop], layer)


def reachable_bytes(root) -> int:
    """Sums the storages of all tensors that the garbage collector can reach from `root`, an independent walk."""
    storages, seen, stack = {}, set(), [root]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, (type, types.ModuleType, types.FunctionType)):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        else:
            stack.extend(gc.get_referents(item))
    return sum(storages.values())


@pytest.mark.parametrize("strategy", [*OURS, "dynamic"])
@pytest.mark.parametrize("chunk", [None, 64, 1], ids=["one_shot", "chunks_of_64", "token_by_token"])
def test_total_bytes_are_those_of_every_reachable_tensor(strategy, chunk):
    config = tiny_llama_config()
    cache = build_cache(strategy, config)
    fill(cache, config, 300, chunk, batch=2)
    assert measure_memory(cache).total_bytes == reachable_bytes(cache) > 0


def allocated_bytes(profiler, folder) -> int:
    """Sums the blocks that the allocator gave out and didn't take back; blocks from before the profile don't count."""
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    blocks: dict[int, int] = {}
    for event in sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            blocks[address] = size
        else:
            blocks.pop(address, None)
    return sum(blocks.values())


@pytest.fixture
def mapped(monkeypatch):
    """Weak references to memory that is mapped from now on, which the allocator doesn't count."""
    found, map_memory = [], hostmemory.map_memory

    def note(size):
        mapping = map_memory(size)
        found.append(weakref.ref(mapping))
        return mapping

    monkeypatch.setattr(hostmemory, "map_memory", note)
    return found


@pytest.mark.parametrize("strategy", OURS)
def test_total_bytes_agree_with_the_allocator_and_mapped_memory(strategy, tmp_path, mapped):
    config = tiny_llama_config(num_key_value_heads=4)
    garbage = [torch.zeros(1 << 20)]  # as earlier tests leave it: freed while the profile runs
    garbage.append(garbage)
    fill(build_cache(strategy, config), config, 256)  # what a first call allocates once isn't the cache's
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        cache = build_cache(strategy, config)
        fill(cache, config, 4096, 1024)
        del garbage
        gc.collect()
    mapped_bytes = sum(len(one()) for one in mapped if one() is not None)
    assert mapped_bytes > 0
    allocated = allocated_bytes(profiler, tmp_path) + mapped_bytes
    assert measure_memory(cache).total_bytes == pytest.approx(allocated, rel=0.01)


def test_int4_takes_at_most_16_hundredths_of_full_precision_at_8k():
    config = tiny_llama_config(num_attention_heads=9, num_key_value_heads=3, head_dim=64, hidden_size=576)
    sizes = {}
    for strategy in ("dynamic", "int4"):
        cache = build_cache(strategy, config)
        fill(cache, config, 8192)
        sizes[strategy] = measure_memory(cache).total_bytes
    assert sizes["dynamic"] == 2 * 2 * 3 * 64 * 8192 * 4
    assert sizes["int4"] <= 0.16 * sizes["dynamic"]


@pytest.mark.parametrize("nbits", [2, 3, 4, 5, 6, 8])
def test_codes_take_their_bits_and_scales_are_counted(nbits):
    config = tiny_llama_config(head_dim=64)
    cache = build_cache(f"k{nbits}v{nbits},recipe=affine,recent=64", config)
    fill(cache, config, 64 * 5)
    breakdown = measure_memory(cache)
    assert breakdown.packed_bits_per_element == nbits + 32 / 64
    assert breakdown.packed_elements == 2 * 2 * 2 * 64 * 256
    assert breakdown.elements == 2 * 2 * 2 * 64 * 320


def test_reset_gives_the_bytes_back():
    config = tiny_llama_config()
    cache = build_cache("int4", config)
    fill(cache, config, 300)
    cache.reset()
    assert measure_memory(cache).total_bytes == 0 == reachable_bytes(cache)


def test_transformers_own_quantized_caches_are_measured_with_their_scales():
    pytest.importorskip("hqq")
    config = tiny_llama_config(head_dim=64)
    cache = build_cache("hf-hqq4", config)
    fill(cache, config, 256)
    breakdown = measure_memory(cache)
    assert breakdown.packed_elements == 2 * 2 * 2 * 64 * 256
    assert 4.5 <= breakdown.packed_bits_per_element <= 5.0  # scale and zero point in the model's float32
    assert breakdown.total_bytes == reachable_bytes(cache)


def test_only_a_cache_is_measured():
    with pytest.raises(TypeError, match="must be a transformers Cache, got list"):
        measure_memory([])
    assert measure_memory(DynamicCache(config=tiny_llama_config())).total_bytes == 0
