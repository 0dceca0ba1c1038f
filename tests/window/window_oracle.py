"""What a window with sinks means, computed without any cache: one forward pass that spells out who sees what.

Two oracles. `full_mask` gives a full-attention model an explicit 4-dimensional mask. `shifted_logits` also moves each
query's sinks: a registered attention function scores every query against its own copy of them, turned by the model's
frequencies as complex numbers in double precision.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from transformers import AttentionInterface, Cache, PreTrainedModel


def left_padding(mask: torch.Tensor) -> torch.Tensor:
    """Returns the padding of each row of `(batch, tokens)`."""
    return (mask.cumsum(-1) == 0).sum(-1)


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Returns the positions that `generate` gives, 0 for padding."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def visible(mask: torch.Tensor, window: int, sinks: int) -> torch.Tensor:
    """Returns `(batch, 1, tokens, tokens)` bool: sinks and the last `window` tokens of each query."""
    tokens = torch.arange(mask.shape[1])
    query, key = tokens[:, None], tokens[None]
    is_sink = key[None] < left_padding(mask)[:, None, None] + sinks
    return (((key <= query) & mask[:, None].bool()) & ((key > query - window) | is_sink))[:, None]


def oracle_logits(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, window: int, sinks: int
) -> torch.Tensor:
    """Returns the logits of one pass with an explicit mask; padding rows of them mean nothing."""
    seen = visible(mask, window, sinks)
    if model.config._attn_implementation == "eager":
        seen = torch.where(seen, 0.0, torch.finfo(model.dtype).min)
    return model(input_ids=ids, attention_mask=seen, position_ids=positions(mask), use_cache=False).logits


def cached_logits(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, cache: Cache, chunks: list[int]
) -> torch.Tensor:
    """Feeds `ids` in chunks through a cache and returns all logits."""
    assert sum(chunks) == ids.shape[1]
    logits, places, first = [], positions(mask), 0
    for count in chunks:
        end = first + count
        out = model(
            input_ids=ids[:, first:end],
            attention_mask=mask[:, :end],
            position_ids=places[:, first:end],
            past_key_values=cache,
        )
        logits.append(out.logits)
        first = end
    return torch.cat(logits, dim=1)


def shifted_logits(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, window: int, sinks: int
) -> torch.Tensor:
    """Returns the logits of one pass in which each query sees its sinks directly before its window."""
    padding, tokens = left_padding(mask), torch.arange(ids.shape[1])
    query, key = tokens[:, None], tokens[None]
    near = ((key <= query) & (key > query - window))[None] & mask[:, None].bool()  # (batch, query, key)
    columns = padding[:, None] + torch.arange(sinks)  # (batch, sinks)
    far = columns[:, None] <= query - window  # (batch, query, sinks)
    moved = (tokens[None] + 1 - padding[:, None] - window - sinks).clamp(min=0)  # (batch, query)
    inv_freq = model.model.rotary_emb.original_inv_freq.double()

    def attention(module, query_states, keys, values, attention_mask, scaling=None, **kwargs):
        groups = module.num_key_value_groups
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        index = columns.clamp(max=ids.shape[1] - 1)[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
        turns = moved if getattr(module, "use_rope", True) else torch.zeros_like(moved)
        turned = _turn(keys.gather(2, index), turns, inv_freq)  # (batch, heads, query, sinks, head_dim)
        scores = query_states @ keys.transpose(2, 3) * scaling
        sink_scores = torch.einsum("bhqd,bhqsd->bhqs", query_states, turned) * scaling
        lowest = torch.finfo(scores.dtype).min
        joined = torch.cat(
            [sink_scores.masked_fill(~far[:, None], lowest), scores.masked_fill(~near[:, None], lowest)], dim=-1
        )
        out = joined.softmax(-1) @ torch.cat([values.gather(2, index), values], dim=2)
        return out.transpose(1, 2).contiguous(), None

    with _attention(model, attention):
        return model(input_ids=ids, position_ids=positions(mask), use_cache=False).logits


def _turn(keys: torch.Tensor, tokens: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Moves `(batch, heads, sinks, head_dim)` forward by `tokens`, `(batch, query)`; channel i pairs with i + half."""
    pairs = len(inv_freq)
    numbers = torch.complex(keys[..., :pairs].double(), keys[..., pairs : 2 * pairs].double())[:, :, None]
    angles = tokens[:, None, :, None, None] * inv_freq
    numbers = numbers * torch.polar(torch.ones_like(angles), angles)
    rest = keys[:, :, None, :, 2 * pairs :].expand(*numbers.shape[:4], -1)
    return torch.cat([numbers.real.to(keys.dtype), numbers.imag.to(keys.dtype), rest], dim=-1)


@contextlib.contextmanager
def _attention(model: PreTrainedModel, function) -> Iterator[None]:
    before = model.config._attn_implementation
    AttentionInterface.register("window_oracle", function)
    model.set_attn_implementation("window_oracle")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
