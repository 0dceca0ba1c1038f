"""Bytes of a cache, told from a configuration: the cache itself is built and filled with tensors without content.

`profile_model` says what each layer of the model stores. A cache of the wanted strategy is then built as always and
gets states of those shapes on the `meta` device, so that growth, sinks, windows and blocks are those of the code that
runs. Only encoding is replaced: one real block tells what a codec makes of it. Equal layers are filled once.

The state that is told: a prompt came in one piece, and the last token was decoded. Left out: what a step needs beside
the cache, of which `dense_layer_bytes` tells the part that a cache is responsible for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Cache, PretrainedConfig

from hf_kvplus.caches import KVPlusCache
from hf_kvplus.checks import require_at_least, require_choice
from hf_kvplus.estimate_layers import Filling, LayerEstimate, estimate_layers
from hf_kvplus.probe import profile_model
from hf_kvplus.stores.readahead import AHEAD_BYTES
from hf_kvplus.stores.space import AUTO, CPU, DEFAULT_DISK_BUDGET_BYTES, DISK, MEMORY, Offload
from hf_kvplus.strategies.build import build_cache, find_strategy
from hf_kvplus.strategies.grammar import parse

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Every tier but the device itself; `hf-offloaded` keeps everything in host memory.
OFFLOAD_PART, HOST_OFFLOADED = "offload", "hf-offloaded"
# The most of one slot that blocks are read into: a slab in float32.
SLOT_BYTES = 1 << 21


@dataclass(frozen=True)
class MemoryEstimate:
    """What a cache takes.

    Args:
        strategy: The strategy.
        seq_len: Tokens in the cache.
        batch_size: Rows, beams included.
        dtype: Type of the model's states.
        layers: By layer; of an encoder-decoder model the decoder's own tokens first, then the encoder's.
        decoder_layers: Layers of the decoder.
        tier: Where an offloaded cache lives, `None` for the device.
        resident_layers: Layers of an offloaded cache that are on the device at a time.
        offload: Where blocks go, of our own offloaded caches.
        tensor_parallel: Devices that share the heads of each layer; all bytes are those of one of them.
        weight_bytes: Bytes of the model's weights in `dtype`.
    """

    strategy: str
    seq_len: int
    batch_size: int
    dtype: torch.dtype
    layers: tuple[LayerEstimate, ...]
    decoder_layers: int
    tier: str | None
    resident_layers: int
    weight_bytes: int
    offload: Offload | None = None
    tensor_parallel: int = 1

    @property
    def cache_bytes(self) -> int:
        """Bytes of the whole cache, wherever it lives."""
        return sum(layer.total_bytes for layer in self.layers)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of the whole cache divided by its tokens, `seq_len * batch_size`."""
        return self.cache_bytes / (self.seq_len * self.batch_size)

    @property
    def device_bytes(self) -> int:
        """Bytes that stay on the device: everything, or the layers that are there at a time.

        Of our own offloaded caches: what isn't packed, scratch to read blocks into, and the budget of tier `auto`.
        """
        if self.tier is None:
            return self.cache_bytes
        if self.offload is not None:
            stays = min(self.packed_bytes, self.offload.budget_bytes or 0) if self.tier == AUTO else 0
            return self.cache_bytes - self.packed_bytes + self.scratch_bytes + stays
        return sum(sorted((layer.total_bytes for layer in self.layers), reverse=True)[: self.resident_layers])

    @property
    def packed_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(layer.packed_bytes for layer in self.layers)

    @property
    def scratch_bytes(self) -> int:
        """Bytes that an offloaded cache reads blocks into: slots for those on their way, and what is read now."""
        if self.offload is None:
            return 0
        ahead = AHEAD_BYTES * self.offload.prefetch_layers + 2 * SLOT_BYTES
        largest = max((layer.packed_bytes for layer in self.layers), default=0)
        return min(ahead, largest * (1 + self.offload.prefetch_layers))

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory beside the device."""
        if self.offload is None:
            return self.cache_bytes if self.tier == CPU else 0
        budget = self.offload.budget_bytes
        if self.tier == DISK:
            return min(self.packed_bytes, DEFAULT_DISK_BUDGET_BYTES if budget is None else budget)
        beyond = max(0, self.packed_bytes - (budget or 0))
        return beyond if self.offload.host_bytes is None else min(beyond, self.offload.host_bytes)

    @property
    def disk_bytes(self) -> int:
        """Bytes in files."""
        if self.offload is None or self.tier == CPU:
            return 0
        if self.tier == DISK:
            return self.packed_bytes
        return max(0, self.packed_bytes - (self.offload.budget_bytes or 0) - self.host_bytes)

    @property
    def dense_layer_bytes(self) -> int:
        """Bytes of the largest layer at full precision, which a decoded layer takes for the time of its attention."""
        return max((layer.dense_bytes for layer in self.layers), default=0)

    def by_device(self, device_map: Mapping[int, str]) -> dict[str, int]:
        """Splits the cache over devices.

        Args:
            device_map: Decoder layer -> device; what a layer reads of an encoder lies with it.

        Returns:
            Device -> bytes of the cache there.

        Raises:
            ValueError: If a layer has no device.
        """
        missing = sorted(set(range(self.decoder_layers)) - set(device_map))
        if missing:
            raise ValueError(f"`device_map` must name a device for every layer, layer {missing[0]} has none")
        sizes: dict[str, int] = {}
        for index, layer in enumerate(self.layers):
            device = device_map[index % self.decoder_layers]
            sizes[device] = sizes.get(device, 0) + layer.total_bytes
        return sizes


def estimate_memory(
    config: PretrainedConfig,
    seq_len: int,
    batch_size: int = 1,
    strategy: str = "dynamic",
    dtype: torch.dtype | str | None = None,
    *,
    num_beams: int = 1,
    tensor_parallel: int = 1,
    encoder_tokens: int | None = None,
    prompt_tokens: int | None = None,
) -> MemoryEstimate:
    """Tells what a cache will take, from a configuration alone.

    Args:
        config: The model's configuration.
        seq_len: Tokens in the cache.
        batch_size: Sequences.
        strategy: A strategy string; see `available_strategies`.
        dtype: Type of the model's states; `None` takes the configuration's, or float32 where it names none.
        num_beams: Beams of each sequence, rows of their own.
        tensor_parallel: Devices that share the heads of each layer; the estimate is for one of them.
        encoder_tokens: Tokens of the encoder; `None` takes what the model fixes (Whisper), or `seq_len`.
        prompt_tokens: Tokens that come in one piece; the others are decoded one by one. `None`: all but the last.

    Returns:
        The estimate, equal to `measure_memory` of such a cache up to a few bytes a layer.

    Raises:
        TypeError: If `config` isn't a transformers configuration or a number isn't an integer.
        ValueError: If a number is out of range, or the strategy is unknown or doesn't fit the model.
        ImportError: If a baseline needs a package that isn't installed.
    """
    for name, value in (("seq_len", seq_len), ("batch_size", batch_size), ("num_beams", num_beams)):
        require_at_least(name, value, 1)
    require_at_least("tensor_parallel", tensor_parallel, 1)
    prompt_tokens = max(1, seq_len - 1) if prompt_tokens is None else prompt_tokens
    require_at_least("prompt_tokens", prompt_tokens, 1)
    if prompt_tokens > seq_len:
        raise ValueError(f"`prompt_tokens` must be at most seq_len={seq_len}, got {prompt_tokens}")
    profile = profile_model(config)
    kind = states_dtype(config, dtype)
    held, tier, resident, offload = _without_offloading(strategy)
    cache = build_cache(held, config, max_length=seq_len)
    _require_own_layers(held, cache)
    own, cross = _halves(cache)
    if offload is not None:
        # The same blocks, left in memory, tell their sizes.
        getattr(cache, "self_attention_cache", cache).shelve_layers(own, Offload(MEMORY))
    fill = Filling(batch_size * num_beams, prompt_tokens, seq_len, kind, tensor_parallel)
    layers = estimate_layers(own, profile.layers, fill)
    if profile.cross_layers:
        encoder = encoder_tokens or profile.encoder_tokens or seq_len
        cross_fill = replace(fill, prompt_tokens=encoder, seq_len=encoder)
        layers += estimate_layers(cross, profile.cross_layers, cross_fill)
    weights = profile.parameters * kind.itemsize // tensor_parallel
    return MemoryEstimate(
        strategy,
        seq_len,
        fill.rows,
        kind,
        tuple(layers),
        len(profile.layers),
        tier,
        resident,
        weights,
        offload,
        tensor_parallel,
    )


def states_dtype(config: PretrainedConfig, dtype: torch.dtype | str | None = None) -> torch.dtype:
    """Returns the type that a model's states have: the one asked for, else the configuration's, else float32.

    Raises:
        ValueError: If it isn't a type that models run in.
    """
    if dtype is None:
        dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(decoder=True), "dtype", None)
    if isinstance(dtype, str):
        require_choice("dtype", dtype, DTYPES)
        return DTYPES[dtype]
    return dtype or torch.float32


def _without_offloading(strategy: str) -> tuple[str, str | None, int, Offload | None]:
    """Takes a part that only says where bytes live out of a strategy.

    Returns:
        The strategy of the bytes, the tier, the layers that are on the device at a time, and where blocks go.
    """
    if strategy == HOST_OFFLOADED:
        return "dynamic", CPU, 2, None
    parts = parse(strategy)
    tiers = [part for part in parts if part.name == OFFLOAD_PART]
    if not tiers:
        return strategy, None, 0, None
    kept = "+".join(part.text for part in parts if part.name != OFFLOAD_PART) or "fp"
    offload = find_strategy(OFFLOAD_PART).apply(tiers[0])["offload"]
    return kept, offload.tier, 1 + offload.prefetch_layers, offload


def _require_own_layers(strategy: str, cache: Cache) -> None:
    """Checks that a cache of another package stores states by its layers, which is all that is filled here.

    Raises:
        ValueError: If it stores them in a way of its own.
    """
    parts = [getattr(cache, half, cache) for half in ("self_attention_cache", "cross_attention_cache")]
    known = (Cache.update, KVPlusCache.update)
    if parse(strategy)[0].name == "adapter" and any(type(part).update not in known for part in parts):
        raise ValueError(
            f"`strategy` `{strategy}` makes a {type(parts[0]).__name__}, whose own `update` can't be told from a "
            "configuration; fill one and measure it with `measure_memory`"
        )


def _halves(cache: Cache) -> tuple[list[Any], list[Any]]:
    """Returns the layers of a cache and of its encoder's half; a half without layers yet has plain ones."""
    if not hasattr(cache, "self_attention_cache"):
        return cache.layers, []
    return cache.self_attention_cache.layers, cache.cross_attention_cache.layers
