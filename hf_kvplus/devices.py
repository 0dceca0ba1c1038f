"""Devices by name: nominal memory, bandwidth and speed, and the one at hand as measured.

Figures are the peaks that vendors publish: dense half precision without sparsity, accumulated in float32 where a card
is slower that way (GeForce). Compared on 2026-11-29 and 30 with published specifications of each card; of the GeForce
figures 165 was seen as it stands, 71 and 210 follow from those with half-precision sums and sparsity. `v100` is the
PCIe card. What a program reaches is less. Left out: prices, interconnects and power.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_kvplus.registry import unknown_name

GIB = 1024**3
TIMED_ROUNDS = 5


@dataclass(frozen=True)
class Device:
    """What counts of a device here.

    Args:
        name: Its name.
        memory_bytes: Its memory.
        bytes_per_s: Bandwidth of that memory.
        flops_per_s: Multiplications and additions per second.
        measured: Whether speed and bandwidth were measured here, or come from a data sheet.
    """

    name: str
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: float
    measured: bool = False


# name: memory in GiB, bandwidth in GB/s, dense half-precision TFLOP/s
DATA_SHEETS = {
    "t4": (16, 320, 65),
    "rtx3060": (12, 360, 26),
    "rtx3090": (24, 936, 71),
    "rtx4090": (24, 1008, 165),
    "rtx5090": (32, 1792, 210),
    "l4": (24, 300, 121),
    "a10g": (24, 600, 70),
    "l40s": (48, 864, 362),
    "v100": (16, 900, 112),
    "a100-40g": (40, 1555, 312),
    "a100-80g": (80, 2039, 312),
    "h100": (80, 3350, 989),
    "h200": (141, 4800, 989),
    "b200": (180, 8000, 2250),
    "mi300x": (192, 5300, 1307),
}
HERE = "here"


def find_device(name: str) -> Device:
    """Returns the device called `name`; `"here"` measures the one at hand, which takes a second.

    Raises:
        ValueError: If there is none; the message lists those there are.
    """
    if name == HERE:
        return measure_device()
    if name not in DATA_SHEETS:
        raise ValueError(unknown_name("device", name, [HERE, *DATA_SHEETS]))
    gib, gigabytes_per_s, teraflops = DATA_SHEETS[name]
    return Device(name, gib * GIB, gigabytes_per_s * 1e9, teraflops * 1e12)


def measure_device() -> Device:
    """Measures the first CUDA device, or else the CPU: its bandwidth by a copy, its speed by a product of matrices."""
    cuda = torch.cuda.is_available()
    where = torch.device("cuda" if cuda else "cpu")
    dtype, size, elements = (torch.bfloat16, 8192, 1 << 28) if cuda else (torch.float32, 1024, 1 << 25)
    source = torch.ones(elements, dtype=dtype, device=where)
    target = torch.empty_like(source)
    copy_s = _median_s(lambda: target.copy_(source), where)
    matrix = torch.ones(size, size, dtype=dtype, device=where)
    product_s = _median_s(lambda: matrix @ matrix, where)
    if cuda:
        facts = torch.cuda.get_device_properties(where)
        name, memory = facts.name, facts.total_memory
    else:
        name, memory = "cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(name, memory, 2 * source.nbytes / copy_s, 2 * size**3 / product_s, measured=True)


def _median_s(action: Callable[[], object], where: torch.device) -> float:
    """Returns the median time of an action, the first one left out."""
    times = []
    for _ in range(TIMED_ROUNDS + 1):
        began = time.perf_counter()
        action()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])
