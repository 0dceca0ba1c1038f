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
from numba import cfunc, types

from hf_kvplus.attention import array_loops, intrinsics, vectors
from hf_kvplus.attention.array_loops import count_up, read_float, scratch, write_float
from hf_kvplus.compiled_kernels import (
    decode,
    encode_arguments,
    encode_feedback,
    encode_loops,
    encode_packing,
    encode_steps,
    encode_vectors,
)
from hf_kvplus.compiled_kernels.decode import as_bytes, as_floats
from hf_kvplus.compiled_kernels.encode_arguments import (
    BEST_BYTES,
    BLOCKS,
    BLOCKS_PER_TASK,
    CHANNEL_MAJOR,
    CHANNEL_SCALE,
    CHANNEL_TABLES,
    CHANNELS,
    CODES,
    CODES_BYTES,
    COLUMN_BYTES,
    CORRECT,
    COUNTER,
    DTYPE,
    EDGES,
    FACTOR,
    FLOOR,
    GROUP,
    GROUPS,
    HEADS,
    ITERATIONS,
    LEAST_CORRECTION,
    LEAST_TOKEN_SCALE,
    LEVELS,
    MATRIX,
    MEAN,
    MEAN_SCALE,
    MOMENT,
    MOST_CORRECTION,
    MOST_TOKEN_SCALE,
    NBITS,
    NOTHING,
    ONE,
    ORDER,
    REFINEMENTS,
    ROW_BYTES,
    SCALE,
    STATES,
    STATES_B,
    STATES_BYTES,
    STATES_H,
    STATES_N,
    STATES_T,
    TABLE,
    TASKS,
    TINY,
    TOKEN_SCALE,
    TOKEN_TABLES,
    TOKENS,
    UP,
    VALID,
    ZERO,
    ZERO_POINT,
)
from hf_kvplus.compiled_kernels.encode_loops import (
    assign_row,
    column_sums,
    covers,
    divide_row,
    invert,
    middles,
    multiply,
    row_sums,
    set_all,
    square_sum,
)
from hf_kvplus.compiled_kernels.encode_packing import assign_affine_row, half_steps, widen
from hf_kvplus.compiled_kernels.encode_steps import (
    as_shorts,
    assign_by_metric,
    fit,
    log_code,
    measured_products,
    normalize_tokens,
    pack_codes,
    read_token,
    refit,
    rotate_token,
    store_offsets,
)

_MODULES = (
    array_loops,
    decode,
    encode_arguments,
    encode_feedback,
    encode_loops,
    encode_packing,
    encode_steps,
    encode_vectors,
    intrinsics,
    vectors,
)
_FILES = (__file__, *(module.__file__ for module in _MODULES))
SOURCES = zlib.crc32(b"".join(Path(name).read_bytes() for name in _FILES))


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
