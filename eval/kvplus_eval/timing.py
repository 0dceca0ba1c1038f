"""Prefill and decode times, and greedy text, with all strategies taking turns in one run.

A shared machine drifts over minutes. Every round therefore times each strategy once, starting with another one each
time, and medians are taken over rounds. Times are only measured for strategies that passed the quality pass, which
warms them up; where an earlier process did that pass, a short run does.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from transformers import Cache, PreTrainedModel

from kvplus_eval.measured import Measured
from kvplus_eval.protocol import Protocol
from kvplus_eval.runner import make_cache, step

# More than what any strategy keeps at full precision, and a block
WARM_TOKENS, WARM_STEPS = 256, 2


@dataclass
class Times:
    """One round of one strategy.

    Args:
        prefill_ms: Milliseconds of prefill.
        ttft_ms: Milliseconds from the prompt to its first token.
        decode_ms: Milliseconds of each decoded token.
        greedy_ids: The tokens.
    """

    prefill_ms: float
    ttft_ms: float = 0.0
    decode_ms: list[float] = field(default_factory=list)
    greedy_ids: list[int] = field(default_factory=list)


def rotated(names: list[str], turn: int) -> list[str]:
    """Returns `names` starting with another one each turn, so that no strategy always runs first."""
    shift = turn % max(1, len(names))
    return names[shift:] + names[:shift]


def clock_ms(device: torch.device) -> float:
    """Returns the time in milliseconds once all work queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() * 1000


def prefill(model: PreTrainedModel, cache: Cache, token_ids: torch.Tensor, chunk_tokens: int) -> torch.Tensor:
    """Feeds a prompt in large chunks.

    Args:
        model: The model.
        cache: An empty cache.
        token_ids: The prompt, shape (tokens,).
        chunk_tokens: Tokens in one pass.

    Returns:
        Logits of the last position, shape (1, vocab).
    """
    for piece in token_ids.split(chunk_tokens):
        logits = step(model, cache, piece, last_only=True)
    return logits


def time_once(
    strategy: str, model: PreTrainedModel, token_ids: torch.Tensor, protocol: Protocol, *, decoded_tokens: int
) -> Times:
    """Prefills a fresh cache with one window and decodes greedily after it.

    Args:
        strategy: A strategy string.
        model: The model.
        token_ids: The window, shape (window_tokens,).
        protocol: Its `prefill_chunk_tokens` is used.
        decoded_tokens: How many tokens to decode.

    Returns:
        The times, and the tokens.
    """
    with torch.inference_mode():
        cache = make_cache(strategy, model, protocol.longest_tokens)
        began = clock_ms(model.device)
        logits = prefill(model, cache, token_ids, protocol.prefill_chunk_tokens)
        ended = clock_ms(model.device)
        times = Times(prefill_ms=ended - began)
        for number in range(decoded_tokens):
            token = logits.argmax(dim=1)
            times.greedy_ids.append(int(token))
            if number == 0:
                times.ttft_ms = clock_ms(model.device) - began
            step_began = clock_ms(model.device)
            logits = step(model, cache, token, last_only=True)
            times.decode_ms.append(clock_ms(model.device) - step_began)
    return times


def warm_up(strategy: str, model: PreTrainedModel, token_ids: torch.Tensor, protocol: Protocol) -> None:
    """Runs a strategy for a moment, far enough that it packs, so that nothing is compiled while it is timed.

    Args:
        strategy: A strategy string.
        model: The model.
        token_ids: The window, shape (window_tokens,).
        protocol: As for `time_once`.
    """
    time_once(strategy, model, token_ids[:WARM_TOKENS], protocol, decoded_tokens=WARM_STEPS)


def share_reference_text(measured: Iterable[Measured], greedy_ids: list[int]) -> None:
    """Puts the reference's greedy text beside every strategy's."""
    for one in measured:
        one.reference_greedy_ids = greedy_ids if one.greedy_ids else []


def add_times(measured: Measured, times: Times, turn: int, protocol: Protocol) -> None:
    """Adds the times of one round to a strategy's measurements; the first round also keeps the greedy text.

    Args:
        measured: The strategy's measurements.
        times: What was timed.
        turn: Number of the round, from 0.
        protocol: How many of the decoded tokens count.
    """
    measured.prefill_ms.append(times.prefill_ms)
    measured.ttft_ms.append(times.ttft_ms)
    measured.decode_ms.extend(times.decode_ms[: protocol.decode_tokens])
    if turn == 0:
        measured.greedy_ids = times.greedy_ids[: protocol.greedy_tokens]
