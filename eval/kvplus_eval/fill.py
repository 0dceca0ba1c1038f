"""Fills a cache with random states instead of those of a prompt that a model computes.

What a cache holds and what reading it needs depends on how many states there are, not on what they say. Computing a
prompt of 8192 tokens takes half a minute, these states a second. Left out: layers that keep anything but keys and
values, as recurrent ones do.
"""

from __future__ import annotations

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_kvplus.compat import cache_keyword


def fill_cache(model: PreTrainedModel, cache: Cache, tokens: int) -> None:
    """Stores normal random keys and values in every layer of an empty cache, as one prompt.

    Args:
        model: The model that the cache is for; one token goes through it, which tells the shapes.
        cache: An empty cache.
        tokens: Tokens of the prompt.

    Raises:
        ValueError: If a layer of the model keeps something else.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for index, (keys, values) in enumerate(_shapes(model)):
            states = (
                torch.randn((*shape[:2], tokens, shape[3]), generator=generator).to(model.device, model.dtype)
                for shape in (keys, values)
            )
            cache.update(*states, index)


def _shapes(model: PreTrainedModel) -> list[tuple[torch.Size, torch.Size]]:
    """Returns the shapes of one token's keys and values in each layer, `(1, kv_heads, 1, head_dim)`."""
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), **{cache_keyword(model): cache})
    shapes = []
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or hasattr(layer, "recurrent_states"):
            raise ValueError(
                f"random states can't stand for what layer {index} of {type(model).__name__} keeps "
                f"({type(layer).__name__}); let the model compute its context (`computed=True`)"
            )
        shapes.append((keys.shape, values.shape))
    return shapes
