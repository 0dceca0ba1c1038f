"""The quality pass: text through a cache in chunks, so that later tokens read what earlier ones stored.

One window at a time goes through a fresh cache. The reference's log-probabilities are written once, and every
strategy, the reference's own included, is compared with them chunk by chunk, so that memory stays at one chunk.
Left out: batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from transformers import Cache, PreTrainedModel

from hf_kvplus import MemoryBreakdown, build_cache, measure_memory
from kvplus_eval.guards import refuse_lossless, refuse_miscounted, refuse_unpacked, refuse_unread
from kvplus_eval.measured import WindowScores
from kvplus_eval.metrics import score_positions
from kvplus_eval.protocol import REFERENCE_STRATEGY, Protocol, is_foreign, keeps_every_token
from kvplus_eval.reference import ReferenceStore
from kvplus_eval.stepping import step


def make_cache(strategy: str, model: PreTrainedModel, longest_tokens: int) -> Cache:
    """Builds a fresh cache.

    Args:
        strategy: A strategy string.
        model: The model, whose config shapes the cache.
        longest_tokens: The most tokens it will hold, which caches of fixed size must know.

    Returns:
        The cache, empty.
    """
    return build_cache(strategy, model.config, max_length=longest_tokens, model=model)


def record_reference(
    index: int, model: PreTrainedModel, token_ids: torch.Tensor, protocol: Protocol, store: ReferenceStore
) -> None:
    """Writes the reference's log-probabilities of one window, unless the store has them.

    Args:
        index: Number of the window.
        model: The model.
        token_ids: The window, shape (window_tokens,).
        protocol: How to feed it.
        store: Where to write.
    """
    if store.has(index):
        return
    with torch.inference_mode():
        cache = make_cache(REFERENCE_STRATEGY, model, protocol.longest_tokens)
        with store.recording(index, _vocab_size(model)) as rows:
            for start, logits in feed(model, cache, token_ids, protocol.chunk_tokens):
                stop = min(start + len(logits), protocol.predicted_tokens)
                log_probs = torch.log_softmax(logits[: stop - start].float(), dim=1)
                rows[start:stop] = log_probs.cpu().numpy()
        memory = measure_memory(cache)
        store.finish(index, memory.total_bytes, memory.elements)


def score_window(
    strategy: str,
    index: int,
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    protocol: Protocol,
    store: ReferenceStore,
    advance: Callable[[int], None],
) -> WindowScores:
    """Runs one window through a fresh cache and compares every position with the reference.

    Args:
        strategy: A strategy string.
        index: Number of the window.
        model: The model.
        token_ids: The window, shape (window_tokens,).
        protocol: How to feed it.
        store: The reference, which has this window; the store of the model's own full cache in it has the first.
        advance: Called with the number of tokens done, for a progress bar.

    Returns:
        Scores of every position, bytes by part, and of the first window bytes against length.

    Raises:
        RefusedError: If the figures would mean nothing.
    """
    refuse_unread(protocol)
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
    columns: dict[str, list[torch.Tensor]] = {}
    moved: list[torch.Tensor] = []
    curve: list[tuple[int, int]] = []
    with torch.inference_mode():
        cache = make_cache(strategy, model, protocol.longest_tokens)
        for start, logits in feed(model, cache, token_ids, protocol.chunk_tokens):
            stop = min(start + len(logits), protocol.predicted_tokens)
            if stop > start:
                reference = store.read(index, start, stop).to(logits.device)
                targets = token_ids[start + 1 : stop + 1].to(logits.device)
                scores = _score_chunk(logits[: stop - start], reference, targets)
                for column, values in scores.items():
                    columns.setdefault(column, []).append(values.cpu())
                if index == 0 and store.own is not None:
                    own = store.own.read(index, start, stop).to(logits.device)
                    scores = _score_chunk(logits[: stop - start], own, targets)
                moved.append(scores["kl_nats"].cpu())
            if index == 0:
                curve.append((start + len(logits), measure_memory(cache).total_bytes))
            advance(len(logits))
    memory, full_bytes = _measure(strategy, cache, index, store), store.full_bytes(index)
    positions = {column: torch.cat(pieces) for column, pieces in columns.items()}
    # Of a model with another one's reference the first window alone is compared with its own full cache
    if index == 0 or store.own is None:
        refuse_unpacked(strategy, memory, store.itself.full_bytes(index))
        refuse_lossless(strategy, torch.cat(moved))
    peak_bytes = torch.cuda.max_memory_allocated(model.device) if model.device.type == "cuda" else None
    return WindowScores(positions, memory, full_bytes, curve, list(getattr(cache, "plan", [])), peak_bytes)


def _measure(strategy: str, cache: Cache, index: int, store: ReferenceStore) -> MemoryBreakdown:
    """Counts the bytes of a cache; what one of another package keeps in its own way has the full cache's elements."""
    memory, own = measure_memory(cache), store.itself
    index = index if store.own is None else 0
    if not is_foreign(strategy) or not keeps_every_token(strategy) or not own.has(index):
        return memory
    return replace(memory, elements=own.full_elements(index) or memory.elements)


def _score_chunk(logits: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Scores the positions of one chunk in float64, where differences of 1e-6 are far above rounding.

    The stored reference is normalized again, since its float32 values sum to 1 only to within rounding.
    """
    if not torch.isfinite(logits).all():
        raise ArithmeticError("the model's output isn't finite with this cache")
    log_probs = torch.log_softmax(logits.float().double(), dim=1)
    return score_positions(log_probs, torch.log_softmax(reference.double(), dim=1), targets)


def feed(
    model: PreTrainedModel, cache: Cache, token_ids: torch.Tensor, chunk_tokens: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Feeds tokens in chunks, checking the cache's own count each time.

    Args:
        model: The model.
        cache: Its cache, empty.
        token_ids: Tokens, shape (tokens,).
        chunk_tokens: Tokens in one forward pass.

    Yields:
        Number of the chunk's first token, and logits of the chunk, shape (chunk, vocab).

    Raises:
        RefusedError: If the cache doesn't count what it was fed.
    """
    for start in range(0, len(token_ids), chunk_tokens):
        chunk = token_ids[start : start + chunk_tokens]
        logits = step(model, cache, chunk)
        refuse_miscounted(int(cache.get_seq_length()), start + len(chunk))
        yield start, logits


def _vocab_size(model: PreTrainedModel) -> int:
    """Returns how many logits a position has, which may exceed the tokenizer's vocabulary."""
    return model.get_output_embeddings().weight.shape[0]
