"""Our storage without quantization: equal to `dynamic` token for token, without its copies."""

from __future__ import annotations

from hf_kvplus.strategies.base import Options, composable
from hf_kvplus.strategies.grammar import Part


@composable("fp", "full precision in buffers that grow: equal to dynamic, without its copy of the cache per step")
def fp(part: Part) -> Options:
    """Returns no quantization."""
    part.require_no_value()
    part.require_options()
    return {"quantization": None}
