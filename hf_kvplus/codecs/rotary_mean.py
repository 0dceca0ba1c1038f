"""Takes turning means out of keys before another codec sees them: what a key bias becomes behind RoPE.

A bias in a key projection is the same for every token, and RoPE turns it along: in a pair of channels with frequency w
the token t places behind the first of its block holds `R(w t) m` beside its own content. Where the pair turns slowly
that is an offset, which any codec with zero points stores once. Where it turns fast it is none, and a bias a hundred
times above the rest takes all levels for itself, in every channel that a rotation mixes it into.

So the mean of a block's keys, turned back along RoPE, is stored for the pairs where it is largest, and what is taken
out is just what will be added back: nothing is approximated, whatever the mean is.

    mean[pair] = mean over t of R(-w t) key[t, pair]         kept for the pairs where it is longest
    stored     = key - R(w t) mean                           by the inner codec
    scores     q key = q stored + cos(w t) (q . mean) + sin(w t) (q x mean)

Turns are counted from the first token of a block, so neither storing nor reading needs a position, and blocks know
nothing of each other. Channels without positions turn with frequency 0. Where frequencies are wrong (they change with
the length, or positions jump within a block) means come out small, and nothing is lost.

Source: KVQuant, https://arxiv.org/abs/2401.18079, quantizes keys as they are before RoPE, for the same reason; here
only means are turned back, so keys are read as they are stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from hf_kvplus.checks import require_at_least
from hf_kvplus.codecs.affine import HALF_MAX
from hf_kvplus.codecs.base import Codec, Packed

# Of a stored mean: two half-precision numbers and the number of its pair.
MEAN_BYTES = 5
# Pairs have numbers of one byte.
MOST_CHANNELS = 512
FIELDS = ("rotary_pair", "rotary_mean")


@dataclass(frozen=True)
class ChannelTurns:
    """How RoPE turns the channels of a head.

    Args:
        inv_freq: Radians per token of each pair of channels that turns; further channels carry no position.
        interleaved: Whether channels 2i and 2i + 1 form a pair, rather than i and i + pairs.
    """

    inv_freq: tuple[float, ...] = ()
    interleaved: bool = False

    def pairs(self, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
        """Returns the first and the second channel of every pair, and its radians per token."""
        turning, still = len(self.inv_freq), head_dim // 2 - len(self.inv_freq)
        step = 2 if self.interleaved else 1
        first = [step * pair for pair in range(turning)]
        second = [channel + (1 if self.interleaved else turning) for channel in first]
        first += range(2 * turning, 2 * turning + still)
        second += range(2 * turning + still, 2 * turning + 2 * still)
        return tuple(first), tuple(second), self.inv_freq + (0.0,) * still


@dataclass(frozen=True, init=False, kw_only=True)
class RotaryMeanCodec(Codec):
    """Stores the largest turning means of each block of keys at half precision, the rest by `inner`.

    Args:
        block_tokens: Tokens in a block.
        inner: The codec of what is left.
        turns: How channels turn.
        means: Pairs of channels per head and block whose means are stored.

    Raises:
        ValueError: If `means` isn't positive.
    """

    inner: Codec
    turns: ChannelTurns
    means: int

    def __init__(self, inner: Codec, turns: ChannelTurns, means: int) -> None:
        require_at_least("means", means, 1)
        object.__setattr__(self, "block_tokens", inner.block_tokens)
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "turns", turns)
        object.__setattr__(self, "means", means)

    def encode(self, states: torch.Tensor, valid: torch.Tensor | None = None) -> Packed:
        """Takes means out and encodes the rest; see `Codec.encode`."""
        first, second, cos, sin = turn_tables(self.turns, self.block_tokens, states.shape[-1], str(states.device))
        rest = states.float().clamp(-HALF_MAX, HALF_MAX).nan_to_num(0.0)
        x, y = rest[..., first], rest[..., second]  # (b, h, n, tokens, pairs)
        back = x * cos + y * sin, y * cos - x * sin
        if valid is None:
            found = torch.stack([turned.mean(-2) for turned in back], dim=-1)  # (b, h, n, pairs, 2)
        else:
            weight = valid[:, None, :, :, None].to(rest.dtype)
            count = weight.sum(-2).clamp_min(1)
            found = torch.stack([(turned * weight).sum(-2) / count for turned in back], dim=-1)
        pairs = found.square().sum(-1).topk(self.means).indices.sort(-1).values  # (b, h, n, means)
        means = found.gather(-2, pairs[..., None].expand(*pairs.shape, 2)).half()
        ours = {"rotary_pair": pairs.to(torch.uint8), "rotary_mean": means}
        self._add(ours, rest, -1)
        return {**self.inner.encode(rest, valid), **ours}

    def decode(self, packed: Packed, head_dim: int, out: torch.Tensor) -> None:
        """Decodes the rest and adds the means; see `Codec.decode`."""
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


@lru_cache(maxsize=64)
def kernel_tables(turns: ChannelTurns, tokens: int, head_dim: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the pairs' channels, `(pairs, 2)` int32, and their cosines and sines, `(pairs, 2, tokens)` float32."""
    first, second, cos, sin = turn_tables(turns, tokens, head_dim, device)
    return torch.stack([first, second], dim=1).int(), torch.stack([cos.T, sin.T], dim=1).contiguous()


@lru_cache(maxsize=64)
def turn_tables(
    turns: ChannelTurns, tokens: int, head_dim: int, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the pairs' first and second channels, `(pairs,)`, and their cosines and sines, `(tokens, pairs)`."""
    first, second, inv_freq = turns.pairs(head_dim)
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * torch.tensor(inv_freq, dtype=torch.float64)
    tables = (torch.tensor(first), torch.tensor(second), angles.cos().float(), angles.sin().float())
    first_at, second_at, cos, sin = (table.to(device) for table in tables)
    return first_at, second_at, cos, sin
