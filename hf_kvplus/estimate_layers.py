"""Bytes of layers, each filled with tensors without content; see `hf_kvplus.estimate`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin, QuantizedLayer

from hf_kvplus.codecs import Codec
from hf_kvplus.codecs.base import Packed
from hf_kvplus.layer import KVLayer
from hf_kvplus.memory import find_tensors, storage_bytes
from hf_kvplus.probe import LayerStates, States
from hf_kvplus.window_layer import SinkWindowLayer

# Lengths at which transformers' quantized layers are really filled; what lies between grows in proportion.
SAMPLE_TOKENS = (64, 128)


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
class Filling:
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


def estimate_layers(layers: list[Any], profile: tuple[LayerStates, ...], fill: Filling) -> list[LayerEstimate]:
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


def _estimate_layer(layer: Any, states: LayerStates, fill: Filling) -> LayerEstimate:
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


def _filled_bytes(layer: Any, states: LayerStates, fill: Filling) -> int:
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


def _sampled_bytes(layer: Any, states: LayerStates, fill: Filling) -> int:
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
