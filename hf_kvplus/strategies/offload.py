"""Blocks elsewhere: `offload:cpu`, `offload:disk,dir=PATH`, `offload:auto,budget=2GiB`."""

from __future__ import annotations

from hf_kvplus.stores.space import AUTO, CPU, DISK, Offload
from hf_kvplus.strategies.base import Options, composable
from hf_kvplus.strategies.grammar import Part
from hf_kvplus.units import parse_bytes

NAMES = {"dir": "directory", "budget": "budget_bytes", "host": "host_bytes", "prefetch": "prefetch_layers"}


@composable("offload", "offload:cpu, :disk,dir=PATH or :auto,budget=2GiB: blocks in host memory or on disk, exactly")
def offload(part: Part) -> Options:
    """Returns where blocks go.

    Raises:
        ValueError: If the tier or an option is unknown, missing or out of range.
    """
    part.require_options(*NAMES)
    tier = part.value or CPU
    if tier not in (CPU, DISK, AUTO):
        raise ValueError(f"strategy part `{part.text}`: the tier must be cpu, disk or auto, got {tier!r}")
    if tier == AUTO and "budget" not in part.options:
        raise ValueError(f"strategy part `{part.text}` needs the bytes that stay; write `offload:auto,budget=2GiB`")
    return {"offload": Offload(tier, **{NAMES[key]: _read(part, key) for key in part.options})}


def _read(part: Part, key: str) -> str | int | None:
    """Returns an option as its own type."""
    if key == "dir":
        return part.options[key]
    if key == "prefetch":
        return part.integer(key)
    if key == "budget" and part.options[key] == "0":
        return 0
    try:
        return parse_bytes(part.options[key])
    except ValueError as error:
        raise ValueError(f"strategy part `{part.text}`: `{key}`: {error}") from None
