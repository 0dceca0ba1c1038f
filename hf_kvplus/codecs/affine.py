"""Asymmetric uniform quantization of keys per channel and of values per token.

Keys have channels whose magnitude is far above the rest, at every token; values don't. So a key group runs along the
tokens of one channel and a value group along the channels of one token. Scales and zero points are half precision and
are rounded outwards before the codes are computed: the codes make up for the rounding and nothing is clipped.

    keys    a block of tokens x channels, stored channel-major   codes (head_dim, block_tokens * nbits / 8)
    values  the same block, stored token-major                   codes (block_tokens, head_dim * nbits / 8)

Left out: symmetric codes (they lose half the range on skewed channels) and zero points as integers (a floating-point
minimum is exact where a channel is constant).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hf_kvplus.checks import require_choice, require_divisor, require_multiple
from hf_kvplus.codecs.base import PER_CHANNEL, PER_TOKEN, Codec, Packed, codecs
from hf_kvplus.codecs.compiled_encode import find_encoder
from hf_kvplus.codecs.packing import PLANES, pack, packed_length, unpack

HALF_MAX = torch.finfo(torch.float16).max


@codecs.register("affine")
@dataclass(frozen=True)
class AffineCodec(Codec):
    """Uniform codes with a half-precision scale and zero point per group.

    Source: KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache, https://arxiv.org/abs/2402.02750; differs in
    that blocks are append-only for keys and values alike and scales are rounded outwards.

    Args:
        block_tokens: Tokens in a block.
        nbits: Bits per code: 2, 3, 4, 5, 6 or 8.
        axis: `"per_channel"` (groups along tokens, for keys) or `"per_token"` (groups along channels, for values).
        group_size: Elements that share a scale; along tokens it must divide `block_tokens`, along channels
            `head_dim`. `None` takes 64, or for values the largest divisor of `head_dim` up to 64.

    Raises:
        ValueError: If an option doesn't fit.
    """

    nbits: int = 4
    axis: str = PER_CHANNEL
    group_size: int | None = None

    def __post_init__(self) -> None:
        """Checks the options once."""
        require_choice("nbits", self.nbits, [bits for bits in PLANES if bits > 1])
        require_choice("axis", self.axis, (PER_CHANNEL, PER_TOKEN))
        require_multiple("block_tokens", self.block_tokens, 8)
        if self.group_size is not None and self.axis == PER_CHANNEL:
            require_divisor("group_size", self.group_size, "block_tokens", self.block_tokens)

    def check(self, head_dim: int) -> None:
        """Checks that the group size fits the channels.

        Raises:
            ValueError: If an explicit `group_size` doesn't divide `head_dim`.
        """
        if self.group_size is not None and self.axis == PER_TOKEN:
            require_divisor("group_size", self.group_size, "head_dim", head_dim)

    def group_length(self, head_dim: int) -> int:
        """Returns the elements that share a scale."""
        if self.group_size is not None:
            return self.group_size
        whole = self.block_tokens if self.axis == PER_CHANNEL else head_dim
        return max(size for size in range(1, min(64, whole) + 1) if whole % size == 0)

    def bits_per_element(self, head_dim: int) -> float:
        """Returns code bits plus 32 bits of scale and zero point per group."""
        line = self.block_tokens if self.axis == PER_CHANNEL else head_dim
        return 8 * packed_length(line, self.nbits) / line + 32 / self.group_length(head_dim)

    def describe(self) -> str:
        """Returns the codec in a few words."""
        return f"{self.nbits} bits {self.axis.replace('_', ' ')}"

    def encode(self, states: torch.Tensor, valid: torch.Tensor | None = None) -> Packed:
        """Quantizes and packs whole blocks; see `Codec.encode`."""
        encoder = find_encoder() if states.device.type == "cpu" else None
        if encoder and encoder.fits(states):
            return encoder.encode_affine(self, states, valid)
        return self.encode_by_operators(states, valid)

    def encode_by_operators(self, states: torch.Tensor, valid: torch.Tensor | None = None) -> Packed:
        """Does the same with PyTorch's operators, on any device."""
        lines = states.float().clamp(-HALF_MAX, HALF_MAX).nan_to_num(0.0)  # (b, h, n, tokens, channels)
        mask = None
        if self.axis == PER_CHANNEL:
            lines = lines.transpose(-1, -2)  # (b, h, n, channels, tokens)
            if valid is not None:
                mask = valid[:, None, :, None, :]  # (b, 1, n, 1, tokens)
        group = self.group_length(states.shape[-1])
        grouped = lines.unflatten(-1, (-1, group))  # (b, h, n, lines, groups, group)
        scale, zero_point = self._fit(grouped, None if mask is None else mask.unflatten(-1, (-1, group)))
        step = scale.float()
        inverse = torch.where(step > 0, 1 / step, 0.0)
        codes = (grouped - zero_point.float()[..., None]).mul_(inverse[..., None])
        codes = codes.round_().clamp_(0, 2**self.nbits - 1).to(torch.uint8).flatten(-2)
        return {"codes": pack(codes, self.nbits), "scale": scale, "zero_point": zero_point}

    def _fit(self, grouped: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns half-precision scale and zero point that cover the valid values of each group."""
        if mask is None:
            lowest, highest = grouped.amin(-1), grouped.amax(-1)
        else:
            lowest = grouped.masked_fill(~mask, math.inf).amin(-1)
            highest = grouped.masked_fill(~mask, -math.inf).amax(-1)
            empty = lowest > highest
            lowest, highest = lowest.masked_fill(empty, 0.0), highest.masked_fill(empty, 0.0)
        zero_point = round_half(lowest, up=False)
        scale = round_half((highest - zero_point.float()) / (2**self.nbits - 1), up=True)
        return scale, zero_point

    def decode(self, packed: Packed, head_dim: int, out: torch.Tensor) -> None:
        """Unpacks and scales blocks into `out`; see `Codec.decode`."""
        line = self.block_tokens if self.axis == PER_CHANNEL else head_dim
        codes = unpack(packed["codes"], self.nbits, line)
        values = codes.unflatten(-1, (-1, self.group_length(head_dim))).float()
        values.mul_(packed["scale"].float()[..., None]).add_(packed["zero_point"].float()[..., None])
        values = values.flatten(-2)
        out.copy_(values.transpose(-1, -2) if self.axis == PER_CHANNEL else values)


def round_half(values: torch.Tensor, *, up: bool) -> torch.Tensor:
    """Rounds float32 values to half precision in one direction.

    Args:
        values: Any shape, float32, within the range of half precision.
        up: Towards positive infinity if true, otherwise towards negative infinity.

    Returns:
        The same shape, float16; never beyond the finite range.
    """
    rounded = values.half()
    if not up:
        return -round_half(-values, up=True)
    short = rounded.float() < values
    bits = rounded.view(torch.int16)
    # One step up in value: away from zero for positive numbers, towards it for negative ones.
    stepped = torch.where(rounded < 0, bits - 1, torch.where(rounded == 0, torch.ones_like(bits), bits + 1))
    return torch.where(short, stepped, bits).view(torch.float16).clamp(-HALF_MAX, HALF_MAX)
