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

from hf_kvplus.codecs import log_scale

CHANNEL_STEPS = tl.constexpr(log_scale.CHANNEL_STEPS)
TOKEN_STEPS = tl.constexpr(log_scale.TOKEN_STEPS)
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


def _assembly(parts: list[tuple[str, str]], subtract: list[str], exponent: str) -> str:
    """Writes PTX that turns four bytes of codes into pairs of float16 numbers.

    Args:
        parts: For each code of a byte the instruction that moves it, `""` for none, and the mask of its bits.
        subtract: What is taken from every number, as float16 bits twice.
        exponent: The upper byte of every number, four times.
    """
    lines = [".reg .b32 moved, upper, number;", f"mov.b32 upper, {exponent};"]
    source = f"${2 * len(parts)}"
    for index, (move, bits) in enumerate(parts):
        lines.append(move.format(source) if move else f"mov.b32 moved, {source};")
        lines.append(f"and.b32 moved, moved, {bits};")
        for half, selector in enumerate(("0x4140", "0x4342")):
            target = f"${2 * index + half}"
            lines.append(f"prmt.b32 {target}, moved, upper, {selector};")
            for number in subtract:
                lines += [f"mov.b32 number, {number};", f"sub.f16x2 {target}, {target}, number;"]
    return "{ " + " ".join(lines) + " }"


# 71.5, 65.5, and 1024 and 127.5 as float16, as numbers of two
NIBBLES = tl.constexpr(
    _assembly([("shl.b32 moved, {0}, 4;", "0xf0f0f0f0"), ("", "0xf0f0f0f0")], ["0x54785478"], "0x54545454")
)
PAIRS = tl.constexpr(
    _assembly(
        [
            ("shl.b32 moved, {0}, 4;", "0x30303030"),
            ("shl.b32 moved, {0}, 2;", "0x30303030"),
            ("", "0x30303030"),
            ("shr.u32 moved, {0}, 2;", "0x30303030"),
        ],
        ["0x54185418"],
        "0x54545454",
    )  # fmt: skip
)
BYTES = tl.constexpr(_assembly([("", "0xffffffff")], ["0x64006400", "0x57f857f8"], "0x64646464"))


@triton.jit
def from_log_scale(number, STEPS: tl.constexpr):
    """Returns the float32 scales of bytes, see `hf_kvplus.codecs.log_scale`."""
    scale = tl.exp2((number.to(tl.float32) - 128.0) * (1.0 / STEPS))
    return tl.where(number == 0, 0.0, scale)


@triton.jit
def part_index(index, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, start=0):
    """Returns which element of a line a place stands for, and whether there is one.

    A byte holds codes that lie SIZE apart. They are unpacked side by side, from byte `start` on, each part padded to
    SIZE_PAD places.
    """
    place = start + index % SIZE_PAD
    return index // SIZE_PAD * SIZE + place, place < SIZE


@triton.jit
def centred(bytes, PART: tl.constexpr, WIDTH: tl.constexpr, CENTRE: tl.constexpr):
    """Returns the codes of one part of some bytes, less CENTRE, as float16; WIDTH is 2 or 4.

    The code goes into the upper bits of a mantissa whose exponent makes it a whole number: 0x5400 is 64, and its bits
    from the fifth on count one each.
    """
    shift: tl.constexpr = PART * WIDTH
    # Triton compiles only one branch of a statement.
    if shift <= 4:  # noqa: SIM108
        moved = bytes.to(tl.uint16) << (4 - shift)
    else:
        moved = bytes.to(tl.uint16) >> (shift - 4)
    number = (moved & (((1 << WIDTH) - 1) << 4)) | 0x5400
    return number.to(tl.float16, bitcast=True) - (64.0 + CENTRE)


@triton.jit
def one_part(bytes, CENTRE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Returns codes of 8 bits, less CENTRE, as float16; 0x6400 is 1024 and its lowest bit counts one."""
    if ASSEMBLY:
        numbers = tl.inline_asm_elementwise(BYTES, "=r,=r,r", [bytes], dtype=tl.float16, is_pure=True, pack=4)
    else:
        numbers = ((bytes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0) - CENTRE
    return numbers


@triton.jit
def two_parts(bytes, CENTRE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Returns both codes of bytes of 4-bit codes, less CENTRE, as float16."""
    if ASSEMBLY:
        a, b = tl.inline_asm_elementwise(
            NIBBLES, "=r,=r,=r,=r,r", [bytes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        a, b = centred(bytes, 0, 4, CENTRE), centred(bytes, 1, 4, CENTRE)
    return a, b


@triton.jit
def four_parts(bytes, CENTRE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Returns the four codes of bytes of 2-bit codes, less CENTRE, as float16."""
    if ASSEMBLY:
        a, b, c, d = tl.inline_asm_elementwise(
            PAIRS, "=r,=r,=r,=r,=r,=r,=r,=r,r", [bytes],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        a, b = centred(bytes, 0, 2, CENTRE), centred(bytes, 1, 2, CENTRE)
        c, d = centred(bytes, 2, 2, CENTRE), centred(bytes, 3, 2, CENTRE)
    return a, b, c, d


@triton.jit
def join_two(first, second):
    """Puts two parts `(lines, size)` side by side, `(lines, 2 * size)`."""
    joined = tl.join(first, second).permute(0, 2, 1)
    return joined.reshape(first.shape[0], 2 * first.shape[1])


@triton.jit
def join_four(first, second, third, fourth):
    """Puts four parts side by side, `(lines, 4 * size)`."""
    return join_two(join_two(first, second), join_two(third, fourth))


@triton.jit
def lower_bits(line, place, seen, PART: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, LOWER: tl.constexpr):
    """Returns what a plane of LOWER bits holds for one part of a plane of WIDTH bits, SIZE bytes in a line."""
    size: tl.constexpr = SIZE * LOWER // WIDTH
    bytes = tl.load(line + place % size, mask=seen, other=0).to(tl.int32)
    shift = PART * WIDTH + place // size * LOWER
    return ((bytes >> shift) & ((1 << LOWER) - 1)).to(tl.float16)


@triton.jit
def load_planes(
    lines, count, LENGTH: tl.constexpr, SIZE_PAD: tl.constexpr, NBITS: tl.constexpr, ASSEMBLY: tl.constexpr, start=0
):
    """Unpacks lines of codes of less than 8 bits; see `load_centred`."""
    place = start + tl.arange(0, SIZE_PAD)[None, :]
    WIDTH: tl.constexpr = 2 if NBITS < 4 else 4
    LOWER: tl.constexpr = NBITS - WIDTH
    SIZE: tl.constexpr = LENGTH * WIDTH // 8
    centre: tl.constexpr = ((1 << WIDTH) - 1) / 2
    # A number is its upper bits times `most`, plus the lower ones; both are centred.
    most: tl.constexpr = 1 << LOWER
    seen = count & (place < SIZE)
    bytes = tl.load(lines + place, mask=seen, other=0)
    rest = lines + SIZE
    if WIDTH == 4:
        a, b = two_parts(bytes, centre, ASSEMBLY)
        numbers = join_two(a, b)
        if LOWER > 0:
            lower = join_two(
                lower_bits(rest, place, seen, 0, SIZE, WIDTH, LOWER),
                lower_bits(rest, place, seen, 1, SIZE, WIDTH, LOWER),
            )
            numbers = numbers * most + (lower - (most - 1) / 2)
    else:
        a, b, c, d = four_parts(bytes, centre, ASSEMBLY)
        numbers = join_four(a, b, c, d)
        if LOWER > 0:
            lower = join_four(
                lower_bits(rest, place, seen, 0, SIZE, WIDTH, LOWER),
                lower_bits(rest, place, seen, 1, SIZE, WIDTH, LOWER),
                lower_bits(rest, place, seen, 2, SIZE, WIDTH, LOWER),
                lower_bits(rest, place, seen, 3, SIZE, WIDTH, LOWER),
            )
            numbers = numbers * most + (lower - (most - 1) / 2)
    return numbers


@triton.jit
def load_centred(
    lines, count, LENGTH: tl.constexpr, SIZE_PAD: tl.constexpr, NBITS: tl.constexpr,
    ASSEMBLY: tl.constexpr, start=0,
):  # fmt: skip
    """Unpacks lines of codes to float16, centred, in the order of `part_index`; anything where there are none.

    Args:
        lines: Addresses, `(lines, 1)`.
        count: Which of them exist, `(lines, 1)`.
        LENGTH: Codes in a line.
        SIZE_PAD: Places of a part.
        NBITS: Bits per code.
        ASSEMBLY: Whether codes are converted by PTX instructions, four at a time.
        start: The first byte of a line that is read.
    """
    if NBITS == 8:
        place = start + tl.arange(0, SIZE_PAD)[None, :]
        bytes = tl.load(lines + place, mask=count & (place < LENGTH), other=0)
        numbers = one_part(bytes, 127.5, ASSEMBLY)
    else:
        numbers = load_planes(lines, count, LENGTH, SIZE_PAD, NBITS, ASSEMBLY, start)
    return numbers


@triton.jit
def curve(number, a, b, c, d):
    """Returns the levels of up to 8 centred codes, an odd polynomial through all of them."""
    square = number * number
    return number * (a + square * (b + square * (c + square * d)))


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
    mask, mask_b, mask_q, padding,
    part_output, part_largest, part_sums,
    scaling, softcap,
    kv_heads, group, queries, sinks,
    blocks, first_block, visible, first_stored, packed_tokens, total, per_share, parts,
    KEY_KIND: tl.constexpr, KEY_NBITS: tl.constexpr, KEY_TOKEN_SCALE: tl.constexpr, KEY_CURVED: tl.constexpr,
    KEY_GROUP: tl.constexpr, KEY_OPERAND: tl.constexpr,
    VALUE_KIND: tl.constexpr, VALUE_NBITS: tl.constexpr, VALUE_TOKEN_SCALE: tl.constexpr, VALUE_CURVED: tl.constexpr,
    VALUE_GROUP: tl.constexpr, VALUE_OPERAND: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, ASSEMBLY: tl.constexpr,
    TOKENS: tl.constexpr, TOKEN_PART: tl.constexpr, TOKEN_PART_PAD: tl.constexpr, TOKENS_PAD: tl.constexpr,
    KEY_CHANNELS: tl.constexpr, KEY_PAD: tl.constexpr,
    VALUE_CHANNELS: tl.constexpr, VALUE_PART: tl.constexpr, VALUE_PART_PAD: tl.constexpr, VALUE_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Attends to a share of the packed blocks; the grid is (shares, batch * kv_heads, chunks of rows)."""
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
        ) * scaling  # fmt: skip
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
