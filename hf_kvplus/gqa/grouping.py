"""Which heads belong together: a search over partitions, exhaustive where there are few, by merging and swaps else."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import combinations

Group = tuple[int, ...]
# Partitions of so many heads are all looked at: 8 heads have 1701 in 4 groups.
EXHAUSTIVE_HEADS = 8


def search_groups(
    heads: int, groups: int, cost: Callable[[Group], float], *, equal_sizes: bool = False
) -> list[Group]:
    """Finds the partition of heads with the least sum of costs.

    Args:
        heads: Number of heads.
        groups: Number of groups.
        cost: What a group costs, given its heads in order; called once for each group.
        equal_sizes: Whether all groups must be equally large.

    Returns:
        The groups, each in order, sorted by their first heads. The best partition up to `EXHAUSTIVE_HEADS` heads,
        a local optimum under swaps and moves beyond.

    Raises:
        ValueError: If there is no such partition.
    """
    if not 1 <= groups <= heads or (equal_sizes and heads % groups):
        raise ValueError(f"`groups` must split {heads} heads{' evenly' if equal_sizes else ''}, got {groups}")
    known = functools.lru_cache(maxsize=None)(cost)

    def total(partition: list[Group]) -> float:
        return sum(known(group) for group in partition)

    size = heads // groups if equal_sizes else None
    if heads <= EXHAUSTIVE_HEADS:
        return min(_partitions(tuple(range(heads)), groups, size), key=total)
    return sorted(_improve(_merge(heads, groups, known, size), known, size))


def _partitions(heads: Group, groups: int, size: int | None) -> Iterator[list[Group]]:
    """Yields all partitions; the first head is always in the first group."""
    if groups == 1:
        if size in (None, len(heads)):
            yield [heads]
        return
    first, rest = heads[0], heads[1:]
    sizes = range(1, len(heads) - groups + 2) if size is None else (size,)
    for count in sizes:
        for others in combinations(rest, count - 1):
            left = tuple(head for head in rest if head not in others)
            for partition in _partitions(left, groups - 1, size):
                yield [(first, *others), *partition]


def _merge(heads: int, groups: int, cost: Callable[[Group], float], size: int | None) -> list[Group]:
    """Merges the pair of groups that costs least, or fills groups of one size one after another."""
    if size is not None:
        left, partition = set(range(heads)), []
        while left:
            group: Group = (min(left),)
            while len(group) < size:
                group = min((tuple(sorted((*group, head))) for head in left - set(group)), key=cost)
            partition.append(group)
            left -= set(group)
        return partition
    partition = [(head,) for head in range(heads)]
    while len(partition) > groups:
        one, other = min(
            combinations(partition, 2),
            key=lambda pair: cost(tuple(sorted(pair[0] + pair[1]))) - cost(pair[0]) - cost(pair[1]),
        )
        partition = [group for group in partition if group not in (one, other)] + [tuple(sorted(one + other))]
    return partition


def _improve(partition: list[Group], cost: Callable[[Group], float], size: int | None) -> list[Group]:
    """Swaps heads between groups, and moves them where sizes are free, as long as that pays."""
    while True:
        change = _best_change(partition, cost, size)
        if change is None:
            return partition
        old, new = change
        partition = [group for group in partition if group not in old] + list(new)


def _best_change(
    partition: list[Group], cost: Callable[[Group], float], size: int | None
) -> tuple[tuple[Group, Group], tuple[Group, Group]] | None:
    """Returns the two groups to replace and what replaces them, or `None` if nothing pays."""
    best, found = 0.0, None
    for one, other in combinations(partition, 2):
        moves = [((a,), (b,)) for a in one for b in other]
        if size is None:
            moves += [((a,), ()) for a in one if len(one) > 1] + [((), (b,)) for b in other if len(other) > 1]
        for given, taken in moves:
            new_one = tuple(sorted((set(one) - set(given)) | set(taken)))
            new_other = tuple(sorted((set(other) - set(taken)) | set(given)))
            gain = cost(one) + cost(other) - cost(new_one) - cost(new_other)
            if gain > best * (1 + 1e-9) + 1e-12:
                best, found = gain, ((one, other), (new_one, new_other))
    return found
