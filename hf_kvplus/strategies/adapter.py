"""Any other cache class as a strategy: `adapter:my_caches`, a module or file with a function that makes the cache.

So a cache from another package stands in the same tables under the same protocol, without a line of code here. The
module is imported when the cache is built, from where Python finds it or from a path that ends with `.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from transformers import Cache, PretrainedConfig

from hf_kvplus.strategies.base import standalone
from hf_kvplus.strategies.grammar import Part

DEFAULT_FUNCTION = "make_cache"
OPTIONS = ("function", "bits", "evicts")


@standalone(
    "adapter", "a cache of another package: adapter:my_caches calls make_cache(config, max_length) of that module"
)
def adapter(part: Part, config: PretrainedConfig, max_length: int | None) -> Cache:
    """Imports a module and lets its function make the cache.

    Args:
        part: `adapter:MODULE` or `adapter:FILE.py`. Options: `function=NAME`, `make_cache` if left out; `bits=4`, what
            the cache claims to store an element in, which the evaluation then holds it to; `evicts=yes` for a cache
            that forgets tokens on purpose, which the evaluation else refuses.
        config: The model's configuration.
        max_length: Tokens that it must hold, or None.

    Returns:
        The cache.

    Raises:
        ValueError: If the module or the function is missing, or `evicts` is neither yes nor no.
        TypeError: If what the function returns isn't a transformers cache.
    """
    part.require_options(*OPTIONS)
    if part.options.get("evicts", "no") not in ("yes", "no"):
        raise ValueError(f"strategy part `{part.text}`: `evicts` must be yes or no, got {part.options['evicts']!r}")
    if not part.value:
        raise ValueError(f"strategy part `{part.text}` needs a module or a .py file: write `adapter:my_caches`")
    module, name = _load(part.value, part.text), part.options.get("function", DEFAULT_FUNCTION)
    if not callable(getattr(module, name, None)):
        raise ValueError(
            f"strategy part `{part.text}`: `{part.value}` has no function `{name}`; define it, or name one"
        )
    cache = getattr(module, name)(config, max_length)
    if not isinstance(cache, Cache):
        raise TypeError(
            f"strategy part `{part.text}`: `{name}` must return a transformers Cache, got {type(cache).__name__}"
        )
    return cache


def _load(place: str, text: str) -> ModuleType:
    """Imports a module by name, or a file by path."""
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name != place.partition(".")[0] and error.name != place:
                raise
            raise ValueError(
                f"strategy part `{text}`: there is no module `{place}`; a file is named by its path"
            ) from error
    path = Path(place)
    if not path.is_file():
        raise ValueError(f"strategy part `{text}`: there is no file `{place}`")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
