import itertools

import pytest
import torch

from hf_kvplus.plans.budget import Budget, parse_budget
from hf_kvplus.plans.solve import BudgetError, Choice, solve


def random_groups(seed, layers=5, choices=4):
    generator = torch.Generator().manual_seed(seed)
    return [
        [Choice("", *torch.rand(2, generator=generator, dtype=torch.float64).tolist()) for _ in range(choices)]
        for _ in range(layers)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_the_choice_is_as_good_as_trying_all(seed):
    groups, budget = random_groups(seed), 2.0
    picked = solve(groups, budget)
    size = sum(group[index].size for group, index in zip(groups, picked, strict=True))
    loss = sum(group[index].loss for group, index in zip(groups, picked, strict=True))
    assert size <= budget + 1e-9
    # Sizes are rounded up, at most one step a layer.
    tight = min(
        sum(choice.loss for choice in choices)
        for choices in itertools.product(*groups)
        if sum(choice.size for choice in choices) <= budget - 0.003
    )
    assert loss <= tight + 1e-12


def test_a_budget_that_is_met_exactly_is_used_up():
    groups = [[Choice("2", 2, 1.0), Choice("4", 4, 0.1)] for _ in range(30)]
    assert sum(solve(groups, 90)) == 15
    assert sum(solve(groups, 60)) == 0
    assert sum(solve(groups, 1000)) == 30


def test_a_budget_below_the_smallest_choices_is_refused():
    with pytest.raises(BudgetError, match="the smallest choices take 4, more than the budget of 3.5"):
        solve([[Choice("2", 2, 1.0)], [Choice("2", 2, 1.0)]], 3.5)


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("3.0bits", Budget(bits=3.0)),
        ("4 bits", Budget(bits=4.0)),
        ("2.5GiB@32k", Budget(bytes=2684354560, tokens=32768)),
        ("100MB@1000", Budget(bytes=100_000_000, tokens=1000)),
    ],
)
def test_budgets_are_read(text, budget):
    assert parse_budget(text) == budget


@pytest.mark.parametrize("text", ["3", "bits", "0bits", "2GiB", "2.5GiB@", "x@32k"])
def test_other_text_isn_t_a_budget(text):
    with pytest.raises(ValueError, match="`budget` must be like 3.0bits or 2.5GiB@32k"):
        parse_budget(text)
