"""The Triton kernels over latents without a GPU: in the interpreter, and compiled ahead of time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from ahead import compile_kernel, resources
from latent_layers import make_latent_layer

from hf_kvplus.attention import triton_latent_kernels
from hf_kvplus.attention.triton_latents import Shape

HERE = Path(__file__).parent


def test_kernels_agree_with_the_reference_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "triton_latents_interpreted.py"]
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


WIDE = {"latents": (512, 512), "kv_heads": 8, "head_dim": 128}
FORMS = {
    "whole-192": {"latents": (192, 192)},
    "int4-128-rows-32": {"quantized": True},
    "int4-192": {"quantized": True, "latents": (192, 176)},
    "int4-512": {"quantized": True, **WIDE},
    "int3-512": {"key_nbits": 3, "value_nbits": 3, **WIDE},
    "affine-256": {"recipe": "affine", **WIDE, "latents": (256, 256)},
    "float32-192": {"quantized": True, "latents": (192, 192), "dtype": torch.float32},
}


@pytest.mark.parametrize(
    ("architecture", "form"), [*((80, form) for form in FORMS), (90, "int4-192"), (90, "int4-512")]
)
def test_latent_attention_compiles_and_spills_no_register(form, architecture, tmp_path, capsys):
    options = {"dtype": torch.bfloat16, **FORMS[form]}
    layer = make_latent_layer(1, **options)
    shape, single = Shape.of(layer, 32 if "rows-32" in form else 9), options["dtype"] == torch.float32
    states = tl.float32 if single else tl.bfloat16
    codes = tl.float32 if single else tl.float16
    kinds = {side: shape.options[f"{side}_KIND"] for side in ("KEY", "VALUE")}
    constants = {
        **shape.options, "ROWS": shape.rows, "HAS_MASK": False, "HAS_SOFTCAP": False, "ASSEMBLY": True,
        "PRECISION": "tf32x3" if single else "tf32",
        **{f"{side}_OPERAND": states if kind == "states" else codes for side, kind in kinds.items()},
    }  # fmt: skip
    stored = {"states": "*fp32" if single else "*bf16", "affine": "*u8", "dual": "*u8"}
    scales = "*fp16" if "affine" in kinds.values() else "*u8"
    dtypes = {f"{side.lower()}_codes": stored[kind] for side, kind in kinds.items()}
    dtypes |= dict.fromkeys(("key_first", "key_second", "value_first", "value_second"), scales)
    compiled = compile_kernel(
        triton_latent_kernels.attend_latents, constants, dtypes, architecture,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    found = resources(compiled, tmp_path)
    with capsys.disabled():
        print(f"\nsm_{architecture} {form}: {found}, {shape.warps} warps, {shape.stages} stages", end=" ")
    assert found.spilled_bytes == 0
    assert found.shared_bytes <= 99 * 1024


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("last", [False, True])
def test_adding_up_compiles_and_spills_no_register(architecture, last, tmp_path):
    constants = {
        "HAS_LOG_SUMS": not last, "HAS_EARLIER": last, "HAS_SINK_LOGITS": last, "CHANNELS": 192, "COLUMNS": 128,
        "ROWS": 16, "STEP": 16,
    }  # fmt: skip
    dtypes = dict.fromkeys(("log_sums", "earlier", "earlier_log_sums"), "*fp32")
    dtypes["output"] = "*bf16" if last else "*fp32"
    compiled = compile_kernel(triton_latent_kernels.gather, constants, dtypes, architecture, num_warps=4, num_stages=3)
    assert resources(compiled, tmp_path).spilled_bytes == 0
