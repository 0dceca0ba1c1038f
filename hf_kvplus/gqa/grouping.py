"""Which heads belong together: a search over partitions, exhaustive where there are few, by swaps and moves else."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import combinations

Group = tuple[int, ...]
# Partitions of so many heads are all looked at: 8 heads have 1701 in 4 groups.
EXHAUSTIVE_HEADS = 8


def search_groups(
    heads: int, groups: int, cost: Callable[[Group], float], *, largest: int | None = None
) -> list[Group]:
    """Finds the partition of heads with the least sum of costs.

    Args:
        heads: Number of heads.
        groups: Number of groups.
        cost: What a group costs, given its heads in order; called once for each group.
        largest: Most heads in a group; `None` for no limit.

    Returns:
        The groups, each in order, sorted by their first heads. The best partition up to `EXHAUSTIVE_HEADS` heads,
        a local optimum under swaps and moves beyond.

    Raises:
        ValueError: If there is no such partition.
    """
    largest = heads if largest is None else largest
    if not 1 <= groups <= heads or groups * largest < heads:
        raise ValueError(f"`groups` must split {heads} heads into groups of at most {largest}, got {groups}")
    known = functools.lru_cache(maxsize=None)(cost)

    def total(partition: list[Group]) -> float:
        return sum(known(group) for group in partition)

    if heads <= EXHAUSTIVE_HEADS:
        return min(_partitions(tuple(range(heads)), groups, largest), key=total)
    return sorted(_improve(_fill(heads, groups, known, largest), known, largest))


def _partitions(heads: Group, groups: int, largest: int) -> Iterator[list[Group]]:
    """Yields all partitions; the first head is always in the first group."""
    if groups == 1:
        if len(heads) <= largest:
            yield [heads]
        return
    first, rest = heads[0], heads[1:]
    for count in range(1, min(largest, len(heads) - groups + 1) + 1):
        for others in combinations(rest, count - 1):
            left = tuple(head for head in rest if head not in others)
            for partition in _partitions(left, groups - 1, largest):
                yield [(first, *others), *partition]


def _fill(heads: int, groups: int, cost: Callable[[Group], float], largest: int) -> list[Group]:
    """Fills groups of about one size one after another, each time with the head that costs least."""
    left, partition = set(range(heads)), []
    for remaining in range(groups, 0, -1):
        size = min(largest, -(-len(left) // remaining))
        group: Group = (min(left),)
        while len(group) < size:
            group = min((tuple(sorted((*group, head))) for head in left - set(group)), key=cost)
        partition.append(group)
        left -= set(group)
    return partition


def _improve(partition: list[Group], cost: Callable[[Group], float], largest: int) -> list[Group]:
    """Swaps heads between groups, and moves them where there is room, as long as that pays."""
    while True:
        change = _best_change(partition, cost, largest)
        if change is None:
            return partition
        old, new = change
        partition = [group for group in partition if group not in old] + list(new)


def _best_change(
    partition: list[Group], cost: Callable[[Group], float], largest: int
) -> tuple[tuple[Group, Group], tuple[Group, Group]] | None:
    """Returns the two groups to replace and what replaces them, or `None` if nothing pays."""
    best, found = 0.0, None
    for one, other in combinations(partition, 2):
        moves = [((a,), (b,)) for a in one for b in other]
        moves += [((a,), ()) for a in one if len(one) > 1 and len(other) < largest]
        moves += [((), (b,)) for b in other if len(other) > 1 and len(one) < largest]
        for given, taken in moves:
            new_one = tuple(sorted((set(one) - set(given)) | set(taken)))
            new_other = tuple(sorted((set(other) - set(taken)) | set(given)))
            gain = cost(one) + cost(other) - cost(new_one) - cost(new_other)
            if gain > best * (1 + 1e-9) + 1e-12:
                best, found = gain, ((one, other), (new_one, new_other))
    return found
