"""Which runs are kept in fast memory, within a budget of bytes that all layers share.

Every decoded token reads every block once, layer by layer, always in the same order. With plain LRU, what comes next
would always just have been thrown out. So a read never displaces anything: it keeps what it read only where there is
room, and runs leave, the least recently used or the oldest first, when new blocks are stored.
"""

from __future__ import annotations

import itertools
import math
from weakref import WeakKeyDictionary

from hf_kvplus.stores.runs import Run

LEAST_RECENTLY_USED, OLDEST = "least recently used", "oldest"


class Residency:
    """Runs in one kind of memory.

    Args:
        budget_bytes: Most bytes, or `None` for no bound.
        order: Which run leaves first: `"least recently used"`, or `"oldest"`, that is the one whose blocks come first.
    """

    def __init__(self, budget_bytes: int | None, order: str) -> None:
        self.budget_bytes, self.order = budget_bytes, order
        self._held: WeakKeyDictionary[Run, tuple[int, int]] = WeakKeyDictionary()
        self._ticks = itertools.count()

    @property
    def held_bytes(self) -> int:
        """Bytes that are here now."""
        return sum(run.data.nbytes for run in self._held if run.data is not None)

    def admit(self, run: Run, position: int) -> list[Run]:
        """Takes a run in, or notes that it grew.

        Args:
            run: The run, whose data is in this memory.
            position: Its first block.

        Returns:
            The runs that have to leave, so that the budget is kept.
        """
        self._held[run] = (position, next(self._ticks))
        leaving: list[Run] = []
        if self.budget_bytes is None:
            return leaving
        surplus = self.held_bytes - self.budget_bytes
        while surplus > 0 and self._held:
            first = min(self._held, key=self._rank)
            size = first.data.nbytes if first.data is not None else 0
            del self._held[first]
            leaving.append(first)
            surplus -= size
        return leaving

    def forget(self, run: Run) -> None:
        """Notes that a run is elsewhere."""
        self._held.pop(run, None)

    def _rank(self, run: Run) -> tuple[int, int]:
        """Returns what the first to leave has least of."""
        position, tick = self._held[run]
        return (position, tick) if self.order == OLDEST else (tick, 0)

    @property
    def room_bytes(self) -> float:
        """Bytes that fit without anything leaving."""
        return math.inf if self.budget_bytes is None else self.budget_bytes - self.held_bytes

    def touch(self, run: Run) -> None:
        """Notes that a run was read."""
        held = self._held.get(run)
        if held is not None:
            self._held[run] = (held[0], next(self._ticks))
