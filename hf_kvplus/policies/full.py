"""Every token is kept."""

from __future__ import annotations

from dataclasses import dataclass

from hf_kvplus.policies.base import Policy


@dataclass(frozen=True)
class FullPolicy(Policy):
    """Keeps every token, without a bound."""

    @property
    def is_sliding(self) -> bool:
        """Nothing leaves."""
        return False

    def first_visible(self, seq_length: int) -> int:
        """Everything is visible."""
        return 0

    def max_length(self) -> int:
        """No bound."""
        return -1
