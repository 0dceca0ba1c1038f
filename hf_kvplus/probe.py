"""What a model stores in each layer and what its weights take, read off the model itself without any memory.

The model is built from its configuration on the `meta` device, where tensors have shapes and no content, and runs two
tokens. Whatever its layers put into a cache (keys and values of any head size, recurrent states, an indexer's keys, an
encoder's states) is then known exactly, for any architecture that transformers has. Layers that are built alike run
once. Left out: models whose code isn't in transformers.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, EncoderDecoderCache, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from hf_kvplus.caches import text_config
from hf_kvplus.compat import cache_keyword

DECODERS = ("AutoModelForCausalLM", "AutoModelForImageTextToText")
ENCODER_DECODERS = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")
PROBE_DTYPE = torch.bfloat16
# What models raise where a configuration is incomplete, or their code needs what tensors hold.
PROBE_ERRORS = (AssertionError, AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError)
PROBE_TOKENS, ENCODER_PROBE_TOKENS = 2, 3


@dataclass(frozen=True)
class States:
    """One tensor that a layer stores: its shape without batch and sequence, and its type.

    Args:
        shape: For keys and values `(kv_heads, head_dim)`; for a state of fixed size everything but the batch.
        dtype: `None` where it is the model's own, otherwise what it always is.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class LayerStates:
    """What one layer stores.

    Args:
        keys: Of every token; `None` where the layer stores none.
        values: Likewise.
        indexer: Keys of an indexer, `(channels,)`, of every token.
        fixed: Recurrent and convolution states.
    """

    keys: States | None = None
    values: States | None = None
    indexer: States | None = None
    fixed: tuple[States, ...] = ()


@dataclass(frozen=True)
class ModelProfile:
    """What a model stores and computes, by layer.

    Args:
        layers: What each decoder layer stores of its own tokens.
        cross_layers: What each decoder layer stores of the encoder's; empty without an encoder.
        encoder_tokens: Tokens of the encoder where the model fixes them, else `None`.
        parameters: Number of weights.
        active_parameters: Weights that one decoded token is multiplied with: no embeddings, of experts the chosen
            ones; no encoder, nor what makes keys and values of its states, nor towers for images and sounds.
    """

    layers: tuple[LayerStates, ...]
    cross_layers: tuple[LayerStates, ...] = ()
    encoder_tokens: int | None = None
    parameters: int = 0
    active_parameters: int = 0


class _ZeroValues(TorchDispatchMode):
    """Answers zeros where a model asks tensors without content for what they hold."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if tensor is None or tensor.device.type != "meta":
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return False if tensor.dtype == torch.bool else 0
        if func is torch.ops.aten.nonzero.default:
            return tensor.new_empty((0, tensor.dim()), dtype=torch.long)
        if func is torch.ops.aten._to_copy.default and torch.device(kwargs.get("device") or "meta").type == "cpu":
            return torch.zeros(tensor.shape, dtype=kwargs.get("dtype") or tensor.dtype, device="cpu")
        return func(*args, **kwargs)


def profile_model(config: PretrainedConfig) -> ModelProfile:
    """Finds out what a model stores.

    Args:
        config: The configuration of any language model that transformers has.

    Returns:
        The profile; the same one for an equal configuration.

    Raises:
        TypeError: If `config` isn't a transformers configuration.
        ValueError: If it isn't one of a language model whose code is in transformers, or the model can't be built
            from it.
    """
    text_config(config)
    return _profile(_Keyed(config))


class _Keyed:
    """A configuration that is hashed by its content."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config
        self.key = type(config).__name__ + json.dumps(config.to_dict(), sort_keys=True, default=str)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keyed) and self.key == other.key


@functools.lru_cache(maxsize=32)
def _profile(keyed: _Keyed) -> ModelProfile:
    config = keyed.config
    with _quiet():
        try:
            model = _build(config)
            own, cross, readers = _run(model, config)
        except PROBE_ERRORS as error:
            raise ValueError(
                f"a model of type {config.model_type!r} with this `config` can't be run without memory "
                f"({type(error).__name__}: {error}); check the configuration, or measure it with `measure_memory`"
            ) from error
    parameters = sum(weights.numel() for weights in model.parameters())
    return ModelProfile(
        layers=tuple(_layer_states(layer) for layer in own),
        cross_layers=tuple(_layer_states(layer) for layer in cross),
        encoder_tokens=cross[0].keys.shape[2] if cross and model.main_input_name == "input_features" else None,
        parameters=parameters,
        active_parameters=_active_parameters(model, _idle_weights(model, config, readers)),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers from warning about a model that only shapes are wanted of."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def _build(config: PretrainedConfig) -> PreTrainedModel:
    """Builds the model without memory.

    Raises:
        ValueError: If transformers has no generating model for the configuration.
    """
    for name in ENCODER_DECODERS if config.is_encoder_decoder else DECODERS:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            with torch.device("meta"):
                own = copy.deepcopy(config)
                return auto.from_config(own, dtype=PROBE_DTYPE, attn_implementation="eager").eval()
    raise ValueError(
        f"`config` must belong to a language model of transformers, got {type(config).__name__} (model type "
        f"{config.model_type!r}); a model with code of its own can't be estimated, measure it with `measure_memory`"
    )


def _run(model: PreTrainedModel, config: PretrainedConfig) -> tuple[list[Any], list[Any], set[int]]:
    """Runs two tokens; returns the cache's layers, those of the encoder's half, and the weights that filled these.

    Raises:
        ValueError: If the model takes something else than tokens or audio.
    """
    decoder_config = text_config(config)
    own, cross = DynamicCache(config=decoder_config), DynamicCache()
    encoder_decoder = bool(config.is_encoder_decoder)
    arguments = {cache_keyword(model): EncoderDecoderCache(own, cross) if encoder_decoder else own}
    tokens = torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device="meta")
    arguments["decoder_input_ids" if encoder_decoder else "input_ids"] = tokens
    if model.main_input_name == "input_features":
        frames = (1, config.num_mel_bins, 2 * config.max_source_positions)
        arguments["input_features"] = torch.zeros(frames, dtype=PROBE_DTYPE, device="meta")
    elif encoder_decoder:
        arguments["input_ids"] = torch.zeros(1, ENCODER_PROBE_TOKENS, dtype=torch.long, device="meta")
    twins = _skip_twins(model, own)
    read = _note_tokens(model) if encoder_decoder else {}
    with torch.no_grad(), _ZeroValues(), torch.device("meta"):
        model(use_cache=True, **arguments)
    halves = own.layers, list(cross.layers)
    for half in halves:
        for index, original in twins.items():
            if index < len(half):
                half[index] = half[original]
            elif index == len(half):
                half.append(half[original])
    readers = set()
    if halves[1]:
        blocks = _decoder_blocks(model, len(own.layers))
        readers = _encoder_readers(blocks, twins, read, halves[1][0].keys.shape[2])
    return own.layers, halves[1], readers


def _skip_twins(model: PreTrainedModel, cache: DynamicCache) -> dict[int, int]:
    """Makes decoder layers that are built like an earlier one return that one's output without running.

    Returns:
        Layer -> the earlier layer that it is like.
    """
    blocks = _decoder_blocks(model, len(cache.layers))
    first: dict[Any, int] = {}
    twins: dict[int, int] = {}
    outputs: dict[int, Any] = {}
    for index, block in enumerate(blocks):
        weights = tuple((name, tuple(weight.shape)) for name, weight in block.named_parameters())
        stored = cache.layers[index]
        kind = (type(block), weights, type(stored), getattr(stored, "sliding_window", None))
        original = first.setdefault(kind, index)
        if original == index:
            block.register_forward_hook(functools.partial(_keep_output, outputs, index))
        else:
            twins[index] = original
            block.forward = functools.partial(_kept_output, outputs, original)
    return twins


def _keep_output(outputs: dict[int, Any], index: int, module: Any, args: Any, output: Any) -> None:
    outputs[index] = output


def _kept_output(outputs: dict[int, Any], index: int, *args: Any, **kwargs: Any) -> Any:
    return outputs[index]


def _note_tokens(model: PreTrainedModel) -> dict[torch.nn.Module, int]:
    """Returns a dictionary into which the decoder's products write how many tokens they were given."""
    read: dict[torch.nn.Module, int] = {}
    for module in model.get_decoder().modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(functools.partial(_keep_tokens, read))
    return read


def _keep_tokens(read: dict[torch.nn.Module, int], module: torch.nn.Module, args: Any, output: Any) -> None:
    read[module] = output.shape[-2] if output.dim() > 1 else 1


def _encoder_readers(
    blocks: list[torch.nn.Module], twins: dict[int, int], read: dict[torch.nn.Module, int], encoder_tokens: int
) -> set[int]:
    """Returns the addresses of the decoder's weights that only the encoder's states are multiplied with."""
    found = {module for module, tokens in read.items() if tokens == encoder_tokens}
    for index, original in twins.items():
        for name, module in blocks[original].named_modules():
            if module in found:
                found.add(blocks[index].get_submodule(name))
    return {id(module.weight) for module in found}


def _idle_weights(model: PreTrainedModel, config: PretrainedConfig, readers: set[int]) -> set[int]:
    """Returns the addresses of weights that no decoded token is multiplied with."""
    if not config.is_encoder_decoder and text_config(config) is config:
        return set()
    head = model.get_output_embeddings()
    decoding = {id(weight) for weight in model.get_decoder().parameters()}
    decoding |= set() if head is None else {id(head.weight)}
    return {id(weight) for weight in model.parameters()} - decoding | readers


def _decoder_blocks(model: PreTrainedModel, count: int) -> list[torch.nn.Module]:
    """Returns the decoder's layers in order, nothing where they aren't one list of modules."""
    decoder = model.get_decoder()
    lists = [module for module in decoder.children() if isinstance(module, torch.nn.ModuleList)]
    fitting = [list(module) for module in lists if len(module) == count]
    return fitting[0] if len(fitting) == 1 else []


def _layer_states(layer: Any) -> LayerStates:
    """Reads one layer of the cache that the model has filled."""
    keys, values, indexer = (getattr(layer, name, None) for name in ("keys", "values", "indexer_keys"))
    fixed = [
        state
        for group in ("conv_states", "recurrent_states")
        for state in getattr(layer, group, {}).values()
        if state is not None
    ]
    per_head = [
        None if states is None else States((states.shape[1], states.shape[3]), _own_dtype(states))
        for states in (keys, values)
    ]
    return LayerStates(
        *per_head,
        indexer=None if indexer is None else States((indexer.shape[2],), _own_dtype(indexer)),
        fixed=tuple(States(tuple(state.shape[1:]), _own_dtype(state)) for state in fixed),
    )


def _own_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Returns the type of a tensor that doesn't follow the model's, which the probe ran in."""
    return None if tensor.dtype == PROBE_DTYPE else tensor.dtype


def _active_parameters(model: PreTrainedModel, idle: set[int]) -> int:
    """Counts the weights that one decoded token is multiplied with; `idle` holds the addresses of others."""
    config = text_config(model.config)
    experts = next((n for name in EXPERT_COUNTS if (n := getattr(config, name, None))), 0)
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    head = model.get_output_embeddings()
    lookups = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding) and (head is None or module.weight is not head.weight)
    }
    total = 0
    for weight in model.parameters():
        if weight.dim() < 2 or id(weight) in lookups or id(weight) in idle:
            continue
        of_experts = weight.dim() == 3 and experts and weight.shape[0] == experts
        total += weight.numel() * chosen // experts if of_experts else weight.numel()
    return total


EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
