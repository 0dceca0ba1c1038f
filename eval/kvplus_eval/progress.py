"""Progress bars: one for the piece at hand, one for the whole run, both with the time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Bars:
    """Shows bars on a terminal, and lines where there is none.

    Args:
        console: Where to show them.
        total_tokens: Tokens that the whole run feeds through the model.
    """

    def __init__(self, console: Console, total_tokens: int) -> None:
        columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # Averaged over ten minutes, since pieces of a run differ in speed
        self._progress = Progress(*columns, TimeRemainingColumn(), console=console, speed_estimate_period=600)
        self._whole = self._progress.add_task("[b]everything", total=total_tokens)

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._progress.stop()

    @contextmanager
    def task(self, name: str, total: int, *, counted: bool = True) -> Iterator[Callable[[int], None]]:
        """Opens a bar for one piece of work.

        Args:
            name: What it is.
            total: Its size, in tokens where `counted`.
            counted: Whether it counts in the bar of the whole run; if the piece ends early, all of it counts as done.

        Yields:
            A function that takes what was done.
        """
        task, done = self._progress.add_task(name, total=total), 0

        def advance(amount: int) -> None:
            nonlocal done
            done += amount
            self._progress.advance(task, amount)
            if counted:
                self._progress.advance(self._whole, amount)

        yield advance
        if counted:
            self._progress.advance(self._whole, max(0, total - done))

    def say(self, line: str) -> None:
        """Prints a line above the bars."""
        self._progress.console.print(line, soft_wrap=True, markup=False)

    def log(self, line: str) -> None:
        """Prints a line where there are no bars to see."""
        if not self._progress.console.is_terminal:
            self.say(line)
