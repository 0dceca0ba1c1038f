"""Rotated states with a scale per channel, a scale per token and a mean per channel, in every block.

The channels are rotated (see `rotation`), the block's mean is taken off, and both its rows and its columns are brought
to unit variance by alternating normalization. What is left is close to a unit Gaussian everywhere, which one table of
levels fits. A token whose magnitude is stored wrongly spoils every later softmax, a channel far above the rest every
score: each has its own scale.

    block (tokens x channels) rotated = level[code] * channel_scale (x) token_scale + mean

    scores    q k^T = token_scale * ((q H * channel_scale) . level[code]) + (q H) . mean
    outputs   p v   = ((p * token_scale) . level[code] * channel_scale + sum(p) * mean) H

Left out: a scale search at 5 bits and more (the range of the data is as good), and zero points per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvplus.checks import require_at_least, require_choice, require_multiple
from hf_kvplus.codecs.affine import HALF_MAX, PER_CHANNEL, PER_TOKEN
from hf_kvplus.codecs.base import Codec, Packed, codecs
from hf_kvplus.codecs.levels import LLOYD_MAX, UNIFORM, level_table, nearest_codes
from hf_kvplus.codecs.log_scale import LARGEST, SMALLEST, from_log_scale, to_log_scale
from hf_kvplus.codecs.packing import PLANES, pack, packed_length, unpack
from hf_kvplus.codecs.rotation import hadamard

# Below this share of a block's mean square a row or a column counts as constant.
VARIANCE_FLOOR = 1e-7


@codecs.register("dual_scale")
@dataclass(frozen=True)
class DualScaleCodec(Codec):
    """Codes of rotated, centred, variance-normalized states.

    Source: KVarN, as described in our notes on variance-normalized tiles: alternating normalization of rows and
    columns in the log domain; differs in one table of Lloyd-Max levels at up to 4 bits, in 8-bit logarithmic scales and in a mean per
    channel in place of zero points.

    Args:
        block_tokens: Tokens in a block.
        nbits: Bits per code: 2, 3, 4, 5, 6 or 8.
        axis: Which axis lies side by side in memory: `"per_channel"` stores a channel's tokens together (keys),
            `"per_token"` a token's channels (values).
        rotate: Whether channels are rotated.
        centered: Whether the mean of each channel is stored.
        levels: `"lloyd_max"` or `"uniform"`.
        iterations: Rounds of normalization; 0 leaves all token scales at 1.
        candidates: Channel scales that are tried, in steps of an eighth of an octave, keeping the least squared error.

    Raises:
        ValueError: If an option doesn't fit.
    """

    nbits: int = 4
    axis: str = PER_CHANNEL
    rotate: bool = True
    centered: bool = True
    levels: str = LLOYD_MAX
    iterations: int = 4
    candidates: int = 3

    def __post_init__(self) -> None:
        """Checks the options once."""
        require_choice("nbits", self.nbits, [bits for bits in PLANES if bits > 1])
        require_choice("axis", self.axis, (PER_CHANNEL, PER_TOKEN))
        require_choice("levels", self.levels, (LLOYD_MAX, UNIFORM))
        require_multiple("block_tokens", self.block_tokens, 8)
        require_at_least("iterations", self.iterations, 0)
        require_at_least("candidates", self.candidates, 1)

    def bits_per_element(self, head_dim: int) -> float:
        """Returns code bits, 8 bits of scale per token and per channel, and 16 of mean per channel."""
        line = self.block_tokens if self.axis == PER_CHANNEL else head_dim
        per_channel = 24 if self.centered else 8
        return 8 * packed_length(line, self.nbits) / line + per_channel / self.block_tokens + 8 / head_dim

    def describe(self) -> str:
        """Returns the codec in a few words."""
        return f"{self.nbits} bits {'rotated, ' if self.rotate else ''}dual scale"

    def rotation(self, head_dim: int, device: torch.device | str = "cpu") -> torch.Tensor | None:
        """Returns the `(head_dim, head_dim)` rotation of stored states, its own inverse; `None` without one."""
        return hadamard(head_dim, device) if self.rotate else None

    def level_table(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Returns the `(2**nbits,)` float32 levels that codes stand for."""
        return level_table(self.nbits, self.levels, device)

    def encode(self, states: torch.Tensor, valid: torch.Tensor | None = None) -> Packed:
        """Normalizes, quantizes and packs whole blocks; see `Codec.encode`."""
        weight, normal = None, states.float().nan_to_num(0.0).clamp(-HALF_MAX, HALF_MAX)
        if valid is not None:
            weight = valid[:, None, :, :, None].float()  # (b, 1, n, tokens, 1)
            normal = normal * weight
        rotation = self.rotation(states.shape[-1], states.device)
        if rotation is not None:
            normal = normal @ rotation  # (b, h, n, tokens, channels)
        token_scale = torch.ones_like(normal[..., :1])
        mean = torch.zeros_like(normal[..., :1, :])
        if self.centered:
            mean = _weighted_mean(normal, token_scale, weight)
        for _ in range(2 if self.iterations else 0):
            token_scale = _balance(normal - mean, weight, self.iterations)
            if self.centered:
                mean = _weighted_mean(normal, token_scale, weight)
        mean = mean.clamp(-HALF_MAX, HALF_MAX).half()
        token_codes = to_log_scale(token_scale)
        normal = (normal - mean.float()) / from_log_scale(token_codes)
        channel_codes, codes = self._quantize(normal, weight)
        if self.axis == PER_CHANNEL:
            codes = codes.transpose(-1, -2)
        packed = {
            "codes": pack(codes, self.nbits),
            "channel_scale": channel_codes.squeeze(-2),
            "token_scale": token_codes.squeeze(-1),
        }
        return {**packed, "mean": mean.squeeze(-2)} if self.centered else packed

    def _quantize(self, normal: torch.Tensor, weight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Chooses channel scales by squared error and returns them, `(..., 1, channels)`, with the codes."""
        weighted = normal if weight is None else normal * weight
        if self.levels == LLOYD_MAX:
            count = normal.shape[-2] if weight is None else weight.sum(-2, keepdim=True).clamp_min(1)
            start = (weighted.square().sum(-2, keepdim=True) / count).sqrt()
            shifts = [(index + 1) // 2 * (-1) ** index for index in range(self.candidates)]
        else:
            start = weighted.abs().amax(-2, keepdim=True) / ((2**self.nbits - 1) / 2)
            shifts = [1 - index for index in range(self.candidates)]
        first = to_log_scale(start)
        levels = self.level_table(normal.device)
        best_error, best_scale, best_codes = None, first, None
        for shift in shifts:
            scale_codes = torch.where(first > 0, (first.int() + shift).clamp(1, 255), 0).to(torch.uint8)
            scale = from_log_scale(scale_codes)
            codes = nearest_codes(normal * torch.where(scale > 0, 1 / scale, 0.0), self.nbits, self.levels)
            if len(shifts) == 1:
                return scale_codes, codes
            gap = (levels[codes.int()] * scale).sub_(normal).square_()
            error = (gap if weight is None else gap * weight).sum(-2, keepdim=True)
            if best_error is None:
                best_error, best_scale, best_codes = error, scale_codes, codes
            else:
                better = error < best_error
                best_error = torch.where(better, error, best_error)
                best_scale = torch.where(better, scale_codes, best_scale)
                best_codes = torch.where(better, codes, best_codes)
        return best_scale, best_codes

    def decode(self, packed: Packed, head_dim: int, out: torch.Tensor) -> None:
        """Unpacks, scales and rotates blocks back into `out`; see `Codec.decode`."""
        line = self.block_tokens if self.axis == PER_CHANNEL else head_dim
        codes = unpack(packed["codes"], self.nbits, line)
        values = self.level_table(codes.device)[codes.int()]
        if self.axis == PER_CHANNEL:
            values = values.transpose(-1, -2)  # (b, h, n, tokens, channels)
        values = values * from_log_scale(packed["channel_scale"])[..., None, :]
        values = values * from_log_scale(packed["token_scale"])[..., None]
        if self.centered:
            values = values + packed["mean"].float()[..., None, :]
        rotation = self.rotation(head_dim, values.device)
        limit = torch.finfo(out.dtype).max
        out.copy_((values if rotation is None else values @ rotation).clamp(-limit, limit))


def _weighted_mean(states: torch.Tensor, token_scale: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Returns the mean of each channel, `(..., 1, channels)`, where a token counts by its precision."""
    precision = token_scale.square().reciprocal()
    if weight is not None:
        precision = precision * weight
    total = precision.sum(-2, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return (precision.transpose(-1, -2) @ states) / total


def _balance(states: torch.Tensor, weight: torch.Tensor | None, iterations: int) -> torch.Tensor:
    """Returns token scales, `(..., tokens, 1)`, that together with channel scales give all rows and columns variance 1.

    Alternating normalization only ever needs the squares, so each round is two products of a matrix with a vector.
    """
    squares = states.square()
    if weight is not None:
        squares = squares * weight
    squares = squares / squares.mean((-1, -2), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    token = torch.ones_like(squares[..., :1])
    for _ in range(iterations):
        channel = (token.reciprocal().transpose(-1, -2) @ squares).clamp_min(VARIANCE_FLOOR)  # (..., 1, channels)
        token = (squares @ channel.reciprocal().transpose(-1, -2)).clamp_min(VARIANCE_FLOOR)
        token = token / token.log().mean(-2, keepdim=True).exp()
    if weight is not None:
        token = torch.where(weight > 0, token, 1.0)
    return token.sqrt().clamp(SMALLEST, LARGEST)
