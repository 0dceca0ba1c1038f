"""Eight-bit floating point with a scale per token: quick to make, and as large as 8-bit integers.

Three bits of mantissa resolve the small numbers of a token as well as its large ones, which neither softmax nor
output asks for; integers of the same size have a small part of the error (docs/log/recipes.md). It is here because
hardware and other systems have it, to compare.

    codes  (block_tokens, head_dim)   e4m3 numbers, as bytes
    scale  (block_tokens,)            a logarithmic byte, see `log_scale`, rounded up so that nothing is clipped

Left out: e5m2 (a quarter of the resolution), and one scale for a whole tensor, which later tokens would outgrow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvplus.codecs.affine import HALF_MAX
from hf_kvplus.codecs.base import Codec, Packed, codecs
from hf_kvplus.codecs.log_scale import CHANNEL_STEPS, from_log_scale, to_log_scale

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
# Half a step of the logarithmic scale, so that rounding to the nearest never makes it too small.
UP = 2.0 ** (0.5 / CHANNEL_STEPS)


@codecs.register("float8")
@dataclass(frozen=True)
class Float8Codec(Codec):
    """Tokens as e4m3 numbers of their own scale.

    Source: FP8 Formats for Deep Learning, https://arxiv.org/abs/2209.05433; differs in a scale for each token and
    head.

    Args:
        block_tokens: Tokens in a block.
    """

    def encode(self, states: torch.Tensor, valid: torch.Tensor | None = None) -> Packed:
        """Scales and converts; tokens don't influence each other. See `Codec.encode`."""
        finite = states.float().nan_to_num(0.0).clamp(-HALF_MAX, HALF_MAX)
        scale = to_log_scale(finite.abs().amax(-1) * (UP / E4M3_MAX))  # (b, h, n, tokens)
        step = from_log_scale(scale)[..., None]
        codes = torch.where(step > 0, finite / step, 0.0).clamp(-E4M3_MAX, E4M3_MAX)
        # Bytes, because few operations (indexing among them) take float8 tensors.
        return {"codes": codes.to(torch.float8_e4m3fn).view(torch.uint8), "scale": scale}

    def decode(self, packed: Packed, head_dim: int, out: torch.Tensor) -> None:
        """Converts and scales back; see `Codec.decode`."""
        values = packed["codes"].contiguous().view(torch.float8_e4m3fn).float()
        limit = torch.finfo(out.dtype).max
        out.copy_(values.mul_(from_log_scale(packed["scale"])[..., None]).clamp_(-limit, limit))

    def bits_per_element(self, head_dim: int) -> float:
        """Returns 8 bits, and 8 of scale per token."""
        return 8 + 8 / head_dim

    def describe(self) -> str:
        """Returns the codec in a few words."""
        return "8 bits e4m3, scale per token"
