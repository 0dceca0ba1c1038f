"""Decode attention over packed latents as Triton kernels: one wide head, which may have hundreds of channels.

    attend_latents  as `triton_kernels.attend_packed`, for sizes that no program holds at once
    gather          one program: some channels of a query vector; adds up what the shares found, and an earlier output

A program takes the keys' channels a part at a time, all of one block; values' channels are divided among programs,
which then compute the same scores. Queries of latents are float32 and read again for each part: a program that held
512 channels of 16 queries would hold little else.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_kvplus.attention.triton_combine import add_up
from hf_kvplus.attention.triton_kernels import block_output, block_scores
from hf_kvplus.attention.triton_tiles import CHANGING, LOG2_E, cap, load_query, soften, store_part, visible_columns
from hf_kvplus.attention.triton_unpack import part_index


@triton.jit(do_not_specialize=CHANGING)
def attend_latents(
    query, query_b, query_h, query_q,
    key_codes, key_first, key_second, key_mean, key_mean_scale, key_a, key_b, key_c, key_d, key_capacity,
    value_codes, value_first, value_second, value_mean, value_mean_scale, value_a, value_b, value_c, value_d,
    value_capacity,
    mask, mask_b, mask_q, padding,
    part_output, part_largest, part_sums,
    scaling, softcap,
    kv_heads, group, queries, sinks,
    blocks, first_block, visible, first_stored, packed_tokens, total, per_share, parts,
    KEY_KIND: tl.constexpr, KEY_NBITS: tl.constexpr, KEY_TOKEN_SCALE: tl.constexpr, KEY_CURVED: tl.constexpr,
    KEY_GROUP: tl.constexpr, KEY_OPERAND: tl.constexpr, KEY_SHARED: tl.constexpr,
    VALUE_KIND: tl.constexpr, VALUE_NBITS: tl.constexpr, VALUE_TOKEN_SCALE: tl.constexpr, VALUE_CURVED: tl.constexpr,
    VALUE_GROUP: tl.constexpr, VALUE_OPERAND: tl.constexpr, VALUE_SHARED: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr,
    TOKENS: tl.constexpr, TOKEN_PART: tl.constexpr, TOKEN_PART_PAD: tl.constexpr, TOKENS_PAD: tl.constexpr,
    KEY_CHANNELS: tl.constexpr, KEY_PAD: tl.constexpr, KEY_PIECES: tl.constexpr,
    VALUE_CHANNELS: tl.constexpr, VALUE_PART: tl.constexpr, VALUE_PART_PAD: tl.constexpr, VALUE_PAD: tl.constexpr,
    VALUE_PIECES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Attends to a share of the packed blocks; the grid is (shares, batch * kv_heads * VALUE_PIECES, chunks of rows).

    A program takes the channels of keys in KEY_PIECES of KEY_PAD, and of values one of VALUE_PIECES: those that
    VALUE_PART_PAD bytes of a line hold. SHARED keys or values have one head, whatever `kv_heads`.
    """
    share, line, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pair, piece = line // VALUE_PIECES, line % VALUE_PIECES
    batch, head = pair // kv_heads, pair % kv_heads
    rows = queries * group
    row = chunk * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, KEY_PAD)
    query_row = batch.to(tl.int64) * query_b + head * group * query_h
    numbers = load_query(query, query_row, query_h, query_q, row, channel, group, rows, KEY_CHANNELS)
    limit = tl.maximum(tl.max(tl.abs(numbers), 1), 1e-30)
    for part in range(1, KEY_PIECES):
        more = load_query(query, query_row, query_h, query_q, row, part * KEY_PAD + channel, group, rows, KEY_CHANNELS)
        limit = tl.maximum(limit, tl.max(tl.abs(more), 1))
    query_index = tl.minimum(row // group, queries - 1)
    gap = tl.load(padding + batch)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    sums = tl.zeros((ROWS,), tl.float32)
    output = tl.zeros((ROWS, VALUE_PAD), tl.float32)
    token, held = part_index(tl.arange(0, TOKENS_PAD), TOKEN_PART, TOKEN_PART_PAD)
    key_line = (batch if KEY_SHARED else pair).to(tl.int64) * key_capacity
    value_line = (batch if VALUE_SHARED else pair).to(tl.int64) * value_capacity
    first = first_block + share * per_share
    for block in range(first, tl.minimum(first + per_share, blocks)):
        scores = tl.zeros((ROWS, TOKENS_PAD), tl.float32)
        # A loop that is unrolled holds more than there are registers.
        for part in range(KEY_PIECES):
            # Triton compiles only one branch of a statement.
            if KEY_PIECES > 1:
                some = load_query(
                    query, query_row, query_h, query_q, row, part * KEY_PAD + channel, group, rows, KEY_CHANNELS
                )
            else:
                some = numbers
            scores += block_scores(
                some / limit[:, None], limit,
                key_codes, key_first, key_second, key_mean, key_mean_scale, key_line + block,
                key_a, key_b, key_c, key_d,
                KEY_KIND, KEY_NBITS, KEY_TOKEN_SCALE, KEY_CURVED, KEY_GROUP, KEY_OPERAND, PRECISION, ASSEMBLY,
                TOKENS, TOKEN_PART, TOKEN_PART_PAD, TOKENS_PAD, KEY_CHANNELS, KEY_PAD, part * KEY_PAD,
            )  # fmt: skip
        scores *= scaling
        if HAS_SOFTCAP:
            scores = cap(scores, softcap)
        columns = first_stored + block * TOKENS + token
        exists = held & ((columns < gap) | (columns >= gap + sinks))
        seen = visible_columns(
            columns, exists, query_index, mask, batch.to(tl.int64) * mask_b, mask_q, visible, total, queries, HAS_MASK
        )
        weights, shrink, largest, sums = soften(scores * LOG2_E, seen, largest, sums)
        output = output * shrink[:, None] + block_output(
            weights, value_codes, value_first, value_second, value_mean, value_mean_scale, value_line + block,
            value_a, value_b, value_c, value_d,
            VALUE_KIND, VALUE_NBITS, VALUE_TOKEN_SCALE, VALUE_CURVED, VALUE_GROUP, VALUE_OPERAND, PRECISION, ASSEMBLY,
            TOKENS, TOKEN_PART, TOKEN_PART_PAD, TOKENS_PAD, VALUE_CHANNELS, VALUE_PART, VALUE_PART_PAD, VALUE_PAD,
            piece * VALUE_PART_PAD,
        )  # fmt: skip
    value_channel, value_held = part_index(tl.arange(0, VALUE_PAD), VALUE_PART, VALUE_PART_PAD, piece * VALUE_PART_PAD)
    # Programs of other pieces write the same sums.
    place = (pair * tl.num_programs(2) + chunk) * parts + share
    store_part(
        output, largest, sums, part_output, part_largest, part_sums, place,
        tl.arange(0, ROWS), rows - chunk * ROWS, value_channel, value_held, ROWS, VALUE_CHANNELS,
    )  # fmt: skip


@triton.jit(do_not_specialize=CHANGING)
def gather(
    part_output, part_largest, part_sums,
    output, output_b, output_h, output_q, log_sums,
    earlier, earlier_log_sums, sink_logits,
    kv_heads, group, queries, parts,
    HAS_LOG_SUMS: tl.constexpr, HAS_EARLIER: tl.constexpr, HAS_SINK_LOGITS: tl.constexpr,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Adds up the parts of one row, and what was found elsewhere; writes averages and the log2 of their sums.

    `log_sums` and `earlier` are contiguous, `(batch, heads, queries)` and one axis of channels more. The grid is
    (rows, batch * kv_heads, columns / COLUMNS).
    """
    row, pair = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    batch, head = pair // kv_heads, pair % kv_heads
    chunks = (queries * group + ROWS - 1) // ROWS
    first = (pair * chunks + row // ROWS) * parts
    here = row % ROWS
    query_head, token = head * group + row % group, row // group
    number = (batch.to(tl.int64) * kv_heads * group + query_head) * queries + token
    step = tl.arange(0, STEP)
    found = tl.full((STEP,), float("-inf"), tl.float32)
    for start in range(0, parts, STEP):
        place = (first + start + step).to(tl.int64) * ROWS + here
        found = tl.maximum(found, tl.load(part_largest + place, mask=start + step < parts, other=float("-inf")))
    largest = tl.max(found, 0)
    if HAS_EARLIER:
        before = tl.load(earlier_log_sums + number)
        largest = tl.maximum(largest, before)
    if HAS_SINK_LOGITS:
        logit = tl.load(sink_logits + query_head).to(tl.float32) * LOG2_E
        largest = tl.maximum(largest, logit)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    result, whole = add_up(
        part_output, part_largest, part_sums, first, first + parts, here, largest, column, ROWS, CHANNELS, STEP
    )
    if HAS_EARLIER:
        weight = tl.exp2(before - largest)
        # Where nothing was found this is the mean of the values, and its weight 0.
        states = tl.load(earlier + number * CHANNELS + column, mask=column < CHANNELS, other=0.0)
        result += states * weight
        whole += weight
    if HAS_SINK_LOGITS:
        whole += tl.exp2(logit - largest)
    # A query that sees nothing gets zeros.
    factor = tl.where(whole > 0, 1.0 / whole, 0.0)
    target = output + batch.to(tl.int64) * output_b + query_head * output_h + token * output_q
    tl.store(target + column, result * factor, mask=column < CHANNELS)
    if HAS_LOG_SUMS:
        tl.store(log_sums + number, tl.where(whole > 0, largest + tl.log2(whole), float("-inf")))
