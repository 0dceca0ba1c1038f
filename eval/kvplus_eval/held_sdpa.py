"""PyTorch's attention in bfloat16 on plain AVX-512: a second yardstick, beside the one on all that a CPU has.

Newer server CPUs multiply bfloat16 numbers in units of their own (AMX, AVX512-BF16), which make attention over dense
bfloat16 states about twice as fast as over float32; without them it takes two or three times as long. Figures of two
machines can only be compared if one knows which it was. PyTorch hands the products of a decoded token to oneMKL, which
reads once, when it is loaded, what it may use; so the yardstick is a process of its own, that waits between two steps.

    python -m kvplus_eval.held_sdpa '{"batch": 1, ...}'   a line of JSON, then a time for each line that is read

oneDNN's and ATen's own limits (`ONEDNN_MAX_CPU_ISA`, `ATEN_CPU_CAPABILITY`) change nothing here: torch 2.13 doesn't
come by them for one token. A CPU that is held takes longer than one that was built without the units: 3.3 to 3.7 times
float32's time, where other machines took 2.1 and 3.1 (docs/log/attention.md).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvplus_eval.timing import clock_ms

NAME = "sdpa-bfloat16-avx512"
HELD = {"MKL_ENABLE_INSTRUCTIONS": "AVX512"}
LIMITS = ("MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
BFLOAT16_UNITS = ("amx_bf16", "avx512_bf16")
CPU_FACTS = Path("/proc/cpuinfo")


def cpu_instructions() -> dict[str, Any]:
    """Returns what dense products may use: ATen's level, the CPU's units for bfloat16, and limits that were set."""
    flags: list[str] = []
    if CPU_FACTS.is_file():
        lines = (line for line in CPU_FACTS.read_text().splitlines() if line.startswith("flags"))
        flags = next(lines, "").split()
    return {
        "aten": torch.backends.cpu.get_cpu_capability(),
        "bfloat16_units": [name for name in BFLOAT16_UNITS if name in flags],
        "limits": {name: os.environ[name] for name in LIMITS if name in os.environ},
    }


class HeldAttention:
    """A process that attends over dense bfloat16 states without units for bfloat16, one step whenever it is asked.

    Args:
        size: Numbers for `batch`, `kv_heads`, `queries`, `head_dim` and `tokens`.

    Raises:
        RuntimeError: If the process doesn't begin; the message ends as its did.
    """

    def __init__(self, size: dict[str, int]) -> None:
        command = [sys.executable, "-m", "kvplus_eval.held_sdpa", json.dumps(size)]
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **threads, **HELD},
        )  # fmt: skip
        self.instructions = json.loads(self._ask())

    def _ask(self) -> str:
        """Asks for a step, and returns the line that comes."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            _, complaint = self.process.communicate()
            raise RuntimeError(f"PyTorch's attention in a process of its own failed: {complaint.splitlines()[-1:]}")
        return line

    def step_ms(self) -> float:
        """Attends once and returns how long it took."""
        return float(self._ask())

    def close(self) -> None:
        """Ends the process."""
        self.process.communicate()


def answer(size: dict[str, int]) -> None:
    """Tells the instructions, then attends once for each line that is read, and writes the milliseconds."""
    shape = [size[name] for name in ("batch", "kv_heads", "tokens", "head_dim")]
    keys, values = (torch.randn(shape, dtype=torch.bfloat16) for _ in range(2))
    query = torch.randn(shape[0], shape[1] * size["queries"], 1, shape[3], dtype=torch.bfloat16)
    act = partial(scaled_dot_product_attention, query, keys, values, enable_gqa=True)
    sys.stdin.readline()
    print(json.dumps(cpu_instructions()), flush=True)
    with torch.inference_mode():
        for _ in sys.stdin:
            began = clock_ms(query.device)
            act()
            print(clock_ms(query.device) - began, flush=True)


if __name__ == "__main__":
    answer(json.loads(sys.argv[1]))
