"""Layers with known content, for the tests of kernels."""

from __future__ import annotations

import torch

from hf_kvplus.layer import KVLayer
from hf_kvplus.recipes import Quantization


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
    **quantization,
) -> KVLayer:
    """Returns a layer that has taken in `length` random tokens, rows padded on the left, its reserves poisoned."""
    codecs = Quantization(**quantization).codecs() if packs else ()
    layer = KVLayer(*codecs, policy=policy, num_sink_tokens=num_sink_tokens)
    shape = (len(padding), kv_heads, length, head_dim)
    # Channels of different magnitude and mean, as keys have them.
    keys = torch.randn(shape) * torch.linspace(0.3, 2.0, head_dim) + torch.randn(head_dim)
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
