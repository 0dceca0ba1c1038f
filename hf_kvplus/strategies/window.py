"""A window with attention sinks: `window:1024,sinks=4,positions=shifted`."""

from __future__ import annotations

from hf_kvplus.policies.sink_window import ORIGINAL, WINDOWED, SinkWindowPolicy
from hf_kvplus.strategies.base import Options, composable
from hf_kvplus.strategies.grammar import Part


@composable("window", "window:N,sinks=4: the last N tokens and each row's first ones, constant memory")
def window(part: Part) -> Options:
    """Returns the policy of a window.

    Raises:
        ValueError: If the length is missing or an option unknown.
    """
    part.require_options("sinks", "positions", "prefill", "rollback")
    length = part.integer(None)
    if length is None:
        raise ValueError(f"strategy part `{part.text}` needs the window's length in tokens; write `window:1024`")
    return {
        "window": SinkWindowPolicy(
            sliding_window=length,
            num_sink_tokens=part.integer("sinks", 4),
            positions=part.options.get("positions", ORIGINAL),
            prefill=part.options.get("prefill", WINDOWED),
            rollback_tokens=part.integer("rollback", 0),
        )
    }
