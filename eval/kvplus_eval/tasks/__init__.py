"""Tasks that plant a fact in a long context and ask for it, one file each, made on the fly."""

import importlib
import pkgutil

from kvplus_eval.tasks.base import TASKS, Haystack, Sample, answer_sample, make_samples

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["TASKS", "Haystack", "Sample", "answer_sample", "make_samples"]
