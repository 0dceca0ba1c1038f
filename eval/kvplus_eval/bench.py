"""Time of one decoded token at several context lengths, strategies taking turns token by token.

All caches stay alive side by side and every step feeds the same token to one after the other, so that drift of a
noisy machine reaches all of them alike. A longer context continues the same caches, so nothing is prefilled twice.
The divergence from the `dynamic` cache on the very same steps stands beside each time: no speed without correctness.

The `bench` part of a row:

    context_tokens, tokens, rounds        what was asked for
    fused                                 whether packed states were read directly, see `use_fused_attention`
    decode_ms_per_token                   median over all steps
    decode_ms_fastest, decode_ms_slowest  extremes
    decode_ms                             every step, in order
    ratio_to_dynamic                      median against dynamic's, null without it
    prefill_ms                            time to bring the cache to this context from the previous one
    cache_bytes, kl_mean_nats             bytes after the last step; divergence from dynamic, null without it
    disk_bytes                            bytes of blocks in files, which cache_bytes doesn't count
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from transformers import Cache, PreTrainedModel

from hf_kvplus import KVPlusCache, measure_memory, use_fused_attention
from hf_kvplus.checks import require_at_least
from kvplus_eval.guards import refuse_miscounted, refuse_unpacked
from kvplus_eval.outcome import Outcome
from kvplus_eval.protocol import REFERENCE_STRATEGY
from kvplus_eval.results import Row
from kvplus_eval.runner import make_cache, step
from kvplus_eval.timing import clock_ms, prefill, rotated

WARMUP_STEPS = 2


@dataclass(frozen=True)
class BenchPlan:
    """What is timed.

    Args:
        contexts: Context lengths in tokens, ascending.
        tokens: Decoded tokens in a round.
        rounds: Rounds; each starts with another strategy.
        prefill_chunk_tokens: Tokens in one forward pass of the prefill.
        fused: Whether caches of this package are read by `use_fused_attention`; others never are.
    """

    contexts: tuple[int, ...]
    tokens: int = 16
    rounds: int = 3
    prefill_chunk_tokens: int = 512
    fused: bool = False

    def __post_init__(self) -> None:
        """Checks the numbers."""
        for name in ("tokens", "rounds", "prefill_chunk_tokens"):
            require_at_least(name, getattr(self, name), 1)
        for context in self.contexts:
            require_at_least("context", context, 1)
        if list(self.contexts) != sorted(set(self.contexts)) or not self.contexts:
            raise ValueError(f"`context` must be lengths in ascending order, each once, got {self.contexts}")
        steps = self.steps_per_context
        for shorter, longer in zip(self.contexts, self.contexts[1:], strict=False):
            if longer - shorter < steps:
                raise ValueError(f"`context` {shorter} and {longer} must lie {steps} apart: so many are decoded")

    @property
    def steps_per_context(self) -> int:
        """Tokens that each cache grows by while one context is timed."""
        return WARMUP_STEPS + self.tokens * self.rounds

    @property
    def longest_tokens(self) -> int:
        """The most tokens that a cache ever holds, and that the text must have."""
        return self.contexts[-1] + self.steps_per_context


@dataclass
class Contestant:
    """One strategy with its cache, alive during the whole benchmark."""

    outcome: Outcome
    cache: Cache | None = None
    fed_tokens: int = 0
    prefill_ms: float = 0.0
    fused: bool = False
    decode_ms: list[float] = field(default_factory=list)
    kl_nats: list[float] = field(default_factory=list)
    log_probs: torch.Tensor | None = None


def run_bench(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    strategies: Sequence[str],
    plan: BenchPlan,
    advance: Callable[[], None],
) -> list[Row]:
    """Times all strategies at all context lengths.

    Args:
        model: The model.
        token_ids: Tokens to feed, shape (at least `plan.longest_tokens`,).
        strategies: Strategy strings.
        plan: What to time.
        advance: Called after each prefill and each round of a strategy, for a progress bar.

    Returns:
        For each context and strategy, the outcome and the `bench` part of a row.
    """
    contestants = [Contestant(Outcome(strategy)) for strategy in strategies]
    rows: list[Row] = []
    with torch.inference_mode():
        for context in plan.contexts:
            context_ids = token_ids[:context]
            for contestant in contestants:
                contestant.outcome.attempt(partial(_grow, contestant, model, context_ids, plan))
                advance()
            _time_steps(contestants, model, token_ids, plan, advance)
            reference = next((one for one in contestants if one.outcome.strategy == REFERENCE_STRATEGY), None)
            rows += [_row(contestant, reference, context, plan) for contestant in contestants]
    return rows


def _grow(contestant: Contestant, model: PreTrainedModel, context_ids: torch.Tensor, plan: BenchPlan) -> None:
    """Brings a cache to a context length, continuing from what it holds."""
    if contestant.cache is None:
        contestant.cache = make_cache(contestant.outcome.strategy, model, plan.longest_tokens)
    contestant.decode_ms, contestant.kl_nats = [], []
    with _attention(contestant, model, plan):
        began = clock_ms(model.device)
        prefill(model, contestant.cache, context_ids[contestant.fed_tokens :], plan.prefill_chunk_tokens)
        contestant.prefill_ms = clock_ms(model.device) - began
    contestant.fed_tokens = len(context_ids)
    refuse_miscounted(int(contestant.cache.get_seq_length()), contestant.fed_tokens)


def _time_steps(
    contestants: list[Contestant],
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    plan: BenchPlan,
    advance: Callable[[], None],
) -> None:
    """Decodes the same tokens with every cache, one step each in turn; the first steps only warm up."""
    by_name = {one.outcome.strategy: one for one in contestants}
    for number in range(plan.steps_per_context):
        counted = number >= WARMUP_STEPS
        for strategy in rotated(list(by_name), number):
            one = by_name[strategy]
            one.outcome.attempt(partial(_step, one, model, token_ids, plan, counted=counted))
        reference = by_name.get(REFERENCE_STRATEGY)
        if counted and reference is not None and reference.log_probs is not None:
            for one in by_name.values():
                one.kl_nats += _divergence(one.log_probs, reference.log_probs)
        if counted and (number + 1 - WARMUP_STEPS) % plan.tokens == 0:
            advance()


def _attention(
    contestant: Contestant, model: PreTrainedModel, plan: BenchPlan
) -> contextlib.AbstractContextManager[object]:
    """Returns the context in which a cache is read: fused where that was asked for and the cache is ours."""
    contestant.fused = plan.fused and isinstance(contestant.cache, KVPlusCache)
    return use_fused_attention(model) if contestant.fused else contextlib.nullcontext()


def _step(
    contestant: Contestant, model: PreTrainedModel, token_ids: torch.Tensor, plan: BenchPlan, *, counted: bool
) -> None:
    """Feeds one token and times it."""
    token = token_ids[contestant.fed_tokens : contestant.fed_tokens + 1].to(model.device)
    with _attention(contestant, model, plan):
        began = clock_ms(model.device)
        logits = step(model, contestant.cache, token, last_only=True)
        took_ms = clock_ms(model.device) - began
    contestant.fed_tokens += 1
    refuse_miscounted(int(contestant.cache.get_seq_length()), contestant.fed_tokens)
    contestant.log_probs = torch.log_softmax(logits[0].float().double(), dim=0)
    if counted:
        contestant.decode_ms.append(took_ms)


def _divergence(log_probs: torch.Tensor | None, reference: torch.Tensor) -> list[float]:
    """Returns the divergence of one step from the reference's, or nothing for a strategy that has left the run."""
    if log_probs is None:
        return []
    return [float(torch.nn.functional.kl_div(log_probs, reference, reduction="sum", log_target=True))]


def _row(contestant: Contestant, reference: Contestant | None, context: int, plan: BenchPlan) -> Row:
    """Makes the row of one strategy at one context length."""
    bench: Row = {"context_tokens": context, "tokens": plan.tokens, "rounds": plan.rounds}
    # A short context may lie in the tokens that stay at full precision; at the longest one a claim has to hold
    longest = context == plan.contexts[-1]
    contestant.outcome.attempt(lambda: bench.update(_figures(contestant, reference, claims=longest)))
    return {**contestant.outcome.facts(), "bench": bench}


def _figures(contestant: Contestant, reference: Contestant | None, *, claims: bool) -> Row:
    """Returns the figures of a strategy that is still in the run."""
    memory = measure_memory(contestant.cache)
    known = reference is not None and reference.outcome.status == "ok"
    if known and claims:
        refuse_unpacked(contestant.outcome.strategy, memory, measure_memory(reference.cache).total_bytes)
    typical_ms = median(contestant.decode_ms)
    return {
        "fused": contestant.fused,
        "decode_ms_per_token": typical_ms,
        "decode_ms_fastest": min(contestant.decode_ms),
        "decode_ms_slowest": max(contestant.decode_ms),
        "decode_ms": contestant.decode_ms,
        "ratio_to_dynamic": typical_ms / median(reference.decode_ms) if known else None,
        "prefill_ms": contestant.prefill_ms,
        "cache_bytes": memory.total_bytes,
        "disk_bytes": memory.disk_bytes,
        "kl_mean_nats": sum(contestant.kl_nats) / len(contestant.kl_nats) if contestant.kl_nats else None,
    }
