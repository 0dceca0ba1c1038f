"""The compiled encoders of `dual_scale` and `affine` blocks: states in, packed bytes out, nothing stored in between.

A task is a few blocks of one KV head of one batch row; threads take tasks from a shared counter. A block's states are
read into the thread's stack as float32 and stay there while they are rotated, normalized, fitted, rounded and packed:
the steps are those of the codecs' own `encode_by_operators`, in the same order.

    states (tokens, channels), any dtype -> float32 -> codes, a byte each -> planes

A function serves all shapes and widths. What is compiled is stored on disk, under a name of its own for each.
Imported only where Numba is installed.
"""

from __future__ import annotations

import math
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import cfunc, njit, types

from hf_kvplus.attention import array_loops, intrinsics, vectors
from hf_kvplus.attention.array_loops import count_up, read_float, scratch, write_float
from hf_kvplus.attention.vectors import LANES
from hf_kvplus.compiled_kernels import decode, encode_feedback, encode_loops, encode_packing, encode_vectors
from hf_kvplus.compiled_kernels.decode import add_and_subtract_16, address_type, as_bytes, as_floats, rotate_16
from hf_kvplus.compiled_kernels.encode_feedback import dot, feed_back, multiply_matrix
from hf_kvplus.compiled_kernels.encode_loops import (
    assign_row,
    column_sums,
    covers,
    divide_row,
    invert,
    keep_better,
    largest_size,
    middles,
    multiply,
    read_row,
    refine,
    round_offsets,
    row_sums,
    set_all,
    square_sum,
)
from hf_kvplus.compiled_kernels.encode_packing import assign_affine_row, half_steps, pack_plane, widen

# Arguments, 64-bit integers: numbers, addresses, and strides in bytes over batch rows, heads, blocks and tokens.
# What is written has no gaps, so it needs no strides. VALID is 0, or the address of a byte for each token of each
# block of each batch row. DTYPE: 0 float32, 1 float16, 2 bfloat16.
COUNTER, TASKS, HEADS, BLOCKS, BLOCKS_PER_TASK, TOKENS, CHANNELS, NBITS, CHANNEL_MAJOR = range(9)
STATES, STATES_B, STATES_H, STATES_N, STATES_T, DTYPE, VALID, CODES = range(9, 17)
# Of dual_scale. CHANNEL_TABLES and TOKEN_TABLES: see `log_code`. EDGES: values that separate LEVELS, if TABLE.
ORDER, MATRIX, ITERATIONS, CLIPS, REFINEMENTS, CORRECT, TABLE, LEVELS, EDGES = range(17, 26)
CHANNEL_TABLES, TOKEN_TABLES, CHANNEL_SCALE, TOKEN_SCALE, MEAN, MEAN_SCALE = range(26, 32)
# Of affine. GROUPS of a line, GROUP elements each.
GROUPS, GROUP, SCALE, ZERO_POINT = range(32, 36)
# Of dual_scale with a metric: a matrix (channels, channels) for each head, see `hf_kvplus.codecs.metric`; or 0.
FACTOR, MOMENT = range(36, 38)
COUNT = 38

MOST_TOKENS, MOST_CHANNELS = 128, 256
STATES_BYTES, CODES_BYTES = 4 * MOST_TOKENS * MOST_CHANNELS, MOST_TOKENS * MOST_CHANNELS
ROW_BYTES, COLUMN_BYTES, BEST_BYTES = 4 * MOST_CHANNELS, 4 * MOST_TOKENS, 16 * MOST_CHANNELS
# Parts of a table of scales, float32 numbers each: scales by byte, the least value of each byte, then a first guess
# of the byte by the upper eight bits of a mantissa, as integers.
EDGES_AT, GUESSES_AT, STEPS_AT, TABLE_LENGTH = 256, 512, 768, 769
NOTHING, ONE, ZERO = np.float32(np.inf), np.float32(1), np.float32(0)
FLOOR, TINY = np.float32(1e-7), np.float32(2.0**-126)
MOST_CORRECTION, LEAST_CORRECTION = np.float32(1.5), np.float32(1 / 1.5)
UP = np.float32(2.0 ** (0.5 / 8))
MEAN_UNIT = np.float32(2.0 ** (0.5 / 8) / 127)
# Their products with the range of a channel are tried.
CLIP_1, CLIP_2 = np.float32(0.85), np.float32(0.7)
LEAST_VARIANCE = np.float32(encode_vectors.LEAST_VARIANCE)
LEAST_TOKEN_SCALE, MOST_TOKEN_SCALE = np.float32(2.0 ** (-127 / 16)), np.float32(2.0 ** (127 / 16))
TOKENS_PER_LOGARITHM = 16
# Vectors of tokens that are corrected at once: 48 tokens of AVX-512.
TOGETHER = 3

_MODULES = (
    array_loops,
    decode,
    encode_feedback,
    encode_loops,
    encode_packing,
    encode_vectors,
    intrinsics,
    vectors,
)
_FILES = (__file__, *(module.__file__ for module in _MODULES))
SOURCES = zlib.crc32(b"".join(Path(name).read_bytes() for name in _FILES))

as_ints = address_type("as_ints", types.int32)
as_shorts = address_type("as_shorts", types.int16)


@njit(error_model="numpy")
def log_code(value_at: int, table_at: int) -> int:
    """Returns the byte of a logarithmic scale that a float32 is rounded to; 0 for 0.

    The guess by exponent and mantissa is off by one at most; the table has the edges that PyTorch's logarithm has.
    """
    value = as_floats(value_at)[0]
    if not value > ZERO:
        return 0
    table, edges = as_ints(table_at), as_floats(table_at)
    bits = as_ints(value_at)[0]
    code = ((bits >> 23) - 127) * table[STEPS_AT] + table[GUESSES_AT + ((bits >> 15) & 255)]
    code = min(max(code, 1), 255)
    if code < 255 and value >= edges[EDGES_AT + code + 1]:
        return code + 1
    if code > 1 and value < edges[EDGES_AT + code]:
        return code - 1
    return code


@njit(error_model="numpy")
def read_token(source: int, target: int, channels: int, dtype: int) -> None:
    """Reads a token's states as float32."""
    if dtype == 0:
        read_row(source, target, channels, "float32")
    elif dtype == 1:
        read_row(source, target, channels, "float16")
    else:
        read_row(source, target, channels, "bfloat16")


@njit(error_model="numpy")
def rotate_token(source: int, matrix: int, target: int, channels: int, order: int) -> None:
    """Rotates a token's states: by 16 channels at a time, then by butterflies between vectors."""
    for c in range(0, channels, 16):
        rotate_16(source + 4 * c, matrix, target + 4 * c)
    half = 16
    while half < order:
        for base in range(0, channels, 2 * half):
            for c in range(base, base + half, 16):
                add_and_subtract_16(target + 4 * c, target + 4 * (c + half))
        half *= 2


@njit(error_model="numpy")
def normalize_tokens(token_at: int, weights_at: int, inverse_at: int, tokens: int, counted: int) -> None:
    """Divides the variances of tokens by their geometric mean; writes reciprocals too. Those without weight are 1."""
    token, weights, inverse = as_floats(token_at), as_floats(weights_at), as_floats(inverse_at)
    total, product, pending = 0.0, 1.0, 0
    for t in range(tokens):
        if weights[t] > ZERO:
            product *= np.float64(token[t])
            pending += 1
            if pending == TOKENS_PER_LOGARITHM:
                total += math.log(product)
                product, pending = 1.0, 0
    total += math.log(product)
    mean = np.float32(math.exp(total / max(counted, 1)))
    for t in range(tokens):
        token[t] = token[t] / mean if weights[t] > ZERO else ONE
        inverse[t] = ONE / token[t]


@njit(error_model="numpy")
def store_offsets(mean_at: int, bytes_at: int, unit_at: int, table_at: int, channels: int) -> int:
    """Rounds offsets to bytes of one unit, which is returned as a byte; see `round_offsets`."""
    write_float(unit_at, largest_size(mean_at, channels) * MEAN_UNIT)
    code = log_code(unit_at, table_at)
    unit = as_floats(table_at)[code]
    round_offsets(mean_at, bytes_at, unit, ONE / unit if unit > ZERO else ZERO, channels)
    return code


@njit(error_model="numpy")
def pack_codes(codes: int, target: int, plane: int, tokens: int, channels: int, nbits: int, transposed: int) -> None:
    """Packs a block's codes, `(tokens, channels)` bytes, along channels or (transposed) along tokens."""
    upper = 4 if 4 <= nbits < 8 else 8 if nbits == 8 else 2
    lower = nbits - upper
    first_bytes = (tokens if transposed else channels) * upper // 8
    line = (tokens if transposed else channels) * nbits // 8
    if transposed:
        pack_width(codes, plane, first_bytes * channels, upper, lower)
        transpose(plane, target, first_bytes, channels, line)
        if lower:
            pack_width(codes, plane, (line - first_bytes) * channels, lower, 0)
            transpose(plane, target + first_bytes, line - first_bytes, channels, line)
    else:
        for token in range(tokens):
            pack_width(codes + token * channels, target + token * line, first_bytes, upper, lower)
            if lower:
                source = codes + token * channels
                pack_width(source, target + token * line + first_bytes, line - first_bytes, lower, 0)


@njit(error_model="numpy")
def pack_width(source: int, target: int, part: int, width: int, lower: int) -> None:
    """Packs one plane, below which there are `lower` bits."""
    if width == 8:
        pack_plane(source, target, part, 8, 0)
    elif width == 4:
        if lower == 0:
            pack_plane(source, target, part, 4, 0)
        elif lower == 1:
            pack_plane(source, target, part, 4, 1)
        else:
            pack_plane(source, target, part, 4, 2)
    elif width == 2:
        if lower == 0:
            pack_plane(source, target, part, 2, 0)
        else:
            pack_plane(source, target, part, 2, 1)
    else:
        pack_plane(source, target, part, 1, 0)


@njit(error_model="numpy")
def transpose(source: int, target: int, rows: int, columns: int, line: int) -> None:
    """Writes bytes `(rows, columns)` as `(columns, rows)`, the lines `line` bytes apart."""
    read, written = as_bytes(source), as_bytes(target)
    for column in range(columns):
        for row in range(rows):
            written[column * line + row] = read[row * columns + column]


@njit(error_model="numpy")
def fit(
    a: Any, states: int, weights: int, mean: int, scale: int, cover: int, error: int, best: int, counted: int
) -> None:
    """Fits offset and step of each channel; `mean` and `cover` hold the middle and the reach of its range."""
    tokens, channels, top = a[TOKENS], a[CHANNELS], (1 << a[NBITS]) - 1
    count = np.float32(max(counted, 1))
    best_error, best_mean, best_scale, middle = best, best + ROW_BYTES, best + 2 * ROW_BYTES, best + 3 * ROW_BYTES
    multiply(mean, middle, ONE, channels)
    for clip in range(a[CLIPS]):
        multiply(middle, mean, ONE, channels)
        multiply(cover, scale, ONE if clip == 0 else CLIP_1 if clip == 1 else CLIP_2, channels)
        for _ in range(a[REFINEMENTS]):
            if a[TABLE]:
                refine(states, weights, mean, scale, error, a[EDGES], a[LEVELS], top, count, tokens, channels, 1)
            else:
                refine(states, weights, mean, scale, error, a[EDGES], a[LEVELS], top, count, tokens, channels, 0)
        if clip == 0:
            multiply(error, best_error, ONE, channels)
            multiply(mean, best_mean, ONE, channels)
            multiply(scale, best_scale, ONE, channels)
        else:
            keep_better(error, mean, scale, best_error, best_mean, best_scale, channels)
    multiply(best_mean, mean, ONE, channels)
    multiply(best_scale, scale, ONE, channels)


@njit(error_model="numpy")
def turn(states: int, turned: int, tokens: int, channels: int, width: int) -> None:
    """Writes a block `(tokens, channels)` as `(channels, width)`; what is behind the tokens is 0."""
    read, written = as_floats(states), as_floats(turned)
    for channel in range(channels):
        for token in range(tokens):
            written[channel * width + token] = read[token * channels + channel]
        for token in range(tokens, width):
            written[channel * width + token] = ZERO


@njit(error_model="numpy")
def round_channel(
    a: Any, turned: int, channel: int, factor: int, mean: Any, scale: Any, weights: int, sums: int, codes: int
) -> None:
    """Rounds one channel after the errors of those behind it were added; see `feed_back`.

    Into `sums` go sums over the tokens that count: of levels and of what was rounded to them, of the squares of levels
    and of both multiplied. In `turned` the channel's states give way to their errors.
    """
    channels, top, width = a[CHANNELS], (1 << a[NBITS]) - 1, (a[TOKENS] + LANES - 1) // LANES * LANES
    behind, row = channels - 1 - channel, factor + 4 * (channel * channels + channel + 1)
    step = scale[channel]
    numbers = as_floats(sums)
    numbers[0], numbers[1], numbers[2], numbers[3] = ZERO, ZERO, ZERO, ZERO
    numbers[4], numbers[5], numbers[6] = mean[channel], step, ONE / step if step > ZERO else ZERO
    edges, levels, first = a[EDGES], a[LEVELS], 0
    while first < width:
        here, there = turned + 4 * (channel * width + first), codes + channel * width + first
        counts, several = weights + 4 * first, width - first >= TOGETHER * LANES
        if a[TABLE] and several:
            feed_back(here, row, counts, there, edges, levels, sums, behind, width, top, 1, TOGETHER)
        elif a[TABLE]:
            feed_back(here, row, counts, there, edges, levels, sums, behind, width, top, 1, 1)
        elif several:
            feed_back(here, row, counts, there, edges, levels, sums, behind, width, top, 0, TOGETHER)
        else:
            feed_back(here, row, counts, there, edges, levels, sums, behind, width, top, 0, 1)
        first += TOGETHER * LANES if several else LANES


@njit(error_model="numpy")
def refit(
    a: Any,
    states: int,
    turned: int,
    factor: int,
    weights: int,
    sums: int,
    codes: int,
    mean_at: int,
    scale_at: int,
    work: int,
    counted: int,
) -> None:
    """Fits offset and step of each channel to states that were corrected for the errors of others.

    The first pass is made with what would be stored of the offsets and steps that came in. `work` has room for two
    rows and a number.
    """
    channels, width = a[CHANNELS], (a[TOKENS] + LANES - 1) // LANES * LANES
    table, count = as_floats(a[CHANNEL_TABLES]), np.float32(max(counted, 1))
    mean, scale, found = as_floats(mean_at), as_floats(scale_at), as_floats(sums)
    rounded_mean, rounded_scale = as_floats(work), as_floats(work + ROW_BYTES)
    multiply(mean_at, work, ONE, channels)
    store_offsets(work, codes, work + 2 * ROW_BYTES, a[CHANNEL_TABLES], channels)
    for channel in range(channels):
        rounded_scale[channel] = table[log_code(scale_at + 4 * channel, a[CHANNEL_TABLES])]
    turn(states, turned, a[TOKENS], channels, width)
    for channel in range(channels - 1, -1, -1):
        round_channel(a, turned, channel, factor, rounded_mean, rounded_scale, weights, sums, codes)
        level_mean, wanted_mean = found[0] / count, found[1] / count
        variance = found[2] / count - level_mean * level_mean
        slope = (found[3] / count - level_mean * wanted_mean) / max(variance, TINY)
        if variance > LEAST_VARIANCE and slope > ZERO:
            mean[channel], scale[channel] = wanted_mean - slope * level_mean, slope


@njit(error_model="numpy")
def assign_by_metric(
    a: Any,
    states: int,
    turned: int,
    factor: int,
    weights: int,
    sums: int,
    plane: int,
    mean: Any,
    scale: Any,
    codes: int,
) -> None:
    """Writes the codes of a block, `(tokens, channels)` bytes, chosen so that their errors are quiet in the metric."""
    tokens, channels, width = a[TOKENS], a[CHANNELS], (a[TOKENS] + LANES - 1) // LANES * LANES
    turn(states, turned, tokens, channels, width)
    for channel in range(channels - 1, -1, -1):
        round_channel(a, turned, channel, factor, mean, scale, weights, sums, plane)
    read, written = as_bytes(plane), as_bytes(codes)
    for token in range(tokens):
        for channel in range(channels):
            written[token * channels + channel] = read[channel * width + token]


@njit(error_model="numpy")
def measured_products(
    a: Any, state: int, moment: int, codes: Any, mean: Any, scale: Any, measured: int, stored: int, sums: int
) -> None:
    """Writes a token's squared length in the metric and its product there with what its codes stand for."""
    channels, levels, numbers = a[CHANNELS], as_floats(a[LEVELS]), as_floats(stored)
    first = 0
    while first < channels:
        if channels - first >= 4 * LANES:
            multiply_matrix(state, moment + 4 * first, measured + 4 * first, channels, 4)
            first += 4 * LANES
        else:
            multiply_matrix(state, moment + 4 * first, measured + 4 * first, channels, 1)
            first += LANES
    for channel in range(channels):
        numbers[channel] = levels[codes[channel]] * scale[channel] + mean[channel]
    write_float(sums, dot(state, measured, channels))
    write_float(sums + 4, dot(stored, measured, channels))


@cache
def dual_scale_encoder() -> Any:
    """Returns the compiled encoder of `dual_scale`, a Numba `cfunc`; its `address` takes that of the arguments."""
    return _build_dual_scale(SOURCES)


@cache
def affine_encoder() -> Any:
    """Returns the compiled encoder of `affine`."""
    return _build_affine(SOURCES)


def _build_dual_scale(sources: int) -> Any:
    """Compiles it; `sources` are part of the key of Numba's cache."""

    def encode_dual_scale(a: Any) -> None:
        _ = sources
        states, codes, plane, row = (
            scratch(STATES_BYTES),
            scratch(CODES_BYTES),
            scratch(CODES_BYTES),
            scratch(ROW_BYTES),
        )
        weights, token_at, inverse_token = scratch(COLUMN_BYTES), scratch(COLUMN_BYTES), scratch(COLUMN_BYTES)
        low, high, mean, scale = scratch(ROW_BYTES), scratch(ROW_BYTES), scratch(ROW_BYTES), scratch(ROW_BYTES)
        inverse, error, cover, best = scratch(ROW_BYTES), scratch(ROW_BYTES), scratch(ROW_BYTES), scratch(BEST_BYTES)
        sums, number, turned = scratch(64), scratch(64), scratch(STATES_BYTES)
        tokens, channels, nbits, order = a[TOKENS], a[CHANNELS], a[NBITS], a[ORDER]
        line, top = 4 * channels, (1 << nbits) - 1
        groups = (a[BLOCKS] + a[BLOCKS_PER_TASK] - 1) // a[BLOCKS_PER_TASK]
        token, weight = as_floats(token_at), as_floats(weights)
        channel_scales, token_scales = as_floats(a[CHANNEL_TABLES]), as_floats(a[TOKEN_TABLES])
        last_level = as_floats(a[LEVELS])[top]
        while True:
            task = count_up(a[COUNTER])
            if task >= a[TASKS]:
                return
            pair, first = task // groups, task % groups * a[BLOCKS_PER_TASK]
            batch, head = pair // a[HEADS], pair % a[HEADS]
            for block in range(first, min(first + a[BLOCKS_PER_TASK], a[BLOCKS])):
                place = pair * a[BLOCKS] + block
                source = a[STATES] + batch * a[STATES_B] + head * a[STATES_H] + block * a[STATES_N]
                counted = 0
                metric = 4 * head * channels * channels
                set_all(weights, ZERO, tokens)
                for t in range(tokens):
                    here = states + t * line
                    if a[VALID] and not as_bytes(a[VALID] + (batch * a[BLOCKS] + block) * tokens)[t]:
                        weight[t] = ZERO
                        set_all(here, ZERO, channels)
                        continue
                    weight[t] = ONE
                    counted += 1
                    if order > 1:
                        read_token(source + t * a[STATES_T], row, channels, a[DTYPE])
                        rotate_token(row, a[MATRIX], here, channels, order)
                    else:
                        read_token(source + t * a[STATES_T], here, channels, a[DTYPE])
                # Token scales
                for t in range(tokens):
                    token[t] = ONE
                if a[ITERATIONS]:
                    average = square_sum(states, tokens * channels) / np.float32(tokens * channels)
                    factor = ONE / max(average, TINY)
                    set_all(inverse_token, ONE, tokens)
                    for _ in range(a[ITERATIONS]):
                        column_sums(states, inverse_token, row, factor, FLOOR, tokens, channels)
                        row_sums(states, row, token_at, factor, FLOOR, tokens, channels)
                        normalize_tokens(token_at, weights, inverse_token, tokens, counted)
                    for t in range(tokens):
                        root = np.float32(math.sqrt(token[t]))
                        write_float(number, min(max(root, LEAST_TOKEN_SCALE), MOST_TOKEN_SCALE))
                        code = log_code(number, a[TOKEN_TABLES])
                        token[t] = token_scales[code]
                        as_bytes(a[TOKEN_SCALE] + place * tokens)[t] = code
                set_all(low, NOTHING, channels)
                set_all(high, -NOTHING, channels)
                for t in range(tokens):
                    if weight[t] > ZERO:
                        divide_row(states + t * line, low, high, token[t], channels)
                if counted == 0:
                    set_all(low, ZERO, channels)
                    set_all(high, ZERO, channels)
                # Offsets and steps of channels
                mean_bytes = a[MEAN] + place * channels
                middles(low, high, mean, channels)
                store_offsets(mean, codes, number, a[CHANNEL_TABLES], channels)
                covers(low, high, mean, cover, last_level, channels)
                if a[REFINEMENTS]:
                    fit(a, states, weights, mean, scale, cover, error, best, counted)
                else:
                    multiply(cover, scale, UP, channels)
                if a[FACTOR]:
                    refit(a, states, turned, a[FACTOR] + metric, weights, sums, plane, mean, scale, best, counted)
                unit = store_offsets(mean, codes, number, a[CHANNEL_TABLES], channels)
                as_bytes(a[MEAN_SCALE])[place] = unit
                for channel in range(channels):
                    as_bytes(mean_bytes)[channel] = as_bytes(codes)[channel]
                    code = log_code(scale + 4 * channel, a[CHANNEL_TABLES])
                    as_bytes(a[CHANNEL_SCALE] + place * channels)[channel] = code
                    as_floats(scale)[channel] = channel_scales[code]
                invert(scale, inverse, channels)
                # Codes
                means, scales = as_floats(mean), as_floats(scale)
                if a[FACTOR]:
                    assign_by_metric(a, states, turned, a[FACTOR] + metric, weights, sums, plane, means, scales, codes)
                for t in range(tokens):
                    here, there = states + t * line, codes + t * channels
                    if a[FACTOR]:
                        if a[CORRECT]:
                            matrix, stored_codes = a[MOMENT] + metric, as_bytes(there)
                            measured_products(a, here, matrix, stored_codes, means, scales, row, cover, sums)
                    elif a[TABLE]:
                        assign_row(here, mean, scale, inverse, there, a[EDGES], a[LEVELS], sums, top, channels, 1)
                    else:
                        assign_row(here, mean, scale, inverse, there, a[EDGES], a[LEVELS], sums, top, channels, 0)
                    if a[CORRECT]:
                        length, product = read_float(sums), read_float(sums + 4)
                        factor = length / max(product, TINY) if product > ZERO else ONE
                        factor = min(max(factor, LEAST_CORRECTION), MOST_CORRECTION) if length > ZERO else ONE
                        write_float(number, token[t] * factor)
                        as_bytes(a[TOKEN_SCALE] + place * tokens)[t] = log_code(number, a[TOKEN_TABLES])
                target = a[CODES] + place * (tokens * channels * nbits // 8)
                pack_codes(codes, target, plane, tokens, channels, nbits, a[CHANNEL_MAJOR])

    encode_dual_scale.__qualname__ = f"encode_dual_scale_{sources:08x}"
    return cfunc(types.void(types.CPointer(types.int64)), cache=True, error_model="numpy")(encode_dual_scale)


def _build_affine(sources: int) -> Any:
    """Compiles it; `sources` are part of the key of Numba's cache."""

    def encode_affine(a: Any) -> None:
        _ = sources
        states, codes, plane = scratch(STATES_BYTES), scratch(CODES_BYTES), scratch(CODES_BYTES)
        low, high, zero, inverse = scratch(ROW_BYTES), scratch(ROW_BYTES), scratch(ROW_BYTES), scratch(ROW_BYTES)
        zeros, inverses = scratch(ROW_BYTES), scratch(ROW_BYTES)
        zero_half, scale_half = scratch(ROW_BYTES), scratch(ROW_BYTES)
        tokens, channels, nbits, line = a[TOKENS], a[CHANNELS], a[NBITS], 4 * a[CHANNELS]
        group, group_count = a[GROUP], a[GROUPS]
        top = np.float32((1 << nbits) - 1)
        groups = (a[BLOCKS] + a[BLOCKS_PER_TASK] - 1) // a[BLOCKS_PER_TASK]
        lines = channels if a[CHANNEL_MAJOR] else tokens
        while True:
            task = count_up(a[COUNTER])
            if task >= a[TASKS]:
                return
            pair, first = task // groups, task % groups * a[BLOCKS_PER_TASK]
            batch, head = pair // a[HEADS], pair % a[HEADS]
            for block in range(first, min(first + a[BLOCKS_PER_TASK], a[BLOCKS])):
                place = pair * a[BLOCKS] + block
                source = a[STATES] + batch * a[STATES_B] + head * a[STATES_H] + block * a[STATES_N]
                scale_out = as_shorts(a[SCALE] + 2 * place * lines * group_count)
                zero_out = as_shorts(a[ZERO_POINT] + 2 * place * lines * group_count)
                for t in range(tokens):
                    read_token(source + t * a[STATES_T], states + t * line, channels, a[DTYPE])
                if a[CHANNEL_MAJOR]:
                    for g in range(group_count):
                        set_all(low, NOTHING, channels)
                        set_all(high, -NOTHING, channels)
                        for t in range(g * group, (g + 1) * group):
                            valid_at = a[VALID] + (batch * a[BLOCKS] + block) * tokens
                            if a[VALID] == 0 or as_bytes(valid_at)[t]:
                                widen(states + t * line, low, high, channels)
                        half_steps(low, high, zero, inverse, zero_half, scale_half, top, channels)
                        for c in range(channels):
                            scale_out[c * group_count + g] = as_shorts(scale_half)[c]
                            zero_out[c * group_count + g] = as_shorts(zero_half)[c]
                        for t in range(g * group, (g + 1) * group):
                            assign_affine_row(states + t * line, zero, inverse, codes + t * channels, top, channels)
                else:
                    for t in range(tokens):
                        here = as_floats(states + t * line)
                        for g in range(group_count):
                            least = greatest = here[g * group]
                            for c in range(g * group, (g + 1) * group):
                                least, greatest = min(least, here[c]), max(greatest, here[c])
                            as_floats(low)[g], as_floats(high)[g] = least, greatest
                        half_steps(low, high, zero, inverse, zero_half, scale_half, top, group_count)
                        for g in range(group_count):
                            scale_out[t * group_count + g] = as_shorts(scale_half)[g]
                            zero_out[t * group_count + g] = as_shorts(zero_half)[g]
                            for c in range(g * group, (g + 1) * group):
                                as_floats(zeros)[c] = as_floats(zero)[g]
                                as_floats(inverses)[c] = as_floats(inverse)[g]
                        assign_affine_row(states + t * line, zeros, inverses, codes + t * channels, top, channels)
                target = a[CODES] + place * (tokens * channels * nbits // 8)
                pack_codes(codes, target, plane, tokens, channels, nbits, a[CHANNEL_MAJOR])

    encode_affine.__qualname__ = f"encode_affine_{sources:08x}"
    return cfunc(types.void(types.CPointer(types.int64)), cache=True, error_model="numpy")(encode_affine)
