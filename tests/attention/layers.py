"""Layers with known content, for the tests of kernels."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from hf_kvplus.codecs.turns import ChannelTurns, turn_tables
from hf_kvplus.key_bias import KeyTurns
from hf_kvplus.layer import KVLayer
from hf_kvplus.recipes import Quantization


def make_turns(head_dim: int = 64, base: float = 10000.0, interleaved: bool = False) -> KeyTurns:
    """Returns what RoPE does to the channels of a head, the last quarter of which carries no position."""
    pairs = 3 * head_dim // 8
    inv_freq = tuple(base ** (-index / pairs) for index in range(pairs))
    return KeyTurns(ChannelTurns(inv_freq, interleaved), biased=True)


def plant_bias(keys: torch.Tensor, turns: ChannelTurns, bias: Mapping[int, float]) -> torch.Tensor:
    """Returns keys `(..., tokens, head_dim)` with a bias in the first channel of some pairs, as RoPE turns it."""
    first, second, cos, sin = turn_tables(turns, keys.shape[-2], keys.shape[-1], "cpu")
    keys = keys.clone()
    for pair, size in bias.items():
        keys[..., first[pair]] += size * cos[:, pair]
        keys[..., second[pair]] += size * sin[:, pair]
    return keys


def make_layer(
    length: int,
    *,
    kv_heads: int = 2,
    head_dim: int = 64,
    padding: tuple[int, ...] = (0,),
    dtype: torch.dtype = torch.float32,
    packs: bool = True,
    policy=None,
    num_sink_tokens: int = 4,
    key_turns: KeyTurns | None = None,
    bias: Mapping[int, float] = MappingProxyType({0: 40.0, 5: -90.0}),
    **quantization,
) -> KVLayer:
    """Returns a layer that has taken in `length` random tokens, rows padded on the left, its reserves poisoned.

    With `key_turns`, its keys have a bias in the first channels of some pairs, which RoPE turns.
    """
    codecs = Quantization(**quantization).codecs(0, head_dim, key_turns) if packs else ()
    layer = KVLayer(*codecs, policy=policy, num_sink_tokens=num_sink_tokens)
    shape = (len(padding), kv_heads, length, head_dim)
    # Channels of different magnitude and mean, as keys have them.
    keys = torch.randn(shape) * torch.linspace(0.3, 2.0, head_dim) + torch.randn(head_dim)
    if key_turns is not None:
        keys = plant_bias(keys, key_turns.turns, bias)
    values = torch.randn(shape) + 0.2
    positions = torch.stack([(torch.arange(length) - count).clamp(min=0) for count in padding])
    with torch.no_grad():
        layer.update(keys.to(dtype), values.to(dtype), kwargs={"position_ids": positions})
    poison(layer)
    return layer


def poison(layer: KVLayer) -> None:
    """Fills what is reserved but not held: NaN in floats, all bits in bytes."""
    for store in (*layer.packed.values(), layer.sinks, layer.recent):
        for buffer in store._buffers.values():
            for part in (buffer[:, :, : store.start], buffer[:, :, store.start + store.length :]):
                part.fill_(float("nan") if part.is_floating_point() else 255 if part.dtype == torch.uint8 else 127)


def padding_mask(layer: KVLayer, queries: int = 1, visible: int = 0) -> torch.Tensor:
    """Returns the mask that a model makes: causal, without padding."""
    total = layer.cumulative_length
    columns = torch.arange(visible, total)
    causal = columns[None] <= torch.arange(total - queries, total)[:, None]
    real = columns[None] >= torch.tensor(layer.padding.counts)[:, None]
    return (causal[None] & real[:, None])[:, None]
