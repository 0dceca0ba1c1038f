"""What is told beforehand of an offloaded cache is what it takes."""

from __future__ import annotations

import pytest
import torch

from conftest import tiny_llama_config
from hf_kvplus import build_cache, estimate_memory, measure_memory, recommend
from hf_kvplus.devices import Device

CONFIG = tiny_llama_config(num_hidden_layers=4)


def filled(strategy: str, tokens: int):
    cache = build_cache(strategy, CONFIG)
    for count in (tokens - 1, 1):
        for layer in range(4):
            states = torch.randn(1, 2, count, 16)
            cache.update(states, states, layer)
    return cache


@pytest.mark.parametrize("base", ["fp", "int4"])
def test_blocks_are_told_by_place(base):
    estimate = estimate_memory(CONFIG, 2000, strategy=f"{base}+offload:disk,budget=0")
    memory = measure_memory(filled(f"{base}+offload:disk,budget=0", 2000))
    assert estimate.tier == "disk"
    assert estimate.host_bytes == 0
    # Records have headers of 16 bytes and fields at multiples of 16.
    assert estimate.disk_bytes <= memory.disk_bytes <= 1.05 * estimate.disk_bytes
    rest = memory.full_precision_bytes
    assert rest <= estimate.cache_bytes - estimate.packed_bytes <= 2 * rest  # recent tokens have room to grow
    assert estimate.device_bytes < estimate.cache_bytes


def test_tiers_share_the_blocks():
    plain = estimate_memory(CONFIG, 4000, strategy="fp")
    host = estimate_memory(CONFIG, 4000, strategy="offload:cpu")
    disk = estimate_memory(CONFIG, 4000, strategy="offload:disk,budget=100kb")
    auto = estimate_memory(CONFIG, 4000, strategy="offload:auto,budget=100kb,host=200kb")
    assert host.host_bytes == host.packed_bytes > 0.9 * plain.cache_bytes
    assert (disk.disk_bytes, disk.host_bytes) == (disk.packed_bytes, 100_000)
    assert auto.host_bytes == 200_000
    assert auto.disk_bytes == auto.packed_bytes - 300_000
    assert auto.device_bytes == host.device_bytes + 100_000
    assert plain.host_bytes == plain.disk_bytes == 0


def test_estimating_makes_no_files(tmp_path):
    estimate_memory(CONFIG, 1000, strategy=f"offload:disk,dir={tmp_path / 'new'}")
    assert not (tmp_path / "new").exists()


def test_offloading_is_recommended_where_nothing_else_fits():
    config = tiny_llama_config(num_hidden_layers=30)
    smallest = estimate_memory(config, 100_000, strategy="int4").device_bytes
    device = Device("small", 1 << 40, 1e11, 1e13)
    found = recommend(config, 100_000, budget_bytes=smallest // 3, device=device)
    assert found.strategy is not None
    assert "offload" in found.strategy
    assert found.estimate.device_bytes <= smallest // 3
