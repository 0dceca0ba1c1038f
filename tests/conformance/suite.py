"""The strategies that the suite runs: adding one is adding one line.

Losses are measured: the largest of any architecture and mode, and half as much again. An unrelated context gives 1 and
more, so that even 4 bits are told from a mix-up; what 8 bits and full precision allow is far less.
"""

from __future__ import annotations

import zoo
from case import Case, Strategy
from modes import MODES

STRATEGIES = [
    Strategy("fp", loss=2e-5),
    Strategy("int8,recent=16", loss=0.1),
    Strategy("int4,recent=16", loss=0.7),
    Strategy("k8v4,recent=16", loss=0.7, architectures=zoo.REPRESENTATIVE),
    Strategy("int3,recent=16", loss=0.9, architectures=zoo.REPRESENTATIVE),
    Strategy("int2,recent=16,sinks=0", loss=1.2, architectures=("Llama",)),
    Strategy("plan:MIXED", loss=0.2, architectures=("Llama", "Gemma 3")),
    # Rotated over all heads, nothing dropped: exact up to rounding, which the threshold for packing allows for.
    Strategy("gqa:1,projection=ROTATED,recent=16", loss=2e-4, architectures=("Llama", "GPT-2", "DeepSeek-V3")),
    Strategy("gqa:1,projection=ROTATED+int8,recent=16", loss=0.1, architectures=("Llama",)),
    Strategy("fp+offload:disk,budget=20kb", loss=2e-5, architectures=("Llama", "Falcon-H1")),
    Strategy("int8,recent=16+offload:disk,budget=0", loss=0.1, architectures=("Llama", "Gemma 3n")),
    Strategy("fp+offload:cpu", loss=2e-5, architectures=("Llama",)),
    Strategy("window:150,sinks=4+offload:disk,budget=0", loss=2e-5, architectures=("Llama",), window=(150, 4)),
    Strategy(
        "window:90,sinks=4",
        loss=2e-5,
        architectures=("Llama", "Gemma 3", "gpt-oss", "Qwen3-Next", "Whisper"),
        window=(90, 4),
    ),
    Strategy("window:150,sinks=4+int8,recent=16", loss=0.1, architectures=("Llama",), window=(150, 4)),
]

# Standalone strategies are the yardstick, the peers that ours are compared with, and caches of others.
NOT_OURS = ("dynamic", "hf-", "adapter")

# What the models of older releases themselves can't do or do otherwise, with `DynamicCache` as well: tried with 5.14.
SINCE = "5.24"
OLDER_CAN_NOT: dict[str, tuple[str, ...]] = {
    "Qwen3-Next": ("padded batch",),
    "Falcon-H1": ("padded batch",),
    "LFM2": (
        "assisted (draft model)",
        "prompt lookup",
        "chunked prefill",
        "padded batch",
        "prefix reuse by deepcopy",
        "multi-turn chat",
        "forward with gradients",
        "crop, then continue",
        "row operations",
        "pickle, reset, move",
    ),
    "Whisper": ("padded batch",),
    "Qwen2-VL": ("chunked prefill",),
}

# (architecture, strategy, mode) -> why the cell doesn't apply, or None
CELLS: dict[tuple[str, str, str], str | None] = {
    (name, strategy.text, mode.name): mode.unless(Case(zoo.ZOO[name], strategy))
    for strategy in STRATEGIES
    for name in strategy.architectures
    for mode in MODES.values()
}
