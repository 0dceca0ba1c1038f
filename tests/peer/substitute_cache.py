"""A pytest plugin that runs transformers' own tests with this package's caches.

Where `generate`, a model's `forward` or a test makes a `DynamicCache` for a configuration, it gets the cache of the
strategy that the environment variable `KVPLUS_PEER_STRATEGY` names (`fp` by default), and where it makes a layer or
asks for a layer's class, ours. Steps: docs/transformers-tests.md.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from transformers import Cache, DynamicCache, EncoderDecoderCache, LlamaConfig
from transformers.cache_utils import (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from hf_kvplus import KVPlusCache, KVPlusEncoderDecoderCache, build_cache
from hf_kvplus.hybrid import HybridKVLayer, RecurrentLayer
from hf_kvplus.layer import KVLayer
from hf_kvplus.policies import NativeWindowPolicy

STRATEGY = os.environ.get("KVPLUS_PEER_STRATEGY", "fp")
PLACES = ("transformers.models.", "transformers.generation.", "tests.")
LAYER_TESTS = "tests.utils.test_cache_utils"
made: Counter[str] = Counter()
configs: WeakKeyDictionary[Cache, Any] = WeakKeyDictionary()


def make_cache(config: Any) -> Cache:
    """Returns our cache for a configuration; of a pair the decoder's half."""
    cache = build_cache(STRATEGY, config)
    cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    made[STRATEGY] += 1
    configs[cache] = config
    return cache


class Substituted(type):
    """Stands for `DynamicCache`."""

    def __call__(cls, *arguments: Any, config: Any = None, offloading: bool = False, **options: Any) -> Any:
        """Makes our cache for a configuration; for offloading and from given states, transformers' own."""
        if offloading or arguments or options:
            return DynamicCache(*arguments, config=config, offloading=offloading, **options)
        if config is None and sys._getframe(1).f_globals.get("__name__") != LAYER_TESTS:
            return DynamicCache()
        # Ours needs a configuration; tests without any use two layers.
        return make_cache(config or LlamaConfig(num_hidden_layers=2))

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (DynamicCache, KVPlusCache))


class SubstitutedCache(metaclass=Substituted):
    """The name that is found instead of `DynamicCache`."""


class SubstitutedPairs(type):
    """Stands for `EncoderDecoderCache`."""

    def __call__(cls, *halves: Any) -> EncoderDecoderCache:
        """Makes our pair; a half that was made for the encoder's states becomes one that keeps all of them."""
        if len(halves) == 2 and halves[1] in configs:
            encoder = halves[1]
            halves = halves[0], KVPlusCache(configs[encoder], quantization=encoder.quantization, cross_attention=True)
        return KVPlusEncoderDecoderCache(*halves) if len(halves) == 2 else EncoderDecoderCache(*halves)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, EncoderDecoderCache)


class SubstitutedPair(metaclass=SubstitutedPairs):
    """The name that is found instead of `EncoderDecoderCache`."""


def full_layer(**options: Any) -> KVLayer:
    """Makes the layer that stands for `DynamicLayer`."""
    return KVLayer()


def sliding_layer(sliding_window: int, **options: Any) -> KVLayer:
    """Makes the layer that stands for `DynamicSlidingWindowLayer`."""
    return KVLayer(policy=NativeWindowPolicy(sliding_window))


def hybrid_layer(**options: Any) -> HybridKVLayer:
    """Makes the layer that stands for `LinearAttentionAndFullAttentionLayer`."""
    return HybridKVLayer()


def sliding_hybrid_layer(sliding_window: int, **options: Any) -> HybridKVLayer:
    """Makes the layer that stands for `LinearAttentionAndSlidingWindowAttentionLayer`."""
    return HybridKVLayer(policy=NativeWindowPolicy(sliding_window))


LAYERS = (full_layer, sliding_layer, RecurrentLayer, hybrid_layer, sliding_hybrid_layer)


class SubstitutedTypes(type):
    """Stands for `type` in tests, which tell layers with a recurrent state by their exact class."""

    def __call__(cls, instance: Any, *rest: Any) -> type:
        """Returns transformers' class for those layers of ours, the class itself for all else."""
        if isinstance(instance, HybridKVLayer):
            sliding = instance.is_sliding
            return LinearAttentionAndSlidingWindowAttentionLayer if sliding else LinearAttentionAndFullAttentionLayer
        return LinearAttentionLayer if isinstance(instance, RecurrentLayer) else type(instance, *rest)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)


class SubstitutedType(metaclass=SubstitutedTypes):
    """The name that is found instead of `type`."""


def substitute(module: Any) -> None:
    """Puts our names into a module that has transformers'."""
    if module.__name__ == LAYER_TESTS:
        module.ALL_DYNAMIC_LAYERS = LAYERS
    elif module.__name__.startswith("tests."):
        module.type = SubstitutedType
    if vars(module).get("DynamicCache") is DynamicCache:
        module.DynamicCache = SubstitutedCache
    if vars(module).get("EncoderDecoderCache") is EncoderDecoderCache:
        module.EncoderDecoderCache = SubstitutedPair


def pytest_collection_finish(session: pytest.Session) -> None:
    """Puts the substitutes in place, except for the strategy `none`, which shows what fails without them."""
    if STRATEGY == "none":
        return
    for name, module in list(sys.modules.items()):
        if name.startswith(PLACES):
            substitute(module)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Tells how many caches were ours, so that a run which substituted nothing can't pass for a success."""
    terminalreporter.write_line(f"strategy {STRATEGY}: {made[STRATEGY]} caches of this package were made")
