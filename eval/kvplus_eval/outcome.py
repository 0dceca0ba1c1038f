"""What became of one strategy: figures, a refusal or a failure; one strategy's failure never stops the others."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvplus_eval.guards import RefusedError
from kvplus_eval.measured import Measured
from kvplus_eval.processes import Processes

# What a cache under test can raise. Named one by one, so that an interrupt or an exit still ends the run.
STRATEGY_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass
class Outcome:
    """The state of one strategy in a run.

    Args:
        strategy: The strategy string.
        status: `ok`, `refused` or `failed`.
        reason: Why there are no figures, None while there is no such reason.
        trace: Traceback of a failure.
        measured: Raw measurements, of use only while the status is `ok`.
        is_warm: Whether this process has run the strategy, so that nothing is compiled or read in while it is timed.
    """

    strategy: str
    status: str = "ok"
    reason: str | None = None
    trace: str | None = None
    measured: Measured = field(default_factory=Measured)
    is_warm: bool = False

    def attempt(self, work: Callable[[], None]) -> None:
        """Runs a piece of work unless an earlier one went wrong, and records how it ends."""
        if self.status != "ok":
            return
        try:
            work()
        except RefusedError as refusal:
            self.status, self.reason = "refused", str(refusal)
        except STRATEGY_ERRORS as error:
            self.status, self.reason = "failed", f"{type(error).__name__}: {error}"
            self.trace = traceback.format_exc()

    def agree(self, processes: Processes, pieces: dict[int, Any] | None = None) -> dict[int, Any]:
        """Tells the other processes what became of the strategy here, and hears the same from them.

        Args:
            processes: Those that share the work; all must call this.
            pieces: What this process has found, by number.

        Returns:
            What all have found. The first status that isn't ok becomes everybody's.
        """
        joined: dict[int, Any] = {}
        for status, reason, trace, found in processes.gather((self.status, self.reason, self.trace, pieces or {})):
            if self.status == "ok" and status != "ok":
                self.status, self.reason, self.trace = status, reason, trace
            joined.update(found)
        return joined

    def facts(self) -> dict[str, str | None]:
        """Returns the part of a result row that says what became of the strategy."""
        return {
            "strategy": self.strategy,
            "status": self.status,
            "reason": self.reason,
            "traceback": self.trace,
        }
