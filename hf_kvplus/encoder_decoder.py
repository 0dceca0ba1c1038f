"""The cache of a model with an encoder (T5, BART, Whisper): a half for the decoder, a half for the encoder's states.

transformers pairs two caches in an `EncoderDecoderCache`, but its `crop` and its row operations insist on its own
cache class. This pair takes any two caches that can do it, so that assisted decoding and row selection work.
"""

from __future__ import annotations

import torch
from transformers import Cache, EncoderDecoderCache


class KVPlusEncoderDecoderCache(EncoderDecoderCache):
    """Two caches for an encoder-decoder model.

    Args:
        self_attention_cache: Holds the decoder's own tokens, for example `QuantizedCache(config)`.
        cross_attention_cache: Holds what the decoder reads of the encoder, for example
            `KVPlusCache(config, cross_attention=True)`.

    Raises:
        TypeError: If one of them isn't a transformers cache.

    Example:
        >>> cache = KVPlusEncoderDecoderCache(QuantizedCache(config), KVPlusCache(config, cross_attention=True))
        >>> model.generate(**inputs, past_key_values=cache)
    """

    def __init__(self, self_attention_cache: Cache, cross_attention_cache: Cache) -> None:
        super().__init__(self_attention_cache, cross_attention_cache)

    @property
    def cross_attention_cache(self) -> Cache:
        """What the decoder reads of the encoder."""
        return self._cross_attention_cache

    @cross_attention_cache.setter
    def cross_attention_cache(self, cache: Cache) -> None:
        # T5Gemma puts an empty cache of the same class here, lest its decoder's windows hold for the encoder too; in a
        # cache for the encoder's states they never do, and the one at hand knows how it is quantized.
        held = vars(self).get("_cross_attention_cache")
        ours, made_for_it = (getattr(one, "cross_attention", None) for one in (held, cache))
        if not (ours and made_for_it is False and type(cache) is type(held) and cache.get_seq_length() == 0):
            self._cross_attention_cache = cache

    def check_dynamic_cache(self, method: str) -> None:
        """Refuses `method` where one of the two caches has no such operation.

        Raises:
            TypeError: If a layer of either cache lacks it.
        """
        for half in (self.self_attention_cache, self.cross_attention_cache):
            lacking = [layer for layer in half.layers if not hasattr(layer, method)]
            if lacking:
                raise TypeError(f"`{method}` isn't defined for {type(lacking[0]).__name__}, a layer of {half}")

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Returns the column of the decoder's next query, for masks; a window answers with a number of its own."""
        return self.self_attention_cache.get_query_offset(layer_idx)

    def activate_past_recording(self) -> None:
        """Keeps what leaves a window of the decoder until the next `crop`; older releases ask the pair itself."""
        self.self_attention_cache.activate_past_recording()

    @property
    def batch_size(self) -> int:
        """Rows held, or -1 before the first forward."""
        return self.self_attention_cache.batch_size

    @property
    def plan(self) -> list[str]:
        """What each layer of either half does with its states, one line a layer."""
        halves = {"decoder": self.self_attention_cache, "encoder": self.cross_attention_cache}
        return [f"{name} {line}" for name, half in halves.items() for line in getattr(half, "plan", ())]

    def to(self, device: torch.device | str) -> KVPlusEncoderDecoderCache:
        """Moves both caches to `device` and returns the pair."""
        self.self_attention_cache.to(device)
        self.cross_attention_cache.to(device)
        return self
