"""One forward pass through a cache, which everything that is measured here is made of."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from hf_kvplus.compat import cache_keyword


def step(model: PreTrainedModel, cache: Cache, token_ids: torch.Tensor, *, last_only: bool = False) -> torch.Tensor:
    """Runs one forward pass through a cache.

    Args:
        model: The model.
        cache: Its cache, which grows by the tokens fed.
        token_ids: Tokens, shape (tokens,), on any device.
        last_only: Compute the logits of the last position alone, where the model can.

    Returns:
        Logits, shape (tokens, vocab) or (1, vocab).
    """
    options: dict[str, Any] = {"logits_to_keep": 1} if last_only and "logits_to_keep" in _forward_names(model) else {}
    options[cache_keyword(model)] = cache
    output = model(input_ids=token_ids[None].to(model.device), use_cache=True, **options)
    return output.logits[0, -1:] if last_only else output.logits[0]


def _forward_names(model: PreTrainedModel) -> set[str]:
    """Returns the names of the arguments of the model's forward."""
    return set(inspect.signature(model.forward).parameters)
