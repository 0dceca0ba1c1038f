"""The inner loops of the CPU kernel, as functions that Numba code can call.

Each is an intrinsic: it takes addresses (64-bit integers) and constants, and writes LLVM instructions with explicit
vectors (see `vectors.py`). Constants become part of the compiled code, so every loop has a fixed length. Rows are the
query vectors that share a KV head; a tile is as many tokens as one packed block. Arrays are float32 unless said
otherwise, and without gaps.

    packed keys     codes (channels, tokens), a scale and a zero point per channel and group of tokens
    packed values   codes (tokens, channels), a scale and a zero point per token and group of channels
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hf_kvplus.attention.vectors import (
    BYTE,
    FLOAT,
    FLOATS,
    INT,
    LANES,
    LONG,
    Builder,
    Places,
    Sums,
    Table,
    Value,
    accumulate,
    call,
    constant,
    exponential,
    hyperbolic_tangent,
    lane_numbers,
    largest_lane,
    line_vectors,
    load,
    load_halves,
    load_levels,
    load_log_scales,
    load_signed_bytes,
    load_states,
    log_scales,
    maximum,
    multiply_add,
    neighbours,
    offset,
    passes,
    pointer,
    prefetch,
    read_factor,
    splat,
    steps,
    store,
    store_places,
    store_states,
    sum_lanes,
    vector,
)

# As in `hf_kvplus.codecs.log_scale`.
CHANNEL_STEPS, TOKEN_STEPS = 8, 16
ZERO = constant(FLOAT, 0.0)
LOWEST = constant(FLOAT, float("-inf"))
# Whether blocks are asked for while the ones before them are worked on.
AHEAD = True
# Tokens, where states aren't packed.
DENSE_AHEAD = 8
STATE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def inner_loop(
    runtime: str, constants: str = "", returns: Any = types.none, *, inline: bool = False
) -> Callable[[Callable], Any]:
    """Turns a function that writes instructions into an intrinsic.

    Each combination of constants becomes a function of its own in the compiled code.

    Args:
        runtime: Names of the arguments known at run time. Those that end in `_at` are addresses, those that begin with
            `float_` are float32, the others 64-bit integers.
        constants: Names of the arguments behind them, which are compile-time constants.
        returns: The Numba type that the intrinsic returns.
        inline: Whether the instructions go into the caller instead.

    Returns:
        A decorator for a function that takes the builder, then a pointer or value per run-time argument, then the
        constants.
    """
    names, fixed_names = runtime.split(), constants.split()
    declared = [types.float32 if name.startswith("float_") else types.int64 for name in names]

    def decorate(write: Callable) -> Any:
        def write_all(builder: Builder, values: Any, fixed: list[Any]) -> Value:
            pairs = zip(names, values, strict=True)
            prepared = [pointer(builder, value) if name.endswith("_at") else value for name, value in pairs]
            return write(builder, *prepared, *fixed)

        def typing(context: Any, *given: Any) -> tuple[Any, Callable]:
            fixed = [type_.literal_value for type_ in given[len(names) :]]

            def generate(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
                values = values[: len(names)]
                if inline:
                    result = write_all(builder, values, fixed)
                else:
                    name = ".".join(["kvplus", write.__name__, *map(str, fixed)])
                    returned = ir.VoidType() if returns is types.none else context.get_value_type(returns)
                    function = _find_function(
                        builder.module, name, returned, [value.type for value in values], write_all, fixed
                    )
                    result = builder.call(function, values)
                return context.get_dummy_value() if returns is types.none else result

            return returns(*declared, *given[len(names) :]), generate

        parameters = ["context", *names, *fixed_names]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        typing.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in parameters])
        typing.__name__, typing.__doc__ = write.__name__, write.__doc__
        return intrinsic(prefer_literal=True)(typing)

    return decorate


def _find_function(
    module: ir.Module, name: str, returned: ir.Type, arguments: list[ir.Type], write_all: Callable, fixed: list[Any]
) -> ir.Function:
    """Returns the function `name` of a module; writes it on first use."""
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(returned, arguments), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    result = write_all(builder, function.args, fixed)
    if isinstance(returned, ir.VoidType):
        builder.ret_void()
    else:
        builder.ret(result)
    return function


# Memory


@inner_loop("", "size", types.int64, inline=True)
def scratch(builder: Builder, size: int) -> Value:
    """Returns the address of `size` bytes on the stack, aligned to a cache line."""
    # Not cgutils.alloca_once: it clears the memory, byte by byte as LLVM sees it.
    with builder.goto_entry_block():
        slot = builder.alloca(ir.ArrayType(BYTE, size))
    slot.align = 64
    return builder.ptrtoint(slot, LONG)


@inner_loop("source_at", "", types.float32, inline=True)
def read_float(builder: Builder, source: Value) -> Value:
    """Reads a float32."""
    return load(builder, source, FLOAT)


@inner_loop("target_at float_value", inline=True)
def write_float(builder: Builder, target: Value, value: Value) -> None:
    """Writes a float32."""
    store(builder, value, target)


@inner_loop("source_at", "", types.int64, inline=True)
def read_long(builder: Builder, source: Value) -> Value:
    """Reads a 64-bit integer."""
    return load(builder, source, LONG)


@inner_loop("target_at value", inline=True)
def write_long(builder: Builder, target: Value, value: Value) -> None:
    """Writes a 64-bit integer."""
    store(builder, value, target)


@inner_loop("arguments_at slot batch head index size", "", types.int64, inline=True)
def locate(
    builder: Builder, arguments: Value, slot: Value, batch: Value, head: Value, index: Value, size: Value
) -> Value:
    """Returns the address of entry `index`, `size` bytes each, of a tensor at `slot`, for a batch row and a head."""
    first = offset(builder, arguments, builder.mul(slot, LONG(8)))
    address = load(builder, first, LONG)
    for number, place in ((batch, 8), (head, 16)):
        address = builder.add(address, builder.mul(number, load(builder, offset(builder, first, place), LONG)))
    return builder.add(address, builder.mul(index, size))


@inner_loop("counter_at", "", types.int64, inline=True)
def count_up(builder: Builder, counter: Value) -> Value:
    """Adds one to a counter that threads share; returns what it was, and makes all earlier writes visible."""
    return builder.atomic_rmw("add", builder.bitcast(counter, LONG.as_pointer()), LONG(1), "acq_rel")


# Rows of numbers


@inner_loop("target_at float_value", "length")
def fill(builder: Builder, target: Value, value: Value, length: int) -> None:
    """Sets `length` numbers to `float_value`."""
    numbers = splat(builder, value)
    with steps(builder, length // LANES, 4 * LANES) as at:
        store(builder, numbers, offset(builder, target, at))


@inner_loop("target_at float_factor", "length")
def scale(builder: Builder, target: Value, factor: Value, length: int) -> None:
    """Multiplies `length` numbers by `float_factor`."""
    factors = splat(builder, factor)
    with steps(builder, length // LANES, 4 * LANES) as at:
        place = offset(builder, target, at)
        store(builder, builder.fmul(load(builder, place, FLOATS), factors), place)


@inner_loop("source_at target_at float_factor", "length")
def add_scaled(builder: Builder, source: Value, target: Value, factor: Value, length: int) -> None:
    """Adds `float_factor` times `length` numbers to others."""
    factors = splat(builder, factor)
    with steps(builder, length // LANES, 4 * LANES) as at:
        place = offset(builder, target, at)
        numbers = load(builder, offset(builder, source, at), FLOATS)
        store(builder, multiply_add(builder, numbers, factors, load(builder, place, FLOATS)), place)


@inner_loop("source_at", "", types.float32)
def lane_sum(builder: Builder, source: Value) -> Value:
    """Returns the sum of LANES numbers."""
    return sum_lanes(builder, load(builder, source, FLOATS))


@inner_loop("source_at target_at float_factor", "length dtype")
def read_states(builder: Builder, source: Value, target: Value, factor: Value, length: int, dtype: str) -> None:
    """Converts `length` states to float32, times `float_factor`."""
    factors = splat(builder, factor)
    with steps(builder, length // LANES, LANES) as at:
        place = offset(builder, source, builder.mul(at, LONG(STATE_BYTES[dtype])))
        numbers = builder.fmul(load_states(builder, place, dtype), factors)
        store(builder, numbers, offset(builder, target, builder.mul(at, LONG(4))))


@inner_loop("source_at target_at float_factor", "length dtype")
def write_states(builder: Builder, source: Value, target: Value, factor: Value, length: int, dtype: str) -> None:
    """Writes `length` numbers, times `float_factor`, as states."""
    factors = splat(builder, factor)
    with steps(builder, length // LANES, LANES) as at:
        numbers = builder.fmul(load(builder, offset(builder, source, builder.mul(at, LONG(4))), FLOATS), factors)
        place = offset(builder, target, builder.mul(at, LONG(STATE_BYTES[dtype])))
        store_states(builder, numbers, place, dtype)


# Scores of a tile, (rows, tokens)


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
    unit = _read_log_scale(builder, mean_scale, octave)
    for row in range(rows):
        total = builder.fmul(splat(builder, sum_lanes(builder, sums[row])), unit)
        store(builder, builder.extract_element(total, INT(0)), offset(builder, bias, 4 * row))
    table, shift = _levels(builder, levels, nbits, has_table)
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


def _levels(builder: Builder, levels: Value, nbits: int, has_table: int) -> tuple[Table | None, float]:
    """Returns the table of levels, or what is taken from a code where levels are uniform."""
    return (Table(builder, levels), 0.0) if has_table else (None, (2**nbits - 1) / 2)


def _read_log_scale(builder: Builder, source: Value, octave: Table) -> Value:
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


@inner_loop("scores_at float_cap", "length")
def cap_scores(builder: Builder, scores: Value, cap: Value, length: int) -> None:
    """Replaces scores by `cap * tanh(score / cap)`."""
    caps, inverse = splat(builder, cap), splat(builder, builder.fdiv(FLOAT(1.0), cap))
    with steps(builder, length // LANES, 4 * LANES) as at:
        place = offset(builder, scores, at)
        numbers = builder.fmul(load(builder, place, FLOATS), inverse)
        store(builder, builder.fmul(hyperbolic_tangent(builder, numbers), caps), place)


@inner_loop("scores_at mask_at masked first last gap_first gap_last", "tokens")
def hide(
    builder: Builder,
    scores: Value,
    mask: Value,
    masked: Value,
    first: Value,
    last: Value,
    gap_first: Value,
    gap_last: Value,
    tokens: int,
) -> None:
    """Sets scores of one row to -inf outside tokens `first` to `last`, inside the gap, and where the mask is 0.

    The mask, a byte per token, is looked at only if `masked`, and only within `first` to `last`.
    """
    bounds = [splat(builder, builder.trunc(bound, INT)) for bound in (first, last, gap_first, gap_last)]
    use_mask = builder.icmp_signed("!=", masked, LONG(0))
    for token in range(0, tokens, LANES):
        numbers = builder.add(lane_numbers(), constant(INT, token))
        seen = builder.and_(
            builder.icmp_signed(">=", numbers, bounds[0]), builder.icmp_signed("<", numbers, bounds[1])
        )
        gap = builder.and_(builder.icmp_signed(">=", numbers, bounds[2]), builder.icmp_signed("<", numbers, bounds[3]))
        readable = builder.and_(seen, splat(builder, use_mask))
        place = builder.bitcast(offset(builder, mask, token), vector(BYTE).as_pointer())
        name = f"llvm.masked.load.v{LANES}i8.p0"
        shown = call(builder, name, vector(BYTE), place, INT(1), readable, ir.Constant(vector(BYTE), [1] * LANES))
        seen = builder.and_(seen, builder.icmp_unsigned("!=", shown, ir.Constant(vector(BYTE), [0] * LANES)))
        seen = builder.and_(seen, builder.not_(gap))
        target = offset(builder, scores, 4 * token)
        store(builder, builder.select(seen, load(builder, target, FLOATS), LOWEST), target)


@inner_loop("scores_at held_at found_at", "tokens rows", types.int64)
def largest(builder: Builder, scores: Value, held: Value, found: Value, tokens: int, rows: int) -> Value:
    """Writes the larger of each row's largest score and of what is held for it; tells whether any is new."""
    grown = ir.Constant(ir.IntType(1), 0)
    for row in range(rows):
        line, before = offset(builder, scores, 4 * row * tokens), load(builder, offset(builder, held, 4 * row), FLOAT)
        result = load(builder, line, FLOATS)
        for token in range(LANES, tokens, LANES):
            result = maximum(builder, result, load(builder, offset(builder, line, 4 * token), FLOATS))
        top = largest_lane(builder, result)
        larger = builder.fcmp_ordered(">", top, before)
        store(builder, builder.select(larger, top, before), offset(builder, found, 4 * row))
        grown = builder.or_(grown, larger)
    return builder.zext(grown, LONG)


@inner_loop("scores_at sums_at largest_at", "tokens rows")
def exponentiate(builder: Builder, scores: Value, sums: Value, largest_: Value, tokens: int, rows: int) -> None:
    """Replaces scores by `exp(score - largest of its row)` and adds them to LANES sums a row.

    Where nothing was seen yet, and the largest score is -inf, they become 0.
    """
    for row in range(rows):
        line, kept = offset(builder, scores, 4 * row * tokens), offset(builder, sums, 4 * row * LANES)
        shift = load(builder, offset(builder, largest_, 4 * row), FLOAT)
        shift = builder.select(builder.fcmp_ordered("==", shift, FLOAT(float("-inf"))), FLOAT(0.0), shift)
        shifts, total = splat(builder, shift), load(builder, kept, FLOATS)
        for token in range(0, tokens, LANES):
            place = offset(builder, line, 4 * token)
            numbers = exponential(builder, builder.fsub(load(builder, place, FLOATS), shifts))
            store(builder, numbers, place)
            total = builder.fadd(total, numbers)
        store(builder, total, kept)


# Output of a tile, (rows, channels), from probabilities (rows, tokens)


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
    unit = _read_log_scale(builder, mean_scale, octave)
    totals = {row: builder.fmul(splat(builder, sum_lanes(builder, sums[row])), unit) for row in range(rows)}
    table, shift = _levels(builder, levels, nbits, has_table)
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


@inner_loop("source_at matrix_at target_at", "channels rows")
def rotate(builder: Builder, source: Value, matrix: Value, target: Value, channels: int, rows: int) -> None:
    """Writes `target[r, c] = sum over k of source[r, k] * matrix[k, c]`; source and target don't overlap."""
    for indices in passes(channels // LANES, rows, 8):
        keys = [(row, i) for row in range(rows) for i in indices]
        with accumulate(builder, channels, dict.fromkeys(keys, ZERO)) as (k, sums):
            line = offset(builder, matrix, builder.mul(k, LONG(4 * channels)))
            numbers = {i: load(builder, offset(builder, line, 4 * i * LANES), FLOATS) for i in indices}
            column = offset(builder, source, builder.mul(k, LONG(4)))
            for row in range(rows):
                factor = read_factor(builder, offset(builder, column, 4 * row * channels))
                for i in indices:
                    sums[row, i] = multiply_add(builder, numbers[i], factor, sums[row, i])
        for row, i in keys:
            store(builder, sums[row, i], offset(builder, target, 4 * (row * channels + i * LANES)))
