"""Finds biases in keys: channels far above the rest, the best known way to ruin keys of few bits (Qwen2 has them).

Behind RoPE there are three kinds, as seen from inside a block of tokens. An *offset* is the same for every token:
stored once and added back. A *turning mean* is the same for every token once RoPE is undone: where a cache takes such
means out (see `hf_kvplus.key_bias`) it costs nothing either. What is left is *spread*, and its scale is what rotation
and token scales must cope with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_kvplus.codecs.identity import IdentityCodec
from hf_kvplus.codecs.rotary_mean import FIELDS, RotaryMeanCodec
from hf_kvplus.key_bias import CHANNELS_PER_MEAN, KeyTurns, layer_key_turns
from hf_kvplus.plans.onepass import AttentionCall, OnePass
from hf_kvplus.recipes import DUAL_SCALE_BLOCK_TOKENS

# Tokens that are run for a report.
BIAS_TOKENS = 512
# How many times above the typical channel counts as far.
FAR = 20
# The first token's keys are unlike all others, and kept at full precision.
SINKS = 8
# A remedy is named where it brings the widest channel down by as much.
REMEDY = 2.0


@dataclass(frozen=True)
class Excess:
    """How far something of a layer's keys is above the typical deviation of a channel.

    Args:
        times: The largest value over the median deviation of its head's channels.
        head: KV head of it.
        channel: Channel of it, of a turning mean the first of its pair.
    """

    times: float = 0.0
    head: int = 0
    channel: int = 0

    def __str__(self) -> str:
        return f"{self.times:.0f} times (head {self.head}, channel {self.channel})"


@dataclass(frozen=True)
class KeyBias:
    """The channels of a layer's keys that stick out most, in blocks as a cache packs them.

    Args:
        layer: Which layer.
        taken: The largest turning mean that is taken out.
        offset: The largest mean of a channel in what is left.
        spread: The largest deviation of a channel in what is left.
        remedy: Turning means (`means` of a strategy) that would bring that down, 0 if none would.
    """

    layer: int
    taken: Excess
    offset: Excess
    spread: Excess
    remedy: int = 0

    @property
    def is_far(self) -> bool:
        """Whether any of it is far above the typical channel."""
        return max(self.taken.times, self.offset.times, self.spread.times) >= FAR

    def describe(self) -> str:
        """Returns a line for people."""
        parts = []
        if self.taken.times >= FAR:
            parts.append(f"a mean that turns with position, {self.taken}, taken out and stored exactly per block")
        if self.offset.times >= FAR:
            parts.append(f"an offset {self.offset}, stored exactly per block")
        if self.spread.times >= FAR:
            advice = f"give `means={self.remedy}`" if self.remedy else "give keys more bits"
            parts.append(f"a channel that deviates {self.spread}; {advice}")
        return f"layer {self.layer}: keys have {' and '.join(parts) or 'no channel far above the typical one'}"


def key_biases(run: OnePass, windows: Sequence[torch.Tensor]) -> list[KeyBias]:
    """Runs text through a model and looks at its keys as a cache gets them.

    Args:
        run: The model, entered.
        windows: Token ids, each `(tokens,)`, of at least two blocks.

    Returns:
        One entry for each layer with attention.
    """
    turns = layer_key_turns(run.model.config.get_text_config(decoder=True))
    blocks: dict[int, list[torch.Tensor]] = {}

    def observe(layer: int, call: AttentionCall, output: torch.Tensor) -> torch.Tensor:
        keys = call.key[:, :, SINKS:].float()
        whole = keys.shape[2] // DUAL_SCALE_BLOCK_TOKENS * DUAL_SCALE_BLOCK_TOKENS
        blocks.setdefault(layer, []).append(keys[:, :, :whole].unflatten(2, (-1, DUAL_SCALE_BLOCK_TOKENS)))
        return output

    run.observe = observe
    try:
        with torch.inference_mode():
            for token_ids in windows:
                run.reference(token_ids, torch.tensor([len(token_ids) - 1]))
    finally:
        run.observe = None
    return [_look(layer, torch.cat(blocks[layer], dim=2), turns[layer]) for layer in sorted(blocks)]


def _look(layer: int, blocks: torch.Tensor, turns: KeyTurns) -> KeyBias:
    """Returns what sticks out of one layer's keys, `(1, kv_heads, blocks, tokens, channels)`."""
    channels = blocks.shape[-1]
    rest, taken = _take_means(blocks, turns, turns.default_means(channels))
    offset, spread = rest.mean(3).abs().mean(2)[0], rest.std(3).mean(2)[0]  # (kv_heads, channels)
    typical = spread.median(-1, keepdim=True).values.clamp_min(1e-30)
    found = _largest(spread / typical)
    remedy = _remedy(blocks, turns, float(spread.max())) if found.times >= FAR else 0
    return KeyBias(layer, _largest(taken / typical), _largest(offset / typical), found, remedy)


def _remedy(blocks: torch.Tensor, turns: KeyTurns, spread: float) -> int:
    """Returns how many means, beyond what is taken by default, would bring the largest deviation down; 0 if none."""
    channels = blocks.shape[-1]
    few = max(1, channels // CHANNELS_PER_MEAN)
    for count in (few, 2 * few, 4 * few):
        if turns.default_means(channels) < count <= channels // 2:
            rest, taken = _take_means(blocks, turns, count)
            if taken.any() and float(rest.std(3).mean(2).max()) * REMEDY <= spread:
                return count
    return 0


def _take_means(blocks: torch.Tensor, turns: KeyTurns, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns keys without their turning means, and how large these were, `(kv_heads, channels)`."""
    sizes = torch.zeros(blocks.shape[1], blocks.shape[-1], device=blocks.device)
    if not count or turns.turns is None:
        return blocks, sizes
    codec = RotaryMeanCodec(IdentityCodec(block_tokens=blocks.shape[3]), turns.turns, count)
    packed = codec.encode(blocks)
    pairs, means = (packed[name][0] for name in FIELDS)  # (kv_heads, blocks, means[, 2])
    first = torch.tensor(turns.turns.pairs(blocks.shape[-1])[0], device=blocks.device)
    lengths = means.float().norm(dim=-1) / blocks.shape[2]
    sizes.scatter_add_(1, first[pairs.long()].flatten(1), lengths.flatten(1))
    return packed["states"], sizes


def _largest(values: torch.Tensor) -> Excess:
    """Returns the largest of `(kv_heads, channels)`."""
    head, channel = divmod(int(values.argmax()), values.shape[1])
    return Excess(float(values.max()), head, channel)
