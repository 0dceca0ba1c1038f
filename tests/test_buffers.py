"""Buffers of stores: large ones on a CPU are memory of their own, which goes back when they are outgrown."""

from __future__ import annotations

import gc

import pytest
import torch

from hf_kvplus.stores import GrowingStore, hostmemory
from hf_kvplus.stores.hostmemory import SMALLEST_BUFFER_BYTES, empty_buffer
from kvplus_eval.peak import RESET, RESET_PEAK, can_watch, status_bytes


@pytest.mark.skipif(not can_watch(), reason="this system doesn't tell a process's peak memory")
def test_stores_that_outgrow_their_buffers_one_after_the_other_leave_no_holes():
    """Buffers from the heap would leave 15 MB of holes here."""
    # The C library maps large blocks only until the first of them is freed.
    torch.zeros(1 << 22).add_(1)
    stores = [GrowingStore(growth=64) for _ in range(60)]
    block = torch.ones(1, 3, 1, 64 * 24, dtype=torch.uint8)
    for store in stores:
        store.append({"codes": block.expand(-1, -1, 170, -1)})
    gc.collect()
    hostmemory.trim_heap()
    before = status_bytes("VmRSS")
    RESET.write_text(RESET_PEAK)
    for store in stores:
        store.append({"codes": block})
    # 3 blocks more in each and one buffer of 0.8 MB on the way make 1.7 MB; the rest is what other threads take
    # meanwhile and what the system's count is off by.
    assert status_bytes("VmHWM") - before < 8_000_000


def test_small_buffers_and_those_of_other_devices_are_pytorchs(monkeypatch):
    monkeypatch.setattr(hostmemory, "map_memory", None)
    assert empty_buffer(torch.empty(0), (SMALLEST_BUFFER_BYTES // 4 - 1,)).shape == (SMALLEST_BUFFER_BYTES // 4 - 1,)
    assert empty_buffer(torch.empty(0, device="meta"), (1 << 20,)).device.type == "meta"
    with pytest.raises(TypeError):
        empty_buffer(torch.empty(0), (SMALLEST_BUFFER_BYTES // 4,))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_large_buffers_have_shape_dtype_and_no_slack(dtype):
    buffer = empty_buffer(torch.empty(0, dtype=dtype), (2, 3, 5000, 4))
    assert buffer.shape == (2, 3, 5000, 4)
    assert buffer.dtype == dtype
    assert buffer.untyped_storage().nbytes() == buffer.nbytes
    assert buffer.fill_(1).sum(dtype=torch.float64) == buffer.numel()


def test_a_store_that_was_filled_in_inference_mode_grows_outside_of_it():
    store = GrowingStore()
    with torch.inference_mode():
        store.append({"keys": torch.ones(1, 2, 100, 64)})
    for _ in range(3):
        store.append({"keys": torch.zeros(1, 2, 100, 64)})
    assert store.get("keys").sum() == 2 * 100 * 64
