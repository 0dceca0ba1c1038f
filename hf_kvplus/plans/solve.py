"""Chooses one candidate a layer: the least loss under a budget of memory.

Losses of layers add up, nearly: each is a small change of the same predictions. So the choice is a knapsack with one
item of each group, solved by dynamic programming over memory in small steps. Sizes are rounded up to whole steps, so
the budget is never exceeded; what rounding left over is then spent on single changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

STEPS = 4096


@dataclass(frozen=True)
class Choice:
    """One way to quantize one layer.

    Args:
        name: What is chosen, for example `k4v2`.
        size: What it takes, in any unit that all choices and the budget share.
        loss: What it costs, in nats.
    """

    name: str
    size: float
    loss: float


class BudgetError(ValueError):
    """A budget that no choice meets."""


def solve(groups: Sequence[Sequence[Choice]], budget: float) -> list[int]:
    """Picks one choice of each group.

    Args:
        groups: The choices of each layer.
        budget: Largest sum of sizes.

    Returns:
        The index of each group's choice, of the least sum of losses.

    Raises:
        BudgetError: If even the smallest choices take more than the budget; the message names their sum.
    """
    smallest = sum(min(choice.size for choice in group) for group in groups)
    if smallest > budget * (1 + 1e-9):
        raise BudgetError(f"the smallest choices take {smallest:.6g}, more than the budget of {budget:.6g}")
    step = max(budget - smallest, 0.0) / STEPS
    best = torch.zeros(STEPS + 1, dtype=torch.float64)  # least loss with at most so many steps of slack
    chosen = []
    for group in groups:
        floor = min(choice.size for choice in group)
        options = torch.full((len(group), STEPS + 1), torch.inf, dtype=torch.float64)
        for index, choice in enumerate(group):
            extra = choice.size - floor
            steps = _steps(extra, step)
            if steps <= STEPS:
                options[index, steps:] = best[: STEPS + 1 - steps] + choice.loss
        best, picks = options.min(dim=0)
        chosen.append((group, floor, picks))
    return _spend(groups, _trace(chosen, step), budget)


def _steps(extra: float, step: float) -> int:
    """Returns a size in whole steps, rounded up; more than there are where steps have no size."""
    if extra <= 0:
        return 0
    return math.ceil(extra / step) if extra <= STEPS * step else STEPS + 1


def _trace(chosen: list[tuple[Sequence[Choice], float, torch.Tensor]], step: float) -> list[int]:
    """Walks back from the full budget."""
    slack, picked = STEPS, []
    for group, floor, picks in reversed(chosen):
        index = int(picks[slack])
        picked.append(index)
        slack -= _steps(group[index].size - floor, step)
    return picked[::-1]


def _spend(groups: Sequence[Sequence[Choice]], picked: list[int], budget: float) -> list[int]:
    """Makes the change that gains most as long as one fits into what is left."""
    while True:
        left = budget * (1 + 1e-9) - sum(group[index].size for group, index in zip(groups, picked, strict=True))
        gains = [
            (group[held].loss - choice.loss, layer, index)
            for layer, (group, held) in enumerate(zip(groups, picked, strict=True))
            for index, choice in enumerate(group)
            if choice.size - group[held].size <= left and choice.loss < group[held].loss
        ]
        if not gains:
            return picked
        _, layer, index = max(gains)
        picked = [*picked[:layer], index, *picked[layer + 1 :]]
