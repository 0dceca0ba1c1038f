"""Inner loops of the CPU kernel: memory, and rows of numbers.

Arrays are float32 unless said otherwise, and without gaps. Rows are the query vectors that share a KV head; a tile is
as many tokens as one packed block.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from hf_kvplus.attention.intrinsics import STATE_BYTES, ZERO, inner_loop
from hf_kvplus.attention.vectors import (
    BYTE,
    FLOAT,
    FLOATS,
    LANES,
    LONG,
    Builder,
    Value,
    accumulate,
    load,
    load_states,
    multiply_add,
    offset,
    passes,
    read_factor,
    splat,
    steps,
    store,
    store_states,
    sum_lanes,
)


@inner_loop("", "size", types.int64, inline=True)
def scratch(builder: Builder, size: int) -> Value:
    """Returns the address of `size` bytes on the stack, aligned to a cache line."""
    # Not cgutils.alloca_once: it clears the memory, byte by byte as LLVM sees it.
    with builder.goto_entry_block():
        slot = builder.alloca(ir.ArrayType(BYTE, size))
    slot.align = 64
    return builder.ptrtoint(slot, LONG)


@inner_loop("source_at", "", types.float32, inline=True)
def read_float(builder: Builder, source: Value) -> Value:
    """Reads a float32."""
    return load(builder, source, FLOAT)


@inner_loop("target_at float_value", inline=True)
def write_float(builder: Builder, target: Value, value: Value) -> None:
    """Writes a float32."""
    store(builder, value, target)


@inner_loop("source_at", "", types.int64, inline=True)
def read_long(builder: Builder, source: Value) -> Value:
    """Reads a 64-bit integer."""
    return load(builder, source, LONG)


@inner_loop("target_at value", inline=True)
def write_long(builder: Builder, target: Value, value: Value) -> None:
    """Writes a 64-bit integer."""
    store(builder, value, target)


@inner_loop("arguments_at slot batch head index size", "", types.int64, inline=True)
def locate(
    builder: Builder, arguments: Value, slot: Value, batch: Value, head: Value, index: Value, size: Value
) -> Value:
    """Returns the address of entry `index`, `size` bytes each, of a tensor at `slot`, for a batch row and a head."""
    first = offset(builder, arguments, builder.mul(slot, LONG(8)))
    address = load(builder, first, LONG)
    for number, place in ((batch, 8), (head, 16)):
        address = builder.add(address, builder.mul(number, load(builder, offset(builder, first, place), LONG)))
    return builder.add(address, builder.mul(index, size))


@inner_loop("counter_at", "", types.int64, inline=True)
def count_up(builder: Builder, counter: Value) -> Value:
    """Adds one to a counter that threads share; returns what it was, and makes all earlier writes visible."""
    return builder.atomic_rmw("add", builder.bitcast(counter, LONG.as_pointer()), LONG(1), "acq_rel")


@inner_loop("target_at float_value", "length")
def fill(builder: Builder, target: Value, value: Value, length: int) -> None:
    """Sets `length` numbers to `float_value`."""
    numbers = splat(builder, value)
    with steps(builder, length // LANES, 4 * LANES) as at:
        store(builder, numbers, offset(builder, target, at))


@inner_loop("target_at float_factor", "length")
def scale(builder: Builder, target: Value, factor: Value, length: int) -> None:
    """Multiplies `length` numbers by `float_factor`."""
    factors = splat(builder, factor)
    with steps(builder, length // LANES, 4 * LANES) as at:
        place = offset(builder, target, at)
        store(builder, builder.fmul(load(builder, place, FLOATS), factors), place)


@inner_loop("source_at target_at float_factor", "length")
def add_scaled(builder: Builder, source: Value, target: Value, factor: Value, length: int) -> None:
    """Adds `float_factor` times `length` numbers to others."""
    factors = splat(builder, factor)
    with steps(builder, length // LANES, 4 * LANES) as at:
        place = offset(builder, target, at)
        numbers = load(builder, offset(builder, source, at), FLOATS)
        store(builder, multiply_add(builder, numbers, factors, load(builder, place, FLOATS)), place)


@inner_loop("source_at", "", types.float32)
def lane_sum(builder: Builder, source: Value) -> Value:
    """Returns the sum of LANES numbers."""
    return sum_lanes(builder, load(builder, source, FLOATS))


@inner_loop("source_at target_at float_factor", "length dtype")
def read_states(builder: Builder, source: Value, target: Value, factor: Value, length: int, dtype: str) -> None:
    """Converts `length` states to float32, times `float_factor`."""
    factors = splat(builder, factor)
    with steps(builder, length // LANES, LANES) as at:
        place = offset(builder, source, builder.mul(at, LONG(STATE_BYTES[dtype])))
        numbers = builder.fmul(load_states(builder, place, dtype), factors)
        store(builder, numbers, offset(builder, target, builder.mul(at, LONG(4))))


@inner_loop("source_at target_at float_factor", "length dtype")
def write_states(builder: Builder, source: Value, target: Value, factor: Value, length: int, dtype: str) -> None:
    """Writes `length` numbers, times `float_factor`, as states."""
    factors = splat(builder, factor)
    with steps(builder, length // LANES, LANES) as at:
        numbers = builder.fmul(load(builder, offset(builder, source, builder.mul(at, LONG(4))), FLOATS), factors)
        place = offset(builder, target, builder.mul(at, LONG(STATE_BYTES[dtype])))
        store_states(builder, numbers, place, dtype)


@inner_loop("source_at matrix_at target_at", "channels rows")
def rotate(builder: Builder, source: Value, matrix: Value, target: Value, channels: int, rows: int) -> None:
    """Writes `target[r, c] = sum over k of source[r, k] * matrix[k, c]`; source and target don't overlap."""
    for indices in passes(channels // LANES, rows, 8):
        keys = [(row, i) for row in range(rows) for i in indices]
        with accumulate(builder, channels, dict.fromkeys(keys, ZERO)) as (k, sums):
            line = offset(builder, matrix, builder.mul(k, LONG(4 * channels)))
            numbers = {i: load(builder, offset(builder, line, 4 * i * LANES), FLOATS) for i in indices}
            column = offset(builder, source, builder.mul(k, LONG(4)))
            for row in range(rows):
                factor = read_factor(builder, offset(builder, column, 4 * row * channels))
                for i in indices:
                    sums[row, i] = multiply_add(builder, numbers[i], factor, sums[row, i])
        for row, i in keys:
            store(builder, sums[row, i], offset(builder, target, 4 * (row * channels + i * LANES)))
