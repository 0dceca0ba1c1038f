"""Inner loops of the CPU kernel: from scores of a tile, `(rows, tokens)`, to probabilities.

Arrays are float32 unless said otherwise, and without gaps. Rows are the query vectors that share a KV head; a tile is
as many tokens as one packed block.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from hf_kvplus.attention.intrinsics import LOWEST, inner_loop
from hf_kvplus.attention.vectors import (
    BYTE,
    FLOAT,
    FLOATS,
    INT,
    LANES,
    LONG,
    Builder,
    Value,
    call,
    constant,
    exponential,
    hyperbolic_tangent,
    lane_numbers,
    largest_lane,
    load,
    maximum,
    offset,
    splat,
    steps,
    store,
    vector,
)


@inner_loop("scores_at float_cap", "length")
def cap_scores(builder: Builder, scores: Value, cap: Value, length: int) -> None:
    """Replaces scores by `cap * tanh(score / cap)`."""
    caps, inverse = splat(builder, cap), splat(builder, builder.fdiv(FLOAT(1.0), cap))
    with steps(builder, length // LANES, 4 * LANES) as at:
        place = offset(builder, scores, at)
        numbers = builder.fmul(load(builder, place, FLOATS), inverse)
        store(builder, builder.fmul(hyperbolic_tangent(builder, numbers), caps), place)


@inner_loop("scores_at mask_at masked first last gap_first gap_last", "tokens")
def hide(
    builder: Builder,
    scores: Value,
    mask: Value,
    masked: Value,
    first: Value,
    last: Value,
    gap_first: Value,
    gap_last: Value,
    tokens: int,
) -> None:
    """Sets scores of one row to -inf outside tokens `first` to `last`, inside the gap, and where the mask is 0.

    The mask, a byte per token, is looked at only if `masked`, and only within `first` to `last`.
    """
    bounds = [splat(builder, builder.trunc(bound, INT)) for bound in (first, last, gap_first, gap_last)]
    use_mask = builder.icmp_signed("!=", masked, LONG(0))
    for token in range(0, tokens, LANES):
        numbers = builder.add(lane_numbers(), constant(INT, token))
        seen = builder.and_(
            builder.icmp_signed(">=", numbers, bounds[0]), builder.icmp_signed("<", numbers, bounds[1])
        )
        gap = builder.and_(builder.icmp_signed(">=", numbers, bounds[2]), builder.icmp_signed("<", numbers, bounds[3]))
        readable = builder.and_(seen, splat(builder, use_mask))
        place = builder.bitcast(offset(builder, mask, token), vector(BYTE).as_pointer())
        name = f"llvm.masked.load.v{LANES}i8.p0"
        shown = call(builder, name, vector(BYTE), place, INT(1), readable, ir.Constant(vector(BYTE), [1] * LANES))
        seen = builder.and_(seen, builder.icmp_unsigned("!=", shown, ir.Constant(vector(BYTE), [0] * LANES)))
        seen = builder.and_(seen, builder.not_(gap))
        target = offset(builder, scores, 4 * token)
        store(builder, builder.select(seen, load(builder, target, FLOATS), LOWEST), target)


@inner_loop("scores_at held_at found_at", "tokens rows", types.int64)
def largest(builder: Builder, scores: Value, held: Value, found: Value, tokens: int, rows: int) -> Value:
    """Writes the larger of each row's largest score and of what is held for it; tells whether any is new."""
    grown = ir.Constant(ir.IntType(1), 0)
    for row in range(rows):
        line, before = offset(builder, scores, 4 * row * tokens), load(builder, offset(builder, held, 4 * row), FLOAT)
        result = load(builder, line, FLOATS)
        for token in range(LANES, tokens, LANES):
            result = maximum(builder, result, load(builder, offset(builder, line, 4 * token), FLOATS))
        top = largest_lane(builder, result)
        larger = builder.fcmp_ordered(">", top, before)
        store(builder, builder.select(larger, top, before), offset(builder, found, 4 * row))
        grown = builder.or_(grown, larger)
    return builder.zext(grown, LONG)


@inner_loop("scores_at sums_at largest_at", "tokens rows")
def exponentiate(builder: Builder, scores: Value, sums: Value, largest_: Value, tokens: int, rows: int) -> None:
    """Replaces scores by `exp(score - largest of its row)` and adds them to LANES sums a row.

    Where nothing was seen yet, and the largest score is -inf, they become 0.
    """
    for row in range(rows):
        line, kept = offset(builder, scores, 4 * row * tokens), offset(builder, sums, 4 * row * LANES)
        shift = load(builder, offset(builder, largest_, 4 * row), FLOAT)
        shift = builder.select(builder.fcmp_ordered("==", shift, FLOAT(float("-inf"))), FLOAT(0.0), shift)
        shifts, total = splat(builder, shift), load(builder, kept, FLOATS)
        for token in range(0, tokens, LANES):
            place = offset(builder, line, 4 * token)
            numbers = exponential(builder, builder.fsub(load(builder, place, FLOATS), shifts))
            store(builder, numbers, place)
            total = builder.fadd(total, numbers)
        store(builder, total, kept)
