"""Storing of new states as Triton kernels: keys and values in one launch, without a tensor in between.

`append_states` copies new tokens behind the recent ones, whatever strides the model left them with; `move_to_front`
moves what remains of the recent tokens over those that have just been packed, in place.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Tokens of a piece. Blocks are a multiple of 8 tokens long, and a move is never shorter than a piece.
TOKENS = tl.constexpr(8)


@triton.jit
def copy_lines(source, stride, target, token, seen, CHANNELS: tl.constexpr, CHANNELS_PAD: tl.constexpr):
    """Copies lines of CHANNELS numbers, `stride` apart at the source and side by side at the target."""
    channel = tl.arange(0, CHANNELS_PAD)
    shown = seen[:, None] & (channel < CHANNELS)[None, :]
    numbers = tl.load(source + token[:, None].to(tl.int64) * stride + channel[None, :], mask=shown)
    tl.store(target + token[:, None].to(tl.int64) * CHANNELS + channel[None, :], numbers, mask=shown)


@triton.jit(do_not_specialize=["capacity", "place", "added"])
def append_states(
    keys, key_row, key_head, key_line, values, value_row, value_head, value_line, key_buffer, value_buffer,
    heads, capacity, place, added,
    KEY_CHANNELS: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_CHANNELS: tl.constexpr, VALUE_PAD: tl.constexpr,
):  # fmt: skip
    """Appends TOKENS of `added` tokens; the grid is (pieces, batch * heads).

    A head's buffers have room for `capacity` tokens; the first new one goes to number `place`.
    """
    pair = tl.program_id(1).to(tl.int64)
    batch, head = pair // heads, pair % heads
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    seen = token < added
    first = pair * capacity + place
    key = keys + batch * key_row + head * key_head
    copy_lines(key, key_line, key_buffer + first * KEY_CHANNELS, token, seen, KEY_CHANNELS, KEY_PAD)
    value = values + batch * value_row + head * value_head
    copy_lines(value, value_line, value_buffer + first * VALUE_CHANNELS, token, seen, VALUE_CHANNELS, VALUE_PAD)


@triton.jit(do_not_specialize=["capacity", "source", "target", "count"])
def move_to_front(
    key_buffer, value_buffer, capacity, source, target, count,
    KEY_CHANNELS: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_CHANNELS: tl.constexpr, VALUE_PAD: tl.constexpr,
):  # fmt: skip
    """Moves `count` tokens of one head from number `source` on to `target`; the grid is (batch * heads,).

    Pieces go one after the other from the front, so that none is overwritten before it was read.
    """
    first = tl.program_id(0).to(tl.int64) * capacity
    for start in range(0, count, TOKENS):
        token = start + tl.arange(0, TOKENS)
        seen = token < count
        key, value = key_buffer + first * KEY_CHANNELS, value_buffer + first * VALUE_CHANNELS
        copy_lines(
            key + source * KEY_CHANNELS, KEY_CHANNELS, key + target * KEY_CHANNELS, token, seen, KEY_CHANNELS, KEY_PAD
        )
        copy_lines(
            value + source * VALUE_CHANNELS, VALUE_CHANNELS, value + target * VALUE_CHANNELS, token, seen,
            VALUE_CHANNELS, VALUE_PAD,
        )  # fmt: skip
        # Threads may hold other tokens of the next piece than of this one.
        tl.debug_barrier()
