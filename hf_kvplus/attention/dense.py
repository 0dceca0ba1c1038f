"""Attention over dense states, for prompts and for whatever the kernels don't read: PyTorch's SDPA, and what it lacks.

SDPA knows no soft-capping, no sink logits and returns no weights; for these scores are computed explicitly, some
queries at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

QUERIES_AT_ONCE = 256


def dense_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attends as transformers' own functions do; arguments and results are theirs.

    Args:
        module: The attention layer.
        query: `(batch, heads, queries, head_dim)`.
        key: `(batch, kv_heads, kv_length, head_dim)`.
        value: `(batch, kv_heads, kv_length, value_head_dim)`.
        attention_mask: `(batch, heads or 1, queries, kv_length)`, boolean or additive.
        **options: `scaling`, `dropout`, `is_causal`, `softcap`, `s_aux`, `output_attentions` and more.

    Returns:
        The output, `(batch, queries, heads, value_head_dim)`, and the weights if `output_attentions`.
    """
    wants_weights = bool(options.get("output_attentions"))
    if options.get("softcap") is None and options.get("s_aux") is None and not wants_weights:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    mask = _whole_mask(module, query, key, attention_mask, options)
    outputs, all_weights = [], []
    for first in range(0, query.shape[2], QUERIES_AT_ONCE):
        chosen = slice(first, first + QUERIES_AT_ONCE)
        part = None if mask is None else mask[:, :, chosen]
        output, weights = _explicit(module, query[:, :, chosen], key, value, part, options)
        outputs.append(output)
        if wants_weights:
            all_weights.append(weights)
    return torch.cat(outputs, dim=1), torch.cat(all_weights, dim=2) if wants_weights else None


def _whole_mask(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, options: dict[str, Any]
) -> torch.Tensor | None:
    """Returns an additive mask, also where SDPA would be told `is_causal`."""
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    queries, length = query.shape[2], key.shape[2]
    if mask is None and causal and queries > 1:
        mask = torch.ones(1, 1, queries, length, dtype=torch.bool, device=query.device).tril(length - queries)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    if options.get("position_bias") is not None:
        mask = options["position_bias"] if mask is None else mask + options["position_bias"]
    return mask


def _explicit(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns output and weights of a few queries."""
    groups = query.shape[1] // key.shape[1]
    scaling = options.get("scaling")
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    grouped = query.unflatten(1, (-1, groups))  # (b, kv, n, q, d)
    scores = (grouped @ key[:, :, None].transpose(-1, -2)).flatten(1, 2) * scaling  # (b, heads, q, kv_length)
    if options.get("softcap") is not None:
        scores = torch.tanh(scores / options["softcap"]) * options["softcap"]
    if mask is not None:
        scores = scores + mask
    scores = scores.float()
    if options.get("s_aux") is not None:
        sinks = options["s_aux"].float().view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    weights = torch.nn.functional.dropout(weights, options.get("dropout") or 0.0, module.training).to(value.dtype)
    output = weights.unflatten(1, (-1, groups)) @ value[:, :, None]
    return output.flatten(1, 2).transpose(1, 2).contiguous(), weights
