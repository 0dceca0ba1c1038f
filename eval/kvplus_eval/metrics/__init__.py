"""The metrics, one file each. A new file that registers a metric shows up in the results and the report by itself."""

import importlib
import pkgutil

from kvplus_eval.metrics.base import METRICS, Column, Metric, column_units, score_positions, summarize

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["METRICS", "Column", "Metric", "column_units", "score_positions", "summarize"]
