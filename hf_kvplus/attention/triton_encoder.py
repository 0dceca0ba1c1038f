"""Encoding on a GPU: hands blocks of states to the Triton kernel that packs them."""

from __future__ import annotations

import torch

from hf_kvplus.attention.triton import interprets, power_of_two
from hf_kvplus.codecs import Codec
from hf_kvplus.codecs.affine import PER_CHANNEL
from hf_kvplus.codecs.base import Packed
from hf_kvplus.codecs.dual_scale import DualScaleCodec
from hf_kvplus.codecs.levels import UNIFORM

MOST_ELEMENTS = 64 * 256
# Comparisons per code with a table of levels, less one.
MOST_TABLE_BITS = 4


class TritonEncoder:
    """Encodes blocks of the dual-scale codec, each in one program."""

    def __init__(self) -> None:
        from hf_kvplus.attention import triton_encode

        self.module = triton_encode

    def refuses(self, codec: Codec, channels: int, device: torch.device) -> str | None:
        """Returns why blocks of states with so many channels can't be encoded, or `None` if they can."""
        if device.type != "cuda" and not interprets(self.module.encode_block):
            return f"the Triton encoder can't read states on {device}"
        if type(codec) is not DualScaleCodec or codec.metric is not None:
            return f"the Triton encoder doesn't write {codec.describe()}"
        tokens = codec.block_tokens
        if power_of_two(tokens) * power_of_two(channels) > MOST_ELEMENTS or channels % 8:
            return f"the Triton encoder doesn't take blocks of {tokens} tokens with {channels} channels"
        if codec.levels != UNIFORM and codec.nbits > MOST_TABLE_BITS:
            return f"the Triton encoder compares with up to {2**MOST_TABLE_BITS} levels, not {2**codec.nbits}"
        return None

    def bind(self, codec: DualScaleCodec) -> BoundEncoder:
        """Returns what encodes blocks of one codec, as a store asks for it."""
        return BoundEncoder(self, codec)

    def encode(self, codec: DualScaleCodec, states: torch.Tensor, valid: torch.Tensor | None = None) -> Packed:
        """Packs whole blocks; as `Codec.encode`, but for codes on the edge between two."""
        packed = self.empty(codec, states, states.shape[2])
        self.encode_into(codec, states, valid, packed, 0)
        return packed

    def empty(self, codec: DualScaleCodec, states: torch.Tensor, blocks: int) -> Packed:
        """Returns a payload of states `(batch, kv_heads, n, block_tokens, head_dim)` with room for some blocks."""
        tokens, channels = states.shape[3:]
        lines, line = (channels, tokens) if codec.axis == PER_CHANNEL else (tokens, channels)
        shapes = {"codes": (lines, line * codec.nbits // 8), "channel_scale": (channels,), "mean_scale": (1,)}
        if codec.iterations:
            shapes["token_scale"] = (tokens,)
        packed = {
            name: torch.empty(*states.shape[:2], blocks, *shape, dtype=torch.uint8, device=states.device)
            for name, shape in shapes.items()
        }
        packed["mean"] = torch.empty(*states.shape[:2], blocks, channels, dtype=torch.int8, device=states.device)
        return packed

    def encode_into(
        self, codec: DualScaleCodec, states: torch.Tensor, valid: torch.Tensor | None, buffers: Packed, place: int
    ) -> None:
        """Packs whole blocks to where they belong, in one launch.

        Args:
            codec: The codec.
            states: `(batch, kv_heads, blocks, block_tokens, head_dim)`.
            valid: As of `Codec.encode`, for all blocks.
            buffers: A payload's tensors `(batch, kv_heads, capacity, ...)`, contiguous.
            place: The first block's place in them.
        """
        batch, heads, blocks, tokens, channels = states.shape
        states = states if states.stride(4) == 1 else states.contiguous()
        levels = codec.level_table(states.device)
        rotation = codec.rotation(channels, states.device)
        with torch.cuda.device_of(states):
            self.module.encode_block[(batch * heads * blocks,)](
                states, *states.stride()[:4], levels if rotation is None else rotation, levels,
                levels if valid is None else valid.contiguous().view(torch.uint8),
                buffers["codes"], buffers["channel_scale"], buffers.get("token_scale", buffers["codes"]),
                buffers["mean"], buffers["mean_scale"], heads, blocks, place, buffers["codes"].shape[2],
                NBITS=codec.nbits, AXIS=0 if codec.axis == PER_CHANNEL else 1, TABLE=codec.levels != UNIFORM,
                ITERATIONS=codec.iterations,
                CLIPS=codec.clips, REFINEMENTS=codec.refinements, CORRECT=codec.correct_tokens,
                HAS_VALID=valid is not None, HAS_ROTATION=rotation is not None,
                PRECISION="ieee" if torch.version.hip else "tf32x3",
                TOKENS=tokens, TOKENS_PAD=max(16, power_of_two(tokens)),
                CHANNELS=channels, CHANNELS_PAD=max(16, power_of_two(channels)),
                num_warps=8, num_stages=1,
            )  # fmt: skip


class BoundEncoder:
    """An encoder for blocks of one codec; see `hf_kvplus.stores.packed.EncodeInPlace`.

    Args:
        encoder: The encoder.
        codec: The codec.
    """

    def __init__(self, encoder: TritonEncoder, codec: DualScaleCodec) -> None:
        self.encoder, self.codec = encoder, codec

    def __call__(self, states: torch.Tensor, valid: torch.Tensor | None = None) -> Packed:
        """Packs blocks into tensors of their own."""
        return self.encoder.encode(self.codec, states, valid)

    def fields(self, states: torch.Tensor) -> Packed:
        """Returns tensors as of a payload, of no blocks."""
        return self.encoder.empty(self.codec, states, 0)

    def into(self, states: torch.Tensor, valid: torch.Tensor | None, buffers: Packed, place: int) -> None:
        """Packs blocks to where they belong."""
        self.encoder.encode_into(self.codec, states, valid, buffers, place)
