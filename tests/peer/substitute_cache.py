"""A pytest plugin that runs transformers' own tests with this package's caches.

`generate` makes a `DynamicCache` where it's given none; here it makes the cache of the strategy that the environment
variable `KVPLUS_PEER_STRATEGY` names (`fp` by default). Nothing else is changed. Steps: docs/transformers-tests.md.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import transformers.generation.utils as generation
from transformers import DynamicCache, EncoderDecoderCache

from hf_kvplus import KVPlusCache, KVPlusEncoderDecoderCache, build_cache

STRATEGY = os.environ.get("KVPLUS_PEER_STRATEGY", "fp")
made: list[str] = []


class Substituted(type):
    """Stands for `DynamicCache` in `generate`."""

    def __call__(cls, *arguments: Any, config: Any = None, offloading: bool = False, **options: Any) -> Any:
        """Makes our cache for a configuration; without one, and for offloading, transformers' own."""
        if config is None or offloading or arguments:
            return DynamicCache(*arguments, config=config, offloading=offloading, **options)
        cache = build_cache(STRATEGY, config)
        made.append(STRATEGY)
        return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (DynamicCache, KVPlusCache))


class SubstitutedCache(metaclass=Substituted):
    """The name that `generate` finds instead of `DynamicCache`."""


class SubstitutedPairs(type):
    """Stands for `EncoderDecoderCache` in `generate`."""

    def __call__(cls, *halves: Any) -> EncoderDecoderCache:
        """Makes the pair that can be cropped and repeated whatever its halves are."""
        return KVPlusEncoderDecoderCache(*halves)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, EncoderDecoderCache)


class SubstitutedPair(metaclass=SubstitutedPairs):
    """The name that `generate` finds instead of `EncoderDecoderCache`."""


def pytest_configure(config: pytest.Config) -> None:
    """Puts the substitutes in place, except for the strategy `none`, which shows what fails without them."""
    if STRATEGY != "none":
        generation.DynamicCache = SubstitutedCache
        generation.EncoderDecoderCache = SubstitutedPair


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Tells how many caches were ours, so that a run which substituted nothing can't pass for a success."""
    terminalreporter.write_line(f"strategy {STRATEGY}: generate made {len(made)} caches of this package")
