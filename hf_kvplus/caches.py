"""The composed cache and its presets, for `model.generate(..., past_key_values=cache)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from hf_kvplus.codecs import Codec
from hf_kvplus.compat import DYNAMIC_LAYER_TYPE_MAPPING, layer_configs, layer_types_and_options
from hf_kvplus.fingerprint import config_fields
from hf_kvplus.gqa.projection import DEFAULT_RECENT_TOKENS, DEFAULT_SINK_TOKENS, GQA
from hf_kvplus.hybrid import HybridKVLayer, RecurrentLayer
from hf_kvplus.layer import KVLayer
from hf_kvplus.layer_plan import LayerPlan, load_plan
from hf_kvplus.offload_index import IndexWriter
from hf_kvplus.policies import FullPolicy, NativeWindowPolicy, Policy, SinkWindowPolicy
from hf_kvplus.positions import check_window, distances_by_slots, sink_rotations
from hf_kvplus.recipes import Quantization
from hf_kvplus.stores.hostmemory import DensePool
from hf_kvplus.stores.space import MEMORY, Offload, Shelf, Shelves, Space
from hf_kvplus.window_layer import SinkWindowLayer
from hf_kvplus.window_masks import Uncomparable, WindowMasks

# Layer types whose keys and values are stored here; a chunk (Llama 4) is a window to a cache, only its mask differs.
WINDOWED = ("sliding_attention", "chunked_attention", "hybrid_sliding")
HYBRID = ("hybrid", "hybrid_sliding")
# Layer types that store nothing: those that read another layer's states, and blocks without attention.
STATELESS = ("dummy",)
# Layer types whose state has a fixed size.
RECURRENT = ("linear_attention", "conv", "mamba")
HANDLED_LAYER_TYPES = ("full_attention", *HYBRID, *WINDOWED)
# A window that recent tokens fill has nothing to offload.
SMALL_WINDOW_TOKENS = 128


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


class KVPlusCache(Cache):
    """A cache of `KVLayer`s, composed from parts; every other class here is a preset of it.

    Layers of a type that isn't handled (indexed, compressed, shared) keep transformers' own layer class. `plan` says
    what happens with each layer.

    Args:
        config: The model's configuration; of a multimodal or encoder-decoder model the text decoder's part is used.
        quantization: How states are quantized, for every layer alike, by a plan, or as a sequence with one entry a
            layer; `None` keeps them as they are.
        window: Sinks and a window, for the layers that have full attention; `None` keeps every token.
        gqa: How fewer heads are stored; `None` stores all. See `GQACache`.
        cross_attention: Whether this cache holds what a decoder reads of its encoder: every layer keeps all of it,
            whatever window the decoder has; see `KVPlusEncoderDecoderCache`.
        offload: Where blocks live, if not on the device; see `OffloadedCache`.

    Raises:
        TypeError: If `config` isn't a transformers configuration.
        ValueError: If the configuration names no layers, or an option doesn't fit the model.
        OffloadError: If the folder of `offload` can't be used.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        quantization: Quantization | LayerPlan | Sequence[Quantization | None] | None = None,
        window: SinkWindowPolicy | None = None,
        gqa: GQA | None = None,
        cross_attention: bool = False,
        offload: Offload | Space | None = None,
    ) -> None:
        decoder_config = text_config(config)
        self.window = window
        self.gqa = gqa
        self.projection = gqa.resolve(decoder_config) if gqa else None
        self.is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        self.last_updated: int | None = None
        self.cross_attention = cross_attention
        self.config_fields = config_fields(decoder_config)
        self.quantization = _checked_quantization(quantization, decoder_config)
        for head_dim in config_head_dims(decoder_config) if self.quantization and not gqa else ():
            for layer_quantization in set(self._quantizations(1)) - {None}:
                for codec in replace(layer_quantization, calibration=None).codecs():
                    codec.check(head_dim)
        layers, self.plan = [], []
        layer_types, layer_options = layer_types_and_options(decoder_config)
        if cross_attention:
            layer_types, layer_options = ["full_attention"] * len(layer_types), [{}] * len(layer_types)
        for index, (layer_type, options) in enumerate(zip(layer_types, layer_options, strict=True)):
            layer, note = self._build_layer(index, layer_type, options)
            layers.append(layer)
            self.plan.append(f"layer {index} ({layer_type}): {note}")
        if window:
            self._put_windows(layers, layer_types, decoder_config)
        self.offload_options: Offload | None = None
        self.space: Space | None = None
        if offload is not None:
            self.shelve_layers(layers, offload)
        _share_dense(layers)
        super().__init__(layers=layers)
        if self.space:
            IndexWriter(self).attach()

    def shelve_layers(self, layers: list[Any], offload: Offload | Space) -> None:
        """Lets the blocks of all layers that form any live where `offload` says, before anything was stored."""
        self.offload_options = offload.options if isinstance(offload, Space) else offload
        if self.offload_options.tier != MEMORY:
            self.space = offload if isinstance(offload, Space) else Space(offload)
        shelves = Shelves(self.space) if self.space else None
        for index, layer in enumerate(layers):
            if not isinstance(layer, KVLayer):
                continue
            held = getattr(layer.policy, "sliding_window", None)
            if not layer.codecs and held and held + getattr(layer.policy, "rollback_tokens", 0) <= SMALL_WINDOW_TOKENS:
                continue
            layer.shelve(Shelf(shelves, index) if shelves else None)
            self.plan[index] += f"; {self.offload_options.describe()}"

    def _quantizations(self, layers: int) -> tuple[Quantization | None, ...]:
        """Returns how each layer is quantized."""
        return self.quantization if isinstance(self.quantization, tuple) else (self.quantization,) * layers

    def _packing(self, index: int) -> Packing | None:
        """Returns how a layer packs blocks, `None` if it doesn't.

        Raises:
            ValueError: If a codec doesn't fit, or a number is given twice.
        """
        quantization, gqa = self._quantizations(index + 1)[index], self.gqa
        if quantization is not None:
            recent, sinks = quantization.residual_length, quantization.num_sink_tokens
            if gqa and (gqa.residual_length, gqa.num_sink_tokens) != (None, None):
                raise ValueError("`gqa` with a quantization takes its recent tokens and sinks; give them there only")
        elif gqa is not None:
            recent = DEFAULT_RECENT_TOKENS if gqa.residual_length is None else gqa.residual_length
            sinks = DEFAULT_SINK_TOKENS if gqa.num_sink_tokens is None else gqa.num_sink_tokens
        codecs = quantization.codecs(index) if quantization else ()
        if self.projection is not None:
            codecs = self.projection.codecs(index, codecs)
        return Packing(codecs, recent, sinks) if codecs else None

    def _build_layer(self, index: int, layer_type: str, options: dict[str, Any]) -> tuple[Any, str]:
        """Returns one layer and what it does."""
        if layer_type in RECURRENT:
            layer = RecurrentLayer(**options)
            return layer, layer.describe()
        if layer_type not in HANDLED_LAYER_TYPES:
            return _transformers_layer(layer_type, options)
        policy: Policy = FullPolicy()
        packing, window = self._packing(index), ""
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

    def _put_windows(self, layers: list[Any], layer_types: list[str], config: PretrainedConfig) -> None:
        """Replaces the layers with full attention by layers with sinks and a window.

        Raises:
            ValueError: If the model has none, some of another kind that grows, or can't be windowed.
        """
        growing = {kind for kind in layer_types if kind not in ("full_attention", *STATELESS, *WINDOWED, *RECURRENT)}
        if growing or "full_attention" not in layer_types:
            kinds = f"layers of type {', '.join(sorted(growing))}, which would keep growing"
            raise ValueError(
                "`window` is for layers with full attention, but this model has "
                f"{kinds if growing else 'a window of its own in every layer'}; leave it out"
            )
        policy = self.window
        check_window(config, policy)
        held = policy.sliding_window + policy.rollback_tokens
        rotations = sink_rotations(config) if policy.positions == "shifted" else [None] * len(layers)
        masks = WindowMasks(by_slots=distances_by_slots(config))
        for index, layer_type in enumerate(layer_types):
            if layer_type == "full_attention":
                packing = self._packing(index)
                if packing and held <= packing.residual_length + packing.block_tokens:
                    packing = None
                layers[index] = SinkWindowLayer(
                    *(packing.codecs if packing else ()),
                    policy=policy,
                    masks=masks,
                    rotation=rotations[index],
                    residual_length=packing.residual_length if packing else 0,
                    num_sink_tokens=packing.num_sink_tokens if packing else 0,
                )
                self.plan[index] = f"layer {index} ({layer_type}): {layers[index].describe()}"

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Returns the column of the next query, for masks."""
        offset = super().get_query_offset(layer_idx)
        # transformers leaves out the mask of a prompt; with a window it is needed, which the sizes decide.
        return Uncomparable(offset) if isinstance(self.layers[layer_idx], SinkWindowLayer) else offset

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

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the newest tokens in every layer, or in none.

        Args:
            tokens_to_remove: Minus the number of tokens; 0 removes none, more than were seen all of them.

        Raises:
            ValueError: If positive.
            RuntimeError: If a layer no longer has what it would have to go back to.
        """
        # Before transformers 5.18 assisted decoding counts in tensors, which lengths and masks would take over.
        tokens_to_remove = int(tokens_to_remove)
        for layer in self.layers:
            if isinstance(layer, (KVLayer, RecurrentLayer)):
                layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)

    @property
    def is_linear(self) -> list[bool]:
        """Which layers hold a recurrent state alone; older transformers takes our hybrid layers for such."""
        return [
            isinstance(layer, LinearAttentionCacheLayerMixin) and not isinstance(layer, CacheLayerMixin)
            for layer in self.layers
        ]

    def reset(self) -> None:
        """Forgets everything and gives the memory back; the next prompt may have another batch size."""
        self.last_updated = None
        for layer in self.layers:
            layer.reset()
        if self.space:
            self.space.reset(self)

    @property
    def directory(self) -> str | None:
        """Folder of the files of an offloaded cache, `None` if there are none."""
        return str(self.space.directory.path) if self.space and self.space.directory else None

    def flush(self) -> None:
        """Waits until everything packed so far can be reopened, where tier `"disk"` keeps it.

        Raises:
            OffloadError: If it can't be written.
        """
        if self.space:
            self.space.flush()

    def close(self) -> None:
        """Forgets everything and removes the files of an offloaded cache, also for its copies."""
        self.last_updated = None
        for layer in self.layers:
            layer.reset()
        if self.space:
            self.space.close()

    def options(self) -> dict[str, Any]:
        """Returns what `from_options` builds an empty cache like this one from, as plain values."""
        plain = [asdict(layer) if layer else None for layer in self._quantizations(1)]
        quantization = plain if isinstance(self.quantization, tuple) else plain[0]
        window = asdict(self.window) if self.window else None
        options = {"quantization": quantization, "window": window, "cross_attention": self.cross_attention}
        if self.gqa:
            options["gqa"] = self.gqa.options(self.projection)
        if self.offload_options:  # a folder belongs to one cache on one machine
            options["offload"] = asdict(self.offload_options) | {"directory": None}
        return options

    @classmethod
    def from_options(
        cls, config: PretrainedConfig, options: dict[str, Any], *, space: Space | None = None
    ) -> KVPlusCache:
        """Builds an empty cache from what `options` returned; blocks live in `space` if it's given.

        Raises:
            TypeError: If there is an option that this version doesn't know.
            ValueError: If an option is out of range or doesn't fit the model.
        """
        options = dict(options)
        kinds = {"quantization": Quantization, "window": SinkWindowPolicy, "gqa": GQA, "offload": Offload}
        for name, kind in kinds.items():
            given = options.get(name)
            if isinstance(given, list):
                options[name] = tuple(kind(**layer) if layer else None for layer in given)
            else:
                options[name] = kind(**given) if given else None
        if space is not None:
            options["offload"] = space
        return KVPlusCache(config, **options)

    def to(self, device: torch.device | str) -> KVPlusCache:
        """Moves every layer to `device` and returns the cache."""
        for layer in self.layers:
            if isinstance(layer, (KVLayer, RecurrentLayer)):
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
        group_size: Elements that share a scale; `None` takes what the recipe measured best with, see `Quantization`.
        residual_length: Most recent tokens that always stay at full precision; `None` takes 64, and 128 at 2 bits.
        num_sink_tokens: First tokens of each row that always stay at full precision; `None` takes 4, and 8 at 2 bits.
        recipe: How states are encoded; `"auto"` takes the best one measured for the width.
        layer_plan: A plan by `kvplus plan` (its file, dictionary or `LayerPlan`), which takes the place of all other
            options.

    Raises:
        TypeError: If `config` isn't a transformers configuration.
        ValueError: If an option is out of range or doesn't fit the model, or the plan was made for another one.

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
        residual_length: int | None = None,
        num_sink_tokens: int | None = None,
        recipe: str = "auto",
        layer_plan: LayerPlan | Mapping[str, Any] | str | Path | None = None,
    ) -> None:
        if layer_plan is not None:
            super().__init__(config, quantization=load_plan(layer_plan))
            return
        quantization = Quantization(
            key_nbits=nbits if key_nbits is None else key_nbits,
            value_nbits=nbits if value_nbits is None else value_nbits,
            group_size=group_size,
            residual_length=residual_length,
            num_sink_tokens=num_sink_tokens,
            recipe=recipe,
        )
        super().__init__(config, quantization=quantization)


class SlidingWindowCache(KVPlusCache):
    """Sinks and a window: constant memory, however long the text; each query sees both and nothing else.

    Source: Efficient Streaming Language Models with Attention Sinks, https://arxiv.org/abs/2309.17453; differs in that
    sinks are moved along RoPE instead of the window, that rows have their own sinks, and that a prompt may come in any
    chunks. Layers that have a window of their own (Gemma, Mistral, gpt-oss) keep it.

    Args:
        config: The model's configuration.
        sliding_window: Latest tokens that a query sees, itself included.
        num_sink_tokens: First real tokens of each row that stay visible.
        positions: `"original"`, or `"shifted"` for text beyond the length that the model was trained for.
        nbits: Bits per code of the window's packed part: 2, 3, 4, 5, 6, 8, or 16 for none.
        prefill: `"windowed"` or `"dense"`; see `SinkWindowPolicy`.
        rollback_tokens: Tokens that can be cropped at any time without `activate_past_recording`.

    Raises:
        TypeError: If `config` isn't a transformers configuration.
        ValueError: If an option is out of range, or doesn't fit the model.

    Example:
        >>> cache = SlidingWindowCache(model.config, sliding_window=1020, positions="shifted")
        >>> model.generate(**inputs, past_key_values=cache, max_new_tokens=20_000)
    """

    def __init__(
        self,
        config: PretrainedConfig,
        sliding_window: int,
        num_sink_tokens: int = 4,
        positions: str = "original",
        nbits: int = 16,
        prefill: str = "windowed",
        rollback_tokens: int = 0,
    ) -> None:
        window = SinkWindowPolicy(sliding_window, num_sink_tokens, positions, prefill, rollback_tokens)
        quantization = Quantization(nbits, nbits, num_sink_tokens=num_sink_tokens)
        super().__init__(config, quantization=quantization, window=window)


def _checked_quantization(
    given: Quantization | LayerPlan | Sequence[Quantization | None] | None, config: PretrainedConfig
) -> Quantization | tuple[Quantization | None, ...] | None:
    """Returns how layers are quantized: alike, or one by one; `None` where nothing is.

    Raises:
        ValueError: If a plan is for another model or a sequence for another number of layers.
    """
    if given is None or isinstance(given, Quantization):
        return given if given and given.packs else None
    plan = given if isinstance(given, LayerPlan) else LayerPlan(tuple(given))
    plan.check(config)
    layers = tuple(layer if layer and layer.packs else None for layer in plan.layers)
    return layers if any(layers) else None


def _share_dense(layers: list[Any]) -> None:
    """Lets the layers that are decoded take turns with buffers for dense states, in each pass of the model."""
    decoding = [layer for layer in layers if isinstance(layer, KVLayer) and layer.codecs and not layer.shelf]
    pool = DensePool()
    for layer in decoding:
        layer.dense_pool, layer.is_last = pool, layer is decoding[-1]


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
    for layer_config in layer_configs(config):
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
