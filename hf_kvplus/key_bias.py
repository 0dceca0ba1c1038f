"""Which layers' keys have turning means taken out (see `hf_kvplus.codecs.rotary_mean`), read off a configuration.

A bias in the projection of keys may be a hundred times above everything else (Qwen2), and RoPE turns it. Whether a
model has such biases is asked of its own code: its attention is built without weights. How large they are only weights
tell, and a cache never sees those, so every layer of such a model stores a few means; `kvplus doctor --text` measures.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch
from transformers import PretrainedConfig

from hf_kvplus.codecs import Codec
from hf_kvplus.codecs.rotary_mean import RotaryMeanCodec
from hf_kvplus.codecs.turns import ChannelTurns
from hf_kvplus.compat import layer_types_and_options
from hf_kvplus.positions import rotated_layers
from hf_kvplus.rope import FULL, channel_turns, modeling_module

# What models call the projection that keys come from, alone or together with others.
KEY_PROJECTIONS = frozenset({"k_proj", "key", "key_proj", "query_key_value", "qkv_proj", "qkv", "Wqkv", "c_attn"})
# Not of text decoders, or not of what they have said so far.
OTHER_ATTENTION = ("Vision", "Audio", "Encoder", "Cross")
# Channels of a head for one pair whose mean is stored: 4 of 32 pairs at 64 channels.
CHANNELS_PER_MEAN = 16


@dataclass(frozen=True)
class KeyTurns:
    """What a configuration tells of one layer's keys.

    Args:
        turns: How their channels turn; `None` if it can't be told.
        biased: Whether they come from a projection with a bias and turn, so that means are taken out by default.
        reason: Why `turns` is `None`.
    """

    turns: ChannelTurns | None = None
    biased: bool = False
    reason: str = "no configuration was given"

    def default_means(self, head_dim: int, narrow: bool = False) -> int:
        """Returns how many means a block stores per head where nothing else was said.

        Args:
            head_dim: Channels per head.
            narrow: Whether a few are worth their bits even without biases.
        """
        if self.turns is None or not self.turns.inv_freq:
            return 0
        return max(1, head_dim // CHANNELS_PER_MEAN) if self.biased or narrow else 0

    def wrap(self, codec: Codec, means: int) -> Codec:
        """Returns a codec of keys that takes means out before `codec` sees them, or `codec` for none.

        Args:
            codec: The codec.
            means: Pairs of channels per head.

        Raises:
            ValueError: If it isn't known how channels turn.
        """
        if not means:
            return codec
        if self.turns is None:
            raise ValueError(f"`rotary_means`={means} can't be had: {self.reason}; leave it out")
        return RotaryMeanCodec(codec, self.turns, means)


# Keys that carry no position, or not by turning: a mean of theirs stays where it is.
STILL = KeyTurns(ChannelTurns())


def layer_key_turns(config: PretrainedConfig) -> list[KeyTurns]:
    """Returns what is known of the keys of each layer.

    Args:
        config: The configuration of a text decoder.
    """
    layer_types, _ = layer_types_and_options(config)
    rotated = rotated_layers(config) if FULL in layer_types else [True] * len(layer_types)
    biased = has_key_bias(config)
    known: dict[str, KeyTurns] = {}
    found = []
    for index, layer_type in enumerate(layer_types):
        if layer_type == FULL and index < len(rotated) and not rotated[index]:
            found.append(STILL)
            continue
        if layer_type not in known:
            known[layer_type] = _key_turns(config, layer_type, biased)
        found.append(known[layer_type])
    return found


def _key_turns(config: PretrainedConfig, layer_type: str, biased: bool) -> KeyTurns:
    """Returns what is known of the keys of one type of layers."""
    if not getattr(config, "rope_parameters", None):
        return STILL
    try:
        return KeyTurns(channel_turns(config, layer_type), biased)
    except ValueError as error:
        return KeyTurns(reason=str(error))


def has_key_bias(config: PretrainedConfig) -> bool:
    """Whether a model's projection of keys has a bias, as its own code builds it from a configuration.

    Args:
        config: The configuration of a text decoder.

    Returns:
        `False` also where the code can't be asked.
    """
    try:
        module = modeling_module(config)
    except ValueError:
        return False
    return any(_builds_key_bias(entry, config) for entry in _attention_classes(module))


@lru_cache(maxsize=64)
def _attention_classes(module: ModuleType) -> tuple[type[torch.nn.Module], ...]:
    """Returns the attention of a decoder's module."""
    return tuple(
        entry
        for name, entry in vars(module).items()
        if inspect.isclass(entry)
        and issubclass(entry, torch.nn.Module)
        and name.endswith("Attention")
        and entry.__module__ == module.__name__
        and not any(other in name for other in OTHER_ATTENTION)
    )


def _builds_key_bias(attention: type[torch.nn.Module], config: PretrainedConfig) -> bool:
    """Whether an attention module has a projection of keys with a bias; nothing is allocated."""
    options = {"layer_idx": 0} if "layer_idx" in inspect.signature(attention).parameters else {}
    try:
        with torch.device("meta"):
            built = attention(config, **options)
    except (AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError):
        return False  # it's made of something else than a configuration
    return any(
        getattr(part, "bias", None) is not None
        for name, part in built.named_modules()
        if name.rpartition(".")[2] in KEY_PROJECTIONS
    )
