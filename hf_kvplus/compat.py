"""Which versions of transformers and torch this package runs with, and what differs between them, in one place.

The oldest transformers is the first one whose `generate` takes tokens back by a negative count after asking the cache
to record its past, and that maps layer types to layer classes: before, a window can't be rolled back and assisted
decoding with it goes wrong. docs/versions.md says more. Importing this module checks both versions.

Left out: padding before transformers 5.24, where attention doesn't tell a cache the positions; rows that are padded on
the left are answered correctly, but their sinks aren't exempt from quantization.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import transformers
from packaging.version import Version

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "DYNAMIC_LAYER_TYPE_MAPPING",
    "SUPPORTED_VERSIONS",
    "cache_keyword",
    "check_version",
    "layer_types_and_options",
]

# First version that will do, and first one that won't.
SUPPORTED_VERSIONS = {"transformers": ("5.14", "6"), "torch": ("2.6", "3")}


def check_version(package: str, found: str) -> None:
    """Checks one of the packages in `SUPPORTED_VERSIONS`.

    Raises:
        ImportError: If `found` is out of range; the message says what to install.
    """
    oldest, beyond = SUPPORTED_VERSIONS[package]
    release = Version(Version(found).base_version)
    if not Version(oldest) <= release < Version(beyond):
        raise ImportError(
            f"hf_kvplus runs with {package} from {oldest} up to, but not including, {beyond}, found {found}; "
            f"pip install '{package}>={oldest},<{beyond}'"
        )


check_version("transformers", transformers.__version__)
check_version("torch", torch.__version__)

from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs  # noqa: E402


def layer_types_and_options(config: PretrainedConfig) -> tuple[list[str], list[dict[str, Any]]]:
    """Returns each layer's type and the arguments of its cache layer.

    Before transformers 5.20 all layers share one set of arguments, and layers that read another layer's cache are
    missing from the list.
    """
    layer_types, options = get_layer_types_and_kwargs(config)
    if isinstance(options, dict):
        options = [dict(options) for _ in layer_types]
    return list(layer_types), list(options)


def layer_configs(config: PretrainedConfig) -> list[PretrainedConfig]:
    """Returns each layer's configuration, or the whole one where all layers are alike (always before 5.20)."""
    return getattr(config, "per_layer_config", None) or [config]


def is_croppable(layer: Any) -> bool:
    """Returns whether a layer can forget its newest tokens; before 5.17 transformers' layers don't say."""
    if hasattr(layer, "is_croppable"):
        return bool(layer.is_croppable)
    recurrent = getattr(layer, "recurrent_states", {})
    return hasattr(layer, "crop") and all(state is None for state in recurrent.values())


def cache_keyword(model: PreTrainedModel) -> str:
    """Returns what a model's `forward` calls its cache: `cache` from transformers 5.24 on, else `past_key_values`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
