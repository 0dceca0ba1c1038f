"""Bytes of a cache while a model generates: a streamer that counts after every step, a picture, a live view.

`generate` hands each token to its streamer, so a streamer sees the cache after every step without any hook. Counting
walks the cache's objects and reads sizes only; no tensor is touched. Left out: beams, with which `generate` takes no
streamer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from transformers import Cache
from transformers.generation.streamers import BaseStreamer

from hf_kvplus.memory import find_tensors, storage_bytes
from hf_kvplus.plots import plot_bytes

# What the second line of a picture is called.
PEAK = "devices' peak, model included"


@dataclass(frozen=True)
class Step:
    """What was there after one step.

    Args:
        tokens: Tokens in the cache.
        cache_bytes: Bytes of every live tensor of the cache.
        peak_bytes: Most bytes that all CUDA devices had allocated since recording began, the model included; 0 on the
            CPU, which doesn't tell.
        elapsed_s: Seconds since recording began.
    """

    tokens: int
    cache_bytes: int
    peak_bytes: int
    elapsed_s: float


class MemoryRecorder(BaseStreamer):
    """Records the bytes of a cache at every step of `generate`, or whenever `record` is called.

    Args:
        cache: The cache that is watched.
        streamer: Another streamer that gets the tokens too, for example a `TextStreamer`.
        on_step: Called with each step.
        every: Steps between two records; the first and the last token are always recorded.

    Raises:
        TypeError: If `cache` isn't a transformers cache.
        ValueError: If `every` is smaller than 1.

    Example:
        >>> with MemoryRecorder(cache) as recorder:
        ...     model.generate(**inputs, past_key_values=cache, streamer=recorder)
        >>> recorder.peak_cache_bytes
        >>> recorder.plot("memory.png")
    """

    def __init__(
        self,
        cache: Cache,
        streamer: BaseStreamer | None = None,
        on_step: Callable[[Step], None] | None = None,
        every: int = 1,
    ) -> None:
        if not isinstance(cache, Cache):
            raise TypeError(f"`cache` must be a transformers Cache, got {type(cache).__name__}")
        if every < 1:
            raise ValueError(f"`every` must be at least 1, got {every}")
        self.cache, self.streamer, self.on_step, self.every = cache, streamer, on_step, every
        self.steps: list[Step] = []
        self._seen = 0
        self._restart()

    def _restart(self) -> None:
        """Begins to count time and peak anew."""
        self._began_s = time.perf_counter()
        for device in _cuda_devices():
            torch.cuda.reset_peak_memory_stats(device)

    def __enter__(self) -> MemoryRecorder:
        """Begins anew."""
        self.steps.clear()
        self._seen = 0
        self._restart()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Records a last step, unless something went wrong."""
        if error is None:
            self.record()

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt, before it is in the cache, or a token, after it was computed from the cache."""
        if self._seen and (self._seen - 1) % self.every == 0:
            self.record()
        self._seen += 1
        if self.streamer is not None:
            self.streamer.put(value)

    def end(self) -> None:
        """Records the last step."""
        self.record()
        if self.streamer is not None:
            self.streamer.end()

    def record(self) -> Step:
        """Records what is there now; nothing new if no token came since the last record.

        Returns:
            The step.
        """
        step = Step(
            tokens=int(self.cache.get_seq_length()),
            cache_bytes=sum(storage_bytes(find_tensors(self.cache)).values()),
            peak_bytes=sum(torch.cuda.max_memory_allocated(device) for device in _cuda_devices()),
            elapsed_s=time.perf_counter() - self._began_s,
        )
        last = self.steps[-1] if self.steps else None
        if last is not None and (last.tokens, last.cache_bytes) == (step.tokens, step.cache_bytes):
            return last
        self.steps.append(step)
        if self.on_step is not None:
            self.on_step(step)
        return step

    @property
    def peak_cache_bytes(self) -> int:
        """Most bytes that the cache had at any recorded step; 0 before the first."""
        return max((step.cache_bytes for step in self.steps), default=0)

    def plot(self, path: str | Path, name: str = "cache") -> None:
        """Draws bytes against tokens: the cache's, and the peak of the devices where they tell it.

        Args:
            path: The PNG or SVG file to write.
            name: What the cache's line is called.

        Raises:
            ValueError: If nothing was recorded.
        """
        if not self.steps:
            raise ValueError("nothing was recorded yet; pass the recorder to `generate` as its streamer")
        lines = [{"strategy": name, "curve": [[step.tokens, step.cache_bytes] for step in self.steps]}]
        if any(step.peak_bytes for step in self.steps):
            lines.append({"strategy": PEAK, "curve": [[step.tokens, step.peak_bytes] for step in self.steps]})
        plot_bytes(lines, Path(path))


def _cuda_devices() -> range:
    """Returns the CUDA devices, none before one is used."""
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)


class LiveView:
    """A terminal view of a recorder: bytes against those of the full cache, tokens, speed.

    Args:
        full_bytes: Bytes of the full cache by number of tokens.
        strategy: The strategy's name.
        console: A rich console; the standard error stream by default, so that text can go to standard output.

    Raises:
        ModuleNotFoundError: If rich isn't installed.
    """

    def __init__(self, full_bytes: Callable[[int], int], strategy: str, console: Any = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self.full_bytes, self.strategy = full_bytes, strategy
        self.live = Live(console=console or Console(stderr=True), refresh_per_second=8, transient=False)
        self._first: Step | None = None

    def __enter__(self) -> LiveView:
        """Opens the view."""
        self.live.__enter__()
        return self

    def __exit__(self, *reason: Any) -> None:
        """Closes the view; the last figures stay."""
        self.live.__exit__(*reason)

    def show(self, step: Step) -> None:
        """Shows a step; give it to a recorder as `on_step`."""
        from rich.table import Table

        from hf_kvplus.units import format_bytes

        self._first = self._first or step
        later_s = step.elapsed_s - self._first.elapsed_s
        speed = f"{(step.tokens - self._first.tokens) / later_s:.1f} tokens/s" if later_s > 0 else "first token"
        full = self.full_bytes(step.tokens)
        share = step.cache_bytes / full if full else 1.0
        table = Table.grid(padding=(0, 2))
        bar = "█" * max(1, round(30 * min(1.0, share)))
        table.add_row(self.strategy, f"{bar:<30}", f"{format_bytes(step.cache_bytes)}", f"{100 * share:.1f} % of full")
        table.add_row("", f"{step.tokens} tokens, {speed}", f"{format_bytes(full)}", "unquantized")
        if step.peak_bytes:
            table.add_row("", "device peak", format_bytes(step.peak_bytes), "")
        self.live.update(table)
