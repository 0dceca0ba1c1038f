"""The inner loops of the compiled encoder, in LLVM's own words like those of the attention kernel.

A block is an array of float32 numbers `(tokens, channels)` without gaps; `channels` is a multiple of LANES and known
at run time only, so one compiled function serves all sizes. Numbers per channel and per token are float32 arrays.
Nothing here adds up in an order that depends on anything but the shape, so equal states give equal bytes.
"""

from __future__ import annotations

from numba import types

from hf_kvplus.attention.intrinsics import STATE_BYTES, inner_loop
from hf_kvplus.attention.vectors import (
    FLOAT,
    LANES,
    LONG,
    Builder,
    Value,
    accumulate,
    call,
    constant,
    load_states,
    maximum,
    multiply_add,
    offset,
    read_factor,
    splat,
    store,
    sum_lanes,
)
from hf_kvplus.compiled_kernels.encode_vectors import (
    HALF_MAX,
    LEAST_VARIANCE,
    MEAN_MAX,
    ONE,
    TINY,
    ZERO,
    clamp,
    columns,
    load_at,
    minimum,
    reciprocal,
    round_even,
    store_at,
    store_bytes,
)


@inner_loop("source_at target_at channels", "dtype")
def read_row(builder: Builder, source: Value, target: Value, channels: Value, dtype: str) -> None:
    """Reads the states of a token within the range of half precision; NaN becomes 0."""
    with columns(builder, channels) as at:
        place = offset(builder, source, builder.udiv(at, LONG(4 // STATE_BYTES[dtype])))
        numbers = load_states(builder, place, dtype)
        numbers = builder.select(builder.fcmp_ordered("ord", numbers, numbers), numbers, ZERO)
        store_at(builder, clamp(builder, numbers, constant(FLOAT, -HALF_MAX), constant(FLOAT, HALF_MAX)), target, at)


@inner_loop("target_at float_value count")
def set_all(builder: Builder, target: Value, value: Value, count: Value) -> None:
    """Sets numbers to one value."""
    numbers = splat(builder, value)
    with columns(builder, count) as at:
        store_at(builder, numbers, target, at)


@inner_loop("source_at target_at float_factor count")
def multiply(builder: Builder, source: Value, target: Value, factor: Value, count: Value) -> None:
    """Writes numbers times a factor."""
    factors = splat(builder, factor)
    with columns(builder, count) as at:
        store_at(builder, builder.fmul(load_at(builder, source, at), factors), target, at)


@inner_loop("source_at target_at count")
def invert(builder: Builder, source: Value, target: Value, count: Value) -> None:
    """Writes reciprocals, 0 for 0."""
    with columns(builder, count) as at:
        store_at(builder, reciprocal(builder, load_at(builder, source, at)), target, at)


@inner_loop("source_at count", "", types.float32)
def square_sum(builder: Builder, source: Value, count: Value) -> Value:
    """Returns the sum of squares; `count` is a multiple of LANES."""
    with accumulate(builder, builder.udiv(count, LONG(LANES)), {0: ZERO}) as (number, sums):
        numbers = load_at(builder, source, builder.mul(number, LONG(4 * LANES)))
        sums[0] = multiply_add(builder, numbers, numbers, sums[0])
    return sum_lanes(builder, sums[0])


@inner_loop("source_at count", "", types.float32)
def largest_size(builder: Builder, source: Value, count: Value) -> Value:
    """Returns the largest absolute value; `count` is a multiple of LANES."""
    with accumulate(builder, builder.udiv(count, LONG(LANES)), {0: ZERO}) as (number, sums):
        numbers = load_at(builder, source, builder.mul(number, LONG(4 * LANES)))
        size = maximum(builder, numbers, builder.fneg(numbers))
        sums[0] = maximum(builder, sums[0], size)
    return call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", FLOAT, sums[0], fastmath=("nnan",))


@inner_loop("states_at weights_at target_at float_factor float_floor tokens channels")
def column_sums(
    builder: Builder,
    states: Value,
    weights: Value,
    target: Value,
    factor: Value,
    floor: Value,
    tokens: Value,
    channels: Value,
) -> None:
    """Writes for each channel the reciprocal of the sum over tokens of `state**2 * factor / weight`.

    The sum is at least `floor`.
    """
    factors, floors = splat(builder, factor), splat(builder, floor)
    line = builder.mul(channels, LONG(4))
    with columns(builder, channels) as at:
        first = offset(builder, states, at)
        with accumulate(builder, tokens, {0: ZERO}) as (token, sums):
            numbers = load_at(builder, first, builder.mul(token, line))
            squares = builder.fmul(builder.fmul(numbers, numbers), factors)
            weight = read_factor(builder, offset(builder, weights, builder.mul(token, LONG(4))))
            sums[0] = multiply_add(builder, squares, weight, sums[0])
        store_at(builder, builder.fdiv(ONE, maximum(builder, sums[0], floors)), target, at)


@inner_loop("states_at weights_at target_at float_factor float_floor tokens channels")
def row_sums(
    builder: Builder,
    states: Value,
    weights: Value,
    target: Value,
    factor: Value,
    floor: Value,
    tokens: Value,
    channels: Value,
) -> None:
    """Writes for each token the sum over channels of `state**2 * factor * weight`, at least `floor`."""
    factors = splat(builder, factor)
    line = builder.mul(channels, LONG(4))
    with accumulate(builder, tokens, {}) as (token, _):
        row = offset(builder, states, builder.mul(token, line))
        with accumulate(builder, builder.udiv(channels, LONG(LANES)), {0: ZERO}) as (number, sums):
            at = builder.mul(number, LONG(4 * LANES))
            numbers = load_at(builder, row, at)
            squares = builder.fmul(builder.fmul(numbers, numbers), factors)
            sums[0] = multiply_add(builder, squares, load_at(builder, weights, at), sums[0])
        total = sum_lanes(builder, sums[0])
        larger = builder.select(builder.fcmp_ordered(">", total, floor), total, floor)
        store(builder, larger, offset(builder, target, builder.mul(token, LONG(4))))


@inner_loop("row_at low_at high_at float_divisor channels")
def divide_row(builder: Builder, row: Value, low: Value, high: Value, divisor: Value, channels: Value) -> None:
    """Divides a token's states and widens the range of each channel to hold them."""
    divisors = splat(builder, divisor)
    with columns(builder, channels) as at:
        numbers = builder.fdiv(load_at(builder, row, at), divisors)
        store_at(builder, numbers, row, at)
        store_at(builder, minimum(builder, numbers, load_at(builder, low, at)), low, at)
        store_at(builder, maximum(builder, numbers, load_at(builder, high, at)), high, at)


@inner_loop("low_at high_at middle_at channels")
def middles(builder: Builder, low: Value, high: Value, middle: Value, channels: Value) -> None:
    """Writes the middle of each channel's range."""
    with columns(builder, channels) as at:
        total = builder.fadd(load_at(builder, low, at), load_at(builder, high, at))
        store_at(builder, builder.fmul(total, constant(FLOAT, 0.5)), middle, at)


@inner_loop("low_at high_at middle_at target_at float_divisor channels")
def covers(
    builder: Builder, low: Value, high: Value, middle: Value, target: Value, divisor: Value, channels: Value
) -> None:
    """Writes the larger distance from the middle to an end of the range, divided."""
    divisors = splat(builder, divisor)
    with columns(builder, channels) as at:
        centre = load_at(builder, middle, at)
        above, below = (
            builder.fsub(load_at(builder, high, at), centre),
            builder.fsub(centre, load_at(builder, low, at)),
        )
        reach = maximum(builder, maximum(builder, above, below), ZERO)
        store_at(builder, builder.fdiv(reach, divisors), target, at)


@inner_loop("mean_at bytes_at float_unit float_inverse channels")
def round_offsets(builder: Builder, mean: Value, bytes_: Value, unit: Value, inverse: Value, channels: Value) -> None:
    """Rounds offsets to signed bytes of one unit: writes the bytes, and over the offsets what these stand for."""
    units, inverses = splat(builder, unit), splat(builder, inverse)
    with columns(builder, channels) as at:
        numbers = round_even(builder, builder.fmul(load_at(builder, mean, at), inverses))
        numbers = clamp(builder, numbers, constant(FLOAT, -MEAN_MAX), constant(FLOAT, MEAN_MAX))
        store_bytes(builder, numbers, bytes_, at)
        store_at(builder, builder.fmul(numbers, units), mean, at)


def nearest(
    builder: Builder, values: Value, table: int, edges: Value, levels: Value, lowest: Value, top: Value
) -> tuple[Value, Value]:
    """Returns the codes of the nearest levels, as floats, and these levels.

    Args:
        builder: Where instructions go.
        values: In units of the levels.
        table: Whether levels are those of a table; otherwise they are whole steps above `lowest`.
        edges: Address of the values that separate levels (table).
        levels: Address of the levels (table).
        lowest: The first level, in every lane.
        top: The last code; a scalar that is a whole number for a table, a float in every lane otherwise.
    """
    if not table:
        codes = clamp(builder, round_even(builder, builder.fsub(values, lowest)), ZERO, top)
        return codes, builder.fadd(codes, lowest)
    with accumulate(builder, top, {"codes": ZERO, "levels": lowest}) as (number, found):
        at = builder.mul(number, LONG(4))
        above = builder.fcmp_ordered(">", values, read_factor(builder, offset(builder, edges, at)))
        level = read_factor(builder, offset(builder, offset(builder, levels, 4), at))
        found["levels"] = builder.select(above, level, found["levels"])
        found["codes"] = builder.select(above, builder.fadd(found["codes"], ONE), found["codes"])
    return found["codes"], found["levels"]


def top_level(builder: Builder, table: int, top: Value) -> Value:
    """Returns the last code in the form that `nearest` takes."""
    return top if table else splat(builder, builder.sitofp(top, FLOAT))


@inner_loop(
    "states_at weights_at mean_at scale_at error_at edges_at levels_at top float_count tokens channels", "table"
)
def refine(
    builder: Builder,
    states: Value,
    weights: Value,
    mean: Value,
    scale: Value,
    error: Value,
    edges: Value,
    levels: Value,
    top: Value,
    count: Value,
    tokens: Value,
    channels: Value,
    table: int,
) -> None:
    """Fits step and offset of each channel to the levels that its states are nearest to, by least squares.

    States of tokens whose weight is 0 are 0. Both numbers stay as they are where the levels are all alike.
    """
    counts, lowest = splat(builder, count), read_factor(builder, levels)
    last, line = top_level(builder, table, top), builder.mul(channels, LONG(4))
    with columns(builder, channels) as at:
        first = offset(builder, states, at)
        means, scales = load_at(builder, mean, at), load_at(builder, scale, at)
        inverses = reciprocal(builder, scales)
        names = ("stored", "stored_squared", "wanted", "wanted_squared", "both")
        with accumulate(builder, tokens, dict.fromkeys(names, ZERO)) as (token, sums):
            numbers = load_at(builder, first, builder.mul(token, line))
            weight = read_factor(builder, offset(builder, weights, builder.mul(token, LONG(4))))
            values = builder.fmul(builder.fsub(numbers, means), inverses)
            _, stored = nearest(builder, values, table, edges, levels, lowest, last)
            counted = builder.fmul(stored, weight)
            sums["stored"] = builder.fadd(sums["stored"], counted)
            sums["stored_squared"] = multiply_add(builder, counted, stored, sums["stored_squared"])
            sums["wanted"] = builder.fadd(sums["wanted"], numbers)
            sums["wanted_squared"] = multiply_add(builder, numbers, numbers, sums["wanted_squared"])
            sums["both"] = multiply_add(builder, counted, numbers, sums["both"])
        average = {name: builder.fdiv(sums[name], counts) for name in names}
        level_mean, wanted_mean = average["stored"], average["wanted"]
        variance = builder.fsub(average["stored_squared"], builder.fmul(level_mean, level_mean))
        covariance = builder.fsub(average["both"], builder.fmul(level_mean, wanted_mean))
        wanted_variance = builder.fsub(average["wanted_squared"], builder.fmul(wanted_mean, wanted_mean))
        slope = builder.fdiv(covariance, maximum(builder, variance, constant(FLOAT, TINY)))
        usable = builder.and_(
            builder.fcmp_ordered(">", variance, constant(FLOAT, LEAST_VARIANCE)),
            builder.fcmp_ordered(">", slope, ZERO),
        )
        rest = builder.fsub(wanted_variance, builder.fmul(slope, covariance))
        store_at(builder, builder.select(usable, rest, wanted_variance), error, at)
        fitted = builder.fsub(wanted_mean, builder.fmul(slope, level_mean))
        store_at(builder, builder.select(usable, fitted, means), mean, at)
        store_at(builder, builder.select(usable, slope, scales), scale, at)


@inner_loop("error_at mean_at scale_at best_error_at best_mean_at best_scale_at channels")
def keep_better(
    builder: Builder,
    error: Value,
    mean: Value,
    scale: Value,
    best_error: Value,
    best_mean: Value,
    best_scale: Value,
    channels: Value,
) -> None:
    """Replaces error, offset and step of each channel where the new error is smaller."""
    with columns(builder, channels) as at:
        better = builder.fcmp_ordered("<", load_at(builder, error, at), load_at(builder, best_error, at))
        for new, held in ((mean, best_mean), (scale, best_scale), (error, best_error)):
            store_at(builder, builder.select(better, load_at(builder, new, at), load_at(builder, held, at)), held, at)


@inner_loop("row_at mean_at scale_at inverse_at codes_at edges_at levels_at sums_at top channels", "table")
def assign_row(
    builder: Builder,
    row: Value,
    mean: Value,
    scale: Value,
    inverse: Value,
    codes: Value,
    edges: Value,
    levels: Value,
    sums: Value,
    top: Value,
    channels: Value,
    table: int,
) -> None:
    """Writes the codes of one token, a byte each.

    Into `sums` go the token's squared length and its product with what its codes stand for.
    """
    lowest, last = read_factor(builder, levels), top_level(builder, table, top)
    rounds = builder.udiv(channels, LONG(LANES))
    with accumulate(builder, rounds, {"length": ZERO, "product": ZERO}) as (number, totals):
        at = builder.mul(number, LONG(4 * LANES))
        numbers, means = load_at(builder, row, at), load_at(builder, mean, at)
        values = builder.fmul(builder.fsub(numbers, means), load_at(builder, inverse, at))
        found, stored = nearest(builder, values, table, edges, levels, lowest, last)
        store_bytes(builder, found, codes, at)
        stored = builder.fadd(builder.fmul(stored, load_at(builder, scale, at)), means)
        totals["length"] = multiply_add(builder, numbers, numbers, totals["length"])
        totals["product"] = multiply_add(builder, stored, numbers, totals["product"])
    store(builder, sum_lanes(builder, totals["length"]), sums)
    store(builder, sum_lanes(builder, totals["product"]), offset(builder, sums, 4))
