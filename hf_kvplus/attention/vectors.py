"""Vectors in LLVM's own words: the small vocabulary that the CPU kernel's inner loops are written in.

Numba leaves vectorizing to LLVM's guesses, which fail on packed codes. Here vector types are explicit, so registers
are where the kernel puts them; LLVM still chooses instructions, and wider vectors than a machine has are split. So one
source serves AVX-512, AVX2 and NEON. Imported only when a CPU kernel is built: llvmlite is an extra.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils

from hf_kvplus.codecs.packing import PLANES

# Sixteen floats fill a register of AVX-512; elsewhere eight are two or four registers.
_features = llvm.get_host_cpu_features()
WIDE = bool(_features.get("avx512f"))
# How a table of 16 numbers is looked up: by one instruction, by two, or lane by lane.
LOOKUP = "wide" if WIDE else "narrow" if _features.get("avx2") else "each"
LANES = 16 if WIDE else 8
# Accumulators of LANES floats that fit into the registers, beside codes and a broadcast factor.
ACCUMULATORS = 24 if WIDE else 6

# Bytes that memory is read by, at least.
CACHE_LINE = 64

BYTE, INT, LONG = ir.IntType(8), ir.IntType(32), ir.IntType(64)
FLOAT, HALF, SHORT = ir.FloatType(), ir.HalfType(), ir.IntType(16)
Builder = ir.IRBuilder
Value = ir.Value


def vector(element: ir.Type, lanes: int = LANES) -> ir.VectorType:
    """Returns the type of a vector."""
    return ir.VectorType(element, lanes)


FLOATS, INTS = vector(FLOAT), vector(INT)


def constant(element: ir.Type, number: float) -> ir.Constant:
    """Returns a vector that holds `number` in every lane."""
    return ir.Constant(vector(element), [number] * LANES)


def lane_numbers() -> ir.Constant:
    """Returns the vector 0, 1, 2, ..."""
    return ir.Constant(INTS, list(range(LANES)))


def splat(builder: Builder, scalar: Value) -> Value:
    """Returns a vector that holds `scalar` in every lane."""
    nothing = ir.Constant(vector(scalar.type), ir.Undefined)
    first = builder.insert_element(nothing, scalar, INT(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(INTS, [0] * LANES))


def pointer(builder: Builder, address: Value) -> Value:
    """Turns an address, a 64-bit integer, into a pointer to bytes."""
    return builder.inttoptr(address, BYTE.as_pointer())


def offset(builder: Builder, base: Value, size: Value | int) -> Value:
    """Returns the pointer `size` bytes behind `base`."""
    return builder.gep(base, [LONG(size) if isinstance(size, int) else size], source_etype=BYTE)


def load(builder: Builder, source: Value, type_: ir.Type) -> Value:
    """Reads a scalar or vector at any address."""
    return builder.load(builder.bitcast(source, type_.as_pointer()), align=1, typ=type_)


def store(builder: Builder, value: Value, target: Value) -> None:
    """Writes a scalar or vector to any address."""
    builder.store(value, builder.bitcast(target, value.type.as_pointer()), align=1)


def call(builder: Builder, name: str, returned: ir.Type, *arguments: Value, fastmath: tuple[str, ...] = ()) -> Value:
    """Calls one of LLVM's intrinsic functions."""
    signature = ir.FunctionType(returned, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, signature, name)
    return builder.call(function, arguments, fastmath=fastmath)


def prefetch(builder: Builder, source: Value, size: int = 1) -> None:
    """Asks for the `size` bytes from an address on, which are read soon; any address will do."""
    for place in range(0, size, CACHE_LINE):
        address = offset(builder, source, place)
        call(builder, "llvm.prefetch.p0", ir.VoidType(), address, INT(0), INT(3), INT(1))


def multiply_add(builder: Builder, left: Value, right: Value, addend: Value) -> Value:
    """Returns `left * right + addend`, fused where the machine can."""
    return call(builder, f"llvm.fmuladd.v{LANES}f32", FLOATS, left, right, addend)


def maximum(builder: Builder, left: Value, right: Value) -> Value:
    """Returns the larger value of each lane."""
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


def largest_lane(builder: Builder, values: Value) -> Value:
    """Returns the largest lane as a scalar."""
    return call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", FLOAT, values, fastmath=("nnan",))


def sum_lanes(builder: Builder, values: Value) -> Value:
    """Returns the sum of all lanes as a scalar, added pairwise."""
    return call(builder, f"llvm.vector.reduce.fadd.v{LANES}f32", FLOAT, FLOAT(-0.0), values, fastmath=("reassoc",))


def load_halves(builder: Builder, source: Value, stride: int = 1, first: int = 0) -> Value:
    """Reads LANES half-precision numbers, each `stride` behind the last, as float32."""
    if stride == 1:
        return builder.fpext(load(builder, source, vector(HALF)), FLOATS)
    everything = load(builder, source, vector(HALF, LANES * stride))
    chosen = ir.Constant(INTS, [lane * stride + first for lane in range(LANES)])
    return builder.fpext(builder.shuffle_vector(everything, everything, chosen), FLOATS)


def load_states(builder: Builder, source: Value, dtype: str) -> Value:
    """Reads LANES contiguous numbers of `dtype` (`float32`, `float16` or `bfloat16`) as float32."""
    if dtype == "float32":
        return load(builder, source, FLOATS)
    if dtype == "float16":
        return load_halves(builder, source)
    upper = builder.shl(builder.zext(load(builder, source, vector(SHORT)), INTS), constant(INT, 16))
    return builder.bitcast(upper, FLOATS)


def store_states(builder: Builder, values: Value, target: Value, dtype: str) -> None:
    """Writes LANES float32 values as `dtype`, rounded to nearest even."""
    if dtype == "float32":
        store(builder, values, target)
    elif dtype == "float16":
        store(builder, builder.fptrunc(values, vector(HALF)), target)
    else:
        bits = builder.bitcast(values, INTS)
        odd = builder.and_(builder.lshr(bits, constant(INT, 16)), constant(INT, 1))
        rounded = builder.add(bits, builder.add(odd, constant(INT, 0x7FFF)))
        store(builder, builder.trunc(builder.lshr(rounded, constant(INT, 16)), vector(SHORT)), target)


def exponential(builder: Builder, values: Value) -> Value:
    """Returns exp of values that are 0 or negative, within 2 units in the last place; 0 below -87.3."""
    power, rest = _exponential_parts(builder, values)
    result = multiply_add(builder, power, rest, power)
    return builder.select(builder.fcmp_ordered(">", values, constant(FLOAT, -87.3)), result, constant(FLOAT, 0.0))


def hyperbolic_tangent(builder: Builder, values: Value) -> Value:
    """Returns tanh, from exp(-2 |x|) - 1, which is exact near 0."""
    bits = builder.bitcast(values, INTS)
    sign = builder.and_(bits, constant(INT, 1 << 31))
    size = builder.bitcast(builder.and_(bits, constant(INT, (1 << 31) - 1)), FLOATS)
    doubled = maximum(builder, builder.fmul(size, constant(FLOAT, -2.0)), constant(FLOAT, -80.0))
    power, rest = _exponential_parts(builder, doubled)
    below_one = multiply_add(builder, power, rest, builder.fsub(power, constant(FLOAT, 1.0)))
    result = builder.fdiv(builder.fneg(below_one), builder.fadd(below_one, constant(FLOAT, 2.0)))
    return builder.bitcast(builder.or_(builder.bitcast(result, INTS), sign), FLOATS)


def _exponential_parts(builder: Builder, values: Value) -> tuple[Value, Value]:
    """Returns `power`, a power of two, and `rest` so that exp of values up to 0 is `power + power * rest`.

    The argument is split into a multiple of ln 2, in two steps so that nothing is lost, and a remainder within half of
    it, for which a polynomial gives exp - 1.
    """
    scaled = builder.fmul(values, constant(FLOAT, 1.4426950408889634))
    multiple = maximum(builder, call(builder, f"llvm.rint.v{LANES}f32", FLOATS, scaled), constant(FLOAT, -127.0))
    remainder = multiply_add(builder, multiple, constant(FLOAT, -0.693145751953125), values)
    remainder = multiply_add(builder, multiple, constant(FLOAT, -1.428606765330187e-06), remainder)
    rest = constant(FLOAT, 1 / 5040)
    for coefficient in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0):
        rest = multiply_add(builder, rest, remainder, constant(FLOAT, coefficient))
    power = builder.shl(builder.add(builder.fptosi(multiple, INTS), constant(INT, 127)), constant(INT, 23))
    return builder.bitcast(power, FLOATS), builder.fmul(rest, remainder)


class Table:
    """A table of up to 16 float32 numbers that is looked up lane by lane.

    Args:
        builder: Where instructions go.
        source: Address of 16 numbers.
    """

    def __init__(self, builder: Builder, source: Value) -> None:
        self.source = source
        count = {"wide": 1, "narrow": 2}.get(LOOKUP, 0)
        self.parts = [load(builder, offset(builder, source, 4 * LANES * part), FLOATS) for part in range(count)]

    def look_up(self, builder: Builder, indices: Value) -> Value:
        """Returns the numbers at `indices`, 0 to 15; with AVX-512 only their lowest four bits count."""
        if LOOKUP == "wide":
            return call(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, self.parts[0], indices)
        if LOOKUP == "narrow":
            lower, upper = (call(builder, "llvm.x86.avx2.permps", FLOATS, part, indices) for part in self.parts)
            return builder.select(builder.icmp_signed("<", indices, constant(INT, 8)), lower, upper)
        result = ir.Constant(FLOATS, ir.Undefined)
        for lane in range(LANES):
            index = builder.zext(builder.extract_element(indices, INT(lane)), LONG)
            number = load(builder, offset(builder, self.source, builder.mul(index, LONG(4))), FLOAT)
            result = builder.insert_element(result, number, INT(lane))
        return result


def load_log_scales(
    builder: Builder, source: Value, octave: Table, steps_per_octave: int, places: Places | None = None
) -> Value:
    """Reads scales of one byte, see `hf_kvplus.codecs.log_scale`: LANES of them, or those at `places`."""
    held = load(builder, source, vector(BYTE)) if places is None else _load_runs(builder, source, places)
    numbers = builder.zext(held, INTS)
    return log_scales(builder, numbers, octave, steps_per_octave)


def log_scales(builder: Builder, numbers: Value, octave: Table, steps_per_octave: int) -> Value:
    """Returns `2 ** ((number - 128) / steps_per_octave)`, and 0 for 0; `octave` holds the powers from 1 to 2."""
    octaves = constant(INT, steps_per_octave.bit_length() - 1)
    whole = builder.add(builder.lshr(numbers, octaves), constant(INT, 127 - 128 // steps_per_octave))
    part = octave.look_up(builder, builder.and_(numbers, constant(INT, steps_per_octave - 1)))
    scale = builder.fmul(builder.bitcast(builder.shl(whole, constant(INT, 23)), FLOATS), part)
    return builder.select(builder.icmp_signed("==", numbers, constant(INT, 0)), constant(FLOAT, 0.0), scale)


def load_signed_bytes(builder: Builder, source: Value) -> Value:
    """Reads LANES signed bytes as float32."""
    return builder.sitofp(builder.sext(load(builder, source, vector(BYTE)), INTS), FLOATS)


def load_levels(
    builder: Builder, line: Value, nbits: int, length: int, index: int | Places, table: Table | None, shift: float
) -> Value:
    """Unpacks LANES codes of one line into what they stand for.

    Args:
        builder: Where instructions go.
        line: Pointer to a line as `hf_kvplus.codecs.packing.pack` writes it.
        nbits: Bits per code.
        length: Codes in the line, a multiple of 8.
        index: Which codes: their places in the line, or the number of a vector of neighbours.
        table: What codes stand for; `None` for the codes themselves.
        shift: What is taken from codes, without a table.

    Returns:
        Float32 numbers.
    """
    places = neighbours(index) if isinstance(index, int) else index
    if table is not None:
        # A lookup by AVX-512 takes the lowest four bits by itself.
        unmasked = LOOKUP == "wide" and nbits == 4
        return table.look_up(builder, _load_numbers(builder, line, nbits, length, places, unmasked))
    codes = builder.sitofp(_load_numbers(builder, line, nbits, length, places), FLOATS)
    return builder.fsub(codes, constant(FLOAT, shift)) if shift else codes


def _load_numbers(
    builder: Builder, line: Value, nbits: int, length: int, places: Places, unmasked: bool = False
) -> Value:
    """Unpacks LANES codes to integers; `unmasked` leaves bits of other codes above those of a single plane."""
    codes, position = None, 0
    for width in PLANES[nbits]:
        plane = _load_plane(builder, offset(builder, line, position), width, length, places, unmasked)
        codes = plane if codes is None else builder.or_(builder.shl(codes, constant(INT, width)), plane)
        position += length * width // 8
    return codes


def _load_plane(builder: Builder, plane: Value, width: int, length: int, places: Places, unmasked: bool) -> Value:
    """Unpacks one plane; code `i` lies in byte `i % size`, above `i // size` others."""
    size = length * width // 8
    shifts = [code // size * width for code in places]
    numbers = builder.zext(_load_bytes(builder, plane, size, [code % size for code in places]), INTS)
    if any(shifts):
        numbers = builder.lshr(numbers, ir.Constant(INTS, shifts))
    if not unmasked and any(shift + width < 8 for shift in shifts):
        numbers = builder.and_(numbers, constant(INT, (1 << width) - 1))
    return numbers


def _load_bytes(builder: Builder, plane: Value, size: int, positions: list[int]) -> Value:
    """Reads the bytes at `positions`, never beyond the plane."""
    if positions == list(range(positions[0], positions[0] + LANES)):
        return load(builder, offset(builder, plane, positions[0]), vector(BYTE))
    count = LANES // positions.count(positions[0])
    if positions == list(range(positions[0], positions[0] + count)) * (LANES // count):
        repeated = load(builder, offset(builder, plane, positions[0]), vector(BYTE, count))
        return builder.shuffle_vector(repeated, repeated, ir.Constant(INTS, list(range(count)) * (LANES // count)))
    # They wrap around the plane's end: two loads that overlap or lie apart, then one shuffle.
    width = min(LANES, 1 << (size.bit_length() - 1))
    starts = [min(positions[0], size - width), 0] if size >= LANES else [0, size - width]
    first, second = (load(builder, offset(builder, plane, start), vector(BYTE, width)) for start in starts)
    lanes = [
        next(part * width + position - start for part, start in enumerate(starts) if start <= position < start + width)
        for position in positions
    ]
    return builder.shuffle_vector(first, second, ir.Constant(INTS, lanes))


Places = tuple[int, ...]


def neighbours(index: int) -> Places:
    """Returns the places of the `index`th LANES codes of a line."""
    return tuple(range(index * LANES, (index + 1) * LANES))


def line_vectors(length: int, nbits: int) -> list[Places]:
    """Divides the codes of a line into vectors that are cheap to unpack.

    The codes of one byte lie apart in the line (see `hf_kvplus.codecs.packing`), so LANES bytes make a vector for each
    of a byte's codes. What is left at the end of a plane is read at once for several of them: 48 codes of 4 bits are
    0 to 15, 24 to 39, and 16 to 23 together with 40 to 47. Vectors of neighbours would need bytes from both ends.
    """
    parts = 8 // nbits
    size = length // max(1, parts)
    vectors: list[Places] = []
    first = 0
    while first < size and PLANES[nbits] == (nbits,):
        run = min(LANES, 1 << ((size - first).bit_length() - 1))
        together = LANES // run
        if parts % together:
            break
        for part in range(0, parts, together):
            starts = [(part + number) * size + first for number in range(together)]
            vectors.append(tuple(start + lane for start in starts for lane in range(run)))
        first += run
    if first < size or not size:
        return [neighbours(index) for index in range(length // LANES)]
    return vectors


def _runs(places: Places) -> list[Places]:
    """Divides places into runs of neighbours."""
    cuts = [0, *(i for i in range(1, len(places)) if places[i] != places[i - 1] + 1), len(places)]
    return [places[first:last] for first, last in zip(cuts, cuts[1:], strict=False)]


def _load_runs(builder: Builder, source: Value, places: Places) -> Value:
    """Reads the bytes at `places`, which are runs of equal length."""
    parts = [load(builder, offset(builder, source, run[0]), vector(BYTE, len(run))) for run in _runs(places)]
    while len(parts) > 1:
        width = 2 * parts[0].type.count
        order = ir.Constant(vector(INT, width), list(range(width)))
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [builder.shuffle_vector(first, second, order) for first, second in pairs]
    return parts[0]


def store_places(builder: Builder, values: Value, target: Value, places: Places) -> None:
    """Writes each lane of float32 values to its place in a line."""
    lane = 0
    for run in _runs(places):
        chosen = ir.Constant(vector(INT, len(run)), list(range(lane, lane + len(run))))
        part = values if len(run) == LANES else builder.shuffle_vector(values, values, chosen)
        store(builder, part, offset(builder, target, 4 * run[0]))
        lane += len(run)


def passes(vectors: int, rows: int, nbits: int) -> list[list[int]]:
    """Divides the vectors of a line into passes whose accumulators fit into registers.

    Vectors that unpack the same bytes go together.
    """
    parts = 8 // PLANES[nbits][0]
    order = list(range(vectors))
    if vectors % parts == 0:
        order = [part * (vectors // parts) + index for index in range(vectors // parts) for part in range(parts)]
    count = -(-vectors // max(1, ACCUMULATORS // rows))
    size = -(-vectors // count)
    return [order[start : start + size] for start in range(0, vectors, size)]


Sums = dict[Any, Value]


@contextmanager
def accumulate(builder: Builder, count: Value | int, start: Sums) -> Iterator[tuple[Value, Sums]]:
    """Opens a loop that carries values in registers.

    LLVM isn't to unroll it: bodies are long enough already.

    Args:
        builder: Where instructions go.
        count: Rounds.
        start: The values before the first round.

    Yields:
        The number of the round, a 64-bit integer, and the values. What is put into them is carried to the next round;
        after the loop they hold the result.
    """
    stop = LONG(count) if isinstance(count, int) else count
    before, sums = builder.block, {}
    body, after = builder.append_basic_block("round"), builder.append_basic_block("after")
    builder.cbranch(builder.icmp_signed("<", LONG(0), stop), body, after)
    builder.position_at_end(body)
    number = builder.phi(LONG)
    carried = {key: builder.phi(value.type) for key, value in start.items()}
    sums.update(carried)
    yield number, sums
    following, end = builder.add(number, LONG(1)), builder.block
    rule = builder.module.add_metadata([ir.MetaDataString(builder.module, "llvm.loop.unroll.disable")])
    branch = builder.cbranch(builder.icmp_signed("<", following, stop), body, after)
    branch.set_metadata("llvm.loop", builder.module.add_metadata([rule]))
    builder.position_at_end(after)
    number.add_incoming(LONG(0), before)
    number.add_incoming(following, end)
    for key, value in start.items():
        carried[key].add_incoming(value, before)
        carried[key].add_incoming(sums[key], end)
        result = builder.phi(value.type)
        result.add_incoming(value, before)
        result.add_incoming(sums[key], end)
        sums[key] = result


@contextmanager
def steps(builder: Builder, count: Value | int, stride: int = 1) -> Iterator[Value]:
    """Opens a loop of `count` rounds; yields 0, `stride`, 2 * `stride`, ... as a 64-bit integer."""
    with accumulate(builder, count, {}) as (number, _):
        yield builder.mul(number, LONG(stride))


def read_factor(builder: Builder, source: Value) -> Value:
    """Reads one float32 into every lane."""
    return splat(builder, load(builder, source, FLOAT))
