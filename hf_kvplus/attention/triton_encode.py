"""Encoding of the dual-scale codec as one Triton kernel: a program takes a block from states to packed bytes.

The steps are those of `DualScaleCodec.encode`, in the same order; a block stays in registers in between. Codes are
packed by tensor cores: the bytes of a plane are the codes times a matrix that puts code `i` at byte `i % size`, times
the place value of `i // size`; sums stay below 256, which is exact. Sums are taken in another order than PyTorch takes
them, so that a scale or a code on the edge between two may fall to the other side.

Left out: codecs with a metric of queries, whose codes depend on one another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_kvplus.attention.triton_unpack import CHANNEL_STEPS, TOKEN_STEPS, from_log_scale
from hf_kvplus.codecs import dual_scale
from hf_kvplus.codecs.affine import HALF_MAX

LARGEST = tl.constexpr(HALF_MAX)
FLOOR = tl.constexpr(dual_scale.VARIANCE_FLOOR)
TINY = tl.constexpr(dual_scale.TINY)
MEAN_MAX = tl.constexpr(float(dual_scale.MEAN_MAX))
UP = tl.constexpr(dual_scale.UP)
MOST_CORRECTION = tl.constexpr(dual_scale.MOST_CORRECTION)
# Channels of the states that a product with the rotation takes at a time.
STEP = tl.constexpr(32)


@triton.jit
def round_even(number):
    """Rounds numbers below 2**22 to the nearest whole one, halves to even."""
    return (number + 12582912.0) - 12582912.0


@triton.jit
def clean(numbers):
    """Returns numbers within the range of half precision, 0 for what isn't one."""
    numbers = tl.where(numbers == numbers, numbers, 0.0)
    return tl.minimum(tl.maximum(numbers, -LARGEST), LARGEST)


@triton.jit
def to_log_scale(scale, STEPS: tl.constexpr):
    """Returns the bytes of scales as integers, see `hf_kvplus.codecs.log_scale`."""
    smallest: tl.constexpr = 2.0 ** (-127 / STEPS)
    number = round_even(tl.log2(tl.maximum(scale, smallest)) * STEPS + 128.0)
    return tl.where(scale > 0, tl.minimum(tl.maximum(number, 1.0), 255.0), 0.0).to(tl.int32)


@triton.jit
def inverse(scale):
    """Returns the reciprocal, and 0 for 0."""
    return tl.where(scale > 0, 1.0 / tl.where(scale > 0, scale, 1.0), 0.0)


@triton.jit
def nearest(number, levels, NBITS: tl.constexpr, TABLE: tl.constexpr):
    """Returns the codes of the nearest levels."""
    most: tl.constexpr = 2**NBITS - 1
    if TABLE:
        code = tl.zeros(number.shape, tl.int32)
        for index in tl.static_range(most):
            middle = (tl.load(levels + index) + tl.load(levels + index + 1)) / 2
            code += tl.where(number > middle, 1, 0)
    else:
        code = tl.minimum(tl.maximum(round_even(number + most / 2), 0.0), most * 1.0).to(tl.int32)
    return code


@triton.jit
def level_of(code, levels, NBITS: tl.constexpr, TABLE: tl.constexpr):
    """Returns what codes stand for."""
    # Triton compiles only one branch of a statement.
    if TABLE:  # noqa: SIM108
        level = tl.load(levels + code)
    else:
        level = code.to(tl.float32) - (2**NBITS - 1) / 2
    return level


@triton.jit
def rounded_mean(mean):
    """Returns offsets as bytes, the byte of their scale, and as they will be read."""
    byte = to_log_scale(tl.max(tl.abs(mean), 0) * (UP / MEAN_MAX), CHANNEL_STEPS)
    unit = from_log_scale(byte, CHANNEL_STEPS)
    number = tl.minimum(tl.maximum(round_even(mean * inverse(unit)), -MEAN_MAX), MEAN_MAX)
    return number, byte, number * unit


@triton.jit
def balance(numbers, weight, count, elements, ITERATIONS: tl.constexpr):
    """Returns token scales that with channel scales give all rows and columns variance 1, `(tokens,)`."""
    squares = numbers * numbers
    squares = squares / tl.maximum(tl.sum(squares) / elements, TINY)
    token = tl.full((numbers.shape[0],), 1.0, tl.float32)
    for _ in range(ITERATIONS):
        channel = tl.maximum(tl.sum(squares / token[:, None], 0), FLOOR)
        token = tl.maximum(tl.sum(squares / channel[None, :], 1), FLOOR)
        middle = tl.exp2(tl.sum(tl.log2(token) * weight) / count)
        token = tl.where(weight > 0, token / middle, 1.0)
    smallest: tl.constexpr = 2.0 ** (-127 / TOKEN_STEPS)
    largest: tl.constexpr = 2.0 ** (127 / TOKEN_STEPS)
    return tl.minimum(tl.maximum(tl.sqrt(token), smallest), largest)


@triton.jit
def least_squares(stored, wanted, mean, scale, weight, count):
    """Fits `wanted = stored * scale + mean` per channel; returns the squared error, offset and step."""
    counted, kept = stored * weight[:, None], wanted * weight[:, None]
    level_mean, wanted_mean = tl.sum(counted, 0) / count, tl.sum(kept, 0) / count
    variance = tl.sum(counted * stored, 0) / count - level_mean * level_mean
    covariance = tl.sum(counted * wanted, 0) / count - level_mean * wanted_mean
    wanted_variance = tl.sum(kept * wanted, 0) / count - wanted_mean * wanted_mean
    slope = covariance / tl.maximum(variance, TINY)
    usable = (variance > 1e-6) & (slope > 0)
    error = tl.where(usable, wanted_variance - slope * covariance, wanted_variance)
    return error, tl.where(usable, wanted_mean - slope * level_mean, mean), tl.where(usable, slope, scale)


@triton.jit
def fit(
    numbers, weight, count, levels, NBITS: tl.constexpr, TABLE: tl.constexpr, CLIPS: tl.constexpr,
    REFINEMENTS: tl.constexpr,
):  # fmt: skip
    """Returns the offset and the step of each channel."""
    held = weight[:, None] > 0
    low = tl.min(tl.where(held, numbers, float("inf")), 0)
    high = tl.max(tl.where(held, numbers, float("-inf")), 0)
    empty = low > high
    low, high = tl.where(empty, 0.0, low), tl.where(empty, 0.0, high)
    _, _, middle = rounded_mean((low + high) / 2)
    top = level_of(2**NBITS - 1, levels, NBITS, TABLE) if TABLE else (2**NBITS - 1) / 2
    cover = tl.maximum(tl.maximum(high - middle, middle - low), 0.0) / top
    if REFINEMENTS == 0:
        best_mean, best_scale = middle, cover * UP
    else:
        best_error, best_mean, best_scale = tl.full(middle.shape, float("inf"), tl.float32), middle, cover
        for clip in range(CLIPS):
            mean, scale, error = middle, cover * (1.0 - 0.15 * clip), best_error
            for _ in range(REFINEMENTS):
                code = nearest((numbers - mean[None, :]) * inverse(scale)[None, :], levels, NBITS, TABLE)
                stored = level_of(code, levels, NBITS, TABLE)
                error, mean, scale = least_squares(stored, numbers, mean, scale, weight, count)
            better = error < best_error
            best_error = tl.where(better, error, best_error)
            best_mean, best_scale = tl.where(better, mean, best_mean), tl.where(better, scale, best_scale)
    return best_mean, best_scale


@triton.jit
def placing(index, place, LENGTH: tl.constexpr, WIDTH: tl.constexpr):
    """Returns the matrix that packs codes `index` into bytes `place` of a plane, broadcast."""
    size: tl.constexpr = LENGTH * WIDTH // 8
    value = (1 << (index // size * WIDTH)).to(tl.float32)
    return tl.where((index < LENGTH) & (place < size) & (index % size == place), value, 0.0).to(tl.float16)


@triton.jit
def store_plane(
    target, code, WIDTH: tl.constexpr, SHIFT: tl.constexpr, AXIS: tl.constexpr, LINE: tl.constexpr,
    TOKENS: tl.constexpr, TOKENS_PAD: tl.constexpr, CHANNELS: tl.constexpr, CHANNELS_PAD: tl.constexpr,
):  # fmt: skip
    """Packs and writes the bits of codes from SHIFT on.

    AXIS 0 puts a channel's tokens side by side, 1 a token's channels. LINE is the bytes of a line with all its planes.
    """
    token, channel = tl.arange(0, TOKENS_PAD), tl.arange(0, CHANNELS_PAD)
    bits = ((code >> SHIFT) & ((1 << WIDTH) - 1)).to(tl.float16)
    if AXIS == 0:
        size: tl.constexpr = TOKENS * WIDTH // 8
        pad: tl.constexpr = TOKENS_PAD
        place = tl.arange(0, pad)
        packed = tl.dot(placing(token[None, :], place[:, None], TOKENS, WIDTH), bits)
        address = target + channel[None, :] * LINE + place[:, None]
        tl.store(address, packed.to(tl.uint8), mask=(place < size)[:, None] & (channel < CHANNELS)[None, :])
    else:
        size: tl.constexpr = CHANNELS * WIDTH // 8
        pad: tl.constexpr = CHANNELS_PAD // (8 // WIDTH) if CHANNELS_PAD // (8 // WIDTH) > 16 else 16
        place = tl.arange(0, pad)
        packed = tl.dot(bits, placing(channel[:, None], place[None, :], CHANNELS, WIDTH))
        address = target + token[:, None] * LINE + place[None, :]
        tl.store(address, packed.to(tl.uint8), mask=(token < TOKENS)[:, None] & (place < size)[None, :])


@triton.jit(do_not_specialize=["blocks", "place", "capacity"])
def encode_block(
    states, stride_b, stride_h, stride_n, stride_t, rotation, levels, valid,
    codes, channel_scale, token_scale, mean_bytes, mean_scale,
    heads, blocks, place, capacity,
    NBITS: tl.constexpr, AXIS: tl.constexpr, TABLE: tl.constexpr, ITERATIONS: tl.constexpr, CLIPS: tl.constexpr,
    REFINEMENTS: tl.constexpr, CORRECT: tl.constexpr, HAS_VALID: tl.constexpr, HAS_ROTATION: tl.constexpr,
    PRECISION: tl.constexpr, TOKENS: tl.constexpr, TOKENS_PAD: tl.constexpr, CHANNELS: tl.constexpr,
    CHANNELS_PAD: tl.constexpr,
):  # fmt: skip
    """Encodes one block; the grid is (batch * heads * blocks,).

    Each head has room for `capacity` blocks, of which the first one here is number `place`.
    """
    number = tl.program_id(0).to(tl.int64)
    block, head, batch = number % blocks, number // blocks % heads, number // blocks // heads
    at = (batch * heads + head) * capacity + place + block
    token, channel = tl.arange(0, TOKENS_PAD), tl.arange(0, CHANNELS_PAD)
    weight = tl.where(token < TOKENS, 1.0, 0.0)
    if HAS_VALID:
        shown = tl.load(valid + (batch * blocks + block) * TOKENS + token, mask=token < TOKENS, other=0)
        weight = tl.where(shown != 0, 1.0, 0.0)
    count = tl.maximum(tl.sum(weight), 1.0)
    source = states + batch * stride_b + head * stride_h + block * stride_n + token[:, None] * stride_t
    if HAS_ROTATION:
        numbers = tl.zeros((TOKENS_PAD, CHANNELS_PAD), tl.float32)
        for start in range(0, CHANNELS, STEP):
            column = start + tl.arange(0, STEP)
            seen = (weight > 0)[:, None] & (column < CHANNELS)[None, :]
            part = clean(tl.load(source + column[None, :], mask=seen, other=0.0).to(tl.float32))
            seen = (column < CHANNELS)[:, None] & (channel < CHANNELS)[None, :]
            matrix = tl.load(rotation + column[:, None] * CHANNELS + channel[None, :], mask=seen, other=0.0)
            numbers += tl.dot(part, matrix, input_precision=PRECISION)
    else:
        seen = (weight > 0)[:, None] & (channel < CHANNELS)[None, :]
        numbers = clean(tl.load(source + channel[None, :], mask=seen, other=0.0).to(tl.float32))
    if ITERATIONS > 0:
        scaled = to_log_scale(balance(numbers, weight, count, TOKENS * CHANNELS * 1.0, ITERATIONS), TOKEN_STEPS)
        token_size = from_log_scale(scaled, TOKEN_STEPS)
        numbers = numbers / token_size[:, None]
    mean, scale = fit(numbers, weight, count, levels, NBITS, TABLE, CLIPS, REFINEMENTS)
    mean = tl.where(channel < CHANNELS, mean, 0.0)
    byte, unit, mean = rounded_mean(mean)
    step = to_log_scale(scale, CHANNEL_STEPS)
    scale = from_log_scale(step, CHANNEL_STEPS)
    code = nearest((numbers - mean[None, :]) * inverse(scale)[None, :], levels, NBITS, TABLE)
    tl.store(mean_bytes + at * CHANNELS + channel, byte.to(tl.int8), mask=channel < CHANNELS)
    tl.store(mean_scale + at, unit.to(tl.uint8))
    tl.store(channel_scale + at * CHANNELS + channel, step.to(tl.uint8), mask=channel < CHANNELS)
    if ITERATIONS > 0:
        if CORRECT:
            stored = level_of(code, levels, NBITS, TABLE) * scale[None, :] + mean[None, :]
            square, projection = tl.sum(numbers * numbers, 1), tl.sum(stored * numbers, 1)
            factor = tl.where(projection > 0, square / tl.maximum(projection, TINY), 1.0)
            factor = tl.minimum(tl.maximum(factor, 1.0 / MOST_CORRECTION), MOST_CORRECTION)
            scaled = to_log_scale(token_size * tl.where(square > 0, factor, 1.0), TOKEN_STEPS)
        tl.store(token_scale + at * TOKENS + token, scaled.to(tl.uint8), mask=token < TOKENS)
    line: tl.constexpr = (TOKENS if AXIS == 0 else CHANNELS) * NBITS // 8
    length: tl.constexpr = TOKENS if AXIS == 0 else CHANNELS
    target = codes + at * (TOKENS * CHANNELS * NBITS // 8)
    upper: tl.constexpr = 8 if NBITS == 8 else 2 if NBITS < 4 else 4
    lower: tl.constexpr = NBITS - upper
    store_plane(target, code, upper, lower, AXIS, line, TOKENS, TOKENS_PAD, CHANNELS, CHANNELS_PAD)
    if lower > 0:
        rest = target + length * upper // 8
        store_plane(rest, code, lower, 0, AXIS, line, TOKENS, TOKENS_PAD, CHANNELS, CHANNELS_PAD)
