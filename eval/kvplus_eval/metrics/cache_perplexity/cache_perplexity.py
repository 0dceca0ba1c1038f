"""Perplexity with a cache, and its change against the full cache with a paired interval, for `evaluate.load`.

Works offline from a checkout: `evaluate.load("eval/kvplus_eval/metrics/cache_perplexity")`. The figures are those that
`kvplus eval` reports, computed by the same code.
"""

import datasets
import evaluate
import torch

from kvplus_eval.measured import Measured
from kvplus_eval.metrics.perplexity import Perplexity

DESCRIPTION = """Perplexity, and its change against the full cache with a 95 % bootstrap interval paired by window."""
INPUTS = """
Args:
    predictions: Losses in nats with the cache under test, one list of floats a window of text.
    references: The same with the full cache.
Returns:
    perplexity, perplexity_change_percent, perplexity_change_low_percent, perplexity_change_high_percent; the last two
    are None for a single window.
"""


@evaluate.utils.file_utils.add_start_docstrings(DESCRIPTION, INPUTS)
class CachePerplexity(evaluate.Metric):
    """The metric as `evaluate` wants it."""

    def _info(self):
        losses = datasets.Sequence(datasets.Value("float64"))
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": losses, "references": losses}),
        )

    def _compute(self, predictions, references):
        mine, theirs = ([torch.tensor(row, dtype=torch.float64) for row in rows] for rows in (predictions, references))
        return Perplexity.summarize(Measured(positions={"loss_nats": mine, "reference_loss_nats": theirs}))
