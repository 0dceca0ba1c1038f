"""Inner loops of the CPU kernel: scores of a tile, `(rows, tokens)`.

Arrays are float32 unless said otherwise, and without gaps. Rows are the query vectors that share a KV head; a tile is
as many tokens as one packed block.

    packed keys     codes (channels, tokens), a scale and a zero point per channel and group of tokens
    turning means   pairs (means), bytes; two half-precision numbers for each
"""

from __future__ import annotations

from hf_kvplus.attention.intrinsics import (
    AHEAD,
    CHANNEL_STEPS,
    DENSE_AHEAD,
    LOWEST,
    STATE_BYTES,
    TOKEN_STEPS,
    ZERO,
    inner_loop,
)
from hf_kvplus.attention.vectors import (
    BYTE,
    FLOAT,
    FLOATS,
    HALF,
    INT,
    LANES,
    LONG,
    Builder,
    Places,
    Sums,
    Table,
    Value,
    accumulate,
    line_vectors,
    load,
    load_halves,
    load_levels,
    load_log_scales,
    load_signed_bytes,
    load_states,
    log_scales,
    multiply_add,
    neighbours,
    offset,
    passes,
    prefetch,
    read_factor,
    splat,
    steps,
    store,
    store_places,
    sum_lanes,
)


@inner_loop("codes_at scale_at zero_at query_at folded_at bias_at scores_at", "nbits channels tokens rows groups")
def packed_scores(
    builder: Builder,
    codes: Value,
    scale: Value,
    zero: Value,
    query: Value,
    folded: Value,
    bias: Value,
    scores: Value,
    nbits: int,
    channels: int,
    tokens: int,
    rows: int,
    groups: int,
) -> None:
    """Writes `scores[r, t] = sum over c of query[r, c] * (codes[c, t] * scale[c, g] + zero[c, g])`; g is t's group.

    Scales and zero points are half precision. `folded`, as large as `query`, and `bias`, one a row, are scratch.
    """
    if AHEAD:
        for source in (scale, zero):
            prefetch(builder, offset(builder, source, 2 * channels * groups), 2 * channels * groups)
    vectors = line_vectors(tokens, nbits) if groups == 1 else [neighbours(i) for i in range(tokens // LANES)]
    each = len(vectors) // groups
    for group in range(groups):
        _fold_key_scales(builder, scale, zero, query, folded, bias, channels, rows, groups, group)
        for indices in passes(each, rows, nbits):
            chosen = [vectors[group * each + index] for index in indices]
            sums = _score_codes(builder, codes, folded, nbits, channels, tokens, rows, chosen)
            for row, places in sums:
                total = builder.fadd(sums[row, places], read_factor(builder, offset(builder, bias, 4 * row)))
                store_places(builder, total, offset(builder, scores, 4 * row * tokens), places)


def _fold_key_scales(
    builder: Builder,
    scale: Value,
    zero: Value,
    query: Value,
    folded: Value,
    bias: Value,
    channels: int,
    rows: int,
    groups: int,
    group: int,
) -> None:
    """Moves one group's scales into the query, and what its zero points add to any score into `bias`."""
    with accumulate(builder, channels // LANES, dict.fromkeys(range(rows), ZERO)) as (number, sums):
        channel = builder.mul(number, LONG(LANES))
        halves = builder.mul(channel, LONG(2 * groups))
        scales = load_halves(builder, offset(builder, scale, halves), groups, group)
        zeros = load_halves(builder, offset(builder, zero, halves), groups, group)
        at = builder.mul(channel, LONG(4))
        for row in range(rows):
            numbers = load(builder, offset(builder, offset(builder, query, at), 4 * row * channels), FLOATS)
            target = offset(builder, offset(builder, folded, at), 4 * row * channels)
            store(builder, builder.fmul(numbers, scales), target)
            sums[row] = multiply_add(builder, numbers, zeros, sums[row])
    for row in range(rows):
        store(builder, sum_lanes(builder, sums[row]), offset(builder, bias, 4 * row))


def _score_codes(
    builder: Builder,
    codes: Value,
    folded: Value,
    nbits: int,
    channels: int,
    tokens: int,
    rows: int,
    chosen: list[Places],
    table: Table | None = None,
    shift: float = 0.0,
) -> Sums:
    """Multiplies codes, or the levels they stand for, by the folded query, for `chosen` vectors of tokens.

    The codes of a channel lie side by side, so a vector of tokens is unpacked once and serves every row; the scores
    stay in registers until all channels are through.
    """
    keys = [(row, places) for row in range(rows) for places in chosen]
    with accumulate(builder, channels, dict.fromkeys(keys, ZERO)) as (channel, sums):
        line = offset(builder, codes, builder.mul(channel, LONG(tokens * nbits // 8)))
        if AHEAD:
            prefetch(builder, offset(builder, line, channels * tokens * nbits // 8))
        numbers = {places: load_levels(builder, line, nbits, tokens, places, table, shift) for places in chosen}
        factors = offset(builder, folded, builder.mul(channel, LONG(4)))
        for row in range(rows):
            factor = read_factor(builder, offset(builder, factors, 4 * row * channels))
            for places in chosen:
                sums[row, places] = multiply_add(builder, numbers[places], factor, sums[row, places])
    return sums


@inner_loop(
    "codes_at channel_scale_at token_scale_at mean_at mean_scale_at levels_at octaves_at query_at folded_at bias_at "
    "scores_at",
    "nbits channels tokens rows has_token_scale has_table",
)
def dual_scores(
    builder: Builder,
    codes: Value,
    channel_scale: Value,
    token_scale: Value,
    mean: Value,
    mean_scale: Value,
    levels: Value,
    octaves: Value,
    query: Value,
    folded: Value,
    bias: Value,
    scores: Value,
    nbits: int,
    channels: int,
    tokens: int,
    rows: int,
    has_token_scale: int,
    has_table: int,
) -> None:
    """Writes `scores[r, t] = sum over c of query[r, c] * state[t, c]` for states of the dual-scale codec.

    `state[t, c] = (level[codes[c, t]] * channel_scale[c] + mean[c] * mean_scale) * token_scale[t]`; scales are bytes
    with a logarithm, means signed bytes. `folded`, as large as `query`, and `bias`, a number per row, are scratch.
    """
    if AHEAD:
        for source, size in ((channel_scale, channels), (mean, channels), (token_scale, tokens * has_token_scale)):
            prefetch(builder, offset(builder, source, size), size)
    octave = Table(builder, octaves)
    with accumulate(builder, channels // LANES, dict.fromkeys(range(rows), ZERO)) as (number, sums):
        channel = builder.mul(number, LONG(LANES))
        scales = load_log_scales(builder, offset(builder, channel_scale, channel), octave, CHANNEL_STEPS)
        means = load_signed_bytes(builder, offset(builder, mean, channel))
        at = builder.mul(channel, LONG(4))
        for row in range(rows):
            numbers = load(builder, offset(builder, offset(builder, query, at), 4 * row * channels), FLOATS)
            target = offset(builder, offset(builder, folded, at), 4 * row * channels)
            store(builder, builder.fmul(numbers, scales), target)
            sums[row] = multiply_add(builder, numbers, means, sums[row])
    unit = read_log_scale(builder, mean_scale, octave)
    for row in range(rows):
        total = builder.fmul(splat(builder, sum_lanes(builder, sums[row])), unit)
        store(builder, builder.extract_element(total, INT(0)), offset(builder, bias, 4 * row))
    table, shift = levels_of(builder, levels, nbits, has_table)
    fine = Table(builder, offset(builder, octaves, 64)) if has_token_scale else None
    vectors = line_vectors(tokens, nbits)
    for indices in passes(len(vectors), rows, nbits):
        chosen = [vectors[index] for index in indices]
        sums = _score_codes(builder, codes, folded, nbits, channels, tokens, rows, chosen, table, shift)
        for places in chosen:
            scales = load_log_scales(builder, token_scale, fine, TOKEN_STEPS, places) if has_token_scale else None
            for row in range(rows):
                total = builder.fadd(sums[row, places], read_factor(builder, offset(builder, bias, 4 * row)))
                total = builder.fmul(total, scales) if has_token_scale else total
                store_places(builder, total, offset(builder, scores, 4 * row * tokens), places)


@inner_loop("pairs_at means_at turns_at places_at query_at scores_at", "count channels tokens rows")
def rotary_scores(
    builder: Builder,
    pairs: Value,
    means: Value,
    turns: Value,
    places: Value,
    query: Value,
    scores: Value,
    count: int,
    channels: int,
    tokens: int,
    rows: int,
) -> None:
    """Adds to `scores[r, t]` what a query finds in turning means, `cos[p, t] (q . mean) + sin[p, t] (q x mean)`.

    The query is that of the model's own channels. `turns` holds cosines and sines, `(pairs, 2, tokens)`, `places` the
    channels of each pair, 32-bit integers `(pairs, 2)`.
    """
    with steps(builder, count) as number:
        pair = builder.zext(load(builder, offset(builder, pairs, number), BYTE), LONG)
        mean = offset(builder, means, builder.mul(number, LONG(4)))
        x, y = (builder.fpext(load(builder, offset(builder, mean, 2 * half), HALF), FLOAT) for half in range(2))
        place = offset(builder, places, builder.mul(pair, LONG(8)))
        first, second = (
            builder.mul(builder.zext(load(builder, offset(builder, place, 4 * half), INT), LONG), LONG(4))
            for half in range(2)
        )
        turn = offset(builder, turns, builder.mul(pair, LONG(8 * tokens)))
        for row in range(rows):
            line = offset(builder, query, 4 * row * channels)
            one, two = (load(builder, offset(builder, line, at), FLOAT) for at in (first, second))
            along = splat(builder, builder.fadd(builder.fmul(one, x), builder.fmul(two, y)))
            across = splat(builder, builder.fsub(builder.fmul(two, x), builder.fmul(one, y)))
            for token in range(0, tokens, LANES):
                cosine, sine = (
                    load(builder, offset(builder, turn, 4 * (token + half * tokens)), FLOATS) for half in range(2)
                )
                target = offset(builder, scores, 4 * (row * tokens + token))
                total = multiply_add(builder, cosine, along, load(builder, target, FLOATS))
                store(builder, multiply_add(builder, sine, across, total), target)


def levels_of(builder: Builder, levels: Value, nbits: int, has_table: int) -> tuple[Table | None, float]:
    """Returns the table of levels, or what is taken from a code where levels are uniform."""
    return (Table(builder, levels), 0.0) if has_table else (None, (2**nbits - 1) / 2)


def read_log_scale(builder: Builder, source: Value, octave: Table) -> Value:
    """Reads one logarithmic scale of channels into every lane."""
    number = splat(builder, builder.zext(load(builder, source, BYTE), INT))
    return log_scales(builder, number, octave, CHANNEL_STEPS)


@inner_loop("keys_at stride count query_at scores_at", "channels tokens rows dtype")
def dense_scores(
    builder: Builder,
    keys: Value,
    stride: Value,
    count: Value,
    query: Value,
    scores: Value,
    channels: int,
    tokens: int,
    rows: int,
    dtype: str,
) -> None:
    """Writes the scores of `count` unpacked keys that lie `stride` bytes apart; those behind them become -inf."""
    for place in range(0, rows * tokens, LANES):
        store(builder, LOWEST, offset(builder, scores, 4 * place))
    with steps(builder, count) as token:
        line = offset(builder, keys, builder.mul(token, stride))
        if AHEAD:
            following = offset(builder, keys, builder.mul(builder.add(token, LONG(DENSE_AHEAD)), stride))
            prefetch(builder, following, channels * STATE_BYTES[dtype])
        sums = dict.fromkeys(range(rows), None)
        for channel in range(0, channels, LANES):
            numbers = load_states(builder, offset(builder, line, channel * STATE_BYTES[dtype]), dtype)
            for row in range(rows):
                factors = load(builder, offset(builder, query, 4 * (row * channels + channel)), FLOATS)
                product = builder.fmul(numbers, factors)
                sums[row] = product if channel == 0 else multiply_add(builder, numbers, factors, sums[row])
        target = offset(builder, scores, builder.mul(token, LONG(4)))
        for row in range(rows):
            store(builder, sum_lanes(builder, sums[row]), offset(builder, target, 4 * row * tokens))
