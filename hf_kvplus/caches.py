"""The composed cache, for `model.generate(..., past_key_values=cache)`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin
from transformers.utils import logging

from hf_kvplus.compat import layer_types_and_options
from hf_kvplus.configs import config_head_dims, text_config
from hf_kvplus.fingerprint import config_fields
from hf_kvplus.gqa.projection import DEFAULT_RECENT_TOKENS, DEFAULT_SINK_TOKENS, GQA
from hf_kvplus.hybrid import RecurrentLayer
from hf_kvplus.key_bias import STILL, KeyTurns, layer_key_turns
from hf_kvplus.layer import KVLayer
from hf_kvplus.layer_build import Packing, build_layer, window_layers
from hf_kvplus.layer_plan import LayerPlan
from hf_kvplus.offload_index import IndexWriter
from hf_kvplus.policies import SinkWindowPolicy
from hf_kvplus.recipes import Quantization
from hf_kvplus.stores.hostmemory import DensePool
from hf_kvplus.stores.space import MEMORY, Offload, Shelf, Shelves, Space
from hf_kvplus.window_layer import SinkWindowLayer
from hf_kvplus.window_masks import Uncomparable

# A window that recent tokens fill has nothing to offload.
SMALL_WINDOW_TOKENS = 128

logger = logging.get_logger(__name__)


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
        offloading: An argument of transformers' own caches, for models that make a cache of the class of another
            (T5Gemma); must be false.

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
        offloading: bool = False,
    ) -> None:
        if offloading:
            raise ValueError("`offloading` is for transformers' own caches; use `OffloadedCache`, or `offload` here")
        decoder_config = text_config(config)
        self.window = window
        self.gqa = gqa
        self.projection = gqa.resolve(decoder_config) if gqa else None
        self.is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        self.last_updated: int | None = None
        self.cross_attention = cross_attention
        self.config_fields = config_fields(decoder_config)
        self.quantization = _checked_quantization(quantization, decoder_config)
        self._head_dims: set[int] = set() if gqa else config_head_dims(decoder_config)
        # Latents of several heads are no heads of a size; where layers differ, a recipe goes by the smallest.
        self._head_dim = min(self._head_dims, default=None)
        layers, self.plan = [], []
        layer_types, layer_options = layer_types_and_options(decoder_config)
        self._key_turns = [STILL] * len(layer_types)
        if cross_attention:
            layer_types, layer_options = ["full_attention"] * len(layer_types), [{}] * len(layer_types)
        elif gqa:
            self._key_turns = [KeyTurns(reason="`gqa` stores latents, no channels that turn")] * len(layer_types)
        elif self.quantization:
            self._key_turns = layer_key_turns(decoder_config)
        for index, (layer_type, options) in enumerate(zip(layer_types, layer_options, strict=True)):
            layer, note = build_layer(layer_type, options, partial(self._packing, index))
            layers.append(layer)
            self.plan.append(f"layer {index} ({layer_type}): {note}")
        if window:
            for index, layer in window_layers(window, layer_types, decoder_config, self._packing).items():
                layers[index] = layer
                self.plan[index] = f"layer {index} ({layer_types[index]}): {layer.describe()}"
        if self.quantization or gqa:
            self._say_if_nothing_is_packed(layers, decoder_config.model_type)
        self.offload_options: Offload | None = None
        self.space: Space | None = None
        if offload is not None:
            self.shelve_layers(layers, offload)
        _share_dense(layers)
        super().__init__(layers=layers)
        if self.space:
            IndexWriter(self).attach()

    def _say_if_nothing_is_packed(self, layers: list[Any], model_type: str) -> None:
        """Tells once that a strategy which packs changes nothing on a model, and why."""
        if not any(isinstance(layer, KVLayer) and layer.codecs for layer in layers):
            kept = sorted({line.partition(": ")[2] for line in self.plan})
            logger.warning_once(
                f"this cache packs nothing of a model of type {model_type!r}: {'; '.join(kept)}. `fp` and `dynamic` "
                "store the same"
            )

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
        codecs = quantization.codecs(index, self._head_dim, self._key_turns[index]) if quantization else ()
        for codec in codecs:
            for head_dim in self._head_dims:
                codec.check(head_dim)
        if self.projection is not None:
            codecs = self.projection.codecs(index, codecs)
        return Packing(codecs, recent, sinks) if codecs else None

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Returns the column of the next query, for masks, with which every forward pass begins.

        Raises:
            RuntimeError: If the last forward pass broke off between two layers.
        """
        self._require_whole_passes()
        offset = super().get_query_offset(layer_idx)
        # transformers leaves out the mask of a prompt; with a window it is needed, which the sizes decide.
        return Uncomparable(offset) if isinstance(self.layers[layer_idx], SinkWindowLayer) else offset

    def _require_whole_passes(self) -> None:
        """Refuses a cache whose first layers have all seen more tokens than its last ones: later text would suffer."""
        ours = [(index, layer) for index, layer in enumerate(self.layers) if isinstance(layer, KVLayer)]
        lengths = {index: layer.cumulative_length for index, layer in ours}
        most, least = max(lengths.values(), default=0), min(lengths.values(), default=0)
        ahead = [index for index, length in lengths.items() if length == most]
        behind = [index for index, length in lengths.items() if length == least]
        # Layers that see something else than text (Mllama's, of images) lie between others.
        if most > least and len(ahead) + len(behind) == len(lengths) and ahead[-1] < behind[0]:
            raise RuntimeError(
                f"a forward pass broke off behind layer {ahead[-1]}, or this model has no layers behind it: the cache "
                f"holds {most} tokens up to there and {least} from layer {behind[0]} on; `reset()` it or use a new one"
            )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new states of one layer and returns all that its queries may see; see `KVLayer.update`.

        Raises:
            ValueError: If the states don't continue those held, or the model has more layers than the cache.
            RuntimeError: If an encoder-decoder model uses this one cache for the decoder and the encoder alike, which
                mixes up the two.
        """
        if self.is_encoder_decoder and layer_idx == self.last_updated and len(self.layers) > 1:
            raise RuntimeError(
                "an encoder-decoder model needs two caches, but stores its decoder's and its encoder's states in this "
                "one; pass `KVPlusEncoderDecoderCache(cache, KVPlusCache(config, cross_attention=True))`, or the pair "
                "that `build_cache(strategy, config)` makes"
            )
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"this cache has {len(self.layers)} layers and got states of layer {layer_idx}, so it is for another "
                "model; make one from this model's `config`"
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
