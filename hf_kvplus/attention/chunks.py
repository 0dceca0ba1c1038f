"""Attention of a prompt's later chunks on a CPU: a chunk to itself, and to what is held, some of it decoded at a time.

A chunk has too many queries for a kernel that reads packed blocks: decoding them once is shared by all queries. But
nothing needs the whole history side by side, a mask over it, or its heads repeated:

    held     slab by slab, every query sees all of it    queries of one KV head are rows: no head is repeated
    chunk    causal                                      as PyTorch does a first prompt

Parts are joined by the logarithms of their sums. A mask is only looked at to learn that it says nothing else; anything
but plain causality goes over dense states.

Source: FlashAttention, https://arxiv.org/abs/2205.14135, whose sums PyTorch's operator for CPUs returns.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch

from hf_kvplus.attention.base import heads_per_group
from hf_kvplus.layer import KVLayer, States
from hf_kvplus.policies import FullPolicy

# Tokens that are dense at a time. Joining two parts costs 1 / SLAB_TOKENS of what attending to one costs, about.
SLAB_TOKENS = 4096
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def reads_in_chunks(layer: KVLayer) -> bool:
    """Returns whether chunks are answered from `layer` without building all its states."""
    channels = {channels for _, channels in layer.shapes.values()}
    return (
        type(layer).update is KVLayer.update
        and layer.shelf is None
        and layer.device.type == "cpu"
        and layer.dtype in DTYPES
        and isinstance(layer.policy, FullPolicy)
        and len(channels) == 1
        and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    )


class CausalMasks:
    """Tells plain causal masks from others; a mask that all layers share is looked at once."""

    def __init__(self) -> None:
        self._known: weakref.ref[torch.Tensor] | None = None
        self._answer = False

    def is_plain(self, mask: torch.Tensor | None) -> bool:
        """Returns whether each of the last columns' queries sees all columns up to its own, in every row.

        Args:
            mask: `(batch or 1, 1, queries, columns)`, boolean.
        """
        if mask is None:
            return False
        if self._known is None or self._known() is not mask:
            self._known, self._answer = weakref.ref(mask), _is_causal(mask)
        return self._answer


def _is_causal(mask: torch.Tensor) -> bool:
    """Looks at every element."""
    queries, columns = mask.shape[2:]
    if not 0 < queries <= columns:
        return False
    own = torch.ones(queries, queries, dtype=torch.bool, device=mask.device).tril()
    return bool(mask[..., : columns - queries].all()) and bool((mask[..., columns - queries :] == own).all())


def attend_chunk(layer: KVLayer, query: torch.Tensor, scaling: float) -> torch.Tensor:
    """Attends to what a layer holds and, causally, to `layer.incoming`, which isn't stored yet.

    Args:
        layer: The layer.
        query: `(batch, heads, queries, head_dim)`, of all incoming tokens.
        scaling: Factor of every score.

    Returns:
        `(batch, queries, heads, head_dim)`, in the dtype of the query.
    """
    group = heads_per_group(layer, query)
    incoming = (layer.incoming[name].repeat_interleave(group, dim=1) for name in ("keys", "values"))
    output, log_sum = _flash(query, *incoming, scaling, is_causal=True)
    rows = query.unflatten(1, (-1, group)).flatten(2, 3)  # (b, kv, n * queries, d)
    held = held_log_sum = None
    for keys, values in _slabs(layer):
        part, part_log_sum = _flash(rows, keys, values, scaling)
        if held is None:
            held, held_log_sum = part, part_log_sum
        else:
            held = torch.lerp(held, part, _share(part_log_sum, held_log_sum))
            held_log_sum = torch.logaddexp(held_log_sum, part_log_sum)
    output = output.transpose(1, 2)  # (b, queries, heads, d)
    if held is not None:
        held = held.unflatten(2, (group, -1)).flatten(1, 2).transpose(1, 2)
        held_log_sum = held_log_sum.unflatten(2, (group, -1)).flatten(1, 2)
        output = torch.lerp(output, held, _share(held_log_sum, log_sum).transpose(1, 2))
    return output.to(query.dtype).contiguous()


def _flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, *, is_causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns outputs and, `(batch, heads, queries)`, the logarithms of the sums of their weights; all float32."""
    output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, is_causal, attn_mask=None, scale=scaling
    )
    # Joining in half precision would lose more than attending does.
    return output.float(), log_sum


def _share(part: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns the share of a part's weights in the sum of two, `(..., 1)`."""
    return torch.sigmoid(part - other)[..., None]


def _slabs(layer: KVLayer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields keys and values of all that is held, in order; what was yielded before may be overwritten."""
    recent, blocks = layer.recent.fields(), layer.packed_blocks
    if not blocks:
        if len(layer.recent):
            yield recent["keys"], recent["values"]
        return
    most = max(1, SLAB_TOKENS // layer.block_tokens)
    room = {
        name: _room(layer, tensor, min(most, blocks) * layer.block_tokens + tensor.shape[2])
        for name, tensor in recent.items()
    }
    if layer.dense_pool is not None and layer.is_last:
        layer.dense_pool.let_go()
    for start in range(0, blocks, most):
        stop = min(start + most, blocks)
        states = _decode(layer, room, start, stop)
        if stop == blocks:
            end = (stop - start) * layer.block_tokens
            for name, tensor in recent.items():
                room[name][:, :, end : end + tensor.shape[2]] = tensor
                states[name] = room[name][:, :, : end + tensor.shape[2]]
        yield states["keys"], states["values"]


def _room(layer: KVLayer, like: torch.Tensor, tokens: int) -> torch.Tensor:
    """Returns room for dense states of so many tokens, if possible some that nobody reads any more."""
    shape = (*like.shape[:2], tokens, like.shape[3])
    return like.new_empty(shape) if layer.dense_pool is None else layer.dense_pool.empty_like(like, shape)


def _decode(layer: KVLayer, room: States, start: int, stop: int) -> States:
    """Decodes blocks `start` to `stop` into the front of `room`."""
    states, tokens = {}, (stop - start) * layer.block_tokens
    first = layer.first_stored + start * layer.block_tokens
    for name, store in layer.packed.items():
        states[name] = room[name][:, :, :tokens]
        store.decode(states[name], start, stop)
        layer.sinks.restore(name, states[name], layer.padding.counts, first, first + tokens)
    return states
