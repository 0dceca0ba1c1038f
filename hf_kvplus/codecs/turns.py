"""How RoPE turns the channels of a head from one token to the next, as numbers and as tables.

Turns are counted from the first token of a block. Channels that carry no position turn with frequency 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


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
