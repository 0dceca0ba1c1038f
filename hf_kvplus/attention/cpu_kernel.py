"""Decode attention over packed keys and values on a CPU: one compiled function that every thread runs.

A task is one KV head of one batch row and one share of its tiles. A tile is a packed block, as many recent tokens, or
the sinks. Threads take tasks from a shared counter; the thread that finishes the last share of a head adds the shares
up. Nothing is allocated: a task works in a few KiB on its thread's stack.

    tile -> scores (rows, tokens) -> online softmax -> output (rows, channels)

Source: Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html, for shares of the sequence;
FlashAttention, https://arxiv.org/abs/2205.14135, for the online softmax. What differs: scales go into the query and
the probabilities, so that a code is only converted and multiplied; it is unpacked once for all queries of a head.

Left out: integer dot products. A query would need three bytes to lose nothing, and cutting it up anew for each block
costs most of what they save.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import cfunc, types

from hf_kvplus.attention import (
    array_loops,
    intrinsics,
    output_loops,
    score_loops,
    slots,
    softmax_loops,
    vectors,
)
from hf_kvplus.attention.array_loops import (
    add_scaled,
    count_up,
    fill,
    lane_sum,
    locate,
    read_float,
    read_long,
    read_states,
    rotate,
    scale,
    scratch,
    write_float,
    write_long,
    write_states,
)
from hf_kvplus.attention.intrinsics import STATE_BYTES
from hf_kvplus.attention.output_loops import dense_output, dual_output, packed_output
from hf_kvplus.attention.score_loops import dense_scores, dual_scores, packed_scores, rotary_scores
from hf_kvplus.attention.softmax_loops import cap_scores, exponentiate, hide, largest
from hf_kvplus.attention.vectors import LANES, LOOKUP

__all__ = ["LANES", "LOOKUP", "KernelForm", "PackedForm", "compile_kernel"]

NOTHING = np.float32(-np.inf)
# A compiled kernel on disk is only as good as the sources that it was made of.
_MODULES = (array_loops, intrinsics, output_loops, score_loops, slots, softmax_loops, vectors)
_FILES = (__file__, *(module.__file__ for module in _MODULES))
SOURCES = zlib.crc32(b"".join(Path(name).read_bytes() for name in _FILES))


@dataclass(frozen=True)
class PackedForm:
    """How the kernel reads packed blocks of keys or of values.

    Args:
        kind: `"states"` for blocks that hold states as they are, `"affine"`, or `"dual"` for the dual-scale codec.
        nbits: Bits per code.
        groups: Of the affine codec, groups of a line that have scales of their own.
        token_scale: Whether each token has a scale (dual).
        table: Whether codes are looked up in a table of levels (dual).
        rotated: Whether channels were mixed by a matrix before.
        means: Pairs of channels whose turning means were taken out before all that (keys).
    """

    kind: str = "states"
    nbits: int = 16
    groups: int = 1
    token_scale: bool = False
    table: bool = False
    rotated: bool = False
    means: int = 0

    def block_bytes(self, channels: int, tokens: int, state_bytes: int) -> int:
        """Returns the bytes from one block's codes or states to the next's."""
        return channels * tokens * (8 * state_bytes if self.kind == "states" else self.nbits) // 8


@dataclass(frozen=True)
class KernelForm:
    """All that a kernel is compiled for.

    Args:
        rows: Query vectors per pass.
        key_channels: Channels per head of queries and keys.
        value_channels: Channels per head of values.
        tokens: Tokens in a tile; a packed block where there are any.
        dtype: Of unpacked states, and of queries and output: `float32`, `float16` or `bfloat16`.
        keys: How packed keys are read.
        values: How packed values are read.
        single: Whether queries and output are float32, whatever `dtype`.
    """

    rows: int
    key_channels: int
    value_channels: int
    tokens: int
    dtype: str
    keys: PackedForm
    values: PackedForm
    single: bool = False


@cache
def compile_kernel(form: KernelForm) -> Any:
    """Returns the kernel for `form`, a Numba `cfunc`; its `address` takes the address of an array laid out by `slots`.

    The first call for a form on a machine compiles it, which takes seconds; later ones read it from Numba's cache.
    """
    return _build(form, SOURCES)


def _build(form: KernelForm, sources: int) -> Any:
    """Compiles the kernel.

    A layer can be read in pieces: runs over ranges of tiles, one after the other, give to the bit what one run gives.

    Numba's cache tells kernels apart by the numbers and strings that the inner function takes from here, so they are
    taken out of `form` one by one.
    """
    rows, tokens, dtype = form.rows, form.tokens, form.dtype
    outer_dtype = "float32" if form.single else dtype
    key_channels, value_channels = form.key_channels, form.value_channels
    state_bytes = STATE_BYTES[dtype]
    key_line, value_line = key_channels * state_bytes, value_channels * state_bytes
    key_bytes = form.keys.block_bytes(key_channels, tokens, state_bytes)
    value_bytes = form.values.block_bytes(value_channels, tokens, state_bytes)
    key_affine, key_dual = int(form.keys.kind == "affine"), int(form.keys.kind == "dual")
    key_nbits, key_groups, key_rotated = form.keys.nbits, form.keys.groups, int(form.keys.rotated)
    key_tokens, key_table, key_means = int(form.keys.token_scale), int(form.keys.table), form.keys.means
    value_affine, value_dual = int(form.values.kind == "affine"), int(form.values.kind == "dual")
    value_nbits, value_groups, value_rotated = form.values.nbits, form.values.groups, int(form.values.rotated)
    value_tokens, value_table = int(form.values.token_scale), int(form.values.table)
    key_scales, value_scales = 2 * key_channels * key_groups, 2 * tokens * value_groups
    # Scratch, from its end: every part is a multiple of a vector long.
    sizes = {
        "query": rows * key_channels,
        "rotated_query": rows * key_channels,
        "folded_query": rows * key_channels,
        "scores": rows * tokens,
        "folded_scores": rows * max(value_groups * tokens, value_channels),
        "output": rows * value_channels,
        "packed_output": rows * value_channels,
        "sums": rows * LANES,
        "largest": rows * LANES,
        "found": rows * LANES,
        "bias": value_groups * rows * LANES,
    }
    places, size = {}, 0
    for name, length in sizes.items():
        places[name] = size
        size += 4 * length
    query_at, rotated_at, folded_query_at = places["query"], places["rotated_query"], places["folded_query"]
    scores_at, folded_at, bias_at = places["scores"], places["folded_scores"], places["bias"]
    output_at, packed_at = places["output"], places["packed_output"]
    sums_at, largest_at, found_at = places["sums"], places["largest"], places["found"]
    # Without a rotation both kinds of values are added up in one place.
    packed_at = packed_at if value_rotated else output_at
    rotated_at = rotated_at if key_rotated else query_at
    tile_scores = rows * tokens
    cleared = 2 * rows * value_channels + rows * LANES
    # What a share has found so far: outputs, sums and largest scores lie side by side.
    kept = cleared + rows * LANES

    def kernel(a: Any) -> None:
        _ = sources  # part of the key of Numba's cache, as all names from outside that are used here
        base, me = scratch(size), a[slots.SELF]
        queries, per_head, shares = a[slots.QUERIES], a[slots.QUERIES_PER_HEAD], a[slots.SHARES]
        all_rows, padded_rows = queries * per_head, a[slots.ROW_CHUNKS] * rows
        tiles = a[slots.PACKED_TILES] + a[slots.RECENT_TILES] + a[slots.SINK_TILES] + a[slots.LEAD_TILES]
        softcap = read_float(me + 8 * slots.SOFTCAP)
        one = np.float32(1)
        while True:
            task = count_up(me + 8 * slots.NEXT_TASK)
            if task >= a[slots.TASKS]:
                return
            share, pair = task % shares, task // shares
            share_first, share_last = tiles * share // shares, tiles * (share + 1) // shares
            begin, end = max(share_first, a[slots.PIECE_FIRST]), min(share_last, a[slots.PIECE_LAST])
            if begin >= end:
                continue
            head, batch = pair % a[slots.KV_HEADS], pair // a[slots.KV_HEADS]
            padding = read_long(a[slots.PADDING] + 8 * batch)
            for first_row in range(0, padded_rows, rows):
                state = a[slots.STATES] + 4 * kept * (task * a[slots.ROW_CHUNKS] + first_row // rows)
                if begin > share_first:
                    read_states(state, base + output_at, one, kept, "float32")
                else:
                    fill(base + output_at, np.float32(0), cleared)
                    for row in range(rows):
                        write_float(base + largest_at + 4 * row, NOTHING)
                for row in range(rows):
                    target = base + query_at + 4 * row * key_channels
                    if first_row + row < all_rows:
                        i, j = (first_row + row) // per_head, (first_row + row) % per_head
                        source = a[slots.QUERY] + batch * a[slots.QUERY_B] + i * a[slots.QUERY_Q]
                        source += (head * per_head + j) * a[slots.QUERY_H]
                        scaling = read_float(me + 8 * slots.SCALING)
                        read_states(source, target, scaling, key_channels, outer_dtype)
                    else:
                        fill(target, np.float32(0), key_channels)
                if key_rotated and a[slots.PACKED_TILES] > 0:
                    rotate(base + query_at, a[slots.KEY_ROTATION], base + rotated_at, key_channels, rows)
                for tile in range(begin, end):
                    # Scores
                    block, start = np.int64(-1), np.int64(0)
                    gap_first, gap_last = np.int64(0), np.int64(0)
                    limit, count, visible = a[slots.TOTAL], np.int64(tokens), a[slots.VISIBLE]
                    recent = tile - a[slots.PACKED_TILES]
                    lead = recent - a[slots.RECENT_TILES] - a[slots.SINK_TILES]
                    if recent < 0:
                        block = tile + a[slots.FIRST_TILE]
                        column = a[slots.FIRST_STORED] + block * tokens
                        gap_first = padding - column
                        gap_last = gap_first + a[slots.SINK_TOKENS]
                        keys_at = locate(me, slots.KEY_CODES, batch, head, block, key_bytes)
                        values_at = locate(me, slots.VALUE_CODES, batch, head, block, value_bytes)
                    elif recent < a[slots.RECENT_TILES]:
                        start = recent * tokens
                        column, count = a[slots.PACKED_TOKENS] + start, min(count, a[slots.RECENT_TOKENS] - start)
                        keys_at = locate(me, slots.RECENT_KEYS, batch, head, start, key_line)
                        values_at = locate(me, slots.RECENT_VALUES, batch, head, start, value_line)
                    elif lead >= 0:
                        start = lead * tokens
                        column, count = a[slots.FIRST_SLOT] + start, min(count, a[slots.LEAD_TOKENS] - start)
                        visible = column
                        keys_at = locate(me, slots.LEAD_KEYS, batch, head, start, key_line)
                        values_at = locate(me, slots.LEAD_VALUES, batch, head, start, value_line)
                    else:
                        start = (recent - a[slots.RECENT_TILES]) * tokens
                        column, count = padding + start, min(count, a[slots.SINK_TOKENS] - start)
                        limit = a[slots.PACKED_TOKENS]
                        keys_at = locate(me, slots.SINK_KEYS, batch, head, start, key_line)
                        values_at = locate(me, slots.SINK_VALUES, batch, head, start, value_line)
                    scores = base + scores_at
                    if key_affine and block >= 0:
                        packed_scores(
                            keys_at,
                            locate(me, slots.KEY_SCALE, batch, head, block, key_scales),
                            locate(me, slots.KEY_ZERO, batch, head, block, key_scales),
                            base + rotated_at, base + folded_query_at, base + bias_at, scores,
                            key_nbits, key_channels, tokens, rows, key_groups,
                        )  # fmt: skip
                    elif key_dual and block >= 0:
                        dual_scores(
                            keys_at,
                            locate(me, slots.KEY_SCALE, batch, head, block, key_channels),
                            locate(me, slots.KEY_ZERO, batch, head, block, tokens),
                            locate(me, slots.KEY_MEAN, batch, head, block, key_channels),
                            locate(me, slots.KEY_MEAN_SCALE, batch, head, block, 1),
                            a[slots.KEY_LEVELS], a[slots.OCTAVES],
                            base + rotated_at, base + folded_query_at, base + bias_at, scores,
                            key_nbits, key_channels, tokens, rows, key_tokens, key_table,
                        )  # fmt: skip
                    else:
                        source = base + (rotated_at if block >= 0 else query_at)
                        dense_scores(keys_at, key_line, count, source, scores, key_channels, tokens, rows, dtype)
                    if key_means and block >= 0:
                        rotary_scores(
                            locate(me, slots.KEY_PAIR, batch, head, block, key_means),
                            locate(me, slots.KEY_PAIR_MEAN, batch, head, block, 4 * key_means),
                            a[slots.KEY_TURNS], a[slots.KEY_TURN_CHANNELS], base + query_at, scores,
                            key_means, key_channels, tokens, rows,
                        )  # fmt: skip
                    if softcap > 0:
                        cap_scores(scores, softcap, tile_scores)
                    # Probabilities
                    first = visible - column
                    for row in range(rows):
                        i = min((first_row + row) // per_head, queries - 1)
                        last = min(count, limit - column)
                        mask = np.int64(0)
                        if a[slots.MASK]:
                            mask = a[slots.MASK] + batch * a[slots.MASK_B] + i * a[slots.MASK_Q]
                            mask += column - a[slots.FIRST_SLOT]
                        else:
                            last = min(last, a[slots.TOTAL] - queries + i + 1 - column)
                        line = scores + 4 * row * tokens
                        overlaps = gap_last > 0 and gap_first < tokens and gap_last > gap_first
                        if mask or first > 0 or last < tokens or overlaps:
                            hide(line, mask, mask, first, last, gap_first, gap_last, tokens)
                    if largest(scores, base + largest_at, base + found_at, tokens, rows):
                        for row in range(rows):
                            new, held = read_float(base + found_at + 4 * row), read_float(base + largest_at + 4 * row)
                            if new > held:
                                shrink = np.float32(math.exp(held - new))
                                scale(base + sums_at + 4 * row * LANES, shrink, LANES)
                                scale(base + output_at + 4 * row * value_channels, shrink, value_channels)
                                if value_rotated:
                                    scale(base + packed_at + 4 * row * value_channels, shrink, value_channels)
                                write_float(base + largest_at + 4 * row, new)
                    exponentiate(scores, base + sums_at, base + largest_at, tokens, rows)
                    # Output
                    if value_affine and block >= 0:
                        packed_output(
                            values_at,
                            locate(me, slots.VALUE_SCALE, batch, head, block, value_scales),
                            locate(me, slots.VALUE_ZERO, batch, head, block, value_scales),
                            scores, base + folded_at, base + bias_at, base + packed_at,
                            value_nbits, value_channels, tokens, rows, value_groups,
                        )  # fmt: skip
                    elif value_dual and block >= 0:
                        dual_output(
                            values_at,
                            locate(me, slots.VALUE_SCALE, batch, head, block, value_channels),
                            locate(me, slots.VALUE_ZERO, batch, head, block, tokens),
                            locate(me, slots.VALUE_MEAN, batch, head, block, value_channels),
                            locate(me, slots.VALUE_MEAN_SCALE, batch, head, block, 1),
                            a[slots.VALUE_LEVELS], a[slots.OCTAVES],
                            scores, base + folded_at, base + packed_at,
                            value_nbits, value_channels, tokens, rows, value_tokens, value_table,
                        )  # fmt: skip
                    else:
                        target = base + (packed_at if block >= 0 else output_at)
                        dense_output(values_at, value_line, count, scores, target, value_channels, tokens, rows, dtype)
                if end < share_last:
                    read_states(base + output_at, state, one, kept, "float32")
                    continue
                # What this share found, for the one that comes last.
                place = task * padded_rows + first_row
                unrotates = value_rotated and a[slots.PACKED_TILES] > 0
                if unrotates:
                    rotate(base + packed_at, a[slots.VALUE_ROTATION], base + folded_at, value_channels, rows)
                for row in range(rows):
                    sums = a[slots.PARTIAL_SUMS] + 8 * (place + row)
                    write_float(sums, read_float(base + largest_at + 4 * row))
                    write_float(sums + 4, lane_sum(base + sums_at + 4 * row * LANES))
                    found = base + output_at + 4 * row * value_channels
                    if unrotates:
                        add_scaled(base + folded_at + 4 * row * value_channels, found, one, value_channels)
                    target = a[slots.PARTIAL_OUTPUT] + 4 * (place + row) * value_channels
                    read_states(found, target, one, value_channels, "float32")
            if end < share_last or count_up(a[slots.SHARES_DONE] + 8 * pair) < shares - 1:
                continue
            write_long(a[slots.SHARES_DONE] + 8 * pair, 0)
            for row in range(all_rows):
                i, j = row // per_head, row % per_head
                query_head = head * per_head + j
                number = (batch * a[slots.KV_HEADS] * per_head + query_head) * queries + i
                highest, total = NOTHING, np.float32(0)
                fill(base + output_at, np.float32(0), value_channels)
                if a[slots.EARLIER]:
                    highest = read_float(a[slots.EARLIER_LOG_SUMS] + 4 * number)
                    if highest > NOTHING:
                        earlier = a[slots.EARLIER] + 4 * number * value_channels
                        read_states(earlier, base + output_at, one, value_channels, "float32")
                        total = one
                if a[slots.SINK_LOGITS]:
                    logit = read_float(a[slots.SINK_LOGITS] + 4 * query_head)
                    if logit > highest:
                        shrink = np.float32(math.exp(highest - logit))
                        scale(base + output_at, shrink, value_channels)
                        total = total * shrink + one
                        highest = logit
                    elif logit > NOTHING:
                        total += np.float32(math.exp(logit - highest))
                for part in range(pair * shares, (pair + 1) * shares):
                    sums = a[slots.PARTIAL_SUMS] + 8 * (part * padded_rows + row)
                    new, weight = read_float(sums), one
                    if new == NOTHING:
                        continue
                    if new > highest:
                        shrink = np.float32(math.exp(highest - new))
                        scale(base + output_at, shrink, value_channels)
                        total *= shrink
                        highest = new
                    else:
                        weight = np.float32(math.exp(new - highest))
                    total += read_float(sums + 4) * weight
                    found = a[slots.PARTIAL_OUTPUT] + 4 * (part * padded_rows + row) * value_channels
                    add_scaled(found, base + output_at, weight, value_channels)
                target = a[slots.OUTPUT] + batch * a[slots.OUTPUT_B] + query_head * a[slots.OUTPUT_H]
                target += i * a[slots.OUTPUT_Q]
                if a[slots.LOG_SUMS]:
                    log_sum = highest + np.float32(math.log(total)) if total > 0 else NOTHING
                    write_float(a[slots.LOG_SUMS] + 4 * number, log_sum)
                # A query that sees nothing gets zeros.
                factor = one / total if total > 0 else one
                write_states(base + output_at, target, factor, value_channels, outer_dtype)

    # Processes that store kernels at the same time would overwrite each other's entries in a list that they share, and
    # then load each other's code; so every form has a file of its own.
    kernel.__qualname__ = f"kernel_{zlib.crc32(repr((form, sources)).encode()):08x}"
    return cfunc(types.void(types.CPointer(types.int64)), cache=True, error_model="numpy")(kernel)
