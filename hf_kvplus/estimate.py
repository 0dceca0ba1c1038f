"""Bytes of a cache, told from a configuration: the cache itself is built and filled with tensors without content.

`profile_model` says what each layer of the model stores. A cache of the wanted strategy is then built as always and
gets states of those shapes on the `meta` device, so that growth, sinks, windows and blocks are those of the code that
runs. Only encoding is replaced: one real block tells what a codec makes of it. Equal layers are filled once.

The state that is told: a prompt came in one piece, and the last token was decoded. Left out: what a step needs beside
the cache, of which `dense_layer_bytes` tells the part that a cache is responsible for.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Cache, PretrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin, QuantizedLayer

from hf_kvplus.caches import KVPlusCache
from hf_kvplus.checks import require_at_least, require_choice
from hf_kvplus.codecs import Codec
from hf_kvplus.codecs.base import Packed
from hf_kvplus.layer import KVLayer
from hf_kvplus.memory import find_tensors, storage_bytes
from hf_kvplus.probe import LayerStates, States, profile_model
from hf_kvplus.stores.readahead import AHEAD_BYTES
from hf_kvplus.stores.space import AUTO, CPU, DEFAULT_DISK_BUDGET_BYTES, DISK, MEMORY, Offload
from hf_kvplus.strategies.build import build_cache, find_strategy
from hf_kvplus.strategies.grammar import parse
from hf_kvplus.window_layer import SinkWindowLayer

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Lengths at which transformers' quantized layers are really filled; what lies between grows in proportion.
SAMPLE_TOKENS = (64, 128)
# Every tier but the device itself; `hf-offloaded` keeps everything in host memory.
OFFLOAD_PART, HOST_OFFLOADED = "offload", "hf-offloaded"
# The most of one slot that blocks are read into: a slab in float32.
SLOT_BYTES = 1 << 21


@dataclass(frozen=True)
class LayerEstimate:
    """Bytes of one layer.

    Args:
        kind: What the layer stores, as the plan of a cache would say it.
        total_bytes: Everything it holds.
        dense_bytes: Its keys and values of all visible tokens at full precision, which attention needs at once.
        visible_tokens: Tokens that a query sees.
        packed_bytes: Blocks, of `total_bytes`; what offloading moves.
    """

    kind: str
    total_bytes: int
    dense_bytes: int
    visible_tokens: int
    packed_bytes: int = 0


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
    fill = _Filling(batch_size * num_beams, prompt_tokens, seq_len, kind, tensor_parallel)
    layers = _estimate_layers(own, profile.layers, fill)
    if profile.cross_layers:
        encoder = encoder_tokens or profile.encoder_tokens or seq_len
        cross_fill = replace(fill, prompt_tokens=encoder, seq_len=encoder)
        layers += _estimate_layers(cross, profile.cross_layers, cross_fill)
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


@dataclass(frozen=True)
class _Filling:
    """How layers are filled."""

    rows: int
    prompt_tokens: int
    seq_len: int
    dtype: torch.dtype
    tensor_parallel: int

    def states(self, states: States, tokens: int) -> torch.Tensor:
        """Returns keys or values of `tokens` tokens without content."""
        heads = -(-states.shape[0] // self.tensor_parallel)
        shape = (self.rows, heads, tokens, states.shape[1])
        return torch.empty(shape, dtype=states.dtype or self.dtype, device="meta")

    def bytes(self, states: States, tokens: int = 1) -> int:
        """Returns the bytes of states of fixed size, or of `tokens` tokens."""
        channels = torch.Size(states.shape).numel()
        return self.rows * tokens * channels * (states.dtype or self.dtype).itemsize


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


def _estimate_layers(layers: list[Any], profile: tuple[LayerStates, ...], fill: _Filling) -> list[LayerEstimate]:
    """Fills one layer of each kind and returns the bytes of all."""
    known: dict[Any, LayerEstimate] = {}
    estimates = []
    for index, states in enumerate(profile):
        layer = layers[index] if index < len(layers) else None
        kind = (type(layer), _options(layer), states)
        if kind not in known:
            known[kind] = _estimate_layer(layer, states, fill)
        estimates.append(known[kind])
    return estimates


def _options(layer: Any) -> str:
    """Returns what tells layers of one class apart."""
    if isinstance(layer, KVLayer):
        return f"{layer.describe()} {layer.policy} {layer.codecs}"
    plain = (int, float, str, type(None))
    return str(sorted((name, value) for name, value in vars(layer or object).items() if type(value) in plain))


def _estimate_layer(layer: Any, states: LayerStates, fill: _Filling) -> LayerEstimate:
    """Returns the bytes of one layer; `layer` is `None` for the plain layers of an encoder's half."""
    fixed = sum(fill.bytes(state) for state in states.fixed)
    indexer = fill.bytes(states.indexer, fill.seq_len) if states.indexer else 0
    if states.keys is None or states.values is None:
        return LayerEstimate(_kind(layer, states), fixed + indexer, 0, 0)
    visible = _visible_tokens(layer, fill.seq_len)
    dense = sum(fill.states(part, visible).nbytes for part in (states.keys, states.values))
    if layer is None:
        held = dense
    elif isinstance(layer, QuantizedLayer):
        held = _sampled_bytes(layer, states, fill)
    else:
        held = _filled_bytes(layer, states, fill)
    packed = sum(store.used_bytes for store in layer.packed.values()) if isinstance(layer, KVLayer) else 0
    return LayerEstimate(_kind(layer, states), held + fixed + indexer, dense, visible, packed)


def _kind(layer: Any, states: LayerStates) -> str:
    """Names what a layer stores."""
    if layer is None:
        return "cross-attention, full precision"
    if states.keys is None:
        return "recurrent state" if states.fixed else "nothing of its own"
    what = layer.describe() if isinstance(layer, KVLayer) else type(layer).__name__
    return f"{what} and recurrent state" if states.fixed else what


def _visible_tokens(layer: Any, seq_len: int) -> int:
    """Returns the tokens that a query sees."""
    longest = -1 if layer is None else layer.get_max_length()
    return min(seq_len, longest) if longest > 0 else seq_len


def _filled_bytes(layer: Any, states: LayerStates, fill: _Filling) -> int:
    """Fills a layer with states without content and counts its storages."""
    if isinstance(layer, KVLayer):
        for name, store in layer.packed.items():
            part = states.keys if name == "keys" else states.values
            store.codec = SizedCodec.of(store.codec, part.dtype or fill.dtype)
    with torch.no_grad():
        for tokens in (fill.prompt_tokens, *[1] * (fill.seq_len - fill.prompt_tokens)):
            if isinstance(layer, SinkWindowLayer):
                layer.get_mask_sizes(tokens)
                layer.masks.plan.built = True  # as the model does before its layers run
            if isinstance(layer, LinearAttentionCacheLayerMixin) and isinstance(layer, KVLayer):
                KVLayer.update(layer, fill.states(states.keys, tokens), fill.states(states.values, tokens))
            else:
                layer.update(fill.states(states.keys, tokens), fill.states(states.values, tokens))
    return sum(size for (device, _), size in storage_bytes(find_tensors(layer)).items() if device == "meta")


@dataclass(frozen=True)
class SizedCodec(Codec):
    """Stands for a codec where only sizes count: `encode` returns tensors of the right shapes without content.

    Args:
        block_tokens: Tokens in a block.
        codec: The codec it stands for.
        dtype: Type of the states.
    """

    codec: Codec | None = None
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, codec: Codec, dtype: torch.dtype) -> SizedCodec:
        """Returns the stand-in for `codec`."""
        return cls(codec.block_tokens, codec, dtype)

    def encode(self, states: torch.Tensor, valid: torch.Tensor | None = None) -> Packed:
        """Returns what the codec would, without content."""
        batch, heads, blocks, _, head_dim = states.shape
        shapes = _payload(self.codec, heads, head_dim, self.dtype)
        return {
            name: torch.empty((batch, shape[0], blocks, *shape[1:]), dtype=kind, device="meta")
            for name, shape, kind in shapes
        }

    def decode(self, packed: Packed, head_dim: int, out: torch.Tensor) -> None:
        """Does nothing: `out` has no content either."""

    def bits_per_element(self, head_dim: int) -> float:
        """Returns the codec's."""
        return self.codec.bits_per_element(head_dim)

    def describe(self) -> str:
        """Returns the codec's words."""
        return self.codec.describe()


@functools.lru_cache(maxsize=256)
def _payload(
    codec: Codec, heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[tuple[str, tuple[int, ...], torch.dtype], ...]:
    """Encodes one real block and returns names, shapes and types of its payload, without batch and block."""
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(1, heads, 1, codec.block_tokens, head_dim, generator=generator).to(dtype)
    return tuple((name, (part.shape[1], *part.shape[3:]), part.dtype) for name, part in codec.encode(block).items())


def _sampled_bytes(layer: Any, states: LayerStates, fill: _Filling) -> int:
    """Tells what one of transformers' quantized layers takes, in a straight line through two short payloads.

    A prompt is quantized whole; decoded tokens wait unquantized until there are `residual_length` of them.
    """
    waiting = (fill.seq_len - fill.prompt_tokens) % layer.residual_length
    total = 0
    for part, axis in ((states.keys, layer.axis_key), (states.values, layer.axis_value)):
        dtype = part.dtype or fill.dtype
        kind = (type(layer), layer.nbits, axis, layer.q_group_size)
        short, long = (_quantized_bytes(kind, tokens, part.shape[1], dtype) for tokens in SAMPLE_TOKENS)
        per_token = (long - short) / (SAMPLE_TOKENS[1] - SAMPLE_TOKENS[0])
        heads = fill.states(part, 1).shape[1]
        packed = short + per_token * (fill.seq_len - waiting - SAMPLE_TOKENS[0])
        total += round(fill.rows * heads * packed) + fill.states(part, waiting).nbytes
    return total


@functools.lru_cache(maxsize=256)
def _quantized_bytes(
    kind: tuple[type[QuantizedLayer], int, int, int], tokens: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Returns the bytes of the payload of one head's states in one of transformers' quantized layers."""
    layer_class, nbits, axis, group_size = kind
    layer = layer_class(nbits=nbits, axis_key=axis, axis_value=axis, q_group_size=group_size)
    states = torch.randn(1, 1, tokens, head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    layer.lazy_initialization(states, states)
    return sum(storage_bytes(find_tensors(layer._quantize(states, axis=axis))).values())
