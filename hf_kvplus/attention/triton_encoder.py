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

    def encode(self, codec: DualScaleCodec, states: torch.Tensor, valid: torch.Tensor | None = None) -> Packed:
        """Packs whole blocks; as `Codec.encode`, but for codes on the edge between two."""
        batch, heads, blocks, tokens, channels = states.shape
        states = states if states.stride(4) == 1 else states.contiguous()
        keys = codec.axis == PER_CHANNEL
        lines, line = (channels, tokens) if keys else (tokens, channels)
        shapes = {"codes": (lines, line * codec.nbits // 8), "channel_scale": (channels,), "mean_scale": (1,)}
        if codec.iterations:
            shapes["token_scale"] = (tokens,)
        packed = {
            name: torch.empty(batch, heads, blocks, *shape, dtype=torch.uint8, device=states.device)
            for name, shape in shapes.items()
        }
        packed["mean"] = torch.empty(batch, heads, blocks, channels, dtype=torch.int8, device=states.device)
        levels = codec.level_table(states.device)
        rotation = codec.rotation(channels, states.device)
        with torch.cuda.device_of(states):
            self.module.encode_block[(batch * heads * blocks,)](
                states, *states.stride()[:4], levels if rotation is None else rotation, levels,
                levels if valid is None else valid.contiguous().view(torch.uint8),
                packed["codes"], packed["channel_scale"], packed.get("token_scale", packed["codes"]),
                packed["mean"], packed["mean_scale"], heads, blocks,
                NBITS=codec.nbits, AXIS=0 if keys else 1, TABLE=codec.levels != UNIFORM, ITERATIONS=codec.iterations,
                CLIPS=codec.clips, REFINEMENTS=codec.refinements, CORRECT=codec.correct_tokens,
                HAS_VALID=valid is not None, HAS_ROTATION=rotation is not None,
                PRECISION="ieee" if torch.version.hip else "tf32x3",
                TOKENS=tokens, TOKENS_PAD=max(16, power_of_two(tokens)),
                CHANNELS=channels, CHANNELS_PAD=max(16, power_of_two(channels)),
                num_warps=8, num_stages=1,
            )  # fmt: skip
        return packed
