"""Where each row of a left-padded batch really begins, read off the positions that the model passes along.

transformers gives padding position 0 and counts real tokens from 0, so a row padded by three reads `0 0 0 0 1 2 ...`:
the last 0 before the counting starts is its first real token. A prompt may arrive in chunks, so a row stays open until
a position above 1 has been seen. Left out: padding on the right, which no position shows, and models that pass no
positions to their attention (GPT-NeoX, Falcon, Llama 4), whose padding is stored like any token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class RowPadding:
    """The number of padding tokens at the left of each row.

    Args:
        counts: Padding tokens per row.
        open_rows: Rows whose first real token may still lie ahead.
    """

    counts: list[int]
    open_rows: list[bool] = field(default_factory=list)

    @classmethod
    def unknown(cls, batch_size: int) -> RowPadding:
        """Returns rows without padding that are all still open."""
        return cls([0] * batch_size, [True] * batch_size)

    @property
    def settled(self) -> bool:
        """Whether no row can change any more."""
        return not any(self.open_rows)

    @property
    def most(self) -> int:
        """The padding of the row that has most."""
        return max(self.counts, default=0)

    @property
    def uniform(self) -> bool:
        """Whether all rows are alike."""
        return len(set(zip(self.counts, self.open_rows, strict=True))) <= 1

    def settle(self) -> None:
        """Declares every row known, for a model that passes no positions."""
        self.open_rows = [False] * len(self.counts)

    def observe(self, first_column: int, last_zero: Sequence[int], all_beginning: Sequence[bool]) -> None:
        """Reads one chunk.

        Args:
            first_column: Column of the chunk's first token.
            last_zero: For each row the index in the chunk of the last position 0 of its beginning, or -1.
            all_beginning: For each row whether the whole chunk has positions up to 1, so that more padding may follow.
        """
        for row, (zero, everything) in enumerate(zip(last_zero, all_beginning, strict=True)):
            if self.open_rows[row]:
                if zero >= 0:
                    self.counts[row] = first_column + zero
                self.open_rows[row] = everything

    def reopen(self, length: int) -> None:
        """Forgets what was known of rows whose first real token lies behind the first `length` columns."""
        for row, count in enumerate(self.counts):
            if count >= length:
                self.counts[row], self.open_rows[row] = 0, True

    def select(self, rows: Sequence[int]) -> None:
        """Keeps `rows`, in that order."""
        self.counts = [self.counts[row] for row in rows]
        self.open_rows = [self.open_rows[row] for row in rows]
