"""The composed cache and its presets, for `model.generate(..., past_key_values=cache)`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from hf_kvplus.codecs import Codec
from hf_kvplus.fingerprint import config_fields
from hf_kvplus.hybrid import HybridKVLayer, repeat_recurrent_rows, select_recurrent_rows
from hf_kvplus.layer import KVLayer
from hf_kvplus.policies import FullPolicy, NativeWindowPolicy, Policy
from hf_kvplus.recipes import Quantization

# Layer types whose keys and values are stored here; a chunk (Llama 4) is a window to a cache, only its mask differs.
WINDOWED = ("sliding_attention", "chunked_attention", "hybrid_sliding")
HYBRID = ("hybrid", "hybrid_sliding")
HANDLED_LAYER_TYPES = ("full_attention", *HYBRID, *WINDOWED)


class KVPlusCache(Cache):
    """A cache of `KVLayer`s, composed from parts; every other class here is a preset of it.

    Layers of a type that isn't handled (linear attention, indexed, shared) keep transformers' own layer class. `plan`
    says what happens with each layer.

    Args:
        config: The model's configuration; of a multimodal or encoder-decoder model the text decoder's part is used.
        quantization: How states are quantized; `None` keeps them as they are.
        cross_attention: Whether this cache holds what a decoder reads of its encoder: every layer keeps all of it,
            whatever window the decoder has; see `KVPlusEncoderDecoderCache`.

    Raises:
        TypeError: If `config` isn't a transformers configuration.
        ValueError: If the configuration names no layers, or an option doesn't fit the model.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        quantization: Quantization | None = None,
        cross_attention: bool = False,
    ) -> None:
        decoder_config = text_config(config)
        self.is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        self.last_updated: int | None = None
        self.cross_attention = cross_attention
        self.config_fields = config_fields(decoder_config)
        self.quantization = quantization if quantization and quantization.packs else None
        for head_dim in config_head_dims(decoder_config) if self.quantization else ():
            for codec in self.quantization.codecs():
                codec.check(head_dim)
        layers, self.plan = [], []
        layer_types, layer_options = get_layer_types_and_kwargs(decoder_config)
        if cross_attention:
            layer_types, layer_options = ["full_attention"] * len(layer_types), [{}] * len(layer_types)
        for index, (layer_type, options) in enumerate(zip(layer_types, layer_options, strict=True)):
            layer, note = self._build_layer(layer_type, options)
            layers.append(layer)
            self.plan.append(f"layer {index} ({layer_type}): {note}")
        super().__init__(layers=layers)

    def _build_layer(self, layer_type: str, options: dict[str, Any]) -> tuple[Any, str]:
        """Returns one layer and what it does."""
        if layer_type not in HANDLED_LAYER_TYPES:
            return _transformers_layer(layer_type, options)
        policy: Policy = FullPolicy()
        quantization, window = self.quantization, ""
        if layer_type in WINDOWED:
            policy = NativeWindowPolicy(options["sliding_window"])
            window = f", the model's own window of {policy.sliding_window} tokens"
            if quantization and policy.sliding_window <= quantization.residual_length + quantization.block_tokens:
                quantization, window = None, f"{window}, which recent tokens fill"
        codecs: tuple[Codec, ...] = ()
        arguments: dict[str, Any] = {"policy": policy}
        if quantization is not None:
            codecs = quantization.codecs()
            arguments["residual_length"] = quantization.residual_length
            arguments["num_sink_tokens"] = 0 if policy.is_sliding else quantization.num_sink_tokens
        if layer_type in HYBRID:
            layer = HybridKVLayer(*codecs, number_of_states=options["number_of_states"], **arguments)
        else:
            layer = KVLayer(*codecs, **arguments)
        return layer, layer.describe() + window

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new states of one layer and returns all that its queries may see; see `KVLayer.update`.

        Raises:
            ValueError: If the states don't continue those held.
            RuntimeError: If an encoder-decoder model uses this one cache for the decoder and the encoder alike, which
                mixes up the two.
        """
        if self.is_encoder_decoder and layer_idx == self.last_updated and len(self.layers) > 1:
            raise RuntimeError(
                "an encoder-decoder model needs two caches, but stores its decoder's and its encoder's states in this "
                "one; pass `KVPlusEncoderDecoderCache(cache, KVPlusCache(config, cross_attention=True))`, or the pair "
                "that `build_cache(strategy, config)` makes"
            )
        self.last_updated = layer_idx
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def reset(self) -> None:
        """Forgets everything and gives the memory back; the next prompt may have another batch size."""
        self.last_updated = None
        for layer in self.layers:
            if type(layer) is LinearAttentionLayer:
                layer.__init__(number_of_states=layer.number_of_states)
            else:
                layer.reset()

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the batch rows `indices` (integers or a boolean mask) of every layer, in that order."""
        for layer in self.layers:
            if hasattr(layer, "batch_select_indices"):
                layer.batch_select_indices(indices)
            else:
                select_recurrent_rows(layer, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every batch row of every layer `repeats` times in place."""
        for layer in self.layers:
            if hasattr(layer, "batch_repeat_interleave"):
                layer.batch_repeat_interleave(repeats)
            else:
                repeat_recurrent_rows(layer, repeats)

    def options(self) -> dict[str, Any]:
        """Returns what `from_options` builds an empty cache like this one from, as plain values."""
        quantization = asdict(self.quantization) if self.quantization else None
        return {"quantization": quantization, "cross_attention": self.cross_attention}

    @classmethod
    def from_options(cls, config: PretrainedConfig, options: dict[str, Any]) -> KVPlusCache:
        """Builds an empty cache from what `options` returned.

        Raises:
            TypeError: If there is an option that this version doesn't know.
            ValueError: If an option is out of range or doesn't fit the model.
        """
        options = dict(options)
        quantization = options.pop("quantization")
        return KVPlusCache(config, quantization=Quantization(**quantization) if quantization else None, **options)

    def to(self, device: torch.device | str) -> KVPlusCache:
        """Moves every layer to `device` and returns the cache."""
        for layer in self.layers:
            if isinstance(layer, KVLayer):
                layer.to(device)
            else:
                _move_tensors(layer, torch.device(device))
        return self


class QuantizedCache(KVPlusCache):
    """Keys and values in 2 to 8 bits; sinks and the most recent tokens at full precision.

    Source: KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache, https://arxiv.org/abs/2402.02750, for the
    axes; differs in that blocks are append-only, the prompt's tail and the sinks stay at full precision and any head
    size, prompt length and batch fits.

    Args:
        config: The model's configuration.
        nbits: Bits per code for keys and values: 2, 3, 4, 5, 6 or 8.
        key_nbits: Bits of keys, if they differ; 16 leaves them unquantized.
        value_nbits: Bits of values, if they differ.
        group_size: Elements that share a scale and a zero point: tokens for keys, channels for values; `None` takes
            64, and for values the largest divisor of `head_dim` up to 64.
        residual_length: Most recent tokens that always stay at full precision.
        num_sink_tokens: First tokens of each row that always stay at full precision.
        recipe: How states are encoded; `"auto"` takes the best one measured for the width.

    Raises:
        TypeError: If `config` isn't a transformers configuration.
        ValueError: If an option is out of range or doesn't fit the model.

    Example:
        >>> cache = QuantizedCache(model.config, nbits=4)
        >>> model.generate(**inputs, past_key_values=cache, max_new_tokens=100)
    """

    def __init__(
        self,
        config: PretrainedConfig,
        nbits: int = 4,
        key_nbits: int | None = None,
        value_nbits: int | None = None,
        group_size: int | None = None,
        residual_length: int = 64,
        num_sink_tokens: int = 4,
        recipe: str = "auto",
    ) -> None:
        quantization = Quantization(
            key_nbits=nbits if key_nbits is None else key_nbits,
            value_nbits=nbits if value_nbits is None else value_nbits,
            group_size=group_size,
            residual_length=residual_length,
            num_sink_tokens=num_sink_tokens,
            recipe=recipe,
        )
        super().__init__(config, quantization=quantization)


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the part of a configuration that describes the text decoder.

    Raises:
        TypeError: If `config` isn't a transformers configuration.
        ValueError: If it names no decoder layers.
    """
    if not isinstance(config, PretrainedConfig):
        raise TypeError(
            f"`config` must be a transformers configuration, got {type(config).__name__}; pass `model.config`"
        )
    decoder_config = config.get_text_config(decoder=True)
    if not getattr(decoder_config, "num_hidden_layers", None):
        raise ValueError(
            f"`config` must name the decoder's layers, but {type(config).__name__} has no `num_hidden_layers`; pass "
            "the configuration of a model that generates text"
        )
    return decoder_config


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


def config_head_dims(config: PretrainedConfig) -> set[int]:
    """Returns the sizes of attention heads that a configuration names, none where it doesn't tell.

    Layers may differ (Gemma 4 has larger heads in its full-attention layers); latent attention names no size.
    """
    sizes = set()
    for layer_config in config.per_layer_config:
        heads, hidden_size = (getattr(layer_config, name, None) for name in ("num_attention_heads", "hidden_size"))
        if getattr(layer_config, "kv_lora_rank", None):
            continue
        if getattr(layer_config, "head_dim", None):
            sizes.add(int(layer_config.head_dim))
        elif isinstance(heads, int) and heads and hidden_size:
            sizes.add(int(hidden_size) // heads)
    return sizes


def _move_tensors(layer: Any, device: torch.device) -> None:
    """Moves the tensors of a transformers layer, also those in its lists and dictionaries, to `device`."""
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor):
            setattr(layer, name, value.to(device))
        elif isinstance(value, dict):
            setattr(layer, name, {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in value.items()})
        elif isinstance(value, list):
            setattr(layer, name, [v.to(device) if isinstance(v, torch.Tensor) else v for v in value])
        elif isinstance(value, torch.device):
            setattr(layer, name, device)
