"""What a policy decides: the first token that a later query may still see, and the sizes a mask needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True)
class Policy(ABC):
    """Decides from token counts alone which tokens of a layer are kept."""

    @property
    @abstractmethod
    def is_sliding(self) -> bool:
        """Whether old tokens leave the cache."""

    @abstractmethod
    def first_visible(self, seq_length: int) -> int:
        """Returns the first of `seq_length` stored tokens that the next query sees."""

    def first_kept(self, seq_length: int) -> int:
        """Returns the first of `seq_length` stored tokens that isn't dropped; by default the first visible one."""
        return self.first_visible(seq_length)

    @abstractmethod
    def max_length(self) -> int:
        """Returns the most tokens ever held, or -1 without a bound."""

    def mask_sizes(self, seq_length: int, query_length: int) -> tuple[int, int]:
        """Returns `(kv_length, kv_offset)` for a call with `query_length` new tokens."""
        first = self.first_visible(seq_length)
        return seq_length - first + query_length, first
