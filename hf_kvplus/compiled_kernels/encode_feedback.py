"""Inner loops of the compiled encoder: codes that carry the errors of earlier channels on, see `codecs.feedback`."""

from __future__ import annotations

from numba import types

from hf_kvplus.attention.intrinsics import inner_loop
from hf_kvplus.attention.vectors import (
    FLOAT,
    LANES,
    LONG,
    Builder,
    Value,
    accumulate,
    load,
    multiply_add,
    offset,
    read_factor,
    store,
    sum_lanes,
)
from hf_kvplus.compiled_kernels.encode_loops import nearest, top_level
from hf_kvplus.compiled_kernels.encode_vectors import ZERO, load_at, store_at, store_bytes


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
    lowest, last = read_factor(builder, levels), top_level(builder, table, top)
    errors = offset(builder, turned, line)
    with accumulate(builder, behind, dict.fromkeys(range(together), ZERO)) as (number, added):
        weight = read_factor(builder, offset(builder, factor, builder.mul(number, LONG(4))))
        row = offset(builder, errors, builder.mul(number, line))
        for part in range(together):
            error = load_at(builder, row, LONG(4 * LANES * part))
            added[part] = multiply_add(builder, weight, error, added[part])
    totals = [ZERO] * 4
    for part in range(together):
        at = LONG(4 * LANES * part)
        numbers, counted = load_at(builder, turned, at), load_at(builder, weights, at)
        target = builder.fadd(numbers, added[part])
        values = builder.fmul(builder.fsub(target, means), inverses)
        found, level = nearest(builder, values, table, edges, levels, lowest, last)
        store_bytes(builder, found, codes, at)
        stored = builder.fadd(builder.fmul(level, scales), means)
        store_at(builder, builder.fsub(numbers, stored), turned, at)
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
            sums[part] = multiply_add(builder, factor, load_at(builder, source, LONG(4 * LANES * part)), sums[part])
    for part in range(together):
        store_at(builder, sums[part], target, LONG(4 * LANES * part))


@inner_loop("left_at right_at count", "", types.float32)
def dot(builder: Builder, left: Value, right: Value, count: Value) -> Value:
    """Returns the product of two rows; `count` is a multiple of LANES."""
    with accumulate(builder, builder.udiv(count, LONG(LANES)), {0: ZERO}) as (number, sums):
        at = builder.mul(number, LONG(4 * LANES))
        sums[0] = multiply_add(builder, load_at(builder, left, at), load_at(builder, right, at), sums[0])
    return sum_lanes(builder, sums[0])
