import math

import pytest
import torch

from hf_kvplus import MemoryBreakdown
from kvplus_eval.measured import Measured
from kvplus_eval.metrics import METRICS, column_units, score_positions, summarize
from kvplus_eval.metrics.perplexity import bootstrap_interval, paired_interval


def log_probs(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


def measured_from(log_probs_, reference, targets):
    scores = score_positions(log_probs_, reference, targets)
    return Measured(positions={name: [values] for name, values in scores.items()})


def test_equal_distributions_lose_nothing():
    reference = log_probs(50, 100)
    figures = summarize(measured_from(reference, reference, torch.zeros(50, dtype=torch.long)))
    assert abs(figures["kl_mean_nats"]) < 1e-15
    assert figures["top1_agreement"] == 1
    assert figures["perplexity_change_percent"] == 0


def test_uniform_output_has_the_vocabulary_as_perplexity():
    uniform = torch.full((10, 64), -math.log(64), dtype=torch.float64)
    figures = summarize(measured_from(uniform, uniform, torch.arange(10)))
    assert figures["perplexity"] == pytest.approx(64)


def test_kl_resolves_far_below_1e_6_after_storage_in_float32():
    reference = log_probs(200, 5000)
    moved = torch.log_softmax(reference + 1e-4 * log_probs(200, 5000, seed=1), dim=-1)
    exact = (reference.exp() * (reference - moved)).sum(dim=1).mean().item()
    stored = torch.log_softmax(reference.float().double(), dim=-1)
    found = score_positions(moved, stored, torch.zeros(200, dtype=torch.long))["kl_nats"].mean().item()
    assert exact < 1e-8
    assert found == pytest.approx(exact, rel=0.02)


def test_kl_is_of_the_reference_to_the_cache_under_test():
    reference = torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()
    other = torch.tensor([[0.9, 0.1]], dtype=torch.float64).log()
    found = score_positions(other, reference, torch.tensor([0]))["kl_nats"].item()
    assert found == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1))


def test_percentiles_come_from_the_tail():
    values = torch.zeros(1000, dtype=torch.float64)
    values[:20] = 5
    columns = {
        name: [values] for name in ("kl_nats", "loss_nats", "reference_loss_nats", "top1_agrees", "top5_agrees")
    }
    figures = summarize(Measured(positions=columns))
    assert figures["kl_median_nats"] == 0
    assert figures["kl_p99_nats"] == 5
    assert figures["kl_mean_nats"] == pytest.approx(0.1)


def test_top1_counts_positions_that_would_choose_alike():
    reference = torch.tensor([[0.7, 0.3], [0.7, 0.3], [0.2, 0.8], [0.2, 0.8]]).double().log()
    other = torch.tensor([[0.6, 0.4], [0.4, 0.6], [0.1, 0.9], [0.4, 0.6]]).double().log()
    assert score_positions(other, reference, torch.zeros(4, dtype=torch.long))["top1_agrees"].mean() == 0.75


def test_the_interval_of_equal_differences_is_that_difference():
    assert paired_interval([0.01] * 5) == pytest.approx((0.01, 0.01))


def test_the_interval_holds_the_mean_and_stays_within_the_windows():
    differences = [0.01, -0.02, 0.05, 0.03, 0.00, 0.02, 0.01, 0.02]
    low, high = paired_interval(differences)
    assert min(differences) <= low < sum(differences) / 8 < high <= max(differences)


def test_few_windows_get_students_interval():
    """Twice 12.7 standard errors of two values; tables have that quantile."""
    assert paired_interval([0.0, 0.2]) == pytest.approx((0.1 - 1.27062, 0.1 + 1.27062), abs=1e-4)
    assert bootstrap_interval([0.0, 0.2]) == pytest.approx((0.0, 0.2))


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    generator = torch.Generator().manual_seed(3)
    covered = 0
    for _ in range(200):
        low, high = paired_interval((0.1 + torch.randn(30, generator=generator)).tolist(), draws=500)
        covered += low <= 0.1 <= high
    assert 0.88 <= covered / 200 <= 0.99


def test_more_windows_narrow_the_interval():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(400, generator=generator).tolist()
    few, many = paired_interval(values[:10]), paired_interval(values)
    assert many[1] - many[0] < (few[1] - few[0]) / 3


def test_one_window_has_no_interval():
    assert paired_interval([0.5]) == (None, None)


@pytest.mark.parametrize(
    ("mine", "theirs", "agreeing"), [([1, 2, 3], [1, 2, 3], 3), ([1, 9, 3], [1, 2, 3], 1), ([9, 2], [1, 2], 0)]
)
def test_greedy_agreement_ends_at_the_first_difference(mine, theirs, agreeing):
    figures = METRICS.get("greedy").summarize(Measured(greedy_ids=mine, reference_greedy_ids=theirs))
    assert figures == {"greedy_agreement_tokens": agreeing, "greedy_tokens": len(theirs)}


def test_bytes_of_all_parts_are_shown_and_compared_with_the_full_cache():
    memory = MemoryBreakdown(
        packed_bytes=30, full_precision_bytes=40, reserved_bytes=20, other_bytes=10, elements=80, packed_elements=40
    )
    figures = METRICS.get("cache_bytes").summarize(Measured(memory=memory, full_bytes=400))
    assert (figures["cache_bytes"], figures["share_of_full_cache"]) == (100, 0.25)
    bits = METRICS.get("stored_bits").summarize(Measured(memory=memory))
    assert bits == {"stored_bits_per_element": 10, "packed_bits_per_element": 6}


def test_every_figure_has_a_unit_and_a_direction_and_nothing_else_is_returned():
    reference = log_probs(4, 8)
    figures = summarize(measured_from(reference, reference, torch.zeros(4, dtype=torch.long)))
    assert figures.keys() == column_units().keys()
    assert {meaning["better"] for meaning in column_units().values()} <= {"lower", "higher", "neither"}
