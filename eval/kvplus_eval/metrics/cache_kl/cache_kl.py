"""KL divergence between the next-token distributions with a full cache and with another, for `evaluate.load`.

Works offline from a checkout: `evaluate.load("eval/kvplus_eval/metrics/cache_kl")`. The figures are those that
`kvplus eval` reports, computed by the same code.
"""

import datasets
import evaluate
import torch

from kvplus_eval.measured import Measured
from kvplus_eval.metrics.kl import KLDivergence

DESCRIPTION = (
    """KL(full cache || cache under test) by position, in nats: mean, median, 90th and 99th percentile, worst."""
)
INPUTS = """
Args:
    predictions: Logits or log-probabilities with the cache under test, one list of floats a position.
    references: The same with the full cache.
Returns:
    kl_mean_nats, kl_median_nats, kl_p90_nats, kl_p99_nats, kl_worst_nats.
"""


@evaluate.utils.file_utils.add_start_docstrings(DESCRIPTION, INPUTS)
class CacheKL(evaluate.Metric):
    """The metric as `evaluate` wants it."""

    def _info(self):
        distribution = datasets.Sequence(datasets.Value("float64"))
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": distribution, "references": distribution}),
        )

    def _compute(self, predictions, references):
        log_probs, reference = (
            torch.log_softmax(torch.tensor(rows, dtype=torch.float64), dim=1) for rows in (predictions, references)
        )
        scores = KLDivergence.score(log_probs, reference, torch.zeros(len(log_probs), dtype=torch.long))
        return KLDivergence.summarize(Measured(positions={name: [values] for name, values in scores.items()}))
