"""What is read off a model's configuration before a cache is made of it."""

from __future__ import annotations

from transformers import PretrainedConfig

from hf_kvplus.compat import layer_configs


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
