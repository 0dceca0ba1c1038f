"""The time of one decoded token at several context lengths, for a curve in the report.

It is `kvplus bench` (see `kvplus_eval.bench`): all caches alive side by side, one step each in turn. Steps and rounds
are few here; for figures to quote, run `kvplus bench` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from kvplus_eval.bench import BenchPlan, run_bench

TOKENS, ROUNDS = 6, 2
FIGURES = ("context_tokens", "decode_ms_per_token", "prefill_ms", "cache_bytes")


def time_contexts(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    strategies: Sequence[str],
    contexts: Sequence[int],
    prefill_chunk_tokens: int,
    advance: Callable[[], None],
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Times all strategies at all context lengths, in turns.

    Args:
        model: The model.
        token_ids: Text, repeated where it is too short: the time of a step doesn't depend on what is said.
        strategies: Strategy strings.
        contexts: Context lengths in tokens, ascending.
        prefill_chunk_tokens: Tokens in one forward pass of the prefill.
        advance: Called after each prefill and each round of a strategy, for a progress bar.

    Returns:
        Strategy -> one entry a context with `FIGURES`, up to the one at which it failed; of those that did, why.
    """
    plan = BenchPlan(tuple(contexts), TOKENS, ROUNDS, prefill_chunk_tokens)
    copies = -(-plan.longest_tokens // len(token_ids))
    found = run_bench(model, token_ids.repeat(copies), list(strategies), plan, advance)
    curves: dict[str, list[dict[str, Any]]] = {strategy: [] for strategy in strategies}
    failures: dict[str, str] = {}
    for row in found:
        strategy, bench = row["strategy"], row["bench"]
        if row["status"] == "ok":
            curves[strategy].append({figure: bench[figure] for figure in FIGURES})
        else:
            failures.setdefault(strategy, f"at {bench['context_tokens']} tokens: {row['reason']}")
    return curves, failures


def count_steps(strategies: Sequence[str], contexts: Sequence[int]) -> int:
    """Returns how often `advance` is called."""
    return len(contexts) * len(strategies) * (1 + ROUNDS)
