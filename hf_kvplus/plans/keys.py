"""Finds biases in keys: channels far above the rest, the best known way to ruin keys of few bits (Qwen2 has them).

Seen from inside a block of tokens there are two kinds. A bias in channels that RoPE turns slowly is an *offset*: the
same for every token of the block, stored once and added back, so it costs nothing. One in channels that turn fast
swings from token to token and is *spread*: no offset takes it away, and its scale is what rotation and token scales
must cope with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_kvplus.plans.onepass import AttentionCall, OnePass
from hf_kvplus.recipes import DUAL_SCALE_BLOCK_TOKENS

# Tokens that are run for a report.
BIAS_TOKENS = 512
# How many times above the typical channel counts as far.
FAR = 20
# The first token's keys are unlike all others, and kept at full precision.
SINKS = 8


@dataclass(frozen=True)
class KeyBias:
    """The channels of a layer's keys that stick out most.

    Args:
        layer: Which layer.
        offset: Largest mean of a channel within a block, over the median deviation of its head's channels.
        offset_at: `(kv_head, channel)` of it.
        spread: Largest deviation of a channel within a block, over the same median.
        spread_at: `(kv_head, channel)` of it.
    """

    layer: int
    offset: float
    offset_at: tuple[int, int]
    spread: float
    spread_at: tuple[int, int]

    def describe(self) -> str:
        """Returns a line for people."""
        parts = []
        if self.offset >= FAR:
            head, channel = self.offset_at
            parts.append(
                f"an offset {self.offset:.0f} times (head {head}, channel {channel}), stored exactly per block"
            )
        if self.spread >= FAR:
            head, channel = self.spread_at
            parts.append(
                f"a channel that turns with position, {self.spread:.0f} times (head {head}, channel {channel}); give "
                "keys more bits"
            )
        return f"layer {self.layer}: keys have {' and '.join(parts) or 'no channel far above the typical one'}"


def key_biases(run: OnePass, windows: Sequence[torch.Tensor]) -> list[KeyBias]:
    """Runs text through a model and looks at its keys as a cache gets them.

    Args:
        run: The model, entered.
        windows: Token ids, each `(tokens,)`, of at least two blocks.

    Returns:
        One entry for each layer with attention.
    """
    offsets: dict[int, torch.Tensor] = {}
    spreads: dict[int, torch.Tensor] = {}

    def observe(layer: int, call: AttentionCall, output: torch.Tensor) -> torch.Tensor:
        keys = call.key[0, :, SINKS:].float()
        whole = keys.shape[1] // DUAL_SCALE_BLOCK_TOKENS * DUAL_SCALE_BLOCK_TOKENS
        blocks = keys[:, :whole].unflatten(1, (-1, DUAL_SCALE_BLOCK_TOKENS))  # (kv_heads, n, tokens, channels)
        offset, spread = blocks.mean(2).abs().mean(1), blocks.std(2).mean(1)  # (kv_heads, channels)
        offsets[layer] = offsets.get(layer, 0) + offset / len(windows)
        spreads[layer] = spreads.get(layer, 0) + spread / len(windows)
        return output

    run.observe = observe
    try:
        with torch.inference_mode():
            for token_ids in windows:
                run.reference(token_ids, torch.tensor([len(token_ids) - 1]))
    finally:
        run.observe = None
    return [_summarize(layer, offsets[layer], spreads[layer]) for layer in sorted(offsets)]


def _summarize(layer: int, offset: torch.Tensor, spread: torch.Tensor) -> KeyBias:
    typical = spread.median(-1, keepdim=True).values.clamp_min(1e-30)
    places = []
    for values in (offset / typical, spread / typical):
        index = int(values.argmax())
        places.append((float(values.max()), (index // values.shape[1], index % values.shape[1])))
    return KeyBias(layer, *places[0], *places[1])
