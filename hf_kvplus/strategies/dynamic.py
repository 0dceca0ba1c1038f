"""transformers' own default cache, the yardstick."""

from __future__ import annotations

from transformers import Cache, DynamicCache, PretrainedConfig

from hf_kvplus.strategies.base import standalone
from hf_kvplus.strategies.grammar import Part


@standalone("dynamic", "transformers' DynamicCache, full precision: the yardstick")
def dynamic(part: Part, config: PretrainedConfig, max_length: int | None) -> Cache:
    """Returns a `DynamicCache` that knows the model's layer types."""
    part.require_no_value()
    part.require_options()
    return DynamicCache(config=config)
