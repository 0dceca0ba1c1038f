"""Fewer stored heads: `gqa:2,projection=PATH`."""

from __future__ import annotations

from hf_kvplus.gqa.projection import GQA
from hf_kvplus.strategies.base import Options, composable
from hf_kvplus.strategies.grammar import Part


@composable("gqa", "gqa:N,projection=FILE: N heads' worth of latent keys and values, see `kvplus calibrate-gqa`")
def gqa(part: Part) -> Options:
    """Returns how fewer heads are stored.

    Raises:
        ValueError: If the number is missing or an option unknown.
    """
    part.require_options("projection", "recent", "sinks")
    heads = part.integer(None)
    if heads is None:
        raise ValueError(f"strategy part `{part.text}` needs the number of heads; write `gqa:2,projection=PATH`")
    return {
        "gqa": GQA(
            num_key_value_heads=heads,
            projection=part.options.get("projection"),
            residual_length=part.integer("recent"),
            num_sink_tokens=part.integer("sinks"),
        )
    }
