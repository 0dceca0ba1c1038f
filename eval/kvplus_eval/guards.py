"""Refusals: measurements that would mean nothing are named and not printed.

The classic way to evaluate a cache without noticing that it does nothing is one forward pass over the whole text:
attention then sees the states as computed, and any cache looks lossless. These guards catch that, and caches that
claim fewer bits than they use.
"""

from __future__ import annotations

import re

import torch

from hf_kvplus import MemoryBreakdown
from hf_kvplus.strategies.build import find_strategy
from hf_kvplus.strategies.grammar import Part, parse
from kvplus_eval.protocol import Protocol, is_foreign

FULL_PRECISION_BITS = 16
# What is left of KL in float64 between equal float32 outputs; the largest of 2047 positions is about 1e-13
LOSSLESS_NATS = 1e-11


class RefusedError(RuntimeError):
    """A measurement was refused; the message is the reason."""


def refuse_unread(protocol: Protocol) -> None:
    """Refuses a protocol that feeds a window in one pass, so that no token reads a stored one.

    Raises:
        RefusedError: If the window isn't longer than a chunk.
    """
    if protocol.chunk_tokens >= protocol.window_tokens:
        raise RefusedError(
            f"the cache is never read: {protocol.chunk_tokens} tokens in a chunk cover the window of "
            f"{protocol.window_tokens}; use a smaller --chunk-tokens"
        )


def refuse_miscounted(seen_tokens: int, fed_tokens: int) -> None:
    """Refuses a cache that doesn't report the tokens that it was fed, since later tokens then read something else.

    Args:
        seen_tokens: What the cache's `get_seq_length` says.
        fed_tokens: How many tokens went in.

    Raises:
        RefusedError: If they differ.
    """
    if seen_tokens != fed_tokens:
        raise RefusedError(f"the cache reports {seen_tokens} tokens after {fed_tokens} were fed")


def refuse_unpacked(strategy: str, memory: MemoryBreakdown, full_bytes: int) -> None:
    """Refuses a strategy that claims to store less and, at the end of a window, didn't.

    Args:
        strategy: The strategy, whose claim is looked up.
        memory: What the cache really held.
        full_bytes: What the reference cache held at the same length.

    Raises:
        RefusedError: If nothing was packed, or the cache isn't smaller than the full one. What a cache of another
            package keeps in places of its own may be packed, so that only its size counts.
    """
    claimed_bits = claimed_stored_bits(strategy)
    if claimed_bits is None or claimed_bits >= FULL_PRECISION_BITS:
        return
    claim = f"`{strategy}` claims {claimed_bits:g} bits an element"
    packed_bytes = memory.packed_bytes + memory.away_bytes
    if packed_bytes == 0 and not (is_foreign(strategy) and memory.other_bytes):
        raise RefusedError(f"{claim}, but nothing was packed; feed more tokens (--window-tokens, --context)")
    if memory.total_bytes >= full_bytes:
        raise RefusedError(f"{claim}, but its cache takes {memory.total_bytes} bytes and the full cache {full_bytes}")


def refuse_lossless(strategy: str, divergence: torch.Tensor) -> None:
    """Refuses a strategy that claims to quantize and whose output is the full cache's to the last digit.

    Such a cache packs something, and then lets attention read the states as they were before.

    Args:
        strategy: The strategy, whose claim is looked up.
        divergence: KL to the full cache by position, in nats, shape (positions,).

    Raises:
        RefusedError: If no position moved.
    """
    claimed_bits = claimed_stored_bits(strategy)
    if claimed_bits is None or claimed_bits >= FULL_PRECISION_BITS:
        return
    if float(divergence.max()) < LOSSLESS_NATS:
        raise RefusedError(
            f"returns unquantized states: `{strategy}` claims {claimed_bits:g} bits an element, and no output moved"
        )


def claimed_stored_bits(strategy: str) -> float | None:
    """Returns the bits an element that a strategy claims, by its registered entry or its name; None for no claim.

    Raises:
        ValueError: If an adapter's `bits` are no number.
    """
    claims = [_claimed_by_part(part) for part in parse(strategy)]
    found = [claim for claim in claims if claim is not None]
    return min(found) if found else None


def _claimed_by_part(part: Part) -> float | None:
    """Returns what one part claims; a pair such as `k8v4` claims the mean of its widths, an adapter its `bits`."""
    name = part.name
    if "bits" in part.options:
        try:
            return float(part.options["bits"])
        except ValueError:
            given = part.options["bits"]
            raise ValueError(f"strategy part `{part.text}`: `bits` must be a number, got {given!r}") from None
    pair = re.fullmatch(r"k(\d+)v(\d+)", name)
    return (int(pair[1]) + int(pair[2])) / 2 if pair else find_strategy(name).info.stored_bits
