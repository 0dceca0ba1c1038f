"""The compiled decoder of `dual_scale` blocks: one function that every thread runs, for all widths and sizes.

A task is a few blocks of one KV head of one batch row; threads take tasks from a shared counter. A block's codes are
unpacked into bytes, a token's channels side by side, and each token then passes through vectors of 16: scaled, rotated
back by 16 channels at a time (the Hadamard matrix of 16, from memory), then by butterflies between vectors. That takes
16 + log2(channels / 16) operations for each state where a product with the matrix takes `channels`.

    codes -> bytes (tokens, channels) -> scaled -> rotated back (-> plus turning means) -> out (tokens, channels)

Imported only where Numba is installed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# Arguments, 64-bit integers: numbers, addresses, and strides in bytes over batch rows, heads, blocks and tokens.
COUNTER = 0
TASKS = 1
HEADS = 2
BLOCKS = 3
BLOCKS_PER_TASK = 4
TOKENS = 5
CHANNELS = 6
NBITS = 7
CHANNEL_MAJOR = 8
ORDER = 9
TABLE = 10
LEVELS = 11
SCALES = 12
TOKEN_SCALES = 13
CODES = 14
CODES_B = 15
CODES_H = 16
CODES_N = 17
CHANNEL_SCALE = 18
CHANNEL_SCALE_B = 19
CHANNEL_SCALE_H = 20
CHANNEL_SCALE_N = 21
MEAN = 22
MEAN_B = 23
MEAN_H = 24
MEAN_N = 25
MEAN_SCALE = 26
MEAN_SCALE_B = 27
MEAN_SCALE_H = 28
MEAN_SCALE_N = 29
TOKEN_SCALE = 30
TOKEN_SCALE_B = 31
TOKEN_SCALE_H = 32
TOKEN_SCALE_N = 33
OUT = 34
OUT_B = 35
OUT_H = 36
OUT_N = 37
OUT_T = 38
MATRIX = 39
# Turning means to be added: how many a block has (0 for none), their pairs, the means (float32), the pairs' cosines
# and sines, float32 (pairs, 2, tokens), and channels, int32 (pairs, 2).
MEANS = 40
PAIR = 41
PAIR_B = 42
PAIR_H = 43
PAIR_N = 44
PAIR_MEAN = 45
PAIR_MEAN_B = 46
PAIR_MEAN_H = 47
PAIR_MEAN_N = 48
TURNS = 49
TURN_CHANNELS = 50
COUNT = 51

MOST_TOKENS = 128
MOST_CHANNELS = 256
CODES_BYTES = MOST_TOKENS * MOST_CHANNELS
ROW_BYTES = 4 * MOST_CHANNELS


def address_type(name: str, number: types.Type) -> Any:
    """Returns a function that turns an address into a pointer to numbers."""

    def typing(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(number)(types.int64), generate

    typing.__name__ = name
    return intrinsic(typing)


as_bytes = address_type("as_bytes", types.uint8)
as_signed_bytes = address_type("as_signed_bytes", types.int8)
as_floats = address_type("as_floats", types.float32)
as_integers = address_type("as_integers", types.int32)


@intrinsic(prefer_literal=True)
def scratch(context: Any, size: Any) -> Any:
    """Returns the address of `size` bytes on the stack; a constant size, and never within a loop."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        with builder.goto_entry_block():
            room = builder.alloca(ir.IntType(8), ir.IntType(64)(size.literal_value))
            room.align = 64
        return builder.ptrtoint(room, ir.IntType(64))

    return types.int64(size), generate


@intrinsic
def count_up(context: Any, address: Any) -> Any:
    """Adds 1 to a number that all threads share and returns what it was."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        target = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", target, ir.IntType(64)(1), "seq_cst")

    return types.int64(types.int64), generate


FLOAT, INT, BYTE, LONG = ir.FloatType(), ir.IntType(32), ir.IntType(8), ir.IntType(64)
FLOATS, INTS, BYTES = ir.VectorType(FLOAT, 16), ir.VectorType(INT, 16), ir.VectorType(BYTE, 16)


def _load(builder: ir.IRBuilder, address: Any, type_: ir.Type, offset: int = 0) -> Any:
    """Reads a scalar or a vector `offset` bytes behind an address, whatever its alignment."""
    place = builder.inttoptr(builder.add(address, LONG(offset)), type_.as_pointer())
    return builder.load(place, align=1)


def _store(builder: ir.IRBuilder, value: Any, address: Any) -> None:
    """Writes a vector to any address."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def _splat(builder: ir.IRBuilder, scalar: Any) -> Any:
    """Returns a vector of 16 equal numbers."""
    nothing = ir.Constant(FLOATS, ir.Undefined)
    first = builder.insert_element(nothing, scalar, INT(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(INTS, [0] * 16))


@intrinsic
def scale_16(context: Any, codes: Any, steps: Any, means: Any, factor: Any, target: Any) -> Any:
    """Writes `(code * step + mean) * factor` for 16 codes; all but `factor` are addresses."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        codes, steps, means, factor, target = arguments
        numbers = builder.uitofp(builder.zext(_load(builder, codes, BYTES), INTS), FLOATS)
        scaled = builder.fadd(builder.fmul(numbers, _load(builder, steps, FLOATS)), _load(builder, means, FLOATS))
        _store(builder, builder.fmul(scaled, _splat(builder, factor)), target)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32, types.int64), generate


@intrinsic
def rotate_16(context: Any, source: Any, matrix: Any, target: Any) -> Any:
    """Writes the product of 16 numbers with a matrix of 16 by 16."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        source, matrix, target = arguments
        total = ir.Constant(FLOATS, [0.0] * 16)
        name, type_ = "llvm.fma.v16f32", ir.FunctionType(FLOATS, [FLOATS] * 3)
        multiply_add = cgutils.get_or_insert_function(builder.module, type_, name)
        for row in range(16):
            number = _splat(builder, _load(builder, source, FLOAT, 4 * row))
            total = builder.call(multiply_add, [number, _load(builder, matrix, FLOATS, 64 * row), total])
        _store(builder, total, target)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def add_and_subtract_16(context: Any, upper: Any, lower: Any) -> Any:
    """Replaces two vectors of 16 by their sum and their difference."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        one, other = (_load(builder, address, FLOATS) for address in arguments)
        _store(builder, builder.fadd(one, other), arguments[0])
        _store(builder, builder.fsub(one, other), arguments[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@njit(error_model="numpy")
def unpack_plane(source: int, target: int, bytes_: int, width: int, first: bool) -> None:
    """Unpacks one plane of a line; the planes behind the first put their bits below those that are there."""
    packed, codes = as_bytes(source), as_bytes(target)
    mask = (1 << width) - 1
    for part in range(8 // width):
        shift, begin = part * width, part * bytes_
        if first:
            for j in range(bytes_):
                codes[begin + j] = (packed[j] >> shift) & mask
        else:
            for j in range(bytes_):
                codes[begin + j] = (codes[begin + j] << width) | ((packed[j] >> shift) & mask)


@njit(error_model="numpy")
def unpack_line(source: int, target: int, length: int, nbits: int) -> None:
    """Unpacks a line of `length` codes, a multiple of 8."""
    if nbits == 8:
        packed, codes = as_bytes(source), as_bytes(target)
        for j in range(length):
            codes[j] = packed[j]
    elif nbits == 4:
        unpack_plane(source, target, length // 2, 4, True)
    elif nbits == 2:
        unpack_plane(source, target, length // 4, 2, True)
    elif nbits == 3:
        unpack_plane(source, target, length // 4, 2, True)
        unpack_plane(source + length // 4, target, length // 8, 1, False)
    elif nbits == 5:
        unpack_plane(source, target, length // 2, 4, True)
        unpack_plane(source + length // 2, target, length // 8, 1, False)
    else:
        unpack_plane(source, target, length // 2, 4, True)
        unpack_plane(source + length // 2, target, length // 4, 2, False)


@njit(error_model="numpy")
def look_up(
    codes_at: int, levels_at: int, steps_at: int, means_at: int, factor: float, target: int, length: int
) -> None:
    """Scales a token's codes, which stand for the levels of a table."""
    codes, levels = as_bytes(codes_at), as_floats(levels_at)
    steps, means, out = as_floats(steps_at), as_floats(means_at), as_floats(target)
    for j in range(length):
        out[j] = (levels[codes[j]] * steps[j] + means[j]) * factor


@njit(error_model="numpy")
def add_turning_means(
    pairs_at: int, means_at: int, turns_at: int, channels_at: int, count: int, tokens: int, out_at: int, stride: int
) -> None:
    """Adds the turning means of a block to its tokens, `stride` bytes apart; see `hf_kvplus.codecs.rotary_mean`."""
    pairs, channels = as_bytes(pairs_at), as_integers(channels_at)
    means, turns = as_floats(means_at), as_floats(turns_at)
    for number in range(count):
        pair, x, y = np.int64(pairs[number]), means[2 * number], means[2 * number + 1]
        if x == 0 and y == 0:
            continue
        first, second, turn = channels[2 * pair], channels[2 * pair + 1], 2 * tokens * pair
        for token in range(tokens):
            out = as_floats(out_at + token * stride)
            cosine, sine = turns[turn + token], turns[turn + tokens + token]
            out[first] += x * cosine - y * sine
            out[second] += y * cosine + x * sine


@cfunc(types.void(types.CPointer(types.int64)), cache=True, error_model="numpy")
def decode_blocks(a: Any) -> None:
    """Decodes blocks; `a` holds the arguments named above."""
    codes_at, line_at, row_at = scratch(CODES_BYTES), scratch(MOST_TOKENS), scratch(ROW_BYTES)
    steps_at, means_at = scratch(ROW_BYTES), scratch(ROW_BYTES)
    tokens, channels, nbits, order = a[TOKENS], a[CHANNELS], a[NBITS], a[ORDER]
    scales, token_scales = as_floats(a[SCALES]), as_floats(a[TOKEN_SCALES])
    lowest = np.float32(0) if a[TABLE] else as_floats(a[LEVELS])[0]
    groups = (a[BLOCKS] + a[BLOCKS_PER_TASK] - 1) // a[BLOCKS_PER_TASK]
    steps, means, codes, line = as_floats(steps_at), as_floats(means_at), as_bytes(codes_at), as_bytes(line_at)
    while True:
        task = count_up(a[COUNTER])
        if task >= a[TASKS]:
            return
        pair, first = task // groups, task % groups * a[BLOCKS_PER_TASK]
        batch, head = pair // a[HEADS], pair % a[HEADS]
        for block in range(first, min(first + a[BLOCKS_PER_TASK], a[BLOCKS])):
            source = a[CODES] + batch * a[CODES_B] + head * a[CODES_H] + block * a[CODES_N]
            step_codes = as_bytes(
                a[CHANNEL_SCALE] + batch * a[CHANNEL_SCALE_B] + head * a[CHANNEL_SCALE_H] + block * a[CHANNEL_SCALE_N]
            )
            mean_codes = as_signed_bytes(a[MEAN] + batch * a[MEAN_B] + head * a[MEAN_H] + block * a[MEAN_N])
            mean_scale_at = a[MEAN_SCALE] + batch * a[MEAN_SCALE_B] + head * a[MEAN_SCALE_H] + block * a[MEAN_SCALE_N]
            mean_scale = scales[as_bytes(mean_scale_at)[0]]
            for channel in range(channels):
                steps[channel] = scales[step_codes[channel]]
                means[channel] = np.float32(mean_codes[channel]) * mean_scale + lowest * steps[channel]
            if a[CHANNEL_MAJOR]:
                for channel in range(channels):
                    unpack_line(source + channel * tokens * nbits // 8, line_at, tokens, nbits)
                    for token in range(tokens):
                        codes[token * channels + channel] = line[token]
            else:
                for token in range(tokens):
                    unpack_line(source + token * channels * nbits // 8, codes_at + token * channels, channels, nbits)
            out_at = a[OUT] + batch * a[OUT_B] + head * a[OUT_H] + block * a[OUT_N]
            scale_at = a[TOKEN_SCALE] + batch * a[TOKEN_SCALE_B] + head * a[TOKEN_SCALE_H] + block * a[TOKEN_SCALE_N]
            for token in range(tokens):
                factor = np.float32(1)
                if a[TOKEN_SCALE]:
                    factor = token_scales[as_bytes(scale_at)[token]]
                target = out_at + token * a[OUT_T]
                # Rotated states are put together in scratch, others where they belong.
                scaled_at = row_at if order > 1 else target
                token_at = codes_at + token * channels
                if a[TABLE]:
                    look_up(token_at, a[LEVELS], steps_at, means_at, factor, scaled_at, channels)
                else:
                    for c in range(0, channels, 16):
                        scale_16(token_at + c, steps_at + 4 * c, means_at + 4 * c, factor, scaled_at + 4 * c)
                if order > 1:
                    for c in range(0, channels, 16):
                        rotate_16(row_at + 4 * c, a[MATRIX], target + 4 * c)
                    half = 16
                    while half < order:
                        for base in range(0, channels, 2 * half):
                            for c in range(base, base + half, 16):
                                add_and_subtract_16(target + 4 * c, target + 4 * (c + half))
                        half *= 2
            if a[MEANS]:
                add_turning_means(
                    a[PAIR] + batch * a[PAIR_B] + head * a[PAIR_H] + block * a[PAIR_N],
                    a[PAIR_MEAN] + batch * a[PAIR_MEAN_B] + head * a[PAIR_MEAN_H] + block * a[PAIR_MEAN_N],
                    a[TURNS], a[TURN_CHANNELS], a[MEANS], tokens, out_at, a[OUT_T],
                )  # fmt: skip
