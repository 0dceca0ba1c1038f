"""Inner loops of the CPU kernel: the output of a tile, `(rows, channels)`, from probabilities `(rows, tokens)`.

Arrays are float32 unless said otherwise, and without gaps. Rows are the query vectors that share a KV head; a tile is
as many tokens as one packed block.

    packed values   codes (tokens, channels), a scale and a zero point per token and group of channels
"""

from __future__ import annotations

from llvmlite import ir

from hf_kvplus.attention.intrinsics import (
    AHEAD,
    CHANNEL_STEPS,
    DENSE_AHEAD,
    STATE_BYTES,
    TOKEN_STEPS,
    ZERO,
    inner_loop,
)
from hf_kvplus.attention.score_loops import levels_of, read_log_scale
from hf_kvplus.attention.vectors import (
    FLOATS,
    LANES,
    LONG,
    Builder,
    Sums,
    Table,
    Value,
    accumulate,
    load,
    load_halves,
    load_levels,
    load_log_scales,
    load_signed_bytes,
    load_states,
    multiply_add,
    offset,
    passes,
    prefetch,
    read_factor,
    splat,
    store,
    sum_lanes,
    vector,
)


@inner_loop(
    "codes_at scale_at zero_at probabilities_at folded_at bias_at output_at", "nbits channels tokens rows groups"
)
def packed_output(
    builder: Builder,
    codes: Value,
    scale: Value,
    zero: Value,
    probabilities: Value,
    folded: Value,
    bias: Value,
    output: Value,
    nbits: int,
    channels: int,
    tokens: int,
    rows: int,
    groups: int,
) -> None:
    """Adds the sum over t of `probabilities[r, t] * (codes[t, c] * scale[t, g] + zero[t, g])` to `output[r, c]`.

    g is the group of channel c. Scales and zero points are half precision. `folded` (groups, rows, tokens) and `bias`
    (groups, rows) are scratch.
    """
    if AHEAD:
        for source in (scale, zero):
            prefetch(builder, offset(builder, source, 2 * tokens * groups), 2 * tokens * groups)
    for group in range(groups):
        _fold_value_scales(builder, scale, zero, probabilities, folded, bias, tokens, rows, groups, group)
    for indices in passes(channels // LANES, rows, nbits):
        group_channels = channels // groups
        places = {
            (row, i): tuple((i * LANES + lane) // group_channels * rows + row for lane in range(LANES))
            for row in range(rows)
            for i in indices
        }
        # A tile's sum starts at its bias and is added to the output as a whole: codes aren't centred, and one running
        # sum over all tiles would lose digits.
        start = {key: _read_lanes(builder, bias, 4, lanes) for key, lanes in places.items()}
        sums = _sum_codes(builder, codes, folded, nbits, channels, tokens, places, start, ahead=0 in indices)
        for row, i in sums:
            target = offset(builder, output, 4 * (row * channels + i * LANES))
            store(builder, builder.fadd(sums[row, i], load(builder, target, FLOATS)), target)


def _fold_value_scales(
    builder: Builder,
    scale: Value,
    zero: Value,
    probabilities: Value,
    folded: Value,
    bias: Value,
    tokens: int,
    rows: int,
    groups: int,
    group: int,
) -> None:
    """Moves one group's scales into the probabilities, and what its zero points add to the output into `bias`."""
    with accumulate(builder, tokens // LANES, dict.fromkeys(range(rows), ZERO)) as (number, sums):
        token = builder.mul(number, LONG(LANES))
        halves = builder.mul(token, LONG(2 * groups))
        scales = load_halves(builder, offset(builder, scale, halves), groups, group)
        zeros = load_halves(builder, offset(builder, zero, halves), groups, group)
        at = builder.mul(token, LONG(4))
        for row in range(rows):
            numbers = load(builder, offset(builder, offset(builder, probabilities, at), 4 * row * tokens), FLOATS)
            target = offset(builder, offset(builder, folded, at), 4 * (group * rows + row) * tokens)
            store(builder, builder.fmul(numbers, scales), target)
            sums[row] = multiply_add(builder, numbers, zeros, sums[row])
    for row in range(rows):
        store(builder, sum_lanes(builder, sums[row]), offset(builder, bias, 4 * (group * rows + row)))


def _sum_codes(
    builder: Builder,
    codes: Value,
    folded: Value,
    nbits: int,
    channels: int,
    tokens: int,
    places: dict[tuple[int, int], tuple[int, ...]],
    start: Sums,
    table: Table | None = None,
    shift: float = 0.0,
    ahead: bool = False,
) -> Sums:
    """Adds up codes, or the levels that they stand for, times folded probabilities.

    Args:
        builder: Where instructions go.
        codes: `(tokens, channels)`, packed.
        folded: Lines of `tokens` numbers.
        nbits: Bits per code.
        channels: Codes in a line.
        tokens: Lines.
        places: For each (row, vector of channels) the line of `folded` that each lane is multiplied by.
        start: The value that each sum starts at.
        table: What codes stand for.
        shift: What is taken from codes, without a table.
        ahead: Whether to ask for the lines of the next block too.
    """
    indices = list(dict.fromkeys(i for _, i in places))
    with accumulate(builder, tokens, start) as (token, sums):
        line = offset(builder, codes, builder.mul(token, LONG(channels * nbits // 8)))
        if AHEAD and ahead:
            prefetch(builder, offset(builder, line, tokens * channels * nbits // 8), channels * nbits // 8)
        numbers = {i: load_levels(builder, line, nbits, channels, i, table, shift) for i in indices}
        column = offset(builder, folded, builder.mul(token, LONG(4)))
        read = {lanes: _read_lanes(builder, column, 4 * tokens, lanes) for lanes in dict.fromkeys(places.values())}
        for (row, i), lanes in places.items():
            sums[row, i] = multiply_add(builder, numbers[i], read[lanes], sums[row, i])
    return sums


def _read_lanes(builder: Builder, source: Value, stride: int, lanes: tuple[int, ...]) -> Value:
    """Reads for each lane the number `stride` times its entry of `lanes` bytes behind `source`; mostly one for all."""
    result, *others = [read_factor(builder, offset(builder, source, stride * place)) for place in dict.fromkeys(lanes)]
    for place, other in zip(list(dict.fromkeys(lanes))[1:], others, strict=True):
        chosen = ir.Constant(vector(ir.IntType(1)), [int(lane == place) for lane in lanes])
        result = builder.select(chosen, other, result)
    return result


@inner_loop(
    "codes_at channel_scale_at token_scale_at mean_at mean_scale_at levels_at octaves_at probabilities_at folded_at "
    "output_at",
    "nbits channels tokens rows has_token_scale has_table",
)
def dual_output(
    builder: Builder,
    codes: Value,
    channel_scale: Value,
    token_scale: Value,
    mean: Value,
    mean_scale: Value,
    levels: Value,
    octaves: Value,
    probabilities: Value,
    folded: Value,
    output: Value,
    nbits: int,
    channels: int,
    tokens: int,
    rows: int,
    has_token_scale: int,
    has_table: int,
) -> None:
    """Adds the sum over t of `probabilities[r, t] * state[t, c]` to `output[r, c]`; see `dual_scores` for `state`.

    `folded`, as large as `probabilities`, is scratch.
    """
    if AHEAD:
        for source, size in ((channel_scale, channels), (mean, channels), (token_scale, tokens * has_token_scale)):
            prefetch(builder, offset(builder, source, size), size)
    octave = Table(builder, octaves)
    fine = Table(builder, offset(builder, octaves, 64)) if has_token_scale else None
    with accumulate(builder, tokens // LANES, dict.fromkeys(range(rows), ZERO)) as (number, sums):
        token = builder.mul(number, LONG(LANES))
        at = builder.mul(token, LONG(4))
        if has_token_scale:
            scales = load_log_scales(builder, offset(builder, token_scale, token), fine, TOKEN_STEPS)
        for row in range(rows):
            numbers = load(builder, offset(builder, offset(builder, probabilities, at), 4 * row * tokens), FLOATS)
            if has_token_scale:
                numbers = builder.fmul(numbers, scales)
                store(builder, numbers, offset(builder, offset(builder, folded, at), 4 * row * tokens))
            sums[row] = builder.fadd(sums[row], numbers)
    unit = read_log_scale(builder, mean_scale, octave)
    totals = {row: builder.fmul(splat(builder, sum_lanes(builder, sums[row])), unit) for row in range(rows)}
    table, shift = levels_of(builder, levels, nbits, has_table)
    source = folded if has_token_scale else probabilities
    for indices in passes(channels // LANES, rows, nbits):
        places = {(row, i): (row,) * LANES for row in range(rows) for i in indices}
        start = dict.fromkeys(places, ZERO)
        ahead = 0 in indices
        sums = _sum_codes(builder, codes, source, nbits, channels, tokens, places, start, table, shift, ahead)
        for i in indices:
            scales = load_log_scales(builder, offset(builder, channel_scale, i * LANES), octave, CHANNEL_STEPS)
            means = load_signed_bytes(builder, offset(builder, mean, i * LANES))
            for row in range(rows):
                target = offset(builder, output, 4 * (row * channels + i * LANES))
                held = multiply_add(builder, sums[row, i], scales, load(builder, target, FLOATS))
                store(builder, multiply_add(builder, totals[row], means, held), target)


@inner_loop("values_at stride count probabilities_at output_at", "channels tokens rows dtype")
def dense_output(
    builder: Builder,
    values: Value,
    stride: Value,
    count: Value,
    probabilities: Value,
    output: Value,
    channels: int,
    tokens: int,
    rows: int,
    dtype: str,
) -> None:
    """Adds the sum over `count` tokens of `probabilities[r, t] * values[t, c]` to `output[r, c]`."""
    for indices in passes(channels // LANES, rows, 8):
        keys = [(row, i) for row in range(rows) for i in indices]
        with accumulate(builder, count, dict.fromkeys(keys, ZERO)) as (token, sums):
            line = offset(builder, values, builder.mul(token, stride))
            if AHEAD and 0 in indices:
                following = offset(builder, values, builder.mul(builder.add(token, LONG(DENSE_AHEAD)), stride))
                prefetch(builder, following, channels * STATE_BYTES[dtype])
            column = offset(builder, probabilities, builder.mul(token, LONG(4)))
            numbers = {
                i: load_states(builder, offset(builder, line, i * LANES * STATE_BYTES[dtype]), dtype) for i in indices
            }
            for row in range(rows):
                factor = read_factor(builder, offset(builder, column, 4 * row * tokens))
                for i in indices:
                    sums[row, i] = multiply_add(builder, numbers[i], factor, sums[row, i])
        for row, i in keys:
            target = offset(builder, output, 4 * (row * channels + i * LANES))
            store(builder, builder.fadd(load(builder, target, FLOATS), sums[row, i]), target)
