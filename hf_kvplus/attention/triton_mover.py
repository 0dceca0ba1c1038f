"""Storing on a GPU: hands new states and a store's buffers to the Triton kernels that copy keys and values at once."""

from __future__ import annotations

from typing import Any

import torch

from hf_kvplus.attention.triton import power_of_two

States = dict[str, torch.Tensor]


class TritonMover:
    """Copies into a store of keys and values; see `hf_kvplus.stores.growing.Mover`."""

    def __init__(self) -> None:
        from hf_kvplus.attention import triton_append

        self.module = triton_append

    def write(self, buffers: States, fields: States, place: int) -> None:
        """Copies states `(batch, kv_heads, added, head_dim)` into the buffers, from token `place` on."""
        keys, values = (
            tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in (fields["keys"], fields["values"])
        )
        batch, heads, added, _ = keys.shape
        if not added:
            return
        with torch.cuda.device_of(keys):
            self.module.append_states[(-(-added // self.module.TOKENS.value), batch * heads)](
                keys, *keys.stride()[:3], values, *values.stride()[:3], buffers["keys"], buffers["values"],
                heads, buffers["keys"].shape[2], place, added, **_channels(buffers), num_warps=4,
            )  # fmt: skip

    def move(self, buffers: States, source: int, target: int, count: int) -> None:
        """Moves `count` tokens from `source` on to `target`, which is at least a piece before it."""
        keys = buffers["keys"]
        if not count:
            return
        if source - target < self.module.TOKENS.value:
            raise ValueError(f"`source` must lie {self.module.TOKENS.value} tokens or more behind `target`")
        with torch.cuda.device_of(keys):
            self.module.move_to_front[(keys.shape[0] * keys.shape[1],)](
                keys, buffers["values"], keys.shape[2], source, target, count, **_channels(buffers), num_warps=4
            )


def _channels(buffers: States) -> dict[str, Any]:
    """Returns the head sizes and the powers of two that hold them."""
    key, value = (buffers[name].shape[3] for name in ("keys", "values"))
    return {
        "KEY_CHANNELS": key, "KEY_PAD": power_of_two(key), "VALUE_CHANNELS": value, "VALUE_PAD": power_of_two(value),
    }  # fmt: skip
