"""Bytes of a cache, counted on every live tensor.

`measure_memory` walks everything reachable from a cache and counts each storage once, so nothing that a cache holds
can be left out. `hf_kvplus.estimate` tells the same figures beforehand, from a configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

from hf_kvplus.codecs.latent import LatentCodec
from hf_kvplus.layer import KVLayer
from hf_kvplus.projections import HeadProjection

# What holds no tensors, or such as belong to the model rather than to a cache.
UNSEARCHED = (str, bytes, int, float, type, torch.dtype, torch.device, HeadProjection)


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes of every tensor that a cache holds, by part.

    Args:
        packed_bytes: Codes, scales and zero points, also those of transformers' own quantized caches.
        full_precision_bytes: Sinks and recent tokens; of transformers' own caches all keys and values.
        reserved_bytes: Room that buffers hold for growth.
        other_bytes: Everything else, such as window sizes or recurrent states.
        elements: Elements of keys and values that the model has given the cache and may still read.
        packed_elements: Those of them that are packed.
        layer_bytes: Bytes of every live tensor by layer, of an encoder-decoder cache the decoder's half first. What
            layers share counts for the first of them.
        host_bytes: Bytes of `total_bytes` that are in host memory beside the device that reads them.
        disk_bytes: Bytes of blocks in files, not part of `total_bytes`; some may be in memory as well.
        shared_bytes: Head projections. Weights rather than content: all caches of a model share them, whatever their
            length, so they aren't part of `total_bytes`.
        away_bytes: Codes, scales and zero points that are in files alone, not part of `total_bytes`.
    """

    packed_bytes: int
    full_precision_bytes: int
    reserved_bytes: int
    other_bytes: int
    elements: int
    packed_elements: int
    layer_bytes: tuple[int, ...] = ()
    shared_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    away_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of every live tensor."""
        return self.packed_bytes + self.full_precision_bytes + self.reserved_bytes + self.other_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of every live tensor on the devices that read the cache."""
        return self.total_bytes - self.host_bytes

    @property
    def bits_per_element(self) -> float:
        """Bits per stored element with everything counted; 0 for an empty cache."""
        return 8 * self.total_bytes / self.elements if self.elements else 0.0

    @property
    def packed_bits_per_element(self) -> float:
        """Bits per packed element: codes, scales and zero points, wherever they are; 0 where nothing is packed."""
        return 8 * (self.packed_bytes + self.away_bytes) / self.packed_elements if self.packed_elements else 0.0


def measure_memory(cache: Cache) -> MemoryBreakdown:
    """Counts the bytes of every tensor reachable from a cache, transformers' own included.

    Args:
        cache: Any transformers cache.

    Returns:
        The bytes by part; `total_bytes` is their sum (without `shared_bytes`).

    Raises:
        TypeError: If `cache` isn't a transformers cache.
    """
    if not isinstance(cache, Cache):
        raise TypeError(f"`cache` must be a transformers Cache, got {type(cache).__name__}")
    total = sum(storage_bytes(find_tensors(cache)).values()) + _dense_pool_bytes(cache)
    packed = full_precision = reserved = elements = packed_elements = 0
    for layer in _attention_layers(cache):
        if isinstance(layer, KVLayer):
            stores = (*layer.packed.values(), layer.sinks, layer.recent)
            packed += sum(store.used_bytes for store in layer.packed.values())
            full_precision += layer.sinks.used_bytes + layer.recent.used_bytes
            reserved += sum(store.allocated_bytes - store.used_bytes for store in stores)
            layer_elements, layer_packed = _layer_elements(layer)
        else:
            payload = find_tensors([vars(layer).get("_quantized_keys"), vars(layer).get("_quantized_values")])
            both = (getattr(layer, name, None) for name in ("keys", "values"))
            # Codes that another package keeps there are no elements
            held = [one for one in both if isinstance(one, torch.Tensor) and one.is_floating_point()]
            packed += sum(storage_bytes(payload).values())
            full_precision += sum(storage_bytes(held).values())
            layer_packed = _quantized_elements(layer)
            layer_elements = layer_packed + sum(tensor.numel() for tensor in held)
        elements += layer_elements
        packed_elements += layer_packed
    other = total - packed - full_precision - reserved
    layers, shared = measure_layers(cache), sum(projection.nbytes for projection in _projections(cache))
    return MemoryBreakdown(
        packed, full_precision, reserved, other, elements, packed_elements, layers, shared, *_places(cache)
    )


def _dense_pool_bytes(cache: Any) -> int:
    """Returns the bytes of the buffers that layers are decoded into, which are no tensors meanwhile.

    Only offloaded layers keep any from one pass to the next.
    """
    layers = [layer for layer in _attention_layers(cache) if isinstance(layer, KVLayer)]
    pools = [layer.shelf.shelves.dense if layer.shelf else layer.dense_pool for layer in layers]
    return sum(pool.held_bytes for pool in {id(pool): pool for pool in pools if pool is not None}.values())


def _is_shelved(layer: Any) -> bool:
    return isinstance(layer, KVLayer) and layer.shelf is not None


def _places(cache: Any) -> tuple[int, int, int]:
    """Returns the bytes of offloaded blocks in host memory beside the device, in files, and of payload only there."""
    stores = [store for layer in _attention_layers(cache) if _is_shelved(layer) for store in layer.packed.values()]
    names = ("host_bytes", "disk_bytes", "away_bytes")
    host, disk, away = (sum(getattr(store, name) for store in stores) for name in names)
    return host, disk, away


def measure_layers(cache: Cache) -> tuple[int, ...]:
    """Counts the bytes that each layer holds; of an encoder-decoder cache the decoder's half comes first.

    Args:
        cache: Any transformers cache.

    Returns:
        Bytes by layer; what layers share counts for the first of them.
    """
    halves = [getattr(cache, half, None) for half in ("self_attention_cache", "cross_attention_cache")]
    layers = [layer for half in halves if half is not None for layer in half.layers] or cache.layers
    counted: set[tuple[str, int]] = set()
    sizes = []
    for layer in layers:
        storages = storage_bytes(find_tensors(layer))
        sizes.append(sum(size for key, size in storages.items() if key not in counted))
        counted.update(storages)
    return tuple(sizes)


def _attention_layers(cache: Any) -> Iterator[Any]:
    """Yields the layers that hold keys and values, also those of both halves of an encoder-decoder cache."""
    for half in ("self_attention_cache", "cross_attention_cache"):
        if hasattr(cache, half):
            yield from _attention_layers(getattr(cache, half))
    for layer in getattr(cache, "layers", ()):
        if hasattr(type(layer), "keys") or "keys" in vars(layer):
            yield layer


def _layer_elements(layer: KVLayer) -> tuple[int, int]:
    """Returns the elements a layer holds and those of them that are packed."""
    if not layer.is_initialized:
        return 0, 0
    per_token = layer.batch_size * sum(heads * channels for heads, channels in layer.shapes.values())
    packed = layer.packed_blocks * layer.block_tokens
    return per_token * (packed + len(layer.recent)), per_token * packed


def _projections(cache: Any) -> set[HeadProjection]:
    """Returns the head projections of a cache."""
    layers = [layer for layer in _attention_layers(cache) if isinstance(layer, KVLayer)]
    codecs = [codec for layer in layers for codec in layer.codecs.values()]
    return {codec.projection for codec in codecs if isinstance(codec, LatentCodec)}


def _quantized_elements(layer: Any) -> int:
    """Returns the elements behind the payload of one of transformers' quantized layers, 0 for its other layers."""
    payloads = (vars(layer).get("_quantized_keys"), vars(layer).get("_quantized_values"))
    return sum(layer._dequantize(payload).numel() for payload in payloads if payload is not None)


def find_tensors(root: Any) -> list[torch.Tensor]:
    """Returns every tensor reachable from `root` through attributes and containers, each once."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    stack = [root]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, UNSEARCHED):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found.append(item)
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack.extend(item)
        if hasattr(item, "__dict__") and not callable(item):
            stack.extend(vars(item).values())
    return found


def storage_bytes(tensors: list[torch.Tensor]) -> dict[tuple[str, int], int]:
    """Returns the bytes of each storage behind `tensors`, keyed by device and address; wrappers hold none."""
    sizes: dict[tuple[str, int], int] = {}
    for tensor in tensors:
        if type(tensor) is not torch.Tensor and hasattr(tensor, "_data"):
            continue  # a quantizer's wrapper: its inner tensors are found on their own
        storage = tensor.untyped_storage()
        if storage.nbytes():
            # A storage on the meta device has a size but no address.
            address = storage._cdata if storage.device.type == "meta" else storage.data_ptr()
            sizes[(str(storage.device), address)] = storage.nbytes()
    return sizes
