"""What a strategy file registers: a name or a pattern, one line of meaning, and a function.

A composable strategy returns arguments of `KVPlusCache` and joins others by `+`; a standalone one returns a cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import Cache, PretrainedConfig

from hf_kvplus.registry import Registry
from hf_kvplus.strategies.grammar import Part


@dataclass(frozen=True)
class StrategyInfo:
    """What `available_strategies` tells of a strategy.

    Args:
        name: How it is written; upper-case letters in it stand for numbers.
        summary: One line of meaning.
        stored_bits: Nominal bits per element of the packed part, scales included, at head_dim 64 (`None` where the
            part says nothing of bits). What a cache really takes is measured, see `measure_memory`.
        composable: Whether it joins others by `+`.
    """

    name: str
    summary: str
    stored_bits: float | None
    composable: bool


@dataclass(frozen=True)
class Strategy:
    """A registered strategy.

    Args:
        info: What is told of it.
        pattern: Regular expression that a part's name must match as a whole.
        apply: `(part, config, max_length) -> Cache`, or for a composable strategy `(part) -> keyword arguments`.
    """

    info: StrategyInfo
    pattern: str
    apply: Callable[..., Any]

    def matches(self, name: str) -> bool:
        """Whether a part's name means this strategy."""
        return re.fullmatch(self.pattern, name) is not None


strategies: Registry[Strategy] = Registry("strategy")

Options = dict[str, Any]
CacheFunction = Callable[[Part, PretrainedConfig, "int | None"], Cache]
PartFunction = Callable[[Part], Options]


def standalone(name: str, summary: str, stored_bits: float | None = None) -> Callable[[CacheFunction], CacheFunction]:
    """Registers a function that returns a whole cache and can't be composed."""
    return _decorator(StrategyInfo(name, summary, stored_bits, composable=False), re.escape(name))


def composable(
    name: str, summary: str, stored_bits: float | None = None, pattern: str | None = None
) -> Callable[[PartFunction], PartFunction]:
    """Registers a function that returns arguments of `KVPlusCache`."""
    return _decorator(StrategyInfo(name, summary, stored_bits, composable=True), pattern or re.escape(name))


def _decorator(info: StrategyInfo, pattern: str) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        strategies.register(info.name)(Strategy(info, pattern, function))
        return function

    return decorate
