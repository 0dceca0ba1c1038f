"""What the inner loops of the compiled encoder have in common: loops over vectors, rounding, reading and writing.

A block is an array of float32 numbers `(tokens, channels)` without gaps; `channels` is a multiple of LANES and known
at run time only, so one compiled function serves all sizes. Numbers per channel and per token are float32 arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hf_kvplus.attention.vectors import (
    BYTE,
    FLOAT,
    FLOATS,
    INTS,
    LANES,
    LONG,
    Builder,
    Value,
    call,
    constant,
    load,
    maximum,
    offset,
    steps,
    store,
    vector,
)

HALF_MAX, TINY, MEAN_MAX = 65504.0, 2.0**-126, 127.0
LEAST_VARIANCE = 1e-6
ZERO, ONE = constant(FLOAT, 0.0), constant(FLOAT, 1.0)


@contextmanager
def columns(builder: Builder, count: Value) -> Iterator[Value]:
    """Opens a loop over vectors of `count` numbers; yields where a vector lies, in bytes."""
    with steps(builder, builder.udiv(builder.add(count, LONG(LANES - 1)), LONG(LANES)), 4 * LANES) as at:
        yield at


def load_at(builder: Builder, source: Value, at: Value) -> Value:
    """Reads a vector."""
    return load(builder, offset(builder, source, at), FLOATS)


def store_at(builder: Builder, values: Value, target: Value, at: Value) -> None:
    """Writes a vector."""
    store(builder, values, offset(builder, target, at))


def minimum(builder: Builder, left: Value, right: Value) -> Value:
    """Returns the smaller value of each lane."""
    return builder.select(builder.fcmp_ordered("<", left, right), left, right)


def clamp(builder: Builder, values: Value, low: Value, high: Value) -> Value:
    """Returns values within bounds; the lower one for NaN."""
    return minimum(builder, maximum(builder, values, low), high)


def reciprocal(builder: Builder, values: Value) -> Value:
    """Returns the reciprocal of values, 0 of 0."""
    return builder.select(builder.fcmp_ordered(">", values, ZERO), builder.fdiv(ONE, values), ZERO)


def round_even(builder: Builder, values: Value) -> Value:
    """Rounds to the nearest whole number, ties to even."""
    return call(builder, f"llvm.rint.v{LANES}f32", FLOATS, values)


def store_bytes(builder: Builder, values: Value, target: Value, at: Value) -> None:
    """Writes whole numbers as bytes."""
    numbers = builder.trunc(builder.fptosi(values, INTS), vector(BYTE))
    store(builder, numbers, offset(builder, target, builder.udiv(at, LONG(4))))
