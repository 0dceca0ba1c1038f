"""From a strategy string to a cache."""

from __future__ import annotations

from transformers import Cache, DynamicCache, EncoderDecoderCache, PretrainedConfig, PreTrainedModel

from hf_kvplus.caches import KVPlusCache, text_config
from hf_kvplus.encoder_decoder import KVPlusEncoderDecoderCache
from hf_kvplus.layer_plan import check_origin
from hf_kvplus.registry import unknown_name
from hf_kvplus.strategies.base import Options, Strategy, StrategyInfo, strategies
from hf_kvplus.strategies.grammar import Part, parse

# What of a strategy also holds for the encoder's states; which tokens are kept isn't part of it.
ENCODER_OPTIONS = ("quantization",)


def build_cache(
    strategy: str,
    config: PretrainedConfig,
    *,
    max_length: int | None = None,
    model: PreTrainedModel | None = None,
) -> Cache:
    """Builds the cache that a strategy string describes.

    Args:
        strategy: Parts joined by `+`, for example `"k8v4"`; see `available_strategies`.
        config: The model's configuration.
        max_length: Tokens that a cache of fixed size must hold; only `hf-static` needs it.
        model: The model that will fill it, if it is at hand: a layer plan, a calibration or a head projection is then
            refused where it was made for other weights, and not only for another configuration. Reads all weights the
            first time.

    Returns:
        A cache for `model.generate(..., past_key_values=cache)`: a `KVPlusCache`, or transformers' own for `dynamic`
        and the `hf-` baselines. A model with an encoder gets a pair of them; a baseline's other half is transformers'
        own at full precision, as in its `generate`.

    Raises:
        ValueError: If the strategy is unknown (near matches are named), its parts contradict each other, or the
            model can't take it.
        TypeError: If `config` isn't a transformers configuration.
        ImportError: If a baseline needs a package that isn't installed.
    """
    parts = parse(strategy)
    found = [find_strategy(part.name) for part in parts]
    config_checked = text_config(config) and config
    alone = [part.name for part, entry in zip(parts, found, strict=True) if not entry.info.composable]
    if alone and len(parts) > 1:
        raise ValueError(f"strategy `{strategy}`: `{alone[0]}` stands alone and can't be joined with other parts")
    if alone:
        cache = found[0].apply(parts[0], config_checked, max_length)
        return EncoderDecoderCache(cache, DynamicCache()) if config.is_encoder_decoder else cache
    options = _merge(strategy, parts, found)
    if model is not None and options.get("quantization") is not None:
        check_origin(options["quantization"], model)
    cache = KVPlusCache(config_checked, **options)
    if model is not None and cache.projection is not None:
        cache.projection.check_model(model)
    if not config.is_encoder_decoder:
        return cache
    encoder_options = {key: value for key, value in options.items() if key in ENCODER_OPTIONS}
    return KVPlusEncoderDecoderCache(cache, KVPlusCache(config_checked, cross_attention=True, **encoder_options))


def _merge(strategy: str, parts: list[Part], found: list[Strategy]) -> Options:
    """Joins the arguments of all parts; two parts may not set the same one."""
    options: Options = {}
    for part, entry in zip(parts, found, strict=True):
        for key, value in entry.apply(part).items():
            if key in options:
                raise ValueError(f"strategy `{strategy}`: `{part.text}` sets {key} a second time; keep one of them")
            options[key] = value
    return options


def find_strategy(name: str) -> Strategy:
    """Returns the strategy that a part's name means.

    Raises:
        ValueError: If there is none.
    """
    for key in strategies:
        entry = strategies.get(key)
        if entry.matches(name):
            return entry
    raise ValueError(unknown_name("strategy", name, strategies.names()))


def available_strategies() -> list[StrategyInfo]:
    """Returns what strategies there are: name, one line of meaning, stored bits."""
    return [strategies.get(name).info for name in strategies]
