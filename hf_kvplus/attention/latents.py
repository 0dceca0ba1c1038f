"""Projections absorbed: what lets a kernel read latent heads without knowing of them.

A layer with latents is read in two parts. Packed latents are one wide head that all query heads share; their queries
are multiplied with the decoder before, their outputs behind, one small product each whatever the length. Sinks and
recent tokens have the model's heads. Both parts are joined by the logarithms of their sums.

    score    q . (D^T c + mean) = (D q) . c + q . mean       c: a token's latents, D: decoder of q's head
    output   sum of p (D^T c + mean) = D^T (sum of p c) + mean

Where the codec behind a projection rotates latents, D is rotated once instead. A part of a layer that isn't projected
keeps its heads; then each head reads the latents of the other part by itself.
"""

from __future__ import annotations

import torch

from hf_kvplus.attention.base import Scoring, say_uncompiled
from hf_kvplus.codecs import Codec
from hf_kvplus.codecs.dual_scale import DualScaleCodec
from hf_kvplus.codecs.latent import LatentCodec
from hf_kvplus.codecs.rotary_mean import without_means
from hf_kvplus.layer import KVLayer


def has_latents(layer: KVLayer) -> bool:
    """Whether a layer stores latent heads."""
    return any(isinstance(codec, LatentCodec) for codec in layer.codecs.values())


def inner_codec(codec: Codec) -> Codec:
    """Returns the codec that encodes what is stored: that of latents, that of keys without their turning means."""
    return codec.inner if isinstance(codec, LatentCodec) else without_means(codec)


def stored_shape(layer: KVLayer, name: str) -> tuple[int, int]:
    """Returns heads and channels of packed keys or values."""
    codec = layer.codecs[name]
    return (1, codec.projection.latents) if isinstance(codec, LatentCodec) else layer.shapes[name]


def shared_heads(layer: KVLayer) -> int:
    """Returns the heads that packed keys and values are read by: one, where both are latents."""
    return max(stored_shape(layer, name)[0] for name in ("keys", "values"))


def absorb(codec: Codec, query: torch.Tensor) -> torch.Tensor:
    """Turns queries into those of what a codec stores.

    Args:
        codec: Of the keys.
        query: `(batch, heads, queries, channels)`.

    Returns:
        `(batch, heads, queries, latents)` float32; the queries themselves if `codec` stores no latents.
    """
    query = query.float()
    if not isinstance(codec, LatentCodec):
        return query
    matrices, _ = _decoder(codec, query.device)
    found = torch.bmm(_by_head(query, len(matrices)), matrices.transpose(1, 2))
    return _by_row(found, query.shape)


def score_offsets(codec: Codec, query: torch.Tensor) -> torch.Tensor | None:
    """Returns what a mean of the keys adds to every product with a query, `(batch, heads, queries)`, if there is one.

    Args:
        codec: Of the keys.
        query: `(batch, heads, queries, channels)`.
    """
    if not has_mean(codec):
        return None
    _, mean = _decoder(codec, query.device)
    found = torch.bmm(_by_head(query.float(), len(mean)), mean.transpose(1, 2))
    return _by_row(found, query.shape).squeeze(3)


def has_mean(codec: Codec) -> bool:
    """Whether a projection takes a mean off that isn't zero."""
    return isinstance(codec, LatentCodec) and codec.projection.has_mean


def expand(codec: Codec, output: torch.Tensor) -> torch.Tensor:
    """Turns averages of what a codec stores into averages of states.

    Args:
        codec: Of the values.
        output: `(batch, heads, queries, latents)` float32, averages by weights that add up to 1.

    Returns:
        `(batch, heads, queries, channels)` float32, contiguous.
    """
    if not isinstance(codec, LatentCodec):
        return output
    matrices, mean = _decoder(codec, output.device)
    found = torch.baddbmm(mean, _by_head(output, len(matrices)), matrices)
    return _by_row(found, output.shape).contiguous()


def bends_mean(codec: Codec, scoring: Scoring) -> bool:
    """Whether a mean of the keys meets soft-capping, and then says once that the reference reads such latents.

    A mean adds the same number to all products of a query, so compiled kernels add it to their logarithms of sums;
    soft-capping bends each product by itself.

    Args:
        codec: Of the keys.
        scoring: How scores come about.
    """
    found = bool(scoring.softcap) and has_mean(codec)
    if found:
        say("scores are soft-capped and a mean was taken off the keys (a bias, or keys without RoPE)")
    return found


def say(reason: str) -> None:
    """Tells a user once that a layer's latents aren't read by a compiled kernel."""
    say_uncompiled("latents", reason)


def _decoder(codec: LatentCodec, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `(heads, latents, channels)`, by which stored latents become states, and the mean."""
    projection, rotation = codec.projection, None
    if isinstance(codec.inner, DualScaleCodec):
        rotation = codec.inner.rotation(projection.latents)
    return projection.by_head(rotation, device)


def _by_head(tensor: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Gathers the rows of each KV head, `(kv_heads, batch * group * queries, channels)`."""
    grouped = tensor.reshape(len(tensor), kv_heads, -1, tensor.shape[3])
    return grouped.transpose(0, 1).reshape(kv_heads, -1, tensor.shape[3])


def _by_row(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Undoes `_by_head` for a tensor that had the first three axes of `shape`."""
    batch, heads, queries, _ = shape
    grouped = tensor.view(len(tensor), batch, -1, tensor.shape[2]).transpose(0, 1)
    return grouped.reshape(batch, heads, queries, tensor.shape[2])
