"""Encoding on a CPU by a compiled function, where Numba is installed (the extra `cpu`).

PyTorch's operators walk over the states dozens of times to encode them; the compiled function reads them once and
stays in the first-level cache. `affine` blocks come out to the bit as the operators' do. Those of `dual_scale` are
computed in the same steps, but sums (of the rotation, of variances, of least squares) are added in another order, so
that a value on the edge between two bytes may fall on the other side; with a metric (see `feedback`) the channels of
that token that are rounded after it then make up for another error. What of a block comes out doesn't depend on how
many are encoded at once, which can't be said of the operators.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from hf_kvplus.codecs.base import PER_CHANNEL, Packed
from hf_kvplus.codecs.compiled import TASKS_PER_THREAD, Arguments, small_rotation
from hf_kvplus.codecs.feedback import require_fit
from hf_kvplus.codecs.levels import UNIFORM
from hf_kvplus.codecs.log_scale import CHANNEL_STEPS, TOKEN_STEPS, from_log_scale, to_log_scale
from hf_kvplus.codecs.rotation import hadamard_order
from hf_kvplus.compiled_kernels import encode_arguments
from hf_kvplus.threads import find_runner

if TYPE_CHECKING:
    from hf_kvplus.codecs.affine import AffineCodec
    from hf_kvplus.codecs.dual_scale import DualScaleCodec
    from hf_kvplus.codecs.metric import KeyMetric

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class Encoder:
    """Encodes blocks of `dual_scale` and `affine` on as many threads as PyTorch uses."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.run = find_runner()
        self.arguments = Arguments(encode_arguments.COUNT)
        self.channel_tables, self.token_tables = log_scale_tables(CHANNEL_STEPS), log_scale_tables(TOKEN_STEPS)

    def fits(self, states: torch.Tensor) -> bool:
        """Whether blocks of such states, `(batch, kv_heads, blocks, block_tokens, head_dim)`, can be encoded here."""
        tokens, channels = states.shape[3:]
        return (
            states.dtype in DTYPES
            and channels % 16 == 0
            and 0 < channels <= encode_arguments.MOST_CHANNELS
            and tokens <= encode_arguments.MOST_TOKENS
            and states.numel() > 0
        )

    def encode_dual_scale(
        self, codec: DualScaleCodec, states: torch.Tensor, valid: torch.Tensor | None = None
    ) -> Packed:
        """Encodes blocks; see `Codec.encode`."""
        k, a = encode_arguments, self.arguments.numbers
        channels = states.shape[-1]
        metric = [] if codec.metric is None else self._prepare_metric(codec.metric, codec.rotate, states)
        levels = codec.level_table()
        edges = ((levels[1:] + levels[:-1]) / 2).contiguous()
        packed, held = self._prepare(codec, states, valid)
        shape = states.shape[:3]
        packed["channel_scale"] = torch.empty(*shape, channels, dtype=torch.uint8)
        packed["mean"] = torch.empty(*shape, channels, dtype=torch.int8)
        packed["mean_scale"] = torch.empty(*shape, 1, dtype=torch.uint8)
        token_scale = torch.empty(*shape, codec.block_tokens, dtype=torch.uint8)
        if codec.iterations:
            packed["token_scale"] = token_scale
        a[k.ORDER] = hadamard_order(channels) if codec.rotate else 1
        # The factor of the whole matrix goes into the small one.
        a[k.MATRIX] = small_rotation(a[k.ORDER]).data_ptr()
        a[k.ITERATIONS], a[k.CLIPS], a[k.REFINEMENTS] = codec.iterations, codec.clips, codec.refinements
        a[k.CORRECT], a[k.TABLE] = codec.correct_tokens, codec.levels != UNIFORM
        a[k.LEVELS], a[k.EDGES] = levels.data_ptr(), edges.data_ptr()
        a[k.FACTOR], a[k.MOMENT] = (matrix.data_ptr() for matrix in metric) if metric else (0, 0)
        a[k.CHANNEL_TABLES], a[k.TOKEN_TABLES] = self.channel_tables.data_ptr(), self.token_tables.data_ptr()
        a[k.CHANNEL_SCALE], a[k.TOKEN_SCALE] = packed["channel_scale"].data_ptr(), token_scale.data_ptr()
        a[k.MEAN], a[k.MEAN_SCALE] = packed["mean"].data_ptr(), packed["mean_scale"].data_ptr()
        self._run(self.kernel.dual_scale_encoder())
        del held, metric
        return packed

    def encode_affine(self, codec: AffineCodec, states: torch.Tensor, valid: torch.Tensor | None = None) -> Packed:
        """Encodes blocks; see `Codec.encode`."""
        k, a = encode_arguments, self.arguments.numbers
        group = codec.group_length(states.shape[-1])
        packed, held = self._prepare(codec, states, valid)
        lines, line = _lines(codec, states)
        a[k.GROUP], a[k.GROUPS] = group, line // group
        for slot, name in ((k.SCALE, "scale"), (k.ZERO_POINT, "zero_point")):
            packed[name] = torch.empty(*states.shape[:3], lines, line // group, dtype=torch.float16)
            a[slot] = packed[name].data_ptr()
        self._run(self.kernel.affine_encoder())
        del held
        return packed

    @staticmethod
    def _prepare_metric(metric: KeyMetric, rotate: bool, states: torch.Tensor) -> list[torch.Tensor]:
        """Returns both matrices of a metric that fits the states."""
        factor = metric.factor(rotate)
        require_fit(factor, states.shape[1], states.shape[-1])
        return [factor, metric.moment(rotate).contiguous()]

    def _prepare(
        self, codec: DualScaleCodec | AffineCodec, states: torch.Tensor, valid: torch.Tensor | None
    ) -> tuple[Packed, list[torch.Tensor | None]]:
        """Writes what both codecs need; returns a payload with room for codes, and tensors that must live on."""
        k, a = encode_arguments, self.arguments.numbers
        states = states.detach()
        states = states if states.stride(4) == 1 else states.contiguous()
        valid = None if valid is None else valid.contiguous()
        batch, heads, blocks, tokens, channels = states.shape
        pairs, threads = batch * heads, torch.get_num_threads()
        per_task = max(1, pairs * blocks // (TASKS_PER_THREAD * threads))
        lines, line = _lines(codec, states)
        codes = torch.empty(batch, heads, blocks, lines, line * codec.nbits // 8, dtype=torch.uint8)
        self.arguments.counter.value = 0
        a[k.COUNTER] = ctypes.addressof(self.arguments.counter)
        a[k.TASKS], a[k.HEADS] = pairs * -(-blocks // per_task), heads
        a[k.BLOCKS], a[k.BLOCKS_PER_TASK], a[k.TOKENS], a[k.CHANNELS] = blocks, per_task, tokens, channels
        a[k.NBITS], a[k.CHANNEL_MAJOR] = codec.nbits, codec.axis == PER_CHANNEL
        a[k.STATES], a[k.DTYPE] = states.data_ptr(), DTYPES[states.dtype]
        for slot, stride in zip((k.STATES_B, k.STATES_H, k.STATES_N, k.STATES_T), states.stride()[:4], strict=True):
            a[slot] = stride * states.element_size()
        a[k.VALID] = 0 if valid is None else valid.data_ptr()
        a[k.CODES] = codes.data_ptr()
        return {"codes": codes}, [states, valid]

    def _run(self, function: Any) -> None:
        """Runs a compiled function with the arguments that were written."""
        a = self.arguments.numbers
        self.run(function.address, ctypes.addressof(a), min(torch.get_num_threads(), a[encode_arguments.TASKS]))


def _lines(codec: DualScaleCodec | AffineCodec, states: torch.Tensor) -> tuple[int, int]:
    """Returns how many lines a block's codes have, and how many codes a line."""
    tokens, channels = states.shape[3:]
    return (channels, tokens) if codec.axis == PER_CHANNEL else (tokens, channels)


def log_scale_tables(steps: int) -> torch.Tensor:
    """Returns what `log_code` reads: scales by byte, least values of bytes, guesses by mantissa, and `steps`.

    The least values are found by halving intervals of bit patterns, so a scale gets the byte that PyTorch's logarithm
    gives it, to the bit.
    """
    codes = torch.arange(256)
    scales = from_log_scale(codes.to(torch.uint8), steps)
    low, high = torch.ones(256, dtype=torch.int32), torch.full((256,), 0x7F7FFFFF, dtype=torch.int32)
    for _ in range(31):
        middle = low + (high - low) // 2
        reached = to_log_scale(middle.view(torch.float32), steps) >= codes
        low, high = torch.where(reached, low, middle + 1), torch.where(reached, middle, high)
    octave = torch.log2(1 + (torch.arange(256, dtype=torch.float64) + 0.5) / 256)
    guesses = (octave * steps + 128).round().to(torch.int32)
    ending = torch.tensor([steps], dtype=torch.int32)
    return torch.cat([scales.view(torch.int32), high, guesses, ending]).contiguous()


@cache
def find_encoder() -> Encoder | None:
    """Returns the compiled encoder, or `None` where Numba isn't installed."""
    try:
        from hf_kvplus.compiled_kernels import encode
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("numba", "llvmlite"):
            raise
        return None
    return Encoder(encode)
