"""Takes turning means out of keys before another codec sees them: what a key bias becomes behind RoPE.

A bias in a key projection is the same for every token, and RoPE turns it along: in a pair of channels with frequency w
the token t places behind the first of its block holds `R(w t) m` beside its own content. Where the pair turns slowly
that is an offset, which any codec with zero points stores once. Where it turns fast it is none, and a bias a hundred
times above the rest takes all levels for itself, in every channel that a rotation mixes it into.

So the mean of a block's keys, turned back along RoPE, is stored for the pairs where it is longest, and what is taken
out is just what will be added back: nothing is approximated, whatever the mean is. A mean that isn't far above the
deviation of a typical pair stays in, because codecs that scale tokens do better with a mean that grows with its token;
so does one that doesn't turn.

    mean[pair] = mean over t of R(-w t) key[t, pair]         kept for the pairs where it is longest, if that is far
    stored     = key - R(w t) mean                           by the inner codec
    scores     q key = q stored + cos(w t) (q . mean) + sin(w t) (q x mean)

Turns are counted from the first token of a block, so neither storing nor reading needs a position, and blocks know
nothing of each other. Channels without positions turn with frequency 0. Where frequencies are wrong (they change with
the length, or positions jump within a block) means come out small, and nothing is lost.

Source: KVQuant, https://arxiv.org/abs/2401.18079, quantizes keys as they are before RoPE, for the same reason; here
only means are turned back, so keys are read as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_kvplus.checks import require_at_least
from hf_kvplus.codecs.affine import HALF_MAX
from hf_kvplus.codecs.base import Codec, Packed
from hf_kvplus.codecs.compiled import find_decoder
from hf_kvplus.codecs.compiled_means import find_mean_taker
from hf_kvplus.codecs.dual_scale import DualScaleCodec
from hf_kvplus.codecs.turns import ChannelTurns, turn_tables

# Of a stored mean: two half-precision numbers and the number of its pair.
MEAN_BYTES = 5
# Times the deviation of the median pair that a mean must have to be taken out, see docs/ablation-means.md.
FAR = 8.0
# Pairs have numbers of one byte.
MOST_CHANNELS = 512
FIELDS = ("rotary_pair", "rotary_mean")


@dataclass(frozen=True, init=False, kw_only=True)
class RotaryMeanCodec(Codec):
    """Stores the largest turning means of each block of keys at half precision, the rest by `inner`.

    Args:
        block_tokens: Tokens in a block.
        inner: The codec of what is left.
        turns: How channels turn.
        means: Pairs of channels per head and block whose means are stored.
        far: Times the deviation of the median pair that a mean must have to be taken out; nothing that reads asks.

    Raises:
        ValueError: If `means` isn't positive, or `far` is negative.
    """

    inner: Codec
    turns: ChannelTurns
    means: int
    far: float = FAR

    def __init__(self, inner: Codec, turns: ChannelTurns, means: int, far: float = FAR) -> None:
        require_at_least("means", means, 1)
        if far < 0:
            raise ValueError(f"`far` must be at least 0, got {far}")
        object.__setattr__(self, "block_tokens", inner.block_tokens)
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "turns", turns)
        object.__setattr__(self, "means", means)
        object.__setattr__(self, "far", far)

    def encode(
        self,
        states: torch.Tensor,
        valid: torch.Tensor | None = None,
        encode_rest: Callable[..., Packed] | None = None,
    ) -> Packed:
        """Takes means out and encodes the rest; see `Codec.encode`.

        Args:
            states: `(batch, kv_heads, blocks, block_tokens, head_dim)`.
            valid: `(batch, blocks, block_tokens)` bool, the tokens that count.
            encode_rest: What encodes in the place of `inner.encode`.
        """
        count: torch.Tensor | int = self.block_tokens
        if valid is not None:
            states = states.masked_fill(~valid[:, None, :, :, None], 0.0)
            count = valid.sum(-1)[:, None, :, None, None].clamp_min(1)
        taker = find_mean_taker() if states.device.type == "cpu" and states.numel() else None
        rest, sums = taker.sums(states, self.turns) if taker else self._sums(states)
        along, across, square, x, y = (sums / count).unbind(-2)  # (b, h, n, pairs)
        length = along.square() + across.square()
        deviation = (square - length).clamp_min(0).median(-1, keepdim=True).values / 2
        longest, pairs = length.topk(self.means)  # (b, h, n, means)
        means = torch.stack([along, across], dim=-1).gather(-2, pairs[..., None].expand(*pairs.shape, 2))
        # A mean that doesn't turn is an offset, which is stored better as such.
        taken = (longest > self.far**2 * deviation) & (longest >= (x.square() + y.square()).gather(-1, pairs))
        means = (means * taken[..., None]).clamp(-HALF_MAX, HALF_MAX).half()
        ours = {"rotary_pair": pairs.to(torch.uint8), "rotary_mean": means}
        if taker:
            taker.take_out(rest, self.turns, *(ours[name] for name in FIELDS))
        else:
            self._add(ours, rest, -1)
        return {**(encode_rest or self.inner.encode)(rest, valid), **ours}

    def _sums(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Does what `MeanTaker.sums` does with PyTorch's operators, on any device."""
        first, second, cos, sin = turn_tables(self.turns, self.block_tokens, states.shape[-1], str(states.device))
        rest = states.float().clamp(-HALF_MAX, HALF_MAX).nan_to_num(0.0)
        x, y = rest[..., first], rest[..., second]  # (b, h, n, tokens, pairs)
        summed = (x * cos + y * sin, y * cos - x * sin, x.square() + y.square(), x, y)
        return rest, torch.stack([part.sum(-2) for part in summed], dim=-2)

    def decode(self, packed: Packed, head_dim: int, out: torch.Tensor) -> None:
        """Decodes the rest and adds the means; see `Codec.decode`."""
        decoder = find_decoder() if out.device.type == "cpu" and out.numel() else None
        if decoder and isinstance(self.inner, DualScaleCodec) and decoder.fits(self.inner, head_dim):
            decoder.decode(self.inner, packed, out, self)
        else:
            self.decode_by_operators(packed, head_dim, out)

    def decode_by_operators(self, packed: Packed, head_dim: int, out: torch.Tensor) -> None:
        """Decodes the rest, and adds the means with PyTorch's operators, on any device."""
        values = out if out.dtype == torch.float32 else torch.empty(out.shape, device=out.device)
        self.inner.decode({name: part for name, part in packed.items() if name not in FIELDS}, head_dim, values)
        self._add(packed, values, 1)
        if values is not out:
            limit = torch.finfo(out.dtype).max
            out.copy_(values.clamp_(-limit, limit))

    def _add(self, packed: Packed, states: torch.Tensor, sign: int) -> None:
        """Adds turning means to states or takes them out, in place."""
        first, second, cos, sin = turn_tables(self.turns, self.block_tokens, states.shape[-1], str(states.device))
        pairs = packed["rotary_pair"].long()  # (b, h, n, means)
        x, y = (sign * packed["rotary_mean"].float())[..., None, :, :].unbind(-1)  # (b, h, n, 1, means)
        cosine, sine = (table.T[pairs].transpose(-1, -2) for table in (cos, sin))  # (b, h, n, tokens, means)
        waves = torch.cat([x * cosine - y * sine, y * cosine + x * sine], dim=-1)
        channels = torch.cat([first[pairs], second[pairs]], dim=-1)
        states.scatter_add_(-1, channels[..., None, :].expand(waves.shape), waves)

    def bits_per_element(self, head_dim: int) -> float:
        """Returns those of the rest, and what the means take."""
        means = 8 * MEAN_BYTES * self.means / (self.block_tokens * head_dim)
        return self.inner.bits_per_element(head_dim) + means

    def check(self, head_dim: int) -> None:
        """Raises ValueError if there aren't that many pairs of channels, or too many."""
        self.inner.check(head_dim)
        if not 2 * max(self.means, len(self.turns.inv_freq)) <= head_dim <= MOST_CHANNELS:
            raise ValueError(
                f"`rotary_means`={self.means} needs heads of {2 * max(self.means, len(self.turns.inv_freq))} to "
                f"{MOST_CHANNELS} channels, got head_dim={head_dim}; give fewer, or 0"
            )

    def describe(self) -> str:
        """Returns the codec in a few words."""
        return f"{self.inner.describe()}, {self.means} turning means"


def without_means(codec: Codec) -> Codec:
    """Returns the codec of what is left when turning means are taken out, or `codec` itself."""
    return codec.inner if isinstance(codec, RotaryMeanCodec) else codec
