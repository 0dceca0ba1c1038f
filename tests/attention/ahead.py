"""Compiles the Triton kernels ahead of time, on a machine without a GPU, and reads off what they take."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
BYTES = {"mask", "key_codes", "value_codes", "key_mean_scale", "value_mean_scale"}


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes.

    Args:
        registers: Per thread.
        spilled_bytes: Local memory per thread: stack and spilled registers.
        shared_bytes: Shared memory per program.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int


def argument_type(name: str, dtypes: dict[str, str]) -> str:
    """Returns the type of a run-time argument."""
    if name in dtypes:
        return dtypes[name]
    if name in BYTES:
        return "*u8"
    if name in ("key_mean", "value_mean"):
        return "*i8"
    if name == "padding":
        return "*i32"
    if name in ("scaling", "softcap") or re.fullmatch("(key|value)_[abcd]", name):
        return "fp32"
    if name.startswith("part_") or name in ("query", "rotation", "sink_logits"):
        return "*fp32"
    return "i32"


def compile_kernel(kernel: Any, constants: dict[str, Any], dtypes: dict[str, str], architecture: int, **options: int):
    """Compiles a kernel; `dtypes` names the types that the constants decide."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else argument_type(name, dtypes) for name in names}
    attributes = {
        (place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if signature[name].startswith("*")
    }
    fixed = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, fixed, attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def resources(compiled: Any, folder: Path) -> Resources:
    """Reads a compiled kernel's registers, local and shared memory from its binary."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    command = [BINARIES / "cuobjdump", "--dump-resource-usage", binary]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return Resources(numbers["REG"], numbers["STACK"] + numbers["LOCAL"], compiled.metadata.shared)
