"""Compiled functions for the turning means of keys (see `hf_kvplus.codecs.rotary_mean`), run by every thread.

    sum_turned     states -> a finite float32 copy, and sums over the tokens of each block and pair of channels
    take_out       takes the chosen means out of that copy

A task is a few blocks of one KV head of one batch row; threads take tasks from a shared counter. Imported only where
Numba is installed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit, types

from hf_kvplus.compiled_kernels.decode import add_turning_means, as_floats, as_integers, count_up

# Arguments, 64-bit integers: numbers, addresses, and strides in bytes over batch rows, heads, blocks and tokens.
COUNTER, TASKS, HEADS, BLOCKS, BLOCKS_PER_TASK, TOKENS, CHANNELS, PAIRS, MEANS = range(9)
STATES, STATES_B, STATES_H, STATES_N, STATES_T = range(9, 14)
# Without gaps, all with (batch, heads, blocks) in front: the copy (tokens, channels), sums (5, pairs), numbers of the
# chosen pairs, bytes (means), and what is added to those, float32 (means, 2).
REST, SUMS, CHOSEN, ADDED = range(14, 18)
# Channels of each pair, int32 (pairs, 2); cosines and sines, float32 (tokens, pairs), and both, (pairs, 2, tokens).
TURN_CHANNELS, COSINES, SINES, TURNS = range(18, 22)
COUNT = 22

MOST = np.float32(np.finfo(np.float16).max)


@njit(error_model="numpy")
def copy_finite(source_at: int, target_at: int, length: int) -> None:
    """Copies numbers, those beyond half precision as its largest, and 0 for those that are none."""
    source, target = as_floats(source_at), as_floats(target_at)
    for channel in range(length):
        number = min(max(source[channel], -MOST), MOST)
        target[channel] = number if source[channel] == source[channel] else np.float32(0)


@njit(error_model="numpy")
def add_turned_back(row_at: int, cosines_at: int, sines_at: int, channels_at: int, sums_at: int, pairs: int) -> None:
    """Adds one token's pairs, turned back, their squares, and the pairs as they are to the sums."""
    row, cosines, sines = as_floats(row_at), as_floats(cosines_at), as_floats(sines_at)
    channels, sums = as_integers(channels_at), as_floats(sums_at)
    for pair in range(pairs):
        x, y = row[channels[2 * pair]], row[channels[2 * pair + 1]]
        sums[pair] += x * cosines[pair] + y * sines[pair]
        sums[pairs + pair] += y * cosines[pair] - x * sines[pair]
        sums[2 * pairs + pair] += x * x + y * y
        sums[3 * pairs + pair] += x
        sums[4 * pairs + pair] += y


@cfunc(types.void(types.CPointer(types.int64)), cache=True, error_model="numpy")
def sum_turned(a: Any) -> None:
    """Copies states and adds up their pairs."""
    tokens, channels, pairs = a[TOKENS], a[CHANNELS], a[PAIRS]
    groups = (a[BLOCKS] + a[BLOCKS_PER_TASK] - 1) // a[BLOCKS_PER_TASK]
    while True:
        task = count_up(a[COUNTER])
        if task >= a[TASKS]:
            return
        line, first = task // groups, task % groups * a[BLOCKS_PER_TASK]
        batch, head = line // a[HEADS], line % a[HEADS]
        for block in range(first, min(first + a[BLOCKS_PER_TASK], a[BLOCKS])):
            number = line * a[BLOCKS] + block
            source = a[STATES] + batch * a[STATES_B] + head * a[STATES_H] + block * a[STATES_N]
            rest, sums_at = a[REST] + 4 * number * tokens * channels, a[SUMS] + 20 * number * pairs
            sums = as_floats(sums_at)
            for place in range(5 * pairs):
                sums[place] = 0
            for token in range(tokens):
                row_at = rest + 4 * token * channels
                copy_finite(source + token * a[STATES_T], row_at, channels)
                turn = 4 * token * pairs
                add_turned_back(row_at, a[COSINES] + turn, a[SINES] + turn, a[TURN_CHANNELS], sums_at, pairs)


@cfunc(types.void(types.CPointer(types.int64)), cache=True, error_model="numpy")
def take_out(a: Any) -> None:
    """Adds what was chosen, negative means, to the copy."""
    tokens, channels, means = a[TOKENS], a[CHANNELS], a[MEANS]
    groups = (a[BLOCKS] + a[BLOCKS_PER_TASK] - 1) // a[BLOCKS_PER_TASK]
    while True:
        task = count_up(a[COUNTER])
        if task >= a[TASKS]:
            return
        first = task // groups * a[BLOCKS] + task % groups * a[BLOCKS_PER_TASK]
        for number in range(first, min(first + a[BLOCKS_PER_TASK], (task // groups + 1) * a[BLOCKS])):
            add_turning_means(
                a[CHOSEN] + number * means, a[ADDED] + 8 * number * means, a[TURNS], a[TURN_CHANNELS], means, tokens,
                a[REST] + 4 * number * tokens * channels, 4 * channels,
            )  # fmt: skip
