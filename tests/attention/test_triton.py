"""The Triton kernels without a GPU: in the interpreter, compiled ahead of time, and their assembly step by step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import numpy as np
import triton.language as tl
from ahead import compile_kernel, resources
from layers import make_layer

from hf_kvplus.attention import integration, triton_append, triton_encode, triton_kernels, triton_unpack
from hf_kvplus.attention.reference import ReferenceKernel
from hf_kvplus.attention.triton import Launch, TritonKernel, parts_of, power_of_two, warps_for

HERE = Path(__file__).parent


def test_kernels_agree_with_the_reference_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "triton_interpreted.py",
        "triton_windows_interpreted.py",
    ]
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def packed_constants(
    *, nbits=4, kind="dual", head_dim=128, tokens=48, rows=16, dtype=torch.bfloat16, masked=False, means=0
):
    """Returns the constants of `attend_packed` for keys and values of one codec."""
    part, part_pad, tokens_pad = parts_of(tokens, nbits)
    value_part, value_part_pad, value_pad = parts_of(head_dim, nbits)
    single = dtype == torch.float32
    sides = {
        "KIND": kind,
        "NBITS": nbits,
        "TOKEN_SCALE": kind == "dual" and nbits < 8,
        "CURVED": nbits == 3,
        "GROUP": 16,
        "OPERAND": tl.float32 if single else tl.float16,
    }
    return {
        **{f"{side}_{name}": value for side in ("KEY", "VALUE") for name, value in sides.items()},
        "HAS_MASK": masked, "HAS_SOFTCAP": masked, "PRECISION": "tf32x3" if single else "tf32", "ASSEMBLY": True,
        "TOKENS": tokens, "TOKEN_PART": part, "TOKEN_PART_PAD": part_pad, "TOKENS_PAD": tokens_pad,
        "KEY_CHANNELS": head_dim, "KEY_PAD": power_of_two(head_dim),
        "VALUE_CHANNELS": head_dim, "VALUE_PART": value_part, "VALUE_PART_PAD": value_part_pad, "VALUE_PAD": value_pad,
        "ROWS": rows, "KEY_MEANS": means,
    }  # fmt: skip


FORMS = {
    "int4": {},
    "int4-masked-capped": {"masked": True},
    "int4-head-256": {"head_dim": 256},
    "int4-rows-32": {"rows": 32},
    "int8": {"nbits": 8, "tokens": 64},
    "int3": {"nbits": 3},
    "int2": {"nbits": 2, "head_dim": 80},
    "int4-means": {"means": 8},
    "int2-means": {"nbits": 2, "means": 8},
    "affine": {"kind": "affine", "tokens": 64},
    "float32": {"dtype": torch.float32},
}


@pytest.mark.parametrize(
    ("architecture", "form"),
    [*((80, form) for form in FORMS), *((90, form) for form in ("int4", "int8", "int3", "int2", "int4-means"))],
)
def test_packed_attention_compiles_and_spills_no_register(form, architecture, tmp_path, capsys):
    options = FORMS[form]
    constants = packed_constants(**options)
    scales = "*fp16" if options.get("kind") == "affine" else "*u8"
    dtypes = dict.fromkeys(("key_first", "key_second", "value_first", "value_second"), scales)
    dtypes |= {"key_pairs": "*u8", "key_means": "*fp16", "key_turns": "*fp32", "key_places": "*i32"}
    dtypes["whole"] = "*fp32" if options.get("dtype") == torch.float32 else "*bf16"
    head_dim, rows = options.get("head_dim", 128), options.get("rows", 16)
    more = constants["KEY_CURVED"] or constants["KEY_MEANS"] > 0
    warps = warps_for(options.get("dtype", torch.bfloat16), rows, head_dim, more)
    compiled = compile_kernel(
        triton_kernels.attend_packed, constants, dtypes, architecture, num_warps=warps, num_stages=Launch().stages
    )
    found = resources(compiled, tmp_path)
    with capsys.disabled():
        print(f"\nsm_{architecture} {form}: {found}, {warps} warps", end=" ")
    assert found.spilled_bytes == 0
    assert found.shared_bytes <= 99 * 1024


@pytest.mark.parametrize("architecture", [80, 90])
def test_the_other_kernels_compile_and_spill_no_register(architecture, tmp_path, capsys):
    states = {
        "OPERAND": tl.bfloat16, "HAS_MASK": True, "HAS_SOFTCAP": True, "PRECISION": "tf32", "TOKENS_PAD": 64,
        "KEY_CHANNELS": 128, "KEY_PAD": 128, "VALUE_CHANNELS": 128, "VALUE_PAD": 128, "ROWS": 16,
    }  # fmt: skip
    combine = {
        "HAS_ROTATION": True, "HAS_SINK_LOGITS": True, "CHANNELS": 128, "CHANNELS_PAD": 128, "ROWS": 16, "STEP": 16,
        "COLUMNS": 32,
    }  # fmt: skip
    half = ("query", "keys", "values", "sink_keys", "sink_values", "lead_keys", "lead_values", "output")
    for kernel, constants in ((triton_kernels.attend_states, states), (triton_kernels.combine, combine)):
        dtypes = dict.fromkeys(half, "*bf16")
        compiled = compile_kernel(kernel, constants, dtypes, architecture, num_warps=4, num_stages=Launch().stages)
        found = resources(compiled, tmp_path)
        with capsys.disabled():
            print(f"\nsm_{architecture} {kernel.__name__}: {found}", end=" ")
        assert found.spilled_bytes == 0
        assert found.shared_bytes <= 99 * 1024


@pytest.mark.parametrize(("architecture", "axis", "nbits"), [(80, 0, 4), (80, 1, 3), (90, 0, 4)])
def test_encoding_compiles_and_spills_no_register(architecture, axis, nbits, tmp_path, capsys):
    constants = {
        "NBITS": nbits, "AXIS": axis, "TABLE": nbits == 3, "ITERATIONS": 4, "CLIPS": 3 if nbits == 3 else 1,
        "REFINEMENTS": 2, "CORRECT": axis == 0, "HAS_VALID": True, "HAS_ROTATION": True, "PRECISION": "tf32x3",
        "TOKENS": 48, "TOKENS_PAD": 64, "CHANNELS": 128, "CHANNELS_PAD": 128,
    }  # fmt: skip
    dtypes = dict.fromkeys(("valid", "codes", "channel_scale", "token_scale", "mean_scale"), "*u8")
    dtypes |= {"states": "*bf16", "levels": "*fp32", "mean_bytes": "*i8"}
    compiled = compile_kernel(triton_encode.encode_block, constants, dtypes, architecture, num_warps=8, num_stages=1)
    found = resources(compiled, tmp_path)
    with capsys.disabled():
        print(f"\nsm_{architecture} encoding, {nbits} bits, axis {axis}: {found}", end=" ")
    assert found.spilled_bytes == 0


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("head_dim", [80, 128, 256])
def test_storing_new_states_compiles_and_spills_no_register(architecture, head_dim, tmp_path, capsys):
    constants = {
        "KEY_CHANNELS": head_dim, "KEY_PAD": power_of_two(head_dim), "VALUE_CHANNELS": head_dim,
        "VALUE_PAD": power_of_two(head_dim),
    }  # fmt: skip
    for kernel in (triton_append.append_states, triton_append.move_to_front):
        dtypes = dict.fromkeys(("keys", "values", "key_buffer", "value_buffer"), "*bf16")
        found = resources(compile_kernel(kernel, constants, dtypes, architecture, num_warps=4), tmp_path)
        with capsys.disabled():
            print(f"\nsm_{architecture} {kernel.__name__}, {head_dim} channels: {found}", end=" ")
        assert found.spilled_bytes == 0
        assert found.registers <= 128


def run_ptx(code: str, outputs: int, source: int) -> list[int]:
    """Runs the few PTX instructions that the kernels write, on one 32-bit number."""
    registers = {f"${outputs}": source}

    def read(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    def select(first: int, second: int, selector: int) -> int:
        bytes_ = first.to_bytes(4, "little") + second.to_bytes(4, "little")
        return sum(bytes_[selector >> 4 * place & 7] << 8 * place for place in range(4))

    def subtract(first: int, second: int) -> int:
        pair = [np.array([number], np.uint32).view(np.float16) for number in (first, second)]
        return int((pair[0] - pair[1]).view(np.uint32)[0])

    for line in code.strip("{} ").split(";"):
        words = line.replace(",", " ").split()
        if not words or words[0] == ".reg":
            continue
        target, *given = words[1:]
        numbers = [read(name) for name in given]
        operations = {
            "mov.b32": lambda a: a,
            "and.b32": lambda a, b: a & b,
            "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
            "shr.u32": lambda a, b: a >> b,
            "prmt.b32": select,
            "sub.f16x2": subtract,
        }
        registers[target] = operations[words[0]](*numbers)
    return [registers[f"${index}"] for index in range(outputs)]


@pytest.mark.parametrize(("name", "nbits"), [("BYTES", 8), ("NIBBLES", 4), ("PAIRS", 2)])
def test_the_assembly_unpacks_every_code(name, nbits):
    code = getattr(triton_unpack, name).value
    parts, centre = 8 // nbits, (2**nbits - 1) / 2
    for first in range(256):
        source = [first, (first * 7 + 1) % 256, 255 - first, (first * 13 + 5) % 256]
        found = run_ptx(code, 2 * parts, int.from_bytes(bytes(source), "little"))
        numbers = np.array(found, np.uint32).view(np.float16).reshape(parts, 4)
        for part in range(parts):
            expected = [(byte >> part * nbits & 2**nbits - 1) - centre for byte in source]
            assert numbers[part].tolist() == expected


def test_a_gpu_is_served_by_triton_and_a_cpu_refused():
    kernel = integration.make_kernel("auto", torch.device("cuda"))
    assert isinstance(kernel, TritonKernel)
    assert "can't read a cache on cpu" in kernel.refuses(make_layer(70))
    assert isinstance(integration.make_kernel("reference", torch.device("cuda")), ReferenceKernel)


def test_a_missing_triton_is_named(monkeypatch):
    import hf_kvplus.attention

    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "hf_kvplus.attention.triton_kernels")
    monkeypatch.delattr(hf_kvplus.attention, "triton_kernels")
    with pytest.raises(ImportError, match="pip install triton"):
        integration.make_kernel("auto", torch.device("cuda"))
