"""Steps of the compiled encoders: each works on one block, or on one token or channel of it, in a thread's stack."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, types

from hf_kvplus.attention.array_loops import write_float
from hf_kvplus.attention.vectors import LANES
from hf_kvplus.compiled_kernels import encode_vectors
from hf_kvplus.compiled_kernels.decode import add_and_subtract_16, address_type, as_bytes, as_floats, rotate_16
from hf_kvplus.compiled_kernels.encode_arguments import (
    CHANNEL_TABLES,
    CHANNELS,
    CLIP_1,
    CLIP_2,
    CLIPS,
    EDGES,
    EDGES_AT,
    GUESSES_AT,
    LEVELS,
    MEAN_UNIT,
    NBITS,
    ONE,
    REFINEMENTS,
    ROW_BYTES,
    STEPS_AT,
    TABLE,
    TINY,
    TOGETHER,
    TOKENS,
    TOKENS_PER_LOGARITHM,
    ZERO,
)
from hf_kvplus.compiled_kernels.encode_feedback import dot, feed_back, multiply_matrix
from hf_kvplus.compiled_kernels.encode_loops import (
    keep_better,
    largest_size,
    multiply,
    read_row,
    refine,
    round_offsets,
)
from hf_kvplus.compiled_kernels.encode_packing import pack_plane

LEAST_VARIANCE = np.float32(encode_vectors.LEAST_VARIANCE)

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
