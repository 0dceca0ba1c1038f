"""Decode attention over packed keys and values as Triton kernels, and what they share.

    attend_packed   one program: a KV head of a batch row, up to ROWS query vectors, a share of the packed blocks
    attend_states   the same over tokens that are held as they came: the recent ones and the sinks
    combine         one program: a query vector; adds up what the shares found

A block is unpacked once for all query vectors of its KV head, and both products run on tensor cores. Scales of the
dual-scale codec go into the query and the probabilities, so that codes are only converted; those of the affine codec
are applied to the codes. Operands are half precision, where centred codes of 8 bits are exact; queries are brought to
at most 1 first, so none overflows. For float32 states operands are float32.

Triton's tensors have lengths that are powers of two: blocks of 48 tokens and head sizes of 80 or 96 are padded, and
what is beyond is never read. Rows: query `i` and head `j` of a KV head are row `i * group + j`.

Source: Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html, for shares of the sequence;
FlashAttention, https://arxiv.org/abs/2205.14135, for the online softmax. Left out: reading two blocks at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_kvplus.attention.triton_combine import combine
from hf_kvplus.attention.triton_tiles import CHANGING, LOG2_E, cap, load_query, soften, store_part, visible_columns
from hf_kvplus.attention.triton_unpack import (
    CHANNEL_STEPS,
    TOKEN_STEPS,
    curve,
    from_log_scale,
    load_centred,
    part_index,
)

__all__ = ["attend_packed", "attend_states", "combine"]


@triton.jit
def block_scores(
    query, limit, codes, first, second, mean, mean_scale, at, a, b, c, d,
    KIND: tl.constexpr, NBITS: tl.constexpr, HAS_TOKEN_SCALE: tl.constexpr, CURVED: tl.constexpr, GROUP: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr, TOKENS: tl.constexpr, PART: tl.constexpr,
    PART_PAD: tl.constexpr, TOKENS_PAD: tl.constexpr, CHANNELS: tl.constexpr, CHANNELS_PAD: tl.constexpr, start=0,
):  # fmt: skip
    """Returns the products of the query with one block's keys, `(ROWS, TOKENS_PAD)`, tokens ordered by `part_index`.

    `query` is `(ROWS, CHANNELS_PAD)` float32 and at most 1, after it was divided by `limit`, a number per row. `first`
    holds scales of channels (of the affine codec's groups), `second` those of tokens (zero points), `mean` and
    `mean_scale` offsets of channels, and `at` is the number of the block in the buffers. Levels that don't lie evenly
    are on the `curve` of `a` to `d`. The query holds channels from `start` on.
    """
    channel = start + tl.arange(0, CHANNELS_PAD)
    token, held = part_index(tl.arange(0, TOKENS_PAD), PART, PART_PAD)
    here = channel < CHANNELS
    seen = here[:, None] & held[None, :]
    if KIND == "states":
        place = at * (TOKENS * CHANNELS) + token[None, :] * CHANNELS + channel[:, None]
        keys = tl.load(codes + place, mask=seen, other=0.0)
        result = tl.dot(query.to(OPERAND), keys.to(OPERAND), input_precision=PRECISION) * limit[:, None]
    else:
        size: tl.constexpr = TOKENS * NBITS // 8
        lines = codes + at * (CHANNELS * size) + channel[:, None] * size
        keys = load_centred(lines, here[:, None], TOKENS, PART_PAD, NBITS, ASSEMBLY)
        if KIND == "affine":
            groups: tl.constexpr = TOKENS // GROUP
            place = at * (CHANNELS * groups) + channel[:, None] * groups + (token // GROUP)[None, :]
            scale = tl.load(first + place, mask=seen, other=0.0).to(tl.float32)
            zero = tl.load(second + place, mask=seen, other=0.0).to(tl.float32)
            centre: tl.constexpr = (2**NBITS - 1) / 2
            keys = tl.where(seen, (keys.to(tl.float32) + centre) * scale + zero, 0.0)
            result = tl.dot(query.to(OPERAND), keys.to(OPERAND), input_precision=PRECISION) * limit[:, None]
        else:
            if CURVED:
                keys = curve(keys.to(tl.float32), a, b, c, d)
            scale = from_log_scale(tl.load(first + at * CHANNELS + channel, mask=here, other=0), CHANNEL_STEPS)
            unit = from_log_scale(tl.load(mean_scale + at), CHANNEL_STEPS)
            offset = tl.load(mean + at * CHANNELS + channel, mask=here, other=0).to(tl.float32) * unit
            bias = tl.sum(query * offset[None, :], 1)
            most = tl.maximum(tl.max(scale, 0), 1e-30)
            # Channels that don't exist have a scale of 0; what is unpacked for them is finite.
            folded = (query * (scale / most)[None, :]).to(OPERAND)
            scores = tl.dot(folded, keys.to(OPERAND), input_precision=PRECISION) * most + bias[:, None]
            if HAS_TOKEN_SCALE:
                numbers = tl.load(second + at * TOKENS + token, mask=held, other=0)
                scores *= from_log_scale(numbers, TOKEN_STEPS)[None, :]
            result = scores * limit[:, None]
    return result


@triton.jit
def rotary_scores(
    query, query_row, query_h, query_q, row, group, rows, pairs, means, turns, places, at, token, held,
    MEANS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, TOKENS_PAD: tl.constexpr,
):  # fmt: skip
    """Returns what queries find in one block's turning means, `(ROWS, TOKENS_PAD)`, tokens as in `token`.

    The query is that of the model's own channels; `turns` holds cosines and sines, `(pairs, 2, TOKENS)`, and `places`
    the channels of each pair.
    """
    scores = tl.zeros((ROWS, TOKENS_PAD), tl.float32)
    line = query + query_row + (row % group) * query_h + (row // group) * query_q
    for number in tl.static_range(MEANS):
        pair = tl.load(pairs + at * MEANS + number).to(tl.int32)
        x = tl.load(means + (at * MEANS + number) * 2).to(tl.float32)
        y = tl.load(means + (at * MEANS + number) * 2 + 1).to(tl.float32)
        one = tl.load(line + tl.load(places + 2 * pair), mask=row < rows, other=0.0).to(tl.float32)
        two = tl.load(line + tl.load(places + 2 * pair + 1), mask=row < rows, other=0.0).to(tl.float32)
        cosine = tl.load(turns + pair * (2 * TOKENS) + token, mask=held, other=0.0)
        sine = tl.load(turns + pair * (2 * TOKENS) + TOKENS + token, mask=held, other=0.0)
        along, across = one * x + two * y, two * x - one * y
        scores += along[:, None] * cosine[None, :] + across[:, None] * sine[None, :]
    return scores


@triton.jit
def block_output(
    weights, codes, first, second, mean, mean_scale, at, a, b, c, d,
    KIND: tl.constexpr, NBITS: tl.constexpr, HAS_TOKEN_SCALE: tl.constexpr, CURVED: tl.constexpr, GROUP: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr, TOKENS: tl.constexpr,
    TOKEN_PART: tl.constexpr, TOKEN_PART_PAD: tl.constexpr, TOKENS_PAD: tl.constexpr, CHANNELS: tl.constexpr,
    PART: tl.constexpr, PART_PAD: tl.constexpr, CHANNELS_PAD: tl.constexpr, start=0,
):  # fmt: skip
    """Returns the weights `(ROWS, TOKENS_PAD)` times one block's values, `(ROWS, CHANNELS_PAD)`; see `block_scores`.

    Weights are 0 for tokens that don't exist. Channels are ordered by `part_index`, from byte `start` of a line on.
    """
    token, held = part_index(tl.arange(0, TOKENS_PAD), TOKEN_PART, TOKEN_PART_PAD)
    channel, here = part_index(tl.arange(0, CHANNELS_PAD), PART, PART_PAD, start)
    seen = held[:, None] & here[None, :]
    if KIND == "states":
        place = at * (TOKENS * CHANNELS) + token[:, None] * CHANNELS + channel[None, :]
        values = tl.load(codes + place, mask=seen, other=0.0).to(OPERAND)
        result = tl.dot(weights.to(OPERAND), values, input_precision=PRECISION)
    else:
        size: tl.constexpr = CHANNELS * NBITS // 8
        lines = codes + at * (TOKENS * size) + token[:, None] * size
        values = load_centred(lines, held[:, None], CHANNELS, PART_PAD, NBITS, ASSEMBLY, start)
        if KIND == "affine":
            groups: tl.constexpr = CHANNELS // GROUP
            place = at * (TOKENS * groups) + token[:, None] * groups + (channel // GROUP)[None, :]
            scale = tl.load(first + place, mask=seen, other=0.0).to(tl.float32)
            zero = tl.load(second + place, mask=seen, other=0.0).to(tl.float32)
            centre: tl.constexpr = (2**NBITS - 1) / 2
            values = (values.to(tl.float32) + centre) * scale + zero
            result = tl.dot(weights.to(OPERAND), values.to(OPERAND), input_precision=PRECISION)
        else:
            if CURVED:
                values = curve(values.to(tl.float32), a, b, c, d)
            if HAS_TOKEN_SCALE:
                numbers = tl.load(second + at * TOKENS + token, mask=held, other=0)
                weights *= from_log_scale(numbers, TOKEN_STEPS)[None, :]
            scale = from_log_scale(tl.load(first + at * CHANNELS + channel, mask=here, other=0), CHANNEL_STEPS)
            unit = from_log_scale(tl.load(mean_scale + at), CHANNEL_STEPS)
            offset = tl.load(mean + at * CHANNELS + channel, mask=here, other=0).to(tl.float32) * unit
            sums = tl.dot(weights.to(OPERAND), values.to(OPERAND), input_precision=PRECISION)
            result = sums * scale[None, :] + tl.sum(weights, 1)[:, None] * offset[None, :]
    return result


@triton.jit(do_not_specialize=CHANGING)
def attend_packed(
    query, query_b, query_h, query_q,
    key_codes, key_first, key_second, key_mean, key_mean_scale, key_a, key_b, key_c, key_d, key_capacity,
    value_codes, value_first, value_second, value_mean, value_mean_scale, value_a, value_b, value_c, value_d,
    value_capacity,
    whole, whole_b, whole_h, whole_q, key_pairs, key_means, key_turns, key_places,
    mask, mask_b, mask_q, padding,
    part_output, part_largest, part_sums,
    scaling, softcap,
    kv_heads, group, queries, sinks,
    blocks, first_block, visible, first_stored, packed_tokens, total, per_share, parts,
    KEY_KIND: tl.constexpr, KEY_NBITS: tl.constexpr, KEY_TOKEN_SCALE: tl.constexpr, KEY_CURVED: tl.constexpr,
    KEY_GROUP: tl.constexpr, KEY_OPERAND: tl.constexpr, KEY_MEANS: tl.constexpr,
    VALUE_KIND: tl.constexpr, VALUE_NBITS: tl.constexpr, VALUE_TOKEN_SCALE: tl.constexpr, VALUE_CURVED: tl.constexpr,
    VALUE_GROUP: tl.constexpr, VALUE_OPERAND: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr,
    TOKENS: tl.constexpr, TOKEN_PART: tl.constexpr, TOKEN_PART_PAD: tl.constexpr, TOKENS_PAD: tl.constexpr,
    KEY_CHANNELS: tl.constexpr, KEY_PAD: tl.constexpr,
    VALUE_CHANNELS: tl.constexpr, VALUE_PART: tl.constexpr, VALUE_PART_PAD: tl.constexpr, VALUE_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Attends to a share of the packed blocks; the grid is (shares, batch * kv_heads, chunks of rows).

    `whole` is the query before it was rotated, for turning means (see `rotary_scores`).
    """
    share, pair, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, head = pair // kv_heads, pair % kv_heads
    rows = queries * group
    row = chunk * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, KEY_PAD)
    query_row = batch.to(tl.int64) * query_b + head * group * query_h
    numbers = load_query(query, query_row, query_h, query_q, row, channel, group, rows, KEY_CHANNELS)
    limit = tl.maximum(tl.max(tl.abs(numbers), 1), 1e-30)
    numbers = numbers / limit[:, None]
    query_index = tl.minimum(row // group, queries - 1)
    gap = tl.load(padding + batch)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    sums = tl.zeros((ROWS,), tl.float32)
    output = tl.zeros((ROWS, VALUE_PAD), tl.float32)
    token, held = part_index(tl.arange(0, TOKENS_PAD), TOKEN_PART, TOKEN_PART_PAD)
    first = first_block + share * per_share
    for block in range(first, tl.minimum(first + per_share, blocks)):
        at = pair.to(tl.int64) * key_capacity + block
        scores = block_scores(
            numbers, limit, key_codes, key_first, key_second, key_mean, key_mean_scale, at, key_a, key_b, key_c, key_d,
            KEY_KIND, KEY_NBITS, KEY_TOKEN_SCALE, KEY_CURVED, KEY_GROUP, KEY_OPERAND, PRECISION, ASSEMBLY,
            TOKENS, TOKEN_PART, TOKEN_PART_PAD, TOKENS_PAD, KEY_CHANNELS, KEY_PAD,
        )  # fmt: skip
        if KEY_MEANS > 0:
            scores += rotary_scores(
                whole, batch.to(tl.int64) * whole_b + head * group * whole_h, whole_h, whole_q, row, group, rows,
                key_pairs, key_means, key_turns, key_places, at, token, held, KEY_MEANS, TOKENS, ROWS, TOKENS_PAD,
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
        at = pair.to(tl.int64) * value_capacity + block
        output = output * shrink[:, None] + block_output(
            weights, value_codes, value_first, value_second, value_mean, value_mean_scale, at,
            value_a, value_b, value_c, value_d,
            VALUE_KIND, VALUE_NBITS, VALUE_TOKEN_SCALE, VALUE_CURVED, VALUE_GROUP, VALUE_OPERAND, PRECISION, ASSEMBLY,
            TOKENS, TOKEN_PART, TOKEN_PART_PAD, TOKENS_PAD, VALUE_CHANNELS, VALUE_PART, VALUE_PART_PAD, VALUE_PAD,
        )  # fmt: skip
    value_channel, value_held = part_index(tl.arange(0, VALUE_PAD), VALUE_PART, VALUE_PART_PAD)
    part = (pair * tl.num_programs(2) + chunk) * parts + share
    store_part(
        output, largest, sums, part_output, part_largest, part_sums, part,
        tl.arange(0, ROWS), rows - chunk * ROWS, value_channel, value_held, ROWS, VALUE_CHANNELS,
    )  # fmt: skip


@triton.jit
def load_states(
    keys, values, at, token, exists, channel, value_channel, KEY_CHANNELS: tl.constexpr, VALUE_CHANNELS: tl.constexpr
):
    """Reads a tile of unpacked states from token `at` on: keys `(channels, tokens)`, values `(tokens, channels)`."""
    key = tl.load(
        keys + (at + token)[None, :] * KEY_CHANNELS + channel[:, None],
        mask=exists[None, :] & (channel < KEY_CHANNELS)[:, None], other=0.0,
    )  # fmt: skip
    value = tl.load(
        values + (at + token)[:, None] * VALUE_CHANNELS + value_channel[None, :],
        mask=exists[:, None] & (value_channel < VALUE_CHANNELS)[None, :], other=0.0,
    )  # fmt: skip
    return key, value


@triton.jit(do_not_specialize=CHANGING)
def attend_states(
    query, query_b, query_h, query_q,
    keys, values, capacity, sink_keys, sink_values, sink_capacity, lead_keys, lead_values, lead,
    mask, mask_b, mask_q, padding,
    part_output, part_largest, part_sums,
    scaling, softcap,
    kv_heads, group, queries, sinks,
    visible, packed_tokens, total, per_share, parts, shares,
    OPERAND: tl.constexpr, HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    TOKENS_PAD: tl.constexpr, KEY_CHANNELS: tl.constexpr, KEY_PAD: tl.constexpr,
    VALUE_CHANNELS: tl.constexpr, VALUE_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Attends to a share of the recent tokens, the sinks and the slots before a window; the grid is as above.

    Tiles are counted from the one that holds column `visible`; behind the recent ones' come the sinks', then those of
    the slots before the window, which stand in columns before `visible` whatever they hold.
    """
    share, pair, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, head = pair // kv_heads, pair % kv_heads
    rows = queries * group
    row = chunk * ROWS + tl.arange(0, ROWS)
    channel, value_channel = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
    query_row = batch.to(tl.int64) * query_b + head * group * query_h
    numbers = load_query(query, query_row, query_h, query_q, row, channel, group, rows, KEY_CHANNELS).to(OPERAND)
    query_index = tl.minimum(row // group, queries - 1)
    gap = tl.load(padding + batch)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    sums = tl.zeros((ROWS,), tl.float32)
    output = tl.zeros((ROWS, VALUE_PAD), tl.float32)
    token = tl.arange(0, TOKENS_PAD)
    hidden = tl.maximum(visible - packed_tokens, 0) // TOKENS_PAD
    tiles = (total - packed_tokens + TOKENS_PAD - 1) // TOKENS_PAD
    ahead = tiles + (sinks + TOKENS_PAD - 1) // TOKENS_PAD
    everything = ahead + (lead + TOKENS_PAD - 1) // TOKENS_PAD
    first = hidden + share * per_share
    for tile in range(first, tl.minimum(first + per_share, everything)):
        if tile < tiles:
            start = tile * TOKENS_PAD
            columns = packed_tokens + start + token
            exists = (start + token < total - packed_tokens) & (columns >= visible)
            key, value = load_states(
                keys, values, pair.to(tl.int64) * capacity + start, token, exists, channel, value_channel,
                KEY_CHANNELS, VALUE_CHANNELS,
            )  # fmt: skip
        elif tile < ahead:
            start = (tile - tiles) * TOKENS_PAD
            columns = gap + start + token
            exists = (start + token < sinks) & (columns < packed_tokens) & (columns >= visible)
            key, value = load_states(
                sink_keys, sink_values, pair.to(tl.int64) * sink_capacity + start, token, exists, channel,
                value_channel, KEY_CHANNELS, VALUE_CHANNELS,
            )  # fmt: skip
        else:
            start = (tile - ahead) * TOKENS_PAD
            columns = visible - lead + start + token
            exists = start + token < lead
            key, value = load_states(
                lead_keys, lead_values, pair.to(tl.int64) * lead + start, token, exists, channel, value_channel,
                KEY_CHANNELS, VALUE_CHANNELS,
            )  # fmt: skip
        scores = tl.dot(numbers, key.to(OPERAND), input_precision=PRECISION) * scaling
        if HAS_SOFTCAP:
            scores = cap(scores, softcap)
        seen = visible_columns(
            columns, exists, query_index, mask, batch.to(tl.int64) * mask_b, mask_q, visible - lead, total, queries,
            HAS_MASK,
        )  # fmt: skip
        weights, shrink, largest, sums = soften(scores * LOG2_E, seen, largest, sums)
        found = tl.dot(weights.to(OPERAND), value.to(OPERAND), input_precision=PRECISION)
        output = output * shrink[:, None] + found
    part = (pair * tl.num_programs(2) + chunk) * parts + (parts - shares) + share
    store_part(
        output, largest, sums, part_output, part_largest, part_sums, part,
        tl.arange(0, ROWS), rows - chunk * ROWS, value_channel, value_channel < VALUE_CHANNELS, ROWS, VALUE_CHANNELS,
    )  # fmt: skip
