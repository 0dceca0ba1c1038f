"""What the runs of one strategy leave behind, before metrics make figures of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from hf_kvplus import MemoryBreakdown


@dataclass
class WindowScores:
    """What one window through one strategy gave.

    Args:
        positions: Column name -> values, shape (predicted_tokens,), float64.
        memory: Bytes by part at its end.
        full_bytes: Bytes of the reference cache at the same length.
        curve: (tokens, bytes) after each chunk; only the first window has one.
        plan: What the cache said it does with each layer, empty where it doesn't say.
        peak_bytes: Most bytes that the device held, None where the device doesn't count.
    """

    positions: dict[str, torch.Tensor]
    memory: MemoryBreakdown
    full_bytes: int
    curve: list[tuple[int, int]]
    plan: list[str]
    peak_bytes: int | None

    def pack(self) -> dict[str, Any]:
        """Returns everything as tensors, numbers and strings."""
        return {**vars(self), "memory": asdict(self.memory)}

    @classmethod
    def unpack(cls, packed: dict[str, Any]) -> WindowScores:
        """Returns what was packed."""
        return cls(**{**packed, "memory": MemoryBreakdown(**packed["memory"])})


@dataclass
class Measured:
    """Raw measurements of one strategy.

    Args:
        positions: Column name -> one tensor a window, shape (predicted_tokens,), float64.
        memory: Bytes by part at the end of the window that took the most.
        full_bytes: Bytes of the reference cache at the same length.
        curve: (tokens, bytes) after each chunk of the first window.
        peak_bytes: Most bytes that the device held during the quality pass, None where the device doesn't count.
        peak_host_bytes: Most bytes that a process of its own needed beside the model, None where it wasn't measured.
        prefill_ms: Time to prefill one window, one value a round.
        ttft_ms: Time from the prompt to the first token, one value a round.
        decode_ms: Time of one decoded token, `decode_tokens` values a round.
        greedy_ids: Greedy continuation of the first window.
        reference_greedy_ids: The same from the reference cache.
        plan: What the cache said it does with each layer, empty where it doesn't say.
        contexts: Times at several context lengths, see `kvplus_eval.contexts`.
        answers: Answers to planted questions, see `kvplus_eval.tasks`.
        noise: How far the reference is from itself, by kind, in nats.
        layers: How well each layer gives back what it was given, see `kvplus_eval.readback`.
        findings: Faults that don't void the figures, in words.
        sensitivity: What each layer costs alone, see `kvplus_eval.sensitivity`.
    """

    positions: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    memory: MemoryBreakdown | None = None
    full_bytes: int = 0
    curve: list[tuple[int, int]] = field(default_factory=list)
    peak_bytes: int | None = None
    peak_host_bytes: int | None = None
    prefill_ms: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    decode_ms: list[float] = field(default_factory=list)
    greedy_ids: list[int] = field(default_factory=list)
    reference_greedy_ids: list[int] = field(default_factory=list)
    plan: list[str] = field(default_factory=list)
    contexts: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    noise: dict[str, float] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    sensitivity: list[dict[str, Any]] = field(default_factory=list)

    def joined(self, column: str) -> torch.Tensor:
        """Returns one column of all windows in a row, shape (windows * predicted_tokens,)."""
        return torch.cat(self.positions[column])

    def window_means(self) -> dict[str, list[float]]:
        """Returns the mean of every column by window, which paired comparisons of two runs need."""
        return {column: [float(values.mean()) for values in windows] for column, windows in self.positions.items()}

    def add_window(self, scores: WindowScores) -> None:
        """Adds the next window."""
        for column, values in scores.positions.items():
            self.positions.setdefault(column, []).append(values)
        if self.memory is None or scores.memory.total_bytes > self.memory.total_bytes:
            self.memory, self.full_bytes = scores.memory, scores.full_bytes
        self.curve = self.curve or scores.curve
        self.plan = scores.plan
        if scores.peak_bytes is not None:
            self.peak_bytes = max(self.peak_bytes or 0, scores.peak_bytes)
