"""Measures the second moment of each layer's queries, for codecs that push errors where queries don't look.

Source: OSCAR (covariances of queries per layer and KV head, from some ten thousand tokens); differs in that they
choose codes (see `hf_kvplus.codecs.feedback`) and no rotation, so that states are read as without calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hf_kvplus.plans.onepass import AttentionCall, OnePass

# The first queries see hardly any keys that could be packed.
FIRST_QUERY = 64


def query_moments(
    run: OnePass, windows: Sequence[torch.Tensor], advance: Callable[[], None] = lambda: None
) -> list[torch.Tensor | None]:
    """Runs text through a model and sums the products of its queries.

    Args:
        run: The model, entered.
        windows: Token ids, each `(tokens,)`.
        advance: Called after each window.

    Returns:
        One entry a layer: `(kv_heads, head_dim, head_dim)` float32, the mean product over queries and the query heads
        of a KV head; `None` for layers without attention.
    """
    sums: dict[int, torch.Tensor] = {}

    def observe(layer: int, call: AttentionCall, output: torch.Tensor) -> torch.Tensor:
        heads = call.key.shape[1]
        seen = (
            call.query[0, :, FIRST_QUERY:].float().unflatten(0, (heads, -1)).flatten(1, 2)
        )  # (kv_heads, n, head_dim)
        product = seen.transpose(1, 2) @ seen / max(1, seen.shape[1])
        sums[layer] = sums.get(layer, 0) + product.cpu()
        return output

    run.observe = observe
    try:
        with torch.inference_mode():
            for token_ids in windows:
                run.reference(token_ids, torch.tensor([len(token_ids) - 1]))
                advance()
    finally:
        run.observe = None
    layers = run.model.config.get_text_config(decoder=True).num_hidden_layers
    return [sums[layer].clone() / len(windows) if layer in sums else None for layer in range(layers)]
