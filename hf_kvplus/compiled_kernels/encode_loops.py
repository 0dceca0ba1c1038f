"""The inner loops of the compiled encoder, in LLVM's own words like those of the attention kernel.

A block is an array of float32 numbers `(tokens, channels)` without gaps; `channels` is a multiple of LANES and known
at run time only, so one compiled function serves all sizes. Numbers per channel and per token are float32 arrays.
Nothing here adds up in an order that depends on anything but the shape, so equal states give equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llvmlite import ir
from numba import types

from hf_kvplus.attention.inner_loops import STATE_BYTES, inner_loop
from hf_kvplus.attention.vectors import (
    BYTE,
    FLOAT,
    FLOATS,
    HALF,
    INTS,
    LANES,
    LONG,
    SHORT,
    Builder,
    Value,
    accumulate,
    call,
    constant,
    load,
    load_states,
    maximum,
    multiply_add,
    offset,
    read_factor,
    splat,
    steps,
    store,
    sum_lanes,
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


def _read(builder: Builder, source: Value, at: Value) -> Value:
    """Reads a vector."""
    return load(builder, offset(builder, source, at), FLOATS)


def _write(builder: Builder, values: Value, target: Value, at: Value) -> None:
    """Writes a vector."""
    store(builder, values, offset(builder, target, at))


def _minimum(builder: Builder, left: Value, right: Value) -> Value:
    """Returns the smaller value of each lane."""
    return builder.select(builder.fcmp_ordered("<", left, right), left, right)


def _clamp(builder: Builder, values: Value, low: Value, high: Value) -> Value:
    """Returns values within bounds; the lower one for NaN."""
    return _minimum(builder, maximum(builder, values, low), high)


def _inverse(builder: Builder, values: Value) -> Value:
    """Returns the reciprocal of values, 0 of 0."""
    return builder.select(builder.fcmp_ordered(">", values, ZERO), builder.fdiv(ONE, values), ZERO)


def _round(builder: Builder, values: Value) -> Value:
    """Rounds to the nearest whole number, ties to even."""
    return call(builder, f"llvm.rint.v{LANES}f32", FLOATS, values)


def _store_bytes(builder: Builder, values: Value, target: Value, at: Value) -> None:
    """Writes whole numbers as bytes."""
    numbers = builder.trunc(builder.fptosi(values, INTS), vector(BYTE))
    store(builder, numbers, offset(builder, target, builder.udiv(at, LONG(4))))


@inner_loop("source_at target_at channels", "dtype")
def read_row(builder: Builder, source: Value, target: Value, channels: Value, dtype: str) -> None:
    """Reads the states of a token within the range of half precision; NaN becomes 0."""
    with columns(builder, channels) as at:
        place = offset(builder, source, builder.udiv(at, LONG(4 // STATE_BYTES[dtype])))
        numbers = load_states(builder, place, dtype)
        numbers = builder.select(builder.fcmp_ordered("ord", numbers, numbers), numbers, ZERO)
        _write(builder, _clamp(builder, numbers, constant(FLOAT, -HALF_MAX), constant(FLOAT, HALF_MAX)), target, at)


@inner_loop("target_at float_value count")
def set_all(builder: Builder, target: Value, value: Value, count: Value) -> None:
    """Sets numbers to one value."""
    numbers = splat(builder, value)
    with columns(builder, count) as at:
        _write(builder, numbers, target, at)


@inner_loop("source_at target_at float_factor count")
def multiply(builder: Builder, source: Value, target: Value, factor: Value, count: Value) -> None:
    """Writes numbers times a factor."""
    factors = splat(builder, factor)
    with columns(builder, count) as at:
        _write(builder, builder.fmul(_read(builder, source, at), factors), target, at)


@inner_loop("source_at target_at count")
def invert(builder: Builder, source: Value, target: Value, count: Value) -> None:
    """Writes reciprocals, 0 for 0."""
    with columns(builder, count) as at:
        _write(builder, _inverse(builder, _read(builder, source, at)), target, at)


@inner_loop("source_at count", "", types.float32)
def square_sum(builder: Builder, source: Value, count: Value) -> Value:
    """Returns the sum of squares; `count` is a multiple of LANES."""
    with accumulate(builder, builder.udiv(count, LONG(LANES)), {0: ZERO}) as (number, sums):
        numbers = _read(builder, source, builder.mul(number, LONG(4 * LANES)))
        sums[0] = multiply_add(builder, numbers, numbers, sums[0])
    return sum_lanes(builder, sums[0])


@inner_loop("source_at count", "", types.float32)
def largest_size(builder: Builder, source: Value, count: Value) -> Value:
    """Returns the largest absolute value; `count` is a multiple of LANES."""
    with accumulate(builder, builder.udiv(count, LONG(LANES)), {0: ZERO}) as (number, sums):
        numbers = _read(builder, source, builder.mul(number, LONG(4 * LANES)))
        size = maximum(builder, numbers, builder.fneg(numbers))
        sums[0] = maximum(builder, sums[0], size)
    return call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", FLOAT, sums[0], fastmath=("nnan",))


# Variances


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
            numbers = _read(builder, first, builder.mul(token, line))
            squares = builder.fmul(builder.fmul(numbers, numbers), factors)
            weight = read_factor(builder, offset(builder, weights, builder.mul(token, LONG(4))))
            sums[0] = multiply_add(builder, squares, weight, sums[0])
        _write(builder, builder.fdiv(ONE, maximum(builder, sums[0], floors)), target, at)


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
            numbers = _read(builder, row, at)
            squares = builder.fmul(builder.fmul(numbers, numbers), factors)
            sums[0] = multiply_add(builder, squares, _read(builder, weights, at), sums[0])
        total = sum_lanes(builder, sums[0])
        larger = builder.select(builder.fcmp_ordered(">", total, floor), total, floor)
        store(builder, larger, offset(builder, target, builder.mul(token, LONG(4))))


# Ranges and steps


@inner_loop("row_at low_at high_at float_divisor channels")
def divide_row(builder: Builder, row: Value, low: Value, high: Value, divisor: Value, channels: Value) -> None:
    """Divides a token's states and widens the range of each channel to hold them."""
    divisors = splat(builder, divisor)
    with columns(builder, channels) as at:
        numbers = builder.fdiv(_read(builder, row, at), divisors)
        _write(builder, numbers, row, at)
        _write(builder, _minimum(builder, numbers, _read(builder, low, at)), low, at)
        _write(builder, maximum(builder, numbers, _read(builder, high, at)), high, at)


@inner_loop("low_at high_at middle_at channels")
def middles(builder: Builder, low: Value, high: Value, middle: Value, channels: Value) -> None:
    """Writes the middle of each channel's range."""
    with columns(builder, channels) as at:
        total = builder.fadd(_read(builder, low, at), _read(builder, high, at))
        _write(builder, builder.fmul(total, constant(FLOAT, 0.5)), middle, at)


@inner_loop("low_at high_at middle_at target_at float_divisor channels")
def covers(
    builder: Builder, low: Value, high: Value, middle: Value, target: Value, divisor: Value, channels: Value
) -> None:
    """Writes the larger distance from the middle to an end of the range, divided."""
    divisors = splat(builder, divisor)
    with columns(builder, channels) as at:
        centre = _read(builder, middle, at)
        above, below = (
            builder.fsub(_read(builder, high, at), centre),
            builder.fsub(centre, _read(builder, low, at)),
        )
        reach = maximum(builder, maximum(builder, above, below), ZERO)
        _write(builder, builder.fdiv(reach, divisors), target, at)


@inner_loop("mean_at bytes_at float_unit float_inverse channels")
def round_offsets(builder: Builder, mean: Value, bytes_: Value, unit: Value, inverse: Value, channels: Value) -> None:
    """Rounds offsets to signed bytes of one unit: writes the bytes, and over the offsets what these stand for."""
    units, inverses = splat(builder, unit), splat(builder, inverse)
    with columns(builder, channels) as at:
        numbers = _round(builder, builder.fmul(_read(builder, mean, at), inverses))
        numbers = _clamp(builder, numbers, constant(FLOAT, -MEAN_MAX), constant(FLOAT, MEAN_MAX))
        _store_bytes(builder, numbers, bytes_, at)
        _write(builder, builder.fmul(numbers, units), mean, at)


# Codes


def _nearest(
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
        codes = _clamp(builder, _round(builder, builder.fsub(values, lowest)), ZERO, top)
        return codes, builder.fadd(codes, lowest)
    with accumulate(builder, top, {"codes": ZERO, "levels": lowest}) as (number, found):
        at = builder.mul(number, LONG(4))
        above = builder.fcmp_ordered(">", values, read_factor(builder, offset(builder, edges, at)))
        level = read_factor(builder, offset(builder, offset(builder, levels, 4), at))
        found["levels"] = builder.select(above, level, found["levels"])
        found["codes"] = builder.select(above, builder.fadd(found["codes"], ONE), found["codes"])
    return found["codes"], found["levels"]


def _top(builder: Builder, table: int, top: Value) -> Value:
    """Returns the last code in the form that `_nearest` takes."""
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
    last, line = _top(builder, table, top), builder.mul(channels, LONG(4))
    with columns(builder, channels) as at:
        first = offset(builder, states, at)
        means, scales = _read(builder, mean, at), _read(builder, scale, at)
        inverses = _inverse(builder, scales)
        names = ("stored", "stored_squared", "wanted", "wanted_squared", "both")
        with accumulate(builder, tokens, dict.fromkeys(names, ZERO)) as (token, sums):
            numbers = _read(builder, first, builder.mul(token, line))
            weight = read_factor(builder, offset(builder, weights, builder.mul(token, LONG(4))))
            values = builder.fmul(builder.fsub(numbers, means), inverses)
            _, stored = _nearest(builder, values, table, edges, levels, lowest, last)
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
        _write(builder, builder.select(usable, rest, wanted_variance), error, at)
        fitted = builder.fsub(wanted_mean, builder.fmul(slope, level_mean))
        _write(builder, builder.select(usable, fitted, means), mean, at)
        _write(builder, builder.select(usable, slope, scales), scale, at)


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
        better = builder.fcmp_ordered("<", _read(builder, error, at), _read(builder, best_error, at))
        for new, held in ((mean, best_mean), (scale, best_scale), (error, best_error)):
            _write(builder, builder.select(better, _read(builder, new, at), _read(builder, held, at)), held, at)


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
    lowest, last = read_factor(builder, levels), _top(builder, table, top)
    rounds = builder.udiv(channels, LONG(LANES))
    with accumulate(builder, rounds, {"length": ZERO, "product": ZERO}) as (number, totals):
        at = builder.mul(number, LONG(4 * LANES))
        numbers, means = _read(builder, row, at), _read(builder, mean, at)
        values = builder.fmul(builder.fsub(numbers, means), _read(builder, inverse, at))
        found, stored = _nearest(builder, values, table, edges, levels, lowest, last)
        _store_bytes(builder, found, codes, at)
        stored = builder.fadd(builder.fmul(stored, _read(builder, scale, at)), means)
        totals["length"] = multiply_add(builder, numbers, numbers, totals["length"])
        totals["product"] = multiply_add(builder, stored, numbers, totals["product"])
    store(builder, sum_lanes(builder, totals["length"]), sums)
    store(builder, sum_lanes(builder, totals["product"]), offset(builder, sums, 4))


# Feedback


@inner_loop("turned_at factor_at weights_at codes_at edges_at levels_at sums_at behind width top", "table together")
def feed_back(
    builder: Builder,
    turned: Value,
    factor: Value,
    weights: Value,
    codes: Value,
    edges: Value,
    levels: Value,
    sums: Value,
    behind: Value,
    width: Value,
    top: Value,
    table: int,
    together: int,
) -> None:
    """Rounds one channel of `together` vectors of tokens after adding errors of the `behind` channels after it.

    `turned` points to the channel's states, which give way to their errors; the channels behind it, `width` numbers
    each, hold errors already, and `factor` what each of them adds. `sums` are seven numbers: to the first four are
    added sums over tokens of levels, of corrected states, of squares of levels and of products of both; the others are
    the channel's offset, step and the reciprocal of that.
    """
    line = builder.mul(width, LONG(4))
    means, scales, inverses = (read_factor(builder, offset(builder, sums, place)) for place in (16, 20, 24))
    lowest, last = read_factor(builder, levels), _top(builder, table, top)
    errors = offset(builder, turned, line)
    with accumulate(builder, behind, dict.fromkeys(range(together), ZERO)) as (number, added):
        weight = read_factor(builder, offset(builder, factor, builder.mul(number, LONG(4))))
        row = offset(builder, errors, builder.mul(number, line))
        for part in range(together):
            error = _read(builder, row, LONG(4 * LANES * part))
            added[part] = multiply_add(builder, weight, error, added[part])
    totals = [ZERO] * 4
    for part in range(together):
        at = LONG(4 * LANES * part)
        numbers, counted = _read(builder, turned, at), _read(builder, weights, at)
        target = builder.fadd(numbers, added[part])
        values = builder.fmul(builder.fsub(target, means), inverses)
        found, level = _nearest(builder, values, table, edges, levels, lowest, last)
        _store_bytes(builder, found, codes, at)
        stored = builder.fadd(builder.fmul(level, scales), means)
        _write(builder, builder.fsub(numbers, stored), turned, at)
        kept = builder.fmul(level, counted)
        totals[0] = builder.fadd(totals[0], kept)
        totals[1] = multiply_add(builder, target, counted, totals[1])
        totals[2] = multiply_add(builder, kept, level, totals[2])
        totals[3] = multiply_add(builder, kept, target, totals[3])
    for place, total in enumerate(totals):
        there = offset(builder, sums, 4 * place)
        store(builder, builder.fadd(load(builder, there, FLOAT), sum_lanes(builder, total)), there)


@inner_loop("row_at matrix_at target_at channels", "together")
def multiply_matrix(
    builder: Builder, row: Value, matrix: Value, target: Value, channels: Value, together: int
) -> None:
    """Writes `together` vectors of a token's product with a matrix `(channels, channels)`."""
    line = builder.mul(channels, LONG(4))
    with accumulate(builder, channels, dict.fromkeys(range(together), ZERO)) as (number, sums):
        factor = read_factor(builder, offset(builder, row, builder.mul(number, LONG(4))))
        source = offset(builder, matrix, builder.mul(number, line))
        for part in range(together):
            sums[part] = multiply_add(builder, factor, _read(builder, source, LONG(4 * LANES * part)), sums[part])
    for part in range(together):
        _write(builder, sums[part], target, LONG(4 * LANES * part))


@inner_loop("left_at right_at count", "", types.float32)
def dot(builder: Builder, left: Value, right: Value, count: Value) -> Value:
    """Returns the product of two rows; `count` is a multiple of LANES."""
    with accumulate(builder, builder.udiv(count, LONG(LANES)), {0: ZERO}) as (number, sums):
        at = builder.mul(number, LONG(4 * LANES))
        sums[0] = multiply_add(builder, _read(builder, left, at), _read(builder, right, at), sums[0])
    return sum_lanes(builder, sums[0])


# The affine codec


@inner_loop("row_at low_at high_at channels")
def widen(builder: Builder, row: Value, low: Value, high: Value, channels: Value) -> None:
    """Widens the range of each channel to hold a token's states."""
    with columns(builder, channels) as at:
        numbers = _read(builder, row, at)
        _write(builder, _minimum(builder, numbers, _read(builder, low, at)), low, at)
        _write(builder, maximum(builder, numbers, _read(builder, high, at)), high, at)


def _half_above(builder: Builder, values: Value) -> Value:
    """Rounds up to half precision, as `hf_kvplus.codecs.affine.round_half` does; float32, never infinite."""
    shorts = vector(SHORT)
    rounded = builder.fptrunc(values, vector(HALF))
    nearest, bits = builder.fpext(rounded, FLOATS), builder.bitcast(rounded, shorts)
    one = ir.Constant(shorts, [1] * LANES)
    stepped = builder.select(builder.fcmp_ordered("==", nearest, ZERO), one, builder.add(bits, one))
    stepped = builder.select(builder.fcmp_ordered("<", nearest, ZERO), builder.sub(bits, one), stepped)
    chosen = builder.select(builder.fcmp_ordered("<", nearest, values), stepped, bits)
    result = builder.fpext(builder.bitcast(chosen, vector(HALF)), FLOATS)
    return _clamp(builder, result, constant(FLOAT, -HALF_MAX), constant(FLOAT, HALF_MAX))


@inner_loop("low_at high_at zero_at inverse_at zero_half_at scale_half_at float_divisor count")
def half_steps(
    builder: Builder,
    low: Value,
    high: Value,
    zero: Value,
    inverse: Value,
    zero_half: Value,
    scale_half: Value,
    divisor: Value,
    count: Value,
) -> None:
    """Writes half-precision zero points and scales of ranges, and what codes are computed with.

    Where nothing was in a range (the lower end is above the other) both are 0.
    """
    divisors = splat(builder, divisor)
    with columns(builder, count) as at:
        lowest, highest = _read(builder, low, at), _read(builder, high, at)
        empty = builder.fcmp_ordered(">", lowest, highest)
        lowest, highest = (builder.select(empty, ZERO, values) for values in (lowest, highest))
        zeros = builder.fneg(_half_above(builder, builder.fneg(lowest)))
        scales = _half_above(builder, builder.fdiv(builder.fsub(highest, zeros), divisors))
        _write(builder, zeros, zero, at)
        _write(builder, _inverse(builder, scales), inverse, at)
        half_at = builder.udiv(at, LONG(2))
        store(builder, builder.fptrunc(zeros, vector(HALF)), offset(builder, zero_half, half_at))
        store(builder, builder.fptrunc(scales, vector(HALF)), offset(builder, scale_half, half_at))


@inner_loop("row_at zero_at inverse_at codes_at float_top channels")
def assign_affine_row(
    builder: Builder, row: Value, zero: Value, inverse: Value, codes: Value, top: Value, channels: Value
) -> None:
    """Writes the codes of one token, a byte each: `(state - zero) * inverse`, rounded."""
    last = splat(builder, top)
    with columns(builder, channels) as at:
        values = builder.fsub(_read(builder, row, at), _read(builder, zero, at))
        values = _round(builder, builder.fmul(values, _read(builder, inverse, at)))
        _store_bytes(builder, _clamp(builder, values, ZERO, last), codes, at)


# Packing


@inner_loop("source_at target_at part", "width shift")
def pack_plane(builder: Builder, source: Value, target: Value, part: Value, width: int, shift: int) -> None:
    """Packs `width` bits of codes, `shift` bits above the lowest, of `8 / width` parts of `part` codes each.

    Byte `i` gets the code `i` of every part, the first part lowest.
    """
    lanes = ir.VectorType(BYTE, LANES)

    def pack(at: Value, type_: ir.Type) -> None:
        total = None
        for number in range(8 // width):
            place = offset(builder, source, builder.add(at, builder.mul(part, LONG(number))))
            codes = load(builder, place, type_)
            amount = _repeat(type_, shift)
            bits = builder.lshr(codes, amount) if shift else codes
            if width < 8:
                bits = builder.and_(bits, _repeat(type_, (1 << width) - 1))
            if number:
                bits = builder.or_(total, builder.shl(bits, _repeat(type_, number * width)))
            total = bits
        store(builder, total, offset(builder, target, at))

    whole = builder.udiv(part, LONG(LANES))
    with steps(builder, whole, LANES) as at:
        pack(at, lanes)
    done = builder.mul(whole, LONG(LANES))
    with steps(builder, builder.sub(part, done)) as number:
        pack(builder.add(done, number), BYTE)


def _repeat(type_: ir.Type, number: int) -> ir.Constant:
    """Returns a constant, in every lane of a vector."""
    return ir.Constant(type_, [number] * type_.count if isinstance(type_, ir.VectorType) else number)
