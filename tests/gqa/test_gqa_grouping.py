"""The search for groups of heads."""

from __future__ import annotations

import pytest
import torch

from hf_kvplus.gqa.grouping import search_groups


def cost_of(places: list[float]):
    """Returns a cost that is least for heads whose places are close."""
    return lambda group: sum((places[a] - places[b]) ** 2 for a in group for b in group) / len(group)


def test_heads_that_are_close_come_together():
    assert search_groups(6, 3, cost_of([0, 5, 9, 0.1, 5.1, 9.1])) == [(0, 3), (1, 4), (2, 5)]


@pytest.mark.parametrize("heads", [5, 12])
def test_groups_are_no_larger_than_allowed(heads):
    groups = search_groups(heads, 3, cost_of([0] * heads), largest=-(-heads // 3))
    assert sorted(head for group in groups for head in group) == list(range(heads))
    assert len(groups) == 3
    assert max(map(len, groups)) <= -(-heads // 3)


def test_many_heads_are_searched_too():
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(16, generator=generator).tolist()
    places = [10.0 * (order[head] // 4) + 0.1 * order[head] for head in range(16)]
    groups = search_groups(16, 4, cost_of(places), largest=4)
    assert all(len({order[head] // 4 for head in group}) == 1 for group in groups)


@pytest.mark.parametrize(("groups", "largest"), [(0, None), (5, None), (2, 1)])
def test_impossible_partitions_are_refused(groups, largest):
    with pytest.raises(ValueError, match="`groups` must split 4 heads"):
        search_groups(4, groups, lambda group: 0.0, largest=largest)
