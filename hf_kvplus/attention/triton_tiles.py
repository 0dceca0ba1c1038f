"""What the Triton kernels of attention do with every tile: queries, masks, the online softmax, shares."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# Whole numbers that change from step to step; compiling for their values would never end.
CHANGING = [
    "blocks",
    "first_block",
    "visible",
    "first_stored",
    "packed_tokens",
    "total",
    "per_share",
    "parts",
    "shares",
    "lead",
]


@triton.jit
def cap(scores, softcap):
    """Returns `softcap * tanh(scores / softcap)`, exact near 0."""
    ratio = scores / softcap
    square = ratio * ratio
    near = ratio * (1.0 - square * (0.33333334 - square * (0.13333334 - square * 0.053968254)))
    power = tl.exp2(tl.abs(ratio) * (-2.0 * LOG2_E))
    far = (1.0 - power) / (1.0 + power)
    return softcap * tl.where(square < 0.01, near, tl.where(ratio < 0, -far, far))


@triton.jit
def visible_columns(
    columns, exists, query_index, mask, mask_row, mask_query, visible, total, queries, HAS_MASK: tl.constexpr
):
    """Returns which columns each row sees, `(ROWS, tokens)`."""
    seen = exists & (columns >= visible) & (columns < total)
    if HAS_MASK:
        place = mask_row + query_index[:, None] * mask_query + (columns - visible)[None, :]
        return tl.load(mask + place, mask=seen[None, :], other=0) != 0
    return seen[None, :] & (columns[None, :] <= (total - queries + query_index)[:, None])


@triton.jit
def soften(scores, seen, largest, sums):
    """Takes a tile of scores, in units of log 2, into the online softmax.

    Returns:
        Weights, by how much what was found before shrinks, and the new largest score and sum of each row.
    """
    scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(largest, tl.max(scores, 1))
    shift = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores - shift[:, None])
    shrink = tl.exp2(largest - shift)
    return weights, shrink, new, sums * shrink + tl.sum(weights, 1)


@triton.jit
def load_query(query, query_row, query_head, query_token, row, channel, group, rows, CHANNELS: tl.constexpr):
    """Reads rows of queries of one KV head, `(ROWS, channels)` float32."""
    place = query_row + (row % group)[:, None] * query_head + (row // group)[:, None] * query_token + channel[None, :]
    seen = (row < rows)[:, None] & (channel < CHANNELS)[None, :]
    return tl.load(query + place, mask=seen, other=0.0).to(tl.float32)


@triton.jit
def store_part(
    output, largest, sums, part_output, part_largest, part_sums, part, row, rows, channel, held,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Leaves what a share found for `combine`."""
    place = part.to(tl.int64) * ROWS + row
    tl.store(part_largest + place, largest, mask=row < rows)
    tl.store(part_sums + place, sums, mask=row < rows)
    seen = (row < rows)[:, None] & held[None, :]
    tl.store(part_output + place[:, None] * CHANNELS + channel[None, :], output, mask=seen)
