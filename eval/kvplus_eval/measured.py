"""What the runs of one strategy leave behind, before metrics make figures of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hf_kvplus import MemoryBreakdown


@dataclass
class Measured:
    """Raw measurements of one strategy.

    Args:
        positions: Column name -> one tensor a window, shape (predicted_tokens,), float64.
        memory: Bytes by part at the end of the window that took the most.
        full_bytes: Bytes of the reference cache at the same length.
        curve: (tokens, bytes) after each chunk of the first window.
        peak_bytes: Most bytes that the device held during the quality pass, None where the device doesn't count.
        prefill_ms: Time to prefill one window, one value a round.
        decode_ms: Time of one decoded token, `decode_tokens` values a round.
        greedy_ids: Greedy continuation of the first window.
        reference_greedy_ids: The same from the reference cache.
        plan: What the cache said it does with each layer, empty where it doesn't say.
    """

    positions: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    memory: MemoryBreakdown | None = None
    full_bytes: int = 0
    curve: list[tuple[int, int]] = field(default_factory=list)
    peak_bytes: int | None = None
    prefill_ms: list[float] = field(default_factory=list)
    decode_ms: list[float] = field(default_factory=list)
    greedy_ids: list[int] = field(default_factory=list)
    reference_greedy_ids: list[int] = field(default_factory=list)
    plan: list[str] = field(default_factory=list)

    def joined(self, column: str) -> torch.Tensor:
        """Returns one column of all windows in a row, shape (windows * predicted_tokens,)."""
        return torch.cat(self.positions[column])
