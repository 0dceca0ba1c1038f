"""Strategy strings such as `k4v4` or `hf-quanto4`, turned into caches. One named recipe a file.

Importing this package registers every module in the folder.
"""

import importlib
import pkgutil

from hf_kvplus.strategies.base import StrategyInfo, strategies
from hf_kvplus.strategies.build import available_strategies, build_cache
from hf_kvplus.strategies.grammar import Part, parse, split_list

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Part", "StrategyInfo", "available_strategies", "build_cache", "parse", "split_list", "strategies"]
