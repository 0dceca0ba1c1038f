"""One prompt, filled in once, and many continuations.

`generate` takes a cache at its word: it skips as many tokens of the prompt as the cache holds, without looking at
them. A cache that holds the whole prompt gets it appended a second time, and one from another prompt answers that one.
Both read well. So what a cache holds is written down beside it, compared, and cut back to what they have in common.

    cache    The | cat | sat | on | the | mat
    prompt   The | cat | sat | down
             kept ..........|           "down" is left for the model to read
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from hf_kvplus.cachefile import CacheFileError
from hf_kvplus.caches import KVPlusCache, text_config
from hf_kvplus.checks import require_at_least
from hf_kvplus.compat import cache_keyword, is_croppable
from hf_kvplus.fingerprint import ModelFingerprint, config_fields, find_differences
from hf_kvplus.layer import KVLayer
from hf_kvplus.saving import load_saved, save_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class ReusedPrefix:
    """What became of a cache that met a new prompt.

    Args:
        kept_tokens: Tokens at the front of the prompt that the cache still holds and that needn't be computed.
        dropped_tokens: Tokens that were in the cache and are no longer.
        new_tokens: Tokens of the prompt that the model has yet to read, at least 1.
    """

    kept_tokens: int
    dropped_tokens: int
    new_tokens: int

    def __str__(self) -> str:
        return f"kept {self.kept_tokens} tokens, dropped {self.dropped_tokens}, {self.new_tokens} left to read"


def reuse_prefix(
    cache: Cache,
    input_ids: torch.Tensor,
    cached_ids: torch.Tensor,
    *,
    config: PretrainedConfig | None = None,
) -> ReusedPrefix:
    """Cuts a cache back to the longest beginning that it has in common with a prompt.

    At least one token of the prompt is left for the model, which has to read something to answer.

    Args:
        cache: The cache; changed in place.
        input_ids: `(batch, seq)` the prompt that is to be continued, padding included.
        cached_ids: `(batch, seq)` the tokens that went into the cache, padding included: the prompt of the first call,
            or the sequences that `generate` returned (the last of them was never read by the model, so it may be one
            longer than the cache).
        config: Configuration of the model that is to go on, to be compared with the cache's.

    Returns:
        What was kept.

    Raises:
        ValueError: If batch sizes differ, the cache holds fewer or more tokens than `cached_ids` tells, its layers
            disagree about their number (tokens were removed by hand) or it belongs to another model.
        RuntimeError: If the cache can't be cut back, because a window has already dropped what would come back or a
            recurrent state can't be rewound. The cache is unchanged.
    """
    _check_ids(input_ids, "input_ids")
    _check_ids(cached_ids, "cached_ids")
    if config is not None:
        check_model(cache, config)
    held = checked_length(cache)
    rows = input_ids.shape[0]
    for name, number in (("cached_ids", cached_ids.shape[0]), ("cache", _rows(cache) if held else rows)):
        if number != rows:
            raise ValueError(
                f"`input_ids` has {rows} rows, but `{name}` has {number}; one prompt for many rows is what "
                "`PrefixCache.fork(rows)` is for"
            )
    if not held <= cached_ids.shape[1] <= held + 1:
        raise ValueError(
            f"the cache holds {held} tokens, but `cached_ids` has {cached_ids.shape[1]}; pass the ids that went into "
            "it, the padding included"
        )
    common = common_prefix(input_ids, cached_ids[:, :held].to(input_ids.device))
    kept = min(common, input_ids.shape[1] - 1)
    if kept < held:
        _crop(cache, held, kept)
    return ReusedPrefix(kept, held - kept, input_ids.shape[1] - kept)


class PrefixCache:
    """A cache with the tokens that are in it, to be continued many times.

    Args:
        cache: The cache; it belongs to this object from now on.
        input_ids: `(batch, seq)` the tokens that went into it, padding included.

    Raises:
        ValueError: If the cache doesn't hold just these tokens.

    Example:
        >>> prefix = PrefixCache.fill(model, build_cache("int4", model.config), document_ids)
        >>> for question_ids in questions:
        ...     input_ids = torch.cat([document_ids, question_ids], dim=1)
        ...     cache, reused = prefix.reuse(input_ids)
        ...     model.generate(input_ids, past_key_values=cache, max_new_tokens=100)
    """

    def __init__(self, cache: Cache, input_ids: torch.Tensor) -> None:
        _check_ids(input_ids, "input_ids")
        held = checked_length(cache)
        if (input_ids.shape[0], input_ids.shape[1]) != (_rows(cache), held):
            raise ValueError(
                f"`input_ids` has {input_ids.shape[0]} rows of {input_ids.shape[1]} tokens, but the cache holds "
                f"{_rows(cache)} rows of {held}; pass the ids that went into it"
            )
        self.cache = cache
        self.input_ids = input_ids.clone()

    @classmethod
    @torch.no_grad()
    def fill(
        cls,
        model: PreTrainedModel,
        cache: Cache,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        chunk_tokens: int = 2048,
    ) -> PrefixCache:
        """Lets a model read a prompt into an empty cache.

        Args:
            model: A decoder-only model.
            cache: An empty cache.
            input_ids: `(batch, seq)` the prompt.
            attention_mask: `(batch, seq)` 0 where it is padding, which belongs on the left.
            chunk_tokens: Tokens read at a time.

        Returns:
            The filled cache with its tokens.

        Raises:
            ValueError: If the cache isn't empty or the model has an encoder.
        """
        _check_ids(input_ids, "input_ids")
        require_at_least("chunk_tokens", chunk_tokens, 1)
        if cache.get_seq_length():
            raise ValueError(f"`cache` must be empty, but holds {cache.get_seq_length()} tokens")
        if model.config.is_encoder_decoder:
            raise ValueError("`model` must be a decoder alone; an encoder-decoder model reads its prompt elsewhere")
        check_model(cache, model.config)
        for first in range(0, input_ids.shape[1], chunk_tokens):
            last = min(first + chunk_tokens, input_ids.shape[1])
            options = _forward_options(model, attention_mask, first, last)
            model(input_ids[:, first:last], use_cache=True, **{cache_keyword(model): cache}, **options)
        return cls(cache, input_ids)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        device: torch.device | str | None = None,
    ) -> PrefixCache:
        """Loads what `save` wrote; arguments and errors as for `load_cache`."""
        saved = load_saved(path, model, tokenizer=tokenizer, device=device)
        if saved.input_ids is None:
            raise CacheFileError(f"{path} has no `input_ids` beside the cache; load it with `load_cache`")
        return cls(saved.cache, saved.input_ids)

    def save(
        self,
        path: str | Path,
        *,
        model: PreTrainedModel | ModelFingerprint | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Writes cache and tokens to a file; see `save_cache`."""
        save_cache(self.cache, path, model=model, tokenizer=tokenizer, input_ids=self.input_ids)

    def __len__(self) -> int:
        return self.input_ids.shape[1]

    def fork(self, repeats: int = 1) -> PrefixCache:
        """Returns a copy that shares nothing with this one, with each row repeated `repeats` times in place."""
        twin = PrefixCache(copy.deepcopy(self.cache), self.input_ids)
        if repeats != 1:
            twin.cache.batch_repeat_interleave(repeats)
            twin.input_ids = twin.input_ids.repeat_interleave(repeats, dim=0)
        return twin

    def reuse(
        self, input_ids: torch.Tensor, *, repeats: int = 1, config: PretrainedConfig | None = None
    ) -> tuple[Cache, ReusedPrefix]:
        """Returns a copy of the cache, cut back to what it has in common with a prompt; this one stays as it is.

        Args:
            input_ids: `(rows, seq)` the whole prompt. If there is one row here and several there, it's repeated.
            repeats: Beams, or `num_return_sequences`: `generate` repeats the rows of the prompt by itself, but not
                those of a cache.
            config: Configuration of the model that is to go on, to be compared with the cache's.

        Returns:
            The cache for `generate(input_ids, past_key_values=...)`, and what was kept.

        Raises:
            ValueError: As for `reuse_prefix`.
            RuntimeError: As for `reuse_prefix`; or if nothing is kept of a cache of transformers' own, whose rows
                can't be repeated then.
        """
        _check_ids(input_ids, "input_ids")
        twin = self.fork(input_ids.shape[0] if self.input_ids.shape[0] == 1 else 1)
        reused = reuse_prefix(twin.cache, input_ids, twin.input_ids, config=config)
        if repeats == 1:
            return twin.cache, reused
        if reused.kept_tokens == 0 and not isinstance(twin.cache, KVPlusCache):
            raise RuntimeError(
                f"the cache has nothing in common with the prompt, and an emptied {type(twin.cache).__name__} keeps "
                f"its rows, which can't become `repeats`={repeats} times as many; use a new cache and let the model "
                "read the whole prompt"
            )
        if reused.kept_tokens:
            twin.cache.batch_repeat_interleave(repeats)
        return twin.cache, reused


def common_prefix(left: torch.Tensor, right: torch.Tensor) -> int:
    """Returns how many columns of two `(batch, seq)` tensors are equal in every row, from the first on."""
    length = min(left.shape[1], right.shape[1])
    equal = (left[:, :length] == right[:, :length]).all(dim=0)
    return int(equal.long().cumprod(0).sum())


def checked_length(cache: Cache) -> int:
    """Returns how many tokens a cache holds.

    Raises:
        TypeError: If it isn't a cache of a decoder.
        ValueError: If its layers disagree, or tokens that the next one sees are missing at the front of a layer.
    """
    if not isinstance(cache, Cache) or isinstance(cache, EncoderDecoderCache):
        raise TypeError(
            f"`cache` must be the cache of a decoder, got {type(cache).__name__}; what an encoder-decoder cache holds "
            "depends on the encoder's input too, so it can't be compared by the decoder's tokens"
        )
    layers = {index: layer for index, layer in enumerate(cache.layers) if isinstance(layer, CacheLayerMixin)}
    lengths = {index: layer.get_seq_length() for index, layer in layers.items()}
    if len(set(lengths.values())) > 1:
        longest, shortest = max(lengths, key=lengths.__getitem__), min(lengths, key=lengths.__getitem__)
        raise ValueError(
            f"the cache's layers disagree: layer {longest} holds {lengths[longest]} tokens, layer {shortest} "
            f"{lengths[shortest]}; tokens were removed by hand or a forward pass broke off. Use a new cache"
        )
    for index, layer in layers.items():
        if not isinstance(layer, KVLayer) or not layer.is_initialized:
            continue
        visible = layer.policy.first_visible(layer.cumulative_length)
        if layer.first_stored > visible:
            raise ValueError(
                f"layer {index} of the cache has lost its first {layer.first_stored} tokens, but the next one sees "
                f"those from {visible} on; they were removed by hand. Use a new cache"
            )
    return next(iter(lengths.values()), 0)


def _rows(cache: Cache) -> int:
    """Returns the batch rows of a cache, 0 before the first forward; transformers' layers don't all tell their own."""
    for layer in cache.layers:
        if isinstance(layer, KVLayer) and layer.is_initialized:
            return layer.batch_size
        if not isinstance(layer, KVLayer) and isinstance(getattr(layer, "keys", None), torch.Tensor):
            return layer.keys.shape[0]
    return 0


def check_model(cache: Cache, config: PretrainedConfig) -> None:
    """Compares a cache with the configuration of the model that is to use it.

    Raises:
        ValueError: If it was made for another model; the message names what differs.
    """
    decoder = text_config(config)
    different = []
    if isinstance(cache, KVPlusCache):
        different = find_differences(cache.config_fields, config_fields(decoder), "config")
    elif cache.layers and len(cache.layers) != len(DynamicCache(config=config).layers):
        different = [f"it has {len(cache.layers)} layers, the model {len(DynamicCache(config=config).layers)}"]
    if different:
        text = "; ".join(different[:8]).replace(" in the file", " in the cache")
        raise ValueError(f"the cache was made for another model: {text}")


def _check_ids(ids: torch.Tensor, name: str) -> None:
    if ids.dim() != 2 or ids.shape[1] < 1 or ids.is_floating_point():
        raise ValueError(f"`{name}` must be token ids (batch, seq) with at least one token, got {tuple(ids.shape)}")


def _crop(cache: Cache, held: int, kept: int) -> None:
    """Cuts a cache back from `held` tokens to `kept`; with none left, our own can start anew whatever its layers.

    Raises:
        RuntimeError: If a layer can't go back that far; nothing was cut then.
    """
    # Not for transformers' own caches: in some versions `reset` leaves zeros behind, of the old length.
    if kept == 0 and isinstance(cache, KVPlusCache):
        cache.reset()
        return
    for index, layer in enumerate(cache.layers):
        reason = _obstacle(layer, held, kept)
        if reason:
            raise RuntimeError(
                f"the prompt leaves the cached tokens after {kept} of {held}, and layer {index} can't go back: "
                f"{reason}. Use a new cache and let the model read the whole prompt"
            )
    cache.crop(kept - held)


def _obstacle(layer: Any, held: int, kept: int) -> str:
    """Returns why a layer can't be cut back from `held` to `kept` tokens, or nothing."""
    if isinstance(layer, LinearAttentionCacheLayerMixin) and not (is_croppable(layer) and layer.record_past):
        return "its recurrent state holds all tokens at once"
    window = "a window has dropped what would become visible again"
    if isinstance(layer, KVLayer):
        return window if layer.policy.first_visible(kept) < layer.first_stored else ""
    if isinstance(layer, CacheLayerMixin) and not is_croppable(layer):
        return f"{type(layer).__name__} can't be cut"
    sliding_window = getattr(layer, "sliding_window", None)
    return window if sliding_window and held >= sliding_window and not getattr(layer, "record_past", False) else ""


def _forward_options(
    model: PreTrainedModel, attention_mask: torch.Tensor | None, first: int, last: int
) -> dict[str, Any]:
    """Returns the arguments for reading columns `first` to `last`, as far as the model's `forward` has them."""
    options: dict[str, Any] = {"logits_to_keep": 1}
    if attention_mask is not None:
        positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        options |= {"attention_mask": attention_mask[:, :last], "position_ids": positions[:, first:last]}
    return {name: value for name, value in options.items() if name in inspect.signature(model.forward).parameters}
