"""What each layer costs alone: a cache of full precision with one layer of the strategy in it, through the same text.

Tells which layers of a model a strategy hurts, which is what `kvplus plan` weighs. The sum over layers is near the
loss of all together only where losses are small. Left out: windows, offloading and other people's caches, whose layers
can't be taken one by one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from hf_kvplus import KVPlusCache
from hf_kvplus.layer import KVLayer
from hf_kvplus.strategies.grammar import parse
from kvplus_eval.guards import claimed_stored_bits
from kvplus_eval.metrics import score_positions
from kvplus_eval.protocol import Protocol, is_ours, keeps_every_token
from kvplus_eval.reference import ReferenceStore
from kvplus_eval.runner import feed, make_cache

FULL = "fp"


def has_sensitivity(strategy: str) -> bool:
    """Whether layers of a strategy can be measured one by one, and claim to store less."""
    stays = not any(part.name == "offload" for part in parse(strategy))
    return stays and is_ours(strategy) and keeps_every_token(strategy) and claimed_stored_bits(strategy) is not None


def lossy_layers(strategy: str, model: PreTrainedModel, protocol: Protocol) -> list[int]:
    """Returns the layers that a strategy quantizes."""
    cache = make_cache(strategy, model, protocol.longest_tokens)
    return [number for number, layer in enumerate(cache.layers) if isinstance(layer, KVLayer) and layer.codecs]


def one_layer_cache(strategy: str, layer: int, model: PreTrainedModel, protocol: Protocol) -> KVPlusCache:
    """Returns an empty cache of full precision in which one layer is the strategy's."""
    cache, lossy = (make_cache(name, model, protocol.longest_tokens) for name in (FULL, strategy))
    cache.layers[layer] = lossy.layers[layer]
    return cache


def layer_loss(
    strategy: str,
    layer: int,
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    protocol: Protocol,
    store: ReferenceStore,
) -> float:
    """Measures one layer on the beginning of the first window.

    Args:
        strategy: The strategy.
        layer: Number of the layer.
        model: The model.
        token_ids: The first window, shape (window_tokens,); the first `protocol.sensitivity_tokens` are fed.
        protocol: How the reference was fed.
        store: The reference, which has that window.

    Returns:
        Mean KL to the full cache in nats.
    """
    fed = token_ids[: protocol.sensitivity_tokens]
    cache = one_layer_cache(strategy, layer, model, replace(protocol, windows=1))
    losses = []
    with torch.inference_mode():
        for start, logits in feed(model, cache, fed, protocol.chunk_tokens):
            stop = min(start + len(logits), protocol.predicted_tokens)
            reference = store.read(0, start, stop).to(logits.device)
            log_probs = torch.log_softmax(logits[: stop - start].float().double(), dim=1)
            targets = token_ids[start + 1 : stop + 1].to(logits.device)
            scores = score_positions(log_probs, torch.log_softmax(reference.double(), dim=1), targets)
            losses.append(scores["kl_nats"].cpu())
    return float(torch.cat(losses).mean())
