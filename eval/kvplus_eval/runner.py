"""The quality pass: text through a cache in chunks, so that later tokens read what earlier ones stored.

One window at a time goes through a fresh cache. The reference's log-probabilities are written once, and every
strategy, the reference's own included, is compared with them chunk by chunk, so that memory stays at one chunk.
Left out: several processes, batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from hf_kvplus import build_cache, measure_memory
from hf_kvplus.compat import cache_keyword
from kvplus_eval.guards import refuse_miscounted, refuse_unpacked, refuse_unread
from kvplus_eval.measured import Measured
from kvplus_eval.metrics import score_positions
from kvplus_eval.protocol import REFERENCE_STRATEGY, Protocol
from kvplus_eval.reference import ReferenceStore


def make_cache(strategy: str, model: PreTrainedModel, longest_tokens: int) -> Cache:
    """Builds a fresh cache.

    Args:
        strategy: A strategy string.
        model: The model, whose config shapes the cache.
        longest_tokens: The most tokens it will hold, which caches of fixed size must know.

    Returns:
        The cache, empty.
    """
    return build_cache(strategy, model.config, max_length=longest_tokens)


def step(model: PreTrainedModel, cache: Cache, token_ids: torch.Tensor, *, last_only: bool = False) -> torch.Tensor:
    """Runs one forward pass through a cache.

    Args:
        model: The model.
        cache: Its cache, which grows by the tokens fed.
        token_ids: Tokens, shape (tokens,), on any device.
        last_only: Compute the logits of the last position alone, where the model can.

    Returns:
        Logits, shape (tokens, vocab) or (1, vocab).
    """
    options: dict[str, Any] = {"logits_to_keep": 1} if last_only and "logits_to_keep" in _forward_names(model) else {}
    options[cache_keyword(model)] = cache
    output = model(input_ids=token_ids[None].to(model.device), use_cache=True, **options)
    return output.logits[0, -1:] if last_only else output.logits[0]


def record_reference(
    model: PreTrainedModel,
    windows: Sequence[torch.Tensor],
    protocol: Protocol,
    store: ReferenceStore,
    advance: Callable[[int], None],
) -> None:
    """Writes the reference's log-probabilities of the windows that the store lacks.

    Args:
        model: The model.
        windows: Token ids, each of shape (window_tokens,).
        protocol: How to feed them.
        store: Where to write.
        advance: Called with the number of tokens done, for a progress bar.
    """
    with torch.inference_mode():
        for index, token_ids in enumerate(windows):
            if store.has(index):
                advance(len(token_ids))
                continue
            cache = make_cache(REFERENCE_STRATEGY, model, protocol.longest_tokens)
            with store.recording(index, _vocab_size(model)) as rows:
                for start, logits in _feed(model, cache, token_ids, protocol.chunk_tokens):
                    stop = min(start + len(logits), protocol.predicted_tokens)
                    log_probs = torch.log_softmax(logits[: stop - start].float(), dim=1)
                    rows[start:stop] = log_probs.cpu().numpy()
                    advance(len(logits))
            store.finish(index, measure_memory(cache).total_bytes)


def measure_quality(
    strategy: str,
    model: PreTrainedModel,
    windows: Sequence[torch.Tensor],
    protocol: Protocol,
    store: ReferenceStore,
    advance: Callable[[int], None],
) -> Measured:
    """Runs all windows through one strategy.

    Args:
        strategy: A strategy string.
        model: The model.
        windows: Token ids, each of shape (window_tokens,).
        protocol: How to feed them.
        store: The reference, complete.
        advance: Called with the number of tokens done, for a progress bar.

    Returns:
        Scores of every position, bytes by part, and bytes against length.

    Raises:
        RefusedError: If the figures would mean nothing.
    """
    refuse_unread(protocol)
    measured = Measured()
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
    with torch.inference_mode():
        for index, token_ids in enumerate(windows):
            cache = make_cache(strategy, model, protocol.longest_tokens)
            measured.plan = list(getattr(cache, "plan", []))
            _score_window(index, model, cache, token_ids, protocol, store, measured, advance)
            memory = measure_memory(cache)
            full_bytes = store.full_bytes(index)
            refuse_unpacked(strategy, memory, full_bytes)
            if measured.memory is None or memory.total_bytes > measured.memory.total_bytes:
                measured.memory, measured.full_bytes = memory, full_bytes
    if model.device.type == "cuda":
        measured.peak_bytes = torch.cuda.max_memory_allocated(model.device)
    return measured


def _score_window(
    index: int,
    model: PreTrainedModel,
    cache: Cache,
    token_ids: torch.Tensor,
    protocol: Protocol,
    store: ReferenceStore,
    measured: Measured,
    advance: Callable[[int], None],
) -> None:
    """Feeds one window and appends its scores, and for the first window its curve of bytes, to `measured`."""
    columns: dict[str, list[torch.Tensor]] = {}
    for start, logits in _feed(model, cache, token_ids, protocol.chunk_tokens):
        stop = min(start + len(logits), protocol.predicted_tokens)
        if stop > start:
            reference = store.read(index, start, stop).to(logits.device)
            targets = token_ids[start + 1 : stop + 1].to(logits.device)
            for column, values in _score_chunk(logits[: stop - start], reference, targets).items():
                columns.setdefault(column, []).append(values.cpu())
        if index == 0:
            measured.curve.append((start + len(logits), measure_memory(cache).total_bytes))
        advance(len(logits))
    for column, pieces in columns.items():
        measured.positions.setdefault(column, []).append(torch.cat(pieces))


def _score_chunk(logits: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Scores the positions of one chunk in float64, where differences of 1e-6 are far above rounding.

    The stored reference is normalized again, since its float32 values sum to 1 only to within rounding.
    """
    if not torch.isfinite(logits).all():
        raise ArithmeticError("the model's output isn't finite with this cache")
    log_probs = torch.log_softmax(logits.float().double(), dim=1)
    return score_positions(log_probs, torch.log_softmax(reference.double(), dim=1), targets)


def _feed(
    model: PreTrainedModel, cache: Cache, token_ids: torch.Tensor, chunk_tokens: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Feeds tokens in chunks and yields (start, logits of the chunk), checking the cache's own count each time."""
    for start in range(0, len(token_ids), chunk_tokens):
        chunk = token_ids[start : start + chunk_tokens]
        logits = step(model, cache, chunk)
        refuse_miscounted(int(cache.get_seq_length()), start + len(chunk))
        yield start, logits


def _forward_names(model: PreTrainedModel) -> set[str]:
    """Returns the names of the arguments of the model's forward."""
    return set(inspect.signature(model.forward).parameters)


def _vocab_size(model: PreTrainedModel) -> int:
    """Returns how many logits a position has, which may exceed the tokenizer's vocabulary."""
    return model.get_output_embeddings().weight.shape[0]
