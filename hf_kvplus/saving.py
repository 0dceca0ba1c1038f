"""A cache in a file: all that it holds, and what it belongs to.

The file is a safetensors file (see `cachefile`), about as large as the cache in memory without the room reserved for
growth. Loading builds an empty cache from the configuration and the stored options, and fills its layers: generation
goes on as if it had never stopped. Nothing is unpickled, so a file from somewhere else can't run code.
"""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import EncoderDecoderCache, PretrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from hf_kvplus.cachefile import DTYPE_NAMES, CacheFileError, read_metadata, write_file
from hf_kvplus.caches import KVPlusCache, text_config
from hf_kvplus.encoder_decoder import KVPlusEncoderDecoderCache
from hf_kvplus.fingerprint import (
    ModelFingerprint,
    config_fields,
    find_differences,
    fingerprint_model,
    hash_tokenizer,
    plain_json,
)
from hf_kvplus.layer import KVLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FILE_FORMAT = "hf_kvplus cache"
FORMAT_VERSION = "1"
SAVED_IDS = "input_ids"

AnyCache = KVPlusCache | EncoderDecoderCache


@dataclass(frozen=True)
class SavedCache:
    """What a file held.

    Args:
        cache: The cache.
        input_ids: `(batch, seq)` tokens that it was made from, where they were saved with it.
    """

    cache: AnyCache
    input_ids: torch.Tensor | None


def save_cache(
    cache: AnyCache,
    path: str | Path,
    *,
    model: PreTrainedModel | ModelFingerprint | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    input_ids: torch.Tensor | None = None,
) -> None:
    """Writes a cache to a file that `load_cache` goes on from, bit for bit.

    A file that was there is replaced in one step once the new one is on the disk; if anything stops the save, the old
    file stays whole.

    Args:
        cache: A cache of this package, or an `EncoderDecoderCache` of two of them.
        path: The file, for example `prompt.safetensors`.
        model: The model that filled it, whose weights are read for a digest; or what `fingerprint_model` made of it.
            Without, the file is tied to the configuration only.
        tokenizer: Its tokenizer, if loading with another one is to be refused.
        input_ids: `(batch, seq)` tokens that the cache was made from, to be kept beside it.

    Raises:
        TypeError: If `cache` is of another kind.
        NotImplementedError: If a layer holds something that a file can't; it's named.
        ValueError: If `input_ids` are fewer than the tokens in the cache.
        OSError: If the file can't be written.
    """
    tensors: dict[str, torch.Tensor] = {}
    parts = {name: _encode_cache(part, name, tensors) for name, part in _split(cache).items()}
    if input_ids is not None:
        if input_ids.dim() != 2 or input_ids.shape[1] < cache.get_seq_length():
            raise ValueError(
                f"`input_ids` must be (batch, seq) with at least the {cache.get_seq_length()} tokens in the cache, "
                f"got shape {tuple(input_ids.shape)}"
            )
        tensors[SAVED_IDS] = input_ids
    known = model if isinstance(model, ModelFingerprint) or model is None else fingerprint_model(model)
    described = {
        "model": known.as_fields() if known else {},
        "tokenizer": hash_tokenizer(tokenizer) if tokenizer is not None else None,
        "versions": _versions(),
        "parts": parts,
    }
    metadata = {name: json.dumps(value) for name, value in described.items()}
    metadata |= {"format": FILE_FORMAT, "format_version": FORMAT_VERSION}
    write_file(Path(path), tensors, metadata)


def load_cache(
    path: str | Path,
    config_or_model: PretrainedConfig | PreTrainedModel | AnyCache,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: torch.device | str | None = None,
) -> AnyCache:
    """Loads a cache; `model.generate(input_ids, past_key_values=cache)` goes on behind the tokens it holds.

    `input_ids` must contain the tokens that are in the cache, as always; they aren't computed again.

    Args:
        path: A file by `save_cache`.
        config_or_model: The model, whose weights are compared if the file has a digest of them; or its configuration,
            where the weights needn't be compared; or an empty cache with the options of the saved one, to be filled.
        tokenizer: The tokenizer, compared if the file has a digest of one.
        device: Where to load it; by default where the model is, layer by layer, otherwise host memory.

    Returns:
        The cache.

    Raises:
        FileNotFoundError: If there is no such file.
        CacheFileError: If it is truncated, damaged, not a saved cache, or made with something else than given here;
            the message names what differs.
        TypeError: If `config_or_model` is none of these.

    Warns:
        UserWarning: If torch, transformers or this package have another version than when it was saved: the stored
            states are as good, but later tokens may differ in rounding.
    """
    return load_saved(path, config_or_model, tokenizer=tokenizer, device=device).cache


def load_saved(
    path: str | Path,
    config_or_model: PretrainedConfig | PreTrainedModel | AnyCache,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: torch.device | str | None = None,
) -> SavedCache:
    """Loads a cache with the tokens saved beside it; arguments and errors as for `load_cache`."""
    path = Path(path)
    metadata = read_metadata(path, FILE_FORMAT)
    if metadata["format_version"] != FORMAT_VERSION:
        raise CacheFileError(
            f"{path}: `format_version` is {metadata['format_version']}, this version reads {FORMAT_VERSION}; save the "
            "cache again"
        )
    parts = json.loads(metadata["parts"])
    cache = _empty_cache(path, config_or_model, parts)
    different = _compare(metadata, config_or_model, tokenizer)
    for name, part in _split(cache).items():
        different += find_differences(_identity(parts[name]), _identity(_describe(part)), name)
    if different:
        raise CacheFileError(f"{path} was saved with something else: {'; '.join(different[:8])}")
    _warn_of_versions(path, json.loads(metadata["versions"]))
    with _open_tensors(path) as file:
        for name, part in _split(cache).items():
            places = layer_devices(config_or_model, len(part.layers), device)
            for index, (layer, saved) in enumerate(zip(part.layers, parts[name]["layers"], strict=True)):
                _restore_layer(layer, _decode(saved["state"], file, places[index]), places[index])
        ids = file.get_tensor(SAVED_IDS) if SAVED_IDS in file.keys() else None  # noqa: SIM118, not a dictionary
    if isinstance(cache, EncoderDecoderCache):
        # Made anew, because a pair notes on being made which of its layers already hold the encoder's states.
        cache = KVPlusEncoderDecoderCache(cache.self_attention_cache, cache.cross_attention_cache)
    return SavedCache(cache, ids if ids is None else ids.to(places[0]))


def _split(cache: Any) -> dict[str, KVPlusCache]:
    """Returns the caches of this package inside `cache` by name."""
    parts = {"cache": cache}
    if isinstance(cache, EncoderDecoderCache):
        parts = {"self_attention": cache.self_attention_cache, "cross_attention": cache.cross_attention_cache}
    for name, part in parts.items():
        if not isinstance(part, KVPlusCache):
            raise TypeError(
                f"`{name}` must be a cache of this package, got {type(part).__name__}; make one with "
                "`build_cache('fp', config)` or `QuantizedCache(config)`"
            )
    return parts


# What a cache is


def _describe(cache: KVPlusCache) -> dict[str, Any]:
    """Returns what a cache is, without what it holds."""
    described = {
        "config": cache.config_fields,
        "options": cache.options(),
        "layers": [{"kind": _describe_layer(layer)} for layer in cache.layers],
    }
    return plain_json(described)


def _identity(description: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a description that must be equal."""
    return {
        "config": description["config"],
        "layers": [layer["kind"] for layer in description["layers"]],
    }


def _describe_layer(layer: Any) -> dict[str, Any]:
    """Returns the class of a layer and, for our own, everything that decides what its bytes mean."""
    kind: dict[str, Any] = {"class": type(layer).__name__}
    if isinstance(layer, KVLayer):
        kind |= {name: _describe_part(codec) for name, codec in layer.codecs.items()}
        kind["policy"] = _describe_part(layer.policy)
        kind["residual_length"] = layer.residual_length
        kind["num_sink_tokens"] = layer.num_sink_tokens
    return kind


def _describe_part(part: Any) -> dict[str, Any]:
    """Returns the class and the options of a codec or policy."""
    return {"class": type(part).__name__, **dataclasses.asdict(part)}


def _versions() -> dict[str, str]:
    from hf_kvplus import __version__

    return {"hf_kvplus": __version__, "transformers": transformers.__version__, "torch": str(torch.__version__)}


def _warn_of_versions(path: Path, saved: dict[str, str]) -> None:
    different = find_differences(saved, _versions(), "")
    if different:
        warnings.warn(f"{path}: {'; '.join(different)}; later tokens may differ in rounding", stacklevel=4)


def _compare(metadata: dict[str, str], given: Any, tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    """Compares model and tokenizer with those of the file, as far as both sides are known."""
    different = []
    saved = json.loads(metadata["model"])
    if isinstance(given, torch.nn.Module) and "weights" in saved:
        # The hub revision says nothing more once the weights themselves are compared.
        different = find_differences(saved["weights"], fingerprint_model(given).weights, "model.weights")
    elif isinstance(given, torch.nn.Module) and "revision" in saved:
        different = find_differences(saved["revision"], getattr(given.config, "_commit_hash", None), "model.revision")
    tokenizer_here = hash_tokenizer(tokenizer) if tokenizer is not None else None
    tokenizer_saved = json.loads(metadata["tokenizer"])
    if tokenizer_here and tokenizer_saved:
        different += find_differences(tokenizer_saved, tokenizer_here, "tokenizer")
    return different


# From layers to tensors and JSON, and back


def _encode_cache(cache: KVPlusCache, name: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Returns the JSON part of a cache and adds its tensors to `tensors`."""
    described = _describe(cache)
    for index, (layer, entry) in enumerate(zip(cache.layers, described["layers"], strict=True)):
        where = f"{name}.layers.{index}"
        entry["state"] = _encode(_layer_state(layer), where, f"layer {index} ({type(layer).__name__})", tensors)
    return described


def _layer_state(layer: Any) -> dict[str, Any]:
    """Returns all that a layer holds: tensors, numbers and containers of them."""
    state = layer.state_dict() if isinstance(layer, KVLayer) else {}
    return {**state, "attributes": {name: vars(layer)[name] for name in _carried_attributes(layer)}}


def _carried_attributes(layer: Any) -> list[str]:
    """Names the attributes of transformers' making: all of its own layers, and the recurrent state of hybrids."""
    if not isinstance(layer, KVLayer):
        return [name for name, value in vars(layer).items() if not isinstance(value, PretrainedConfig)]
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        recurrent = vars(LinearAttentionLayer(number_of_states=layer.number_of_states))
        return [name for name in recurrent if name not in ("device", "dtype", "record_past")]
    return []


def _restore_layer(layer: Any, state: dict[str, Any], device: torch.device) -> None:
    """Fills an empty layer: keys and values first, since that begins with a reset, which forgets all else."""
    attributes = state.pop("attributes")
    if isinstance(layer, KVLayer):
        layer.load_state_dict(state, device)
    for name, value in attributes.items():
        setattr(layer, name, value)


def _encode(value: Any, name: str, layer: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Turns a value into JSON; tensors are put aside under their names.

    Raises:
        NotImplementedError: If there is something that a file can't hold.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor) and type(value) is torch.Tensor and value.dtype in DTYPE_NAMES:
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict) and all(isinstance(key, (int, str)) for key in value):
        return {"dict": [[key, _encode(item, f"{name}.{key}", layer, tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(item, f"{name}.{index}", layer, tensors) for index, item in enumerate(value)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": None}
    raise NotImplementedError(
        f"{layer} can't be saved: `{name.rpartition('.')[2]}` is a {type(value).__name__}, which a cache file can't "
        "hold"
    )


def _decode(value: Any, file: Any, device: torch.device) -> Any:
    """Turns JSON by `_encode` back into values, with tensors from `file` on `device`."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return file.get_tensor(content).to(device)
    if kind == "dict":
        return {key: _decode(item, file, device) for key, item in content}
    if kind in ("list", "tuple"):
        items = [_decode(item, file, device) for item in content]
        return items if kind == "list" else tuple(items)
    return device if kind == "device" else getattr(torch, content)


def _open_tensors(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise CacheFileError(f"{path} isn't a valid safetensors file: {error}") from error


# Where a loaded cache comes from and goes to


def _empty_cache(path: Path, given: Any, parts: dict[str, Any]) -> AnyCache:
    """Returns the empty cache that the file is loaded into."""
    if isinstance(given, (KVPlusCache, EncoderDecoderCache)):
        halves = _split(given)
        if set(halves) != set(parts):
            raise CacheFileError(f"{path} holds {' and '.join(parts)}, the cache given has {' and '.join(halves)}")
        if any(part.get_seq_length() for part in halves.values()):
            raise CacheFileError(f"`config_or_model` is a cache that already holds tokens; {path} needs an empty one")
        return given
    config = given.config if isinstance(given, torch.nn.Module) else given
    decoder = text_config(config)
    saved = next(iter(parts.values()))
    # Before a cache is built: options that fit one model may be errors for another.
    different = find_differences(saved["config"], config_fields(decoder), "config")
    if different:
        raise CacheFileError(f"{path} was saved with another model: {'; '.join(different[:8])}")
    try:
        built = [KVPlusCache.from_options(config, part["options"]) for part in parts.values()]
    except TypeError as error:
        raise CacheFileError(f"{path} has options that this version doesn't know: {error}") from error
    return built[0] if len(built) == 1 else KVPlusEncoderDecoderCache(*built)


def layer_devices(given: Any, count: int, device: torch.device | str | None) -> list[torch.device]:
    """Returns where each layer goes."""
    if device is not None or not isinstance(given, torch.nn.Module):
        return [torch.device(device or "cpu")] * count
    places = [given.device] * count
    decoder = given.get_decoder()
    for name, parameter in (decoder or given).named_parameters():
        number = re.search(r"\.(\d+)\.", name)
        if number and int(number[1]) < count:
            places[int(number[1])] = parameter.device
    return places
