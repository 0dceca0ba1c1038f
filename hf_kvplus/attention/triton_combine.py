"""The Triton kernel that adds up what the shares of a sequence found."""

from __future__ import annotations

import triton
import triton.language as tl

from hf_kvplus.attention.triton_tiles import CHANGING, LOG2_E


@triton.jit
def add_up(
    part_output, part_largest, part_sums, first, last, row, largest, channel,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Adds up parts `first` to `last` of one row: `(channels,)`, and the sum of their weights."""
    number = tl.arange(0, STEP)
    output = tl.zeros(channel.shape, tl.float32)
    total = tl.zeros((STEP,), tl.float32)
    for start in range(first, last, STEP):
        held = start + number < last
        place = (start + number).to(tl.int64) * ROWS + row
        weight = tl.exp2(tl.load(part_largest + place, mask=held, other=float("-inf")) - largest)
        total += tl.load(part_sums + place, mask=held, other=0.0) * weight
        seen = held[:, None] & (channel < CHANNELS)[None, :]
        found = tl.load(part_output + place[:, None] * CHANNELS + channel[None, :], mask=seen, other=0.0)
        output += tl.sum(found * weight[:, None], 0)
    return output, tl.sum(total, 0)


@triton.jit(do_not_specialize=CHANGING)
def combine(
    part_output, part_largest, part_sums, output, rotation, sink_logits,
    kv_heads, group, queries, parts, shares,
    HAS_ROTATION: tl.constexpr, HAS_SINK_LOGITS: tl.constexpr,
    CHANNELS: tl.constexpr, CHANNELS_PAD: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds up the parts of one row, turns what packed values gave back, and writes the result.

    The last `shares` parts are of unpacked states. The grid is (rows, batch * kv_heads).
    """
    row, pair = tl.program_id(0), tl.program_id(1)
    batch, head = pair // kv_heads, pair % kv_heads
    chunks = (queries * group + ROWS - 1) // ROWS
    first = (pair * chunks + row // ROWS) * parts
    here = row % ROWS
    query_head = head * group + row % group
    number = tl.arange(0, STEP)
    found = tl.full((STEP,), float("-inf"), tl.float32)
    for start in range(0, parts, STEP):
        place = (first + start + number).to(tl.int64) * ROWS + here
        found = tl.maximum(found, tl.load(part_largest + place, mask=start + number < parts, other=float("-inf")))
    largest = tl.max(found, 0)
    if HAS_SINK_LOGITS:
        logit = tl.load(sink_logits + query_head).to(tl.float32) * LOG2_E
        largest = tl.maximum(largest, logit)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    channel = tl.arange(0, CHANNELS_PAD)
    middle, last = first + parts - shares, first + parts
    packed, total = add_up(
        part_output, part_largest, part_sums, first, middle, here, largest, channel, ROWS, CHANNELS, STEP
    )
    target = output + ((batch.to(tl.int64) * queries + row // group) * kv_heads * group + query_head) * CHANNELS
    for start in range(0, CHANNELS, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        states, more = add_up(
            part_output, part_largest, part_sums, middle, last, here, largest, column, ROWS, CHANNELS, STEP
        )
        whole = total + more
        if HAS_SINK_LOGITS:
            whole += tl.exp2(logit - largest)
        seen = (channel < CHANNELS)[:, None] & (column < CHANNELS)[None, :]
        if HAS_ROTATION:
            matrix = tl.load(rotation + channel[:, None] * CHANNELS + column[None, :], mask=seen, other=0.0)
        else:
            matrix = tl.where(seen & (channel[:, None] == column[None, :]), 1.0, 0.0)
        # A query that sees nothing gets zeros.
        factor = tl.where(whole > 0, 1.0 / whole, 0.0)
        result = (tl.sum(packed[:, None] * matrix, 0) + states) * factor
        tl.store(target + column, result, mask=column < CHANNELS)
