"""Inner loops of the compiled encoder: the affine codec, and packing of codes."""

from __future__ import annotations

from llvmlite import ir

from hf_kvplus.attention.intrinsics import inner_loop
from hf_kvplus.attention.vectors import (
    BYTE,
    FLOAT,
    FLOATS,
    HALF,
    LANES,
    LONG,
    SHORT,
    Builder,
    Value,
    constant,
    load,
    maximum,
    offset,
    splat,
    steps,
    store,
    vector,
)
from hf_kvplus.compiled_kernels.encode_vectors import (
    HALF_MAX,
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


@inner_loop("row_at low_at high_at channels")
def widen(builder: Builder, row: Value, low: Value, high: Value, channels: Value) -> None:
    """Widens the range of each channel to hold a token's states."""
    with columns(builder, channels) as at:
        numbers = load_at(builder, row, at)
        store_at(builder, minimum(builder, numbers, load_at(builder, low, at)), low, at)
        store_at(builder, maximum(builder, numbers, load_at(builder, high, at)), high, at)


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
    return clamp(builder, result, constant(FLOAT, -HALF_MAX), constant(FLOAT, HALF_MAX))


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
        lowest, highest = load_at(builder, low, at), load_at(builder, high, at)
        empty = builder.fcmp_ordered(">", lowest, highest)
        lowest, highest = (builder.select(empty, ZERO, values) for values in (lowest, highest))
        zeros = builder.fneg(_half_above(builder, builder.fneg(lowest)))
        scales = _half_above(builder, builder.fdiv(builder.fsub(highest, zeros), divisors))
        store_at(builder, zeros, zero, at)
        store_at(builder, reciprocal(builder, scales), inverse, at)
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
        values = builder.fsub(load_at(builder, row, at), load_at(builder, zero, at))
        values = round_even(builder, builder.fmul(values, load_at(builder, inverse, at)))
        store_bytes(builder, clamp(builder, values, ZERO, last), codes, at)


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
