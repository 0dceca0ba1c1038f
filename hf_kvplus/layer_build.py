"""Builds the layers of a cache: which class keeps a layer's states, with which parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from hf_kvplus.codecs import Codec
from hf_kvplus.compat import DYNAMIC_LAYER_TYPE_MAPPING
from hf_kvplus.hybrid import HybridKVLayer, RecurrentLayer
from hf_kvplus.layer import KVLayer
from hf_kvplus.policies import FullPolicy, NativeWindowPolicy, Policy, SinkWindowPolicy
from hf_kvplus.positions import check_window, distances_by_slots, sink_rotations
from hf_kvplus.window_layer import SinkWindowLayer
from hf_kvplus.window_masks import WindowMasks

# Layer types whose keys and values are stored here; a chunk (Llama 4) is a window to a cache, only its mask differs.
WINDOWED = ("sliding_attention", "chunked_attention", "hybrid_sliding")
HYBRID = ("hybrid", "hybrid_sliding")
# Layer types that store nothing: those that read another layer's states, and blocks without attention.
STATELESS = ("dummy",)
# Layer types whose state has a fixed size.
RECURRENT = ("linear_attention", "conv", "mamba")
HANDLED_LAYER_TYPES = ("full_attention", *HYBRID, *WINDOWED)


@dataclass(frozen=True)
class Packing:
    """How one layer packs blocks.

    Args:
        codecs: Key codec and value codec.
        residual_length: Most recent tokens that stay as they are.
        num_sink_tokens: First tokens of each row that do.
    """

    codecs: tuple[Codec, ...]
    residual_length: int
    num_sink_tokens: int

    @property
    def block_tokens(self) -> int:
        """Tokens in a block."""
        return self.codecs[0].block_tokens


def build_layer(
    layer_type: str, options: dict[str, Any], make_packing: Callable[[], Packing | None]
) -> tuple[Any, str]:
    """Returns one layer and what it does.

    Args:
        layer_type: As transformers calls it.
        options: What transformers' own layer of that type is made with.
        make_packing: Returns how blocks are packed, `None` if they aren't; asked of layers that are stored here.

    Raises:
        ValueError: If transformers has no layer of that type either.
    """
    if layer_type in RECURRENT:
        layer = RecurrentLayer(**options)
        return layer, layer.describe()
    if layer_type not in HANDLED_LAYER_TYPES:
        return _transformers_layer(layer_type, options)
    policy: Policy = FullPolicy()
    packing, window = make_packing(), ""
    if layer_type in WINDOWED:
        policy = NativeWindowPolicy(options["sliding_window"])
        window = f", the model's own window of {policy.sliding_window} tokens"
        if packing and policy.sliding_window <= packing.residual_length + packing.block_tokens:
            packing, window = None, f"{window}, which recent tokens fill"
    codecs: tuple[Codec, ...] = ()
    arguments: dict[str, Any] = {"policy": policy}
    if packing is not None:
        codecs = packing.codecs
        arguments["residual_length"] = packing.residual_length
        arguments["num_sink_tokens"] = 0 if policy.is_sliding else packing.num_sink_tokens
    if layer_type in HYBRID:
        layer = HybridKVLayer(*codecs, number_of_states=options["number_of_states"], **arguments)
    else:
        layer = KVLayer(*codecs, **arguments)
    return layer, layer.describe() + window


def _transformers_layer(layer_type: str, options: dict[str, Any]) -> tuple[Any, str]:
    """Returns the layer that transformers itself uses for `layer_type`, and what it does.

    Raises:
        ValueError: If transformers has none, or loads it together with the model only.
    """
    if layer_type not in DYNAMIC_LAYER_TYPE_MAPPING:
        raise ValueError(
            f"`config` has layers of type {layer_type!r}, for which transformers has no cache yet; load the model "
            "before its cache is made"
        )
    layer = DYNAMIC_LAYER_TYPE_MAPPING[layer_type](**options)
    return layer, f"kept by transformers' {type(layer).__name__}"


def window_layers(
    policy: SinkWindowPolicy,
    layer_types: list[str],
    config: PretrainedConfig,
    packing: Callable[[int], Packing | None],
) -> dict[int, SinkWindowLayer]:
    """Returns layers with sinks and a window, by their numbers, in the place of those with full attention.

    Args:
        policy: The window.
        layer_types: Of all layers, as transformers calls them.
        config: The configuration of the text decoder.
        packing: Returns how a layer packs blocks.

    Raises:
        ValueError: If the model has none, some of another kind that grows, or can't be windowed.
    """
    growing = {kind for kind in layer_types if kind not in ("full_attention", *STATELESS, *WINDOWED, *RECURRENT)}
    if growing or "full_attention" not in layer_types:
        kinds = f"layers of type {', '.join(sorted(growing or {*layer_types} - {*STATELESS}))}"
        what = f"{kinds}, which would keep growing" if growing else f"only {kinds}"
        if not growing and {*layer_types} <= {*WINDOWED, *STATELESS}:
            what = "a window of its own in every layer"
        raise ValueError(f"`window` is for layers with full attention, but this model has {what}; leave it out")
    check_window(config, policy)
    held = policy.sliding_window + policy.rollback_tokens
    rotations = sink_rotations(config) if policy.positions == "shifted" else [None] * len(layer_types)
    masks = WindowMasks(by_slots=distances_by_slots(config))
    layers = {}
    for index, layer_type in enumerate(layer_types):
        if layer_type != "full_attention":
            continue
        packed = packing(index)
        if packed and held <= packed.residual_length + packed.block_tokens:
            packed = None
        layers[index] = SinkWindowLayer(
            *(packed.codecs if packed else ()),
            policy=policy,
            masks=masks,
            rotation=rotations[index],
            residual_length=packed.residual_length if packed else 0,
            num_sink_tokens=packed.num_sink_tokens if packed else 0,
        )
    return layers
