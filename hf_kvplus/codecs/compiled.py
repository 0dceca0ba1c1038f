"""Decoding on a CPU by a compiled function, where Numba is installed (the extra `cpu`).

PyTorch's operators walk over the states about ten times to decode them; the compiled function stays in the first-level
cache. Results differ from those of the operators in the last bit, because the rotation adds in another order. What of
a block comes out doesn't depend on how many are decoded at once.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from hf_kvplus.codecs.base import PER_CHANNEL, Packed
from hf_kvplus.codecs.levels import UNIFORM
from hf_kvplus.codecs.log_scale import CHANNEL_STEPS, TOKEN_STEPS, from_log_scale
from hf_kvplus.codecs.rotation import hadamard, hadamard_order
from hf_kvplus.codecs.turns import kernel_tables
from hf_kvplus.threads import find_runner

if TYPE_CHECKING:
    from hf_kvplus.codecs.dual_scale import DualScaleCodec
    from hf_kvplus.codecs.rotary_mean import RotaryMeanCodec

TASKS_PER_THREAD = 8


class Arguments(threading.local):
    """The arguments of the compiled function, for each thread that calls it."""

    def __init__(self, count: int) -> None:
        self.numbers = (ctypes.c_int64 * count)()
        self.counter = ctypes.c_int64(0)


class Decoder:
    """Decodes blocks of `dual_scale` on as many threads as PyTorch uses."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.run = find_runner()
        self.arguments = Arguments(kernel.COUNT)
        every = torch.arange(256, dtype=torch.uint8)
        self.channel_scales, self.token_scales = (
            from_log_scale(every, CHANNEL_STEPS),
            from_log_scale(every, TOKEN_STEPS),
        )

    def fits(self, codec: DualScaleCodec, head_dim: int) -> bool:
        """Whether blocks of this shape can be decoded here."""
        return (
            head_dim % 16 == 0
            and head_dim <= self.kernel.MOST_CHANNELS
            and codec.block_tokens <= self.kernel.MOST_TOKENS
        )

    def decode(
        self, codec: DualScaleCodec, packed: Packed, out: torch.Tensor, means: RotaryMeanCodec | None = None
    ) -> None:
        """Decodes blocks; see `Codec.decode`.

        Args:
            codec: The codec.
            packed: Its payload.
            out: `(batch, kv_heads, blocks, block_tokens, head_dim)`, written in place.
            means: The codec of turning means that are to be added, if the payload has any.
        """
        if out.dtype != torch.float32 or out.stride(-1) != 1:
            values = torch.empty(out.shape)
            self.decode(codec, packed, values, means)
            limit = torch.finfo(out.dtype).max
            out.copy_(values.clamp_(-limit, limit))
            return
        k, a = self.kernel, self.arguments.numbers
        batch, heads, blocks, tokens, channels = out.shape
        threads = torch.get_num_threads()
        pairs = batch * heads
        per_task = max(1, pairs * blocks // (TASKS_PER_THREAD * threads))
        levels = codec.level_table()
        rotation = codec.rotation(channels)
        self.arguments.counter.value = 0
        a[k.COUNTER] = ctypes.addressof(self.arguments.counter)
        a[k.TASKS], a[k.HEADS] = pairs * -(-blocks // per_task), heads
        a[k.BLOCKS], a[k.BLOCKS_PER_TASK], a[k.TOKENS], a[k.CHANNELS] = blocks, per_task, tokens, channels
        a[k.NBITS], a[k.CHANNEL_MAJOR] = codec.nbits, codec.axis == PER_CHANNEL
        a[k.ORDER] = 1 if rotation is None else hadamard_order(channels)
        # The factor of the whole matrix goes into the small one.
        matrix = small_rotation(a[k.ORDER])
        a[k.MATRIX] = matrix.data_ptr()
        a[k.TABLE], a[k.LEVELS] = codec.levels != UNIFORM, levels.data_ptr()
        a[k.SCALES], a[k.TOKEN_SCALES] = self.channel_scales.data_ptr(), self.token_scales.data_ptr()
        fields = {k.CODES: "codes", k.CHANNEL_SCALE: "channel_scale", k.MEAN: "mean", k.MEAN_SCALE: "mean_scale"}
        held = {slot: _dense_lines(packed[name]) for slot, name in fields.items()}
        held[k.OUT] = out
        a[k.TOKEN_SCALE] = 0
        if codec.iterations:
            held[k.TOKEN_SCALE] = _dense_lines(packed["token_scale"])
        a[k.MEANS] = 0 if means is None else means.means
        if means is not None:
            places, turns = kernel_tables(means.turns, tokens, channels, "cpu")
            a[k.TURN_CHANNELS], a[k.TURNS] = places.data_ptr(), turns.data_ptr()
            held[k.PAIR], held[k.PAIR_MEAN] = _dense_lines(packed["rotary_pair"]), packed["rotary_mean"].float()
        for slot, tensor in held.items():
            strides = [stride * tensor.element_size() for stride in tensor.stride()]
            a[slot : slot + 4] = [tensor.data_ptr(), *strides[:3]]
        a[k.OUT_T] = 4 * out.stride(3)
        self.run(k.decode_blocks.address, ctypes.addressof(a), min(threads, a[k.TASKS]))


def _dense_lines(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor whose blocks lie in memory without gaps, the given one where they do."""
    return tensor if tensor[0, 0, 0].is_contiguous() else tensor.contiguous()


@cache
def small_rotation(order: int) -> torch.Tensor:
    """Returns the Hadamard matrix of 16, scaled as the one of `order` is."""
    return (hadamard(16) * (16 / order) ** 0.5).contiguous()


@cache
def find_decoder() -> Decoder | None:
    """Returns the compiled decoder, or `None` where Numba isn't installed."""
    try:
        from hf_kvplus.compiled_kernels import decode
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("numba", "llvmlite"):
            raise
        return None
    return Decoder(decode)
