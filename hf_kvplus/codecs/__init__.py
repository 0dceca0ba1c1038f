"""Codecs: how states become bytes. Importing this package registers every codec module in the folder."""

import importlib
import pkgutil

from hf_kvplus.codecs.base import Codec, Packed, codecs

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Codec", "Packed", "codecs"]
