"""The window that a model was trained with: Mistral, Gemma, gpt-oss and other models with sliding layers."""

from __future__ import annotations

from dataclasses import dataclass

from hf_kvplus.checks import require_at_least
from hf_kvplus.policies.base import Policy


@dataclass(frozen=True)
class NativeWindowPolicy(Policy):
    """Keeps the last `sliding_window - 1` tokens; with the query itself that is the model's own window.

    Args:
        sliding_window: Tokens that a query sees, itself included.

    Raises:
        ValueError: If the window is smaller than 1.
    """

    sliding_window: int

    def __post_init__(self) -> None:
        """Checks the window once."""
        require_at_least("sliding_window", self.sliding_window, 1)

    @property
    def is_sliding(self) -> bool:
        """Old tokens leave."""
        return True

    def first_visible(self, seq_length: int) -> int:
        """Returns the first of the last `sliding_window - 1` tokens."""
        return max(0, seq_length - self.sliding_window + 1)

    def max_length(self) -> int:
        """Returns the window."""
        return self.sliding_window
