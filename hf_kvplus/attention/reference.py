"""Decode attention in plain PyTorch: slow, for every codec and device, the truth that kernels are compared with.

Blocks are decoded a slab at a time and joined by an online softmax, so nothing larger than a slab is ever dense.
Latent heads aren't even decoded: queries and outputs go through the projection instead, once, whatever the length.

Source: FlashAttention, https://arxiv.org/abs/2205.14135, for the online softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hf_kvplus.attention.base import Scoring, heads_per_group
from hf_kvplus.codecs.latent import LatentCodec
from hf_kvplus.layer import KVLayer
from hf_kvplus.projections import HeadProjection

SLAB_TOKENS = 512
# Latents may be stored whole, and then a slab is a view.
LATENT_SLAB_TOKENS = 4096


@dataclass
class Part:
    """Keys and values of some columns.

    Args:
        keys: `(batch, kv_heads, tokens, head_dim)`.
        values: `(batch, kv_heads, tokens, value_head_dim)`.
        columns: `(batch or 1, tokens)`.
        seen: `(batch or 1, tokens)` bool; `False` where a column is held by another part.
        key_projection: If given, `keys` are its latents, `(batch, 1, tokens, latents)`.
        value_projection: Likewise for `values`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    columns: torch.Tensor
    seen: torch.Tensor
    key_projection: HeadProjection | None = None
    value_projection: HeadProjection | None = None

    def scores(self, grouped: torch.Tensor) -> torch.Tensor:
        """Returns products of queries `(batch, kv_heads, n, queries, head_dim)` and keys, `(..., queries, tokens)`."""
        if self.key_projection is None:
            return grouped @ self.keys[:, :, None].transpose(-1, -2)
        latent, offset = self.key_projection.absorb(grouped.flatten(1, 2))  # (b, heads, q, latents)
        products = latent.flatten(1, 2) @ self.keys[:, 0].transpose(-1, -2)  # (b, heads * q, tokens)
        return products.view(*grouped.shape[:4], -1) + offset.view(*grouped.shape[:4], 1)

    def outputs(self, weights: torch.Tensor) -> torch.Tensor:
        """Returns `(batch, kv_heads, n, queries, value_head_dim)` for weights `(..., queries, tokens)`."""
        if self.value_projection is None:
            return weights @ self.values[:, :, None]
        sums = (weights.flatten(1, 3) @ self.values[:, 0]).view(*weights.shape[:4], -1)
        states = self.value_projection.expand(sums.flatten(1, 2), weights.sum(-1, keepdim=True).flatten(1, 2))
        return states.view(*weights.shape[:4], -1)


class ReferenceKernel:
    """Attends in `dtype`, block by block.

    Args:
        dtype: Of all arithmetic.
    """

    reads_pieces = True

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype

    def refuses(self, layer: KVLayer) -> str | None:
        """Reads any layer."""
        return None

    def attend(
        self, layer: KVLayer, query: torch.Tensor, scoring: Scoring, mask: torch.Tensor | None, visible: int
    ) -> torch.Tensor:
        """Attends; see `Kernel.attend`."""
        batch, heads, queries, _ = query.shape
        grouped = query.to(self.dtype).unflatten(1, (-1, heads_per_group(layer, query)))  # (b, kv, n, q, d)
        state = None
        for part in parts(layer, visible, self.dtype):
            scores = part.scores(grouped) * scoring.scaling  # (b, kv, n, q, tokens)
            if scoring.softcap:
                scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
            seen = self._seen(part, mask, visible - layer.lead_tokens, queries, layer.cumulative_length)
            scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
            state = _join(state, scores, part)
        largest, total, output = state
        if scoring.sink_logits is not None:
            logits = scoring.sink_logits.to(self.dtype).view(1, *grouped.shape[1:3], 1, 1)
            shift = torch.maximum(largest, logits)
            shrink = torch.where(largest > -torch.inf, (largest - shift).exp(), 0.0)
            total, output = total * shrink + (logits - shift).exp(), output * shrink
        output = torch.where(total > 0, output / total, 0.0)
        return output.flatten(1, 2).transpose(1, 2).to(query.dtype).contiguous()

    def _seen(self, part: Part, mask: torch.Tensor | None, first: int, queries: int, total: int) -> torch.Tensor:
        """Returns which tokens of a part each query sees, `(batch or 1, queries, tokens)`; `first`: the mask's."""
        seen = (part.seen & (part.columns < total))[:, None]
        if mask is None:
            last = torch.arange(total - queries, total, device=part.columns.device)
            return seen & (part.columns[:, None] <= last[:, None])
        index = (part.columns - first).clamp(0, mask.shape[3] - 1)
        rows = max(len(index), len(mask))
        index = index[:, None].expand(rows, mask.shape[2], -1)
        return seen & mask[:, 0].expand(rows, -1, -1).gather(2, index)


def _join(state: tuple[torch.Tensor, ...] | None, scores: torch.Tensor, part: Part) -> tuple[torch.Tensor, ...]:
    """Adds a part to the running `(largest score, sum, output)` of the online softmax."""
    largest = scores.amax(-1, keepdim=True)
    if state is not None:
        largest = torch.maximum(largest, state[0])
    shift = torch.where(largest > -torch.inf, largest, 0.0)
    weights = (scores - shift).exp()
    total, output = weights.sum(-1, keepdim=True), part.outputs(weights)
    if state is not None:
        shrink = (state[0] - shift).exp()
        total, output = total + state[1] * shrink, output + state[2] * shrink
    return largest, total, output


def parts(layer: KVLayer, visible: int, dtype: torch.dtype) -> Iterator[Part]:
    """Yields what a layer holds, in parts of at most SLAB_TOKENS packed tokens."""
    device = layer.recent.get("keys").device
    padding = torch.tensor(layer.padding.counts, device=device)[:, None]
    sinks = layer.num_sink_tokens if len(layer.sinks) else 0
    if layer.lead:
        # They stand directly before the window, whatever columns they come from.
        columns = torch.arange(visible - layer.lead_tokens, visible, device=device)[None]
        keys, values = (layer.lead[name].to(dtype) for name in ("keys", "values"))
        yield Part(keys, values, columns, torch.ones_like(columns, dtype=torch.bool))
    if layer.packed_blocks:
        projections = [getattr(layer.codecs[name], "projection", None) for name in ("keys", "values")]
        slab_tokens = LATENT_SLAB_TOKENS if None not in projections else SLAB_TOKENS
        slab = max(1, slab_tokens // layer.block_tokens)
        first = max(0, visible - layer.first_stored) // layer.block_tokens
        for start in range(first, layer.packed_blocks, slab):
            stop = min(start + slab, layer.packed_blocks)
            keys, values = (_decode(layer, name, start, stop, dtype) for name in ("keys", "values"))
            columns = (
                torch.arange(keys.shape[2], device=device)[None] + layer.first_stored + start * layer.block_tokens
            )
            seen = ((columns < padding) | (columns >= padding + sinks)) & (columns >= visible)
            yield Part(keys, values, columns, seen, *projections)
    if sinks:
        columns = padding + torch.arange(sinks, device=device)
        keys, values = (layer.sinks.get(name).to(dtype) for name in ("keys", "values"))
        yield Part(keys, values, columns, (columns >= visible) & (columns < layer.packed_tokens))
    keys, values = (layer.recent.get(name).to(dtype) for name in ("keys", "values"))
    columns = torch.arange(layer.packed_tokens, layer.cumulative_length, device=device)[None]
    yield Part(keys, values, columns, columns >= visible)


def _decode(layer: KVLayer, name: str, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Decodes blocks `start` to `stop`, `(batch, kv_heads, tokens, channels)`; of latent heads only the latents."""
    codec = layer.codecs[name]
    if isinstance(codec, LatentCodec):
        return codec.latents(layer.packed[name].fields(start, stop)).flatten(2, 3).to(dtype)
    heads, channels = layer.shapes[name]
    tokens = (stop - start) * layer.block_tokens
    # Codecs compute in single precision.
    out = torch.empty(layer.batch_size, heads, tokens, channels, dtype=torch.float32, device=layer.device)
    layer.packed[name].decode(out, start, stop)
    return out.to(dtype)
