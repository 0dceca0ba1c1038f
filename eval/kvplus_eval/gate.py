"""The gate before everything else: our storage at full precision must say on this model what transformers' cache says.

Where it doesn't, no figure of ours means anything on this model, and every strategy of ours is refused.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from kvplus_eval.guards import RefusedError
from kvplus_eval.protocol import REFERENCE_STRATEGY, Protocol
from kvplus_eval.reference import ReferenceStore
from kvplus_eval.runner import feed, make_cache

GATE_STRATEGY = "fp"
GATE_CHUNKS = 8
# Equal states in other strides may take another kernel, which rounds otherwise
FLOAT32_NATS, HALF_NATS = 1e-6, 1e-2


def check_gate(model: PreTrainedModel, token_ids: torch.Tensor, protocol: Protocol, store: ReferenceStore) -> float:
    """Feeds the beginning of the first window through `fp` and compares it with the reference.

    Args:
        model: The model.
        token_ids: The first window, shape (window_tokens,).
        protocol: How it is fed.
        store: The reference, which has this window.

    Returns:
        The largest KL of a position in nats.

    Raises:
        RefusedError: If it is larger than rounding explains.
    """
    begun = token_ids[: GATE_CHUNKS * protocol.chunk_tokens]
    worst = 0.0
    with torch.inference_mode():
        cache = make_cache(GATE_STRATEGY, model, protocol.longest_tokens)
        for start, logits in feed(model, cache, begun, protocol.chunk_tokens):
            stop = min(start + len(logits), protocol.predicted_tokens)
            if stop <= start:
                continue
            log_probs = torch.log_softmax(logits[: stop - start].double(), dim=1)
            reference = torch.log_softmax(store.read(0, start, stop).to(logits.device).double(), dim=1)
            divergence = torch.nn.functional.kl_div(log_probs, reference, reduction="none", log_target=True)
            worst = max(worst, float(divergence.sum(dim=1).max()))
    limit = FLOAT32_NATS if model.dtype == torch.float32 else HALF_NATS
    if not worst <= limit:
        raise RefusedError(
            f"`{GATE_STRATEGY}` isn't equal to `{REFERENCE_STRATEGY}` on this model: KL {worst:.2g} nats at a "
            f"position, {limit:g} allowed; no figure of this package's caches would mean anything"
        )
    return worst
