"""transformers' own quantized, offloaded and static caches, as peers to compare with.

`hqq` runs with axis 1, its fair setting: with its default axis 0 a group mixes tokens and batch rows and the error of
stored tokens grows with every re-quantization.
"""

from __future__ import annotations

import importlib.util

import torch
import transformers
from transformers import Cache, DynamicCache, PretrainedConfig, StaticCache, cache_utils
from transformers import QuantizedCache as TransformersQuantizedCache

from hf_kvplus.strategies.base import CacheFunction, standalone
from hf_kvplus.strategies.grammar import Part


def _register_quantized(backend: str, nbits: int, module: str, package: str, axis: int) -> CacheFunction:
    name = f"hf-{backend}{nbits}"

    @standalone(
        name, f"transformers' QuantizedCache, {backend}, {nbits} bits, groups of 64 (axis {axis})", nbits + 0.5
    )
    def build(part: Part, config: PretrainedConfig, max_length: int | None) -> Cache:
        part.require_no_value()
        part.require_options()
        if importlib.util.find_spec(module) is None:
            raise ImportError(f'strategy `{name}` needs {package}: pip install "hf_kvplus[peers]"')
        return TransformersQuantizedCache(backend, config, nbits=nbits, axis_key=axis, axis_value=axis)

    return build


for _nbits in (4, 2):
    _register_quantized("quanto", _nbits, "optimum.quanto", "optimum-quanto", axis=0)
for _nbits in (8, 4, 3, 2):
    _register_quantized("hqq", _nbits, "hqq", "hqq", axis=1)


@standalone("hf-fp8", "transformers' QuantizedCache, float8, one scale per tensor", 8.0)
def fp8(part: Part, config: PretrainedConfig, max_length: int | None) -> Cache:
    """Returns transformers' cache in 8-bit floating point.

    Raises:
        ValueError: If the installed transformers is too old to have it.
    """
    part.require_no_value()
    part.require_options()
    if not hasattr(cache_utils, "Fp8QuantizedLayer"):
        raise ValueError(
            f"strategy `hf-fp8` needs a transformers that has a float8 cache, as 5.24 does, found "
            f"{transformers.__version__}; use `hf-hqq8`"
        )
    return TransformersQuantizedCache("fp8", config)


@standalone("hf-offloaded", "transformers' DynamicCache with layers in host memory (needs CUDA)")
def offloaded(part: Part, config: PretrainedConfig, max_length: int | None) -> Cache:
    """Returns transformers' offloaded cache.

    Raises:
        ValueError: If there is no CUDA device, which transformers' implementation needs.
    """
    part.require_no_value()
    part.require_options()
    if not torch.cuda.is_available():
        raise ValueError("strategy `hf-offloaded` needs a CUDA device, and there is none; use `dynamic` or `fp`")
    return DynamicCache(config=config, offloading=True)


@standalone("hf-static", "transformers' StaticCache, allocated whole: hf-static:MAX_LENGTH")
def static(part: Part, config: PretrainedConfig, max_length: int | None) -> Cache:
    """Returns transformers' cache of fixed size.

    Raises:
        ValueError: If no length is given.
    """
    part.require_options()
    length = part.integer(None, max_length)
    if length is None:
        raise ValueError(
            "strategy `hf-static` needs its length in tokens: write `hf-static:4096` or pass `max_length`"
        )
    return StaticCache(config=config, max_cache_len=length)
