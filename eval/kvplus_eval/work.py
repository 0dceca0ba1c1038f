"""How much a protocol asks for, in tokens fed through the model: for the progress bar and for `--dry-run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvplus_eval.contexts import ROUNDS, TOKENS
from kvplus_eval.processes import Processes
from kvplus_eval.protocol import Protocol
from kvplus_eval.sensitivity import has_sensitivity


@dataclass(frozen=True)
class Work:
    """One part of an evaluation.

    Args:
        name: What it is.
        tokens: Tokens fed through the model.
        passes: Forward passes.
        shared: Whether several processes share it.
    """

    name: str
    tokens: int
    passes: int
    shared: bool = False


def list_work(protocol: Protocol, strategies: Sequence[str], layers: int = 0) -> list[Work]:
    """Lists what a protocol asks for, parts that it leaves out included with 0 tokens.

    Args:
        protocol: The protocol.
        strategies: The strategies.
        layers: Layers of the model, which are quantized one by one where that is asked for.

    Returns:
        The parts in order.
    """
    count, one = len(strategies), protocol.windows * protocol.window_tokens
    chunks = protocol.windows * -(-protocol.window_tokens // protocol.chunk_tokens)
    decoded = protocol.timing_rounds * protocol.decode_tokens + max(0, protocol.greedy_tokens - protocol.decode_tokens)
    decoded = decoded if protocol.timing_rounds else 0
    watched = protocol.window_tokens if protocol.peak_memory else 0
    timed = protocol.timing_rounds * protocol.window_tokens
    samples = len(protocol.tasks) * len(protocol.task_depths) * protocol.task_samples
    asked = samples * sum(protocol.task_lengths)
    steps = len(protocol.contexts) * (2 + TOKENS * ROUNDS)
    context = max(protocol.contexts, default=0)
    noise_windows = min(protocol.noise_windows, protocol.windows)
    per_chunk = protocol.prefill_chunk_tokens
    alone = layers * sum(map(has_sensitivity, strategies)) if protocol.sensitivity_tokens else 0
    return [
        Work("reference", one, chunks, shared=True),
        Work("quality", count * one, count * chunks, shared=True),
        Work("noise", len(protocol.noise) * noise_windows * protocol.window_tokens, len(protocol.noise) * chunks),
        Work(
            "layers alone",
            alone * protocol.sensitivity_tokens,
            alone * (protocol.sensitivity_tokens // protocol.chunk_tokens),
            shared=True,
        ),
        Work("planted facts", count * asked, count * (asked // per_chunk + 2 * samples), shared=True),
        Work("times", count * (timed + decoded), count * (timed // per_chunk + decoded)),
        Work("times by context", count * (context + steps), count * (context // per_chunk + steps)),
        Work(
            "peak memory", count * watched, count * (watched // per_chunk + protocol.decode_tokens) if watched else 0
        ),
    ]


def count_work(
    protocol: Protocol, strategies: Sequence[str], processes: Processes, *, has_reference: bool = False
) -> int:
    """Returns the tokens that this process will see fed, so far as bars count them.

    Args:
        protocol: The protocol.
        strategies: The strategies.
        processes: This process among its like.
        has_reference: Whether another model is the reference, so that of the model's own one window is enough.
    """
    total = 0
    for work in list_work(protocol, strategies):
        if work.name in ("peak memory", "layers alone"):
            continue
        if work.name == "reference" and has_reference:
            total += protocol.window_tokens if processes.is_first else 0
        elif work.shared:
            total += work.tokens // processes.count
        elif processes.is_first:
            total += work.tokens
    return total
