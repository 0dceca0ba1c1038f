"""Rotated states with a scale per token and a scale and an offset per channel, in every block.

The channels are rotated (see `rotation`) and both rows and columns of a block are brought to equal variance by
alternating normalization. What is left is quantized per channel with equal steps, whose size and offset are fitted by
least squares. A token whose magnitude is stored wrongly spoils every later softmax: its scale is corrected at the end
so that the projection of the stored key on the true one has the right length.

    rotated[token, channel] = (level[code] * channel_scale[channel] + mean[channel]) * token_scale[token]

    scores    q k^T = token_scale * ((q H * channel_scale) . level[code] + (q H) . mean)
    outputs   p v   = ((p * token_scale) . level[code] * channel_scale + sum(p * token_scale) * mean) H

The offset takes a key bias with it, exactly: it is stored and added back, never dropped. Left out: offsets per token,
and any state that outlives a block.

With a metric of the model's queries (see `metric` and `feedback`) codes are chosen so that their errors lie in
directions that queries don't look into. Only encoding knows of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from hf_kvplus.checks import require_at_least, require_choice, require_multiple
from hf_kvplus.codecs.affine import HALF_MAX, PER_CHANNEL, PER_TOKEN
from hf_kvplus.codecs.base import Codec, Packed, codecs
from hf_kvplus.codecs.compiled import find_decoder
from hf_kvplus.codecs.compiled_encode import find_encoder
from hf_kvplus.codecs.feedback import round_with_feedback
from hf_kvplus.codecs.levels import LLOYD_MAX, UNIFORM, level_table, nearest_codes
from hf_kvplus.codecs.log_scale import (
    CHANNEL_STEPS,
    TOKEN_STEPS,
    from_log_scale,
    largest,
    smallest,
    to_log_scale,
)
from hf_kvplus.codecs.metric import KeyMetric
from hf_kvplus.codecs.packing import PLANES, pack, packed_length, unpack
from hf_kvplus.codecs.rotation import hadamard

# Below this share of a block's mean square a row or a column counts as constant.
VARIANCE_FLOOR = 1e-7
TINY = torch.finfo(torch.float32).tiny
MEAN_MAX = 127
# Half a step of the logarithmic scale: what rounding to the nearest byte may take off.
UP = 2.0 ** (0.5 / CHANNEL_STEPS)
# Parts of a channel's range that are tried as the range of its levels.
CLIPS = (1.0, 0.85, 0.7)
# What remains of a token's length after quantization is never far from it.
MOST_CORRECTION = 1.5


@codecs.register("dual_scale")
@dataclass(frozen=True)
class DualScaleCodec(Codec):
    """Codes of rotated states, normalized along both axes.

    Source: KVarN (alternating variance normalization of rows and columns in the log domain after a Hadamard
    rotation); differs in 8-bit logarithmic scales, steps fitted by least squares and the correction of token scales.

    Args:
        block_tokens: Tokens in a block.
        nbits: Bits per code: 2, 3, 4, 5, 6 or 8.
        axis: Which axis lies side by side in memory: `"per_channel"` stores a channel's tokens together (keys),
            `"per_token"` a token's channels (values).
        rotate: Whether channels are rotated.
        iterations: Rounds of normalization; 0 stores no token scales.
        levels: `"uniform"` or `"lloyd_max"`.
        clips: How many of `CLIPS` are tried per channel, keeping the least squared error.
        refinements: Rounds of fitting step and offset by least squares; 0 covers the whole range.
        correct_tokens: Whether token scales are corrected for the length that quantization took off.
        metric: What errors cost, where it was measured for the model; the codes change, their layout doesn't.

    Raises:
        ValueError: If an option doesn't fit.
    """

    nbits: int = 4
    axis: str = PER_CHANNEL
    rotate: bool = True
    iterations: int = 4
    levels: str = UNIFORM
    clips: int = 1
    refinements: int = 2
    correct_tokens: bool = False
    metric: KeyMetric | None = None

    def __post_init__(self) -> None:
        """Checks the options once."""
        require_choice("nbits", self.nbits, [bits for bits in PLANES if bits > 1])
        require_choice("axis", self.axis, (PER_CHANNEL, PER_TOKEN))
        require_choice("levels", self.levels, (LLOYD_MAX, UNIFORM))
        require_choice("clips", self.clips, range(1, len(CLIPS) + 1))
        require_multiple("block_tokens", self.block_tokens, 8)
        require_at_least("iterations", self.iterations, 0)
        require_at_least("refinements", self.refinements, 0)
        if self.correct_tokens and not self.iterations:
            raise ValueError("`correct_tokens` needs token scales; give `iterations` of at least 1")

    def bits_per_element(self, head_dim: int) -> float:
        """Returns code bits, 8 bits of scale per token, 16 of scale and mean per channel and 8 per block."""
        line = self.block_tokens if self.axis == PER_CHANNEL else head_dim
        per_channel = 16 + 8 / head_dim
        per_token = 8 if self.iterations else 0
        return 8 * packed_length(line, self.nbits) / line + per_channel / self.block_tokens + per_token / head_dim

    def describe(self) -> str:
        """Returns the codec in a few words."""
        calibrated = ", calibrated" if self.metric else ""
        return f"{self.nbits} bits {'rotated, ' if self.rotate else ''}dual scale{calibrated}"

    def rotation(self, head_dim: int, device: torch.device | str = "cpu") -> torch.Tensor | None:
        """Returns the `(head_dim, head_dim)` rotation of stored states, its own inverse; `None` without one."""
        return hadamard(head_dim, device) if self.rotate else None

    def level_table(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Returns the `(2**nbits,)` float32 levels that codes stand for."""
        return level_table(self.nbits, self.levels, device)

    def encode(self, states: torch.Tensor, valid: torch.Tensor | None = None) -> Packed:
        """Normalizes, quantizes and packs whole blocks; see `Codec.encode`."""
        encoder = find_encoder() if states.device.type == "cpu" else None
        if encoder and encoder.fits(states):
            return encoder.encode_dual_scale(self, states, valid)
        return self.encode_by_operators(states, valid)

    def encode_by_operators(self, states: torch.Tensor, valid: torch.Tensor | None = None) -> Packed:
        """Does the same with PyTorch's operators, on any device."""
        normal = states.float().nan_to_num(0.0).clamp(-HALF_MAX, HALF_MAX)
        weight = None if valid is None else valid[:, None, :, :, None].float()  # (b, 1, n, tokens, 1)
        if weight is not None:
            normal = normal * weight
        rotation = self.rotation(states.shape[-1], states.device)
        if rotation is not None:
            normal = normal @ rotation  # (b, h, n, tokens, channels)
        packed: Packed = {}
        token_scale = None
        if self.iterations:
            token_codes = to_log_scale(_balance(normal, weight, self.iterations), TOKEN_STEPS)
            token_scale = from_log_scale(token_codes, TOKEN_STEPS)
            normal = normal / token_scale
        mean, scale = self.fit_channels(normal, weight)
        if self.metric is not None:
            # A first pass tells how far corrected states reach, to which offsets and steps are fitted.
            first, target = self._feedback(self.metric, normal, *_stored_as(mean, scale))
            stored = self.level_table(first.device)[first.int()]
            _, mean, scale = _least_squares(stored, target, mean, scale, weight)
        packed["mean"], packed["mean_scale"], mean = _round_mean(mean)
        packed["channel_scale"] = to_log_scale(scale).squeeze(-2)
        scale = from_log_scale(packed["channel_scale"])[..., None, :]
        if self.metric is not None:
            codes, _ = self._feedback(self.metric, normal, mean, scale)
        else:
            codes = nearest_codes((normal - mean) * _inverse(scale), self.nbits, self.levels)
        packed["codes"] = pack(codes.transpose(-1, -2) if self.axis == PER_CHANNEL else codes, self.nbits)
        if token_scale is not None:
            if self.correct_tokens:
                stored = self.level_table(codes.device)[codes.int()] * scale + mean
                moment = self.metric.moment(self.rotate, normal.device) if self.metric else None
                token_codes = to_log_scale(token_scale * _correction(normal, stored, moment), TOKEN_STEPS)
            packed["token_scale"] = token_codes.squeeze(-1)
        return packed

    def _feedback(
        self, metric: KeyMetric, normal: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns codes and what was rounded to them, chosen so that errors are quiet in the metric."""
        factor = metric.factor(self.rotate, normal.device)
        nearest = partial(nearest_codes, nbits=self.nbits, kind=self.levels)
        return round_with_feedback(normal, mean, scale, factor, nearest, self.level_table(normal.device))

    def fit_channels(self, normal: torch.Tensor, weight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the offset and the step of each channel, both `(..., 1, channels)`."""
        low, high = _range(normal, weight)
        _, _, middle = _round_mean((low + high) / 2)
        levels = self.level_table(normal.device)
        cover = torch.maximum(high - middle, middle - low).clamp_min(0) / levels[-1]
        if not self.refinements:
            return middle, cover * UP
        best: list[torch.Tensor] = []  # squared error, offset, step
        for clip in CLIPS[: self.clips]:
            mean, scale = middle, cover * clip
            for _ in range(self.refinements):
                stored = levels[nearest_codes((normal - mean) * _inverse(scale), self.nbits, self.levels).int()]
                error, mean, scale = _least_squares(stored, normal, mean, scale, weight)
            tried = [error, mean, scale]
            if best:
                better = error < best[0]
                tried = [torch.where(better, new, old) for new, old in zip(tried, best, strict=True)]
            best = tried
        return best[1], best[2]

    def decode(self, packed: Packed, head_dim: int, out: torch.Tensor) -> None:
        """Unpacks, scales and rotates blocks back into `out`; see `Codec.decode`."""
        decoder = find_decoder() if out.device.type == "cpu" and out.numel() else None
        if decoder and decoder.fits(self, head_dim):
            decoder.decode(self, packed, out)
        else:
            self.decode_by_operators(packed, head_dim, out)

    def decode_by_operators(self, packed: Packed, head_dim: int, out: torch.Tensor) -> None:
        """Does the same with PyTorch's operators, on any device."""
        line = self.block_tokens if self.axis == PER_CHANNEL else head_dim
        codes = unpack(packed["codes"], self.nbits, line)
        if self.axis == PER_CHANNEL:
            codes = codes.transpose(-1, -2)  # (b, h, n, tokens, channels)
        scale = from_log_scale(packed["channel_scale"])[..., None, :]
        mean = (packed["mean"].float() * from_log_scale(packed["mean_scale"]))[..., None, :]
        levels = self.level_table(codes.device)
        if self.levels == UNIFORM:
            values = codes.float().mul_(scale).add_(mean + levels[0] * scale)
        else:
            values = levels[codes.int()].mul_(scale).add_(mean)
        if self.iterations:
            values.mul_(from_log_scale(packed["token_scale"], TOKEN_STEPS)[..., None])
        rotation = self.rotation(head_dim, values.device)
        limit = torch.finfo(out.dtype).max
        out.copy_((values if rotation is None else values @ rotation).clamp_(-limit, limit))


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """Returns the reciprocal, and 0 for 0."""
    return torch.where(scale > 0, 1 / scale, 0.0)


def _range(states: torch.Tensor, weight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns least and greatest value of each channel, `(..., 1, channels)`; 0 where no token is valid."""
    if weight is None:
        return states.amin(-2, keepdim=True), states.amax(-2, keepdim=True)
    padding, empty = weight == 0, weight.sum(-2, keepdim=True) == 0
    low = states.masked_fill(padding, torch.inf).amin(-2, keepdim=True).masked_fill(empty, 0.0)
    return low, states.masked_fill(padding, -torch.inf).amax(-2, keepdim=True).masked_fill(empty, 0.0)


def _least_squares(
    stored: torch.Tensor, wanted: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fits `wanted = stored * scale + mean` per channel.

    Args:
        stored: Levels, `(..., tokens, channels)`.
        wanted: Normalized states, likewise.
        mean: `(..., 1, channels)`, kept together with `scale` where the levels of a channel are all alike.
        scale: Likewise.
        weight: `(..., tokens, 1)`, 0 for tokens that don't count.

    Returns:
        Squared error, offset and step, each `(..., 1, channels)`.
    """
    count: torch.Tensor | int = stored.shape[-2]
    counted, kept = stored, wanted
    if weight is not None:
        count = weight.sum(-2, keepdim=True).clamp_min(1)
        counted, kept = stored * weight, wanted * weight
    level_mean, wanted_mean = counted.sum(-2, keepdim=True) / count, kept.sum(-2, keepdim=True) / count
    variance = (counted * stored).sum(-2, keepdim=True) / count - level_mean.square()
    covariance = (counted * wanted).sum(-2, keepdim=True) / count - level_mean * wanted_mean
    wanted_variance = (kept * wanted).sum(-2, keepdim=True) / count - wanted_mean.square()
    slope = covariance / variance.clamp_min(TINY)
    usable = (variance > 1e-6) & (slope > 0)
    error = torch.where(usable, wanted_variance - slope * covariance, wanted_variance)
    return error, torch.where(usable, wanted_mean - slope * level_mean, mean), torch.where(usable, slope, scale)


def _round_mean(mean: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stores offsets `(..., 1, channels)` in signed bytes of one scale.

    Returns:
        Bytes `(..., channels)`, their logarithmic scale `(..., 1)`, and the offsets that these stand for, as given.
    """
    scale_codes = to_log_scale(mean.abs().amax(-1, keepdim=True) * (UP / MEAN_MAX))
    scale = from_log_scale(scale_codes)
    codes = (mean * _inverse(scale)).round().clamp(-MEAN_MAX, MEAN_MAX)
    return codes.to(torch.int8).squeeze(-2), scale_codes.squeeze(-2), codes * scale


def _stored_as(mean: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns offsets and steps, `(..., 1, channels)`, as they will be read."""
    return _round_mean(mean)[2], from_log_scale(to_log_scale(scale))


def _correction(wanted: torch.Tensor, stored: torch.Tensor, moment: torch.Tensor | None) -> torch.Tensor:
    """Returns the factor per token, `(..., tokens, 1)`, that makes `<stored, wanted>` equal `<wanted, wanted>`.

    Products are those of a metric `(kv_heads, channels, channels)`, if one is given.
    """
    measured = wanted if moment is None else wanted @ moment[:, None]
    length = (measured * wanted).sum(-1, keepdim=True)
    projection = (stored * measured).sum(-1, keepdim=True)
    factor = torch.where(projection > 0, length / projection.clamp_min(TINY), 1.0)
    return torch.where(length > 0, factor.clamp(1 / MOST_CORRECTION, MOST_CORRECTION), 1.0)


def _balance(states: torch.Tensor, weight: torch.Tensor | None, iterations: int) -> torch.Tensor:
    """Returns token scales, `(..., tokens, 1)`, that with channel scales give all rows and columns variance 1.

    Alternating normalization only ever needs the squares, so each round is two products of a matrix with a vector.
    """
    squares = states.square()
    squares = squares / squares.mean((-1, -2), keepdim=True).clamp_min(TINY)
    token = torch.ones_like(squares[..., :1])
    for _ in range(iterations):
        channel = (token.reciprocal().transpose(-1, -2) @ squares).clamp_min(VARIANCE_FLOOR)  # (..., 1, channels)
        token = (squares @ channel.reciprocal().transpose(-1, -2)).clamp_min(VARIANCE_FLOOR)
        token = token / _geometric_mean(token, weight)
        if weight is not None:
            token = torch.where(weight > 0, token, 1.0)
    return token.sqrt().clamp(smallest(TOKEN_STEPS), largest(TOKEN_STEPS))


def _geometric_mean(token: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Returns the geometric mean of the tokens that count, `(..., 1, 1)`."""
    logarithm = token.log()
    if weight is None:
        return logarithm.mean(-2, keepdim=True).exp()
    return ((logarithm * weight).sum(-2, keepdim=True) / weight.sum(-2, keepdim=True).clamp_min(1)).exp()
