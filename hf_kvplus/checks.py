"""The wording of argument errors, in one place: the argument, what must hold, the value received, the next step."""

from __future__ import annotations

from collections.abc import Collection

import torch


def require_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Checks that `value` is one of `choices`.

    Raises:
        ValueError: If it isn't.
    """
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(str, choices))}, got {value!r}")


def require_at_least(name: str, value: int, minimum: int) -> None:
    """Checks that `value` is an integer of at least `minimum`.

    Raises:
        TypeError: If it isn't an integer.
        ValueError: If it is smaller.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` must be an integer, got {value!r} of type {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"`{name}` must be at least {minimum}, got {value}")


def require_multiple(name: str, value: int, factor: int) -> None:
    """Checks that `value` is a positive multiple of `factor`.

    Raises:
        TypeError: If it isn't an integer.
        ValueError: If it is no multiple.
    """
    require_at_least(name, value, 1)
    if value % factor:
        lower = max(factor, value - value % factor)
        upper = value - value % factor + factor
        raise ValueError(f"`{name}` must be a multiple of {factor}, got {value}; use {lower} or {upper}")


def require_divisor(name: str, value: int, whole_name: str, whole: int) -> None:
    """Checks that `value` divides `whole`, for example a group size and a head dimension.

    Raises:
        ValueError: If it doesn't; the message lists the divisors from 8 up (or all, where there is none).
    """
    if value < 1 or whole % value:
        divisors = [size for size in range(1, whole + 1) if whole % size == 0]
        usable = [size for size in divisors if size >= 8] or divisors
        raise ValueError(
            f"`{name}` must divide {whole_name}={whole}, got {value}; use one of {', '.join(map(str, usable))}"
        )


def require_states(key_states: torch.Tensor, value_states: torch.Tensor) -> None:
    """Checks that key and value states are 4-dimensional and agree in batch and length.

    Raises:
        ValueError: If a shape doesn't fit.
        TypeError: If the states aren't floating-point tensors.
    """
    for name, states in (("key_states", key_states), ("value_states", value_states)):
        if states.dim() != 4:
            raise ValueError(f"`{name}` must have shape (batch, kv_heads, seq, head_dim), got {tuple(states.shape)}")
        if not states.is_floating_point():
            raise TypeError(f"`{name}` must be a floating-point tensor, got {states.dtype}")
    if key_states.shape[0] != value_states.shape[0] or key_states.shape[2] != value_states.shape[2]:
        raise ValueError(
            "`key_states` and `value_states` must agree in batch and length, got "
            f"{tuple(key_states.shape)} and {tuple(value_states.shape)}"
        )
