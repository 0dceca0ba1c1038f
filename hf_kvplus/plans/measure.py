"""Measures what each layer loses at each width, for all layers and widths from a few passes over some text.

The divergence that a small change of a layer's attention output causes is half the expected square of the change of
log p(y), for y drawn from the model's own predictions. So two backward passes a window tell how each layer's output
matters; after that, a width costs one attention of one layer, not a pass through the model. Changes at different
tokens count as independent, so the sum over a plan's layers tells plans apart but is no measurement: what a plan
really costs is measured with all its layers quantized.

Source: Optimal Brain Damage (the Fisher information as the curvature of the loss); differs in that activations are
changed and not weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hf_kvplus.codecs import Codec
from hf_kvplus.codecs.identity import IdentityCodec
from hf_kvplus.key_bias import layer_key_turns
from hf_kvplus.layer import KVLayer
from hf_kvplus.plans.onepass import AttentionCall, OnePass
from hf_kvplus.recipes import Quantization

# Draws of the model's predictions for each window.
SAMPLES = 2
PARTS = ("keys", "values")


def layer_losses(
    run: OnePass,
    windows: Sequence[torch.Tensor],
    candidates: Sequence[Quantization],
    advance: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Predicts what quantizing the keys or the values of one layer costs.

    Args:
        run: The model, entered.
        windows: Token ids, each `(tokens,)`.
        candidates: How to quantize.
        advance: Called after each layer of each window.

    Returns:
        `(layers, candidates, 2)` float64: nats a position for keys and for values alone; NaN for layers without
        attention.
    """
    config = run.model.config.get_text_config(decoder=True)
    count, turns = config.num_hidden_layers, layer_key_turns(config)
    losses = torch.full((count, len(candidates), 2), torch.nan, dtype=torch.float64)
    for number, token_ids in enumerate(windows):
        calls, gradients = _curvature(run, token_ids, seed=number)
        for layer, call in calls.items():
            with torch.no_grad():
                plain = call.plain()
            for index, candidate in enumerate(candidates):
                for part, name in enumerate(PARTS):
                    codecs = candidate.codecs(layer, call.key.shape[-1], turns[layer])
                    change = _change(call, candidate, codecs, name, run.chunk_tokens) - plain
                    loss = _loss(change, gradients[layer])
                    losses[layer, index, part] = loss / len(windows) + losses[layer, index, part].nan_to_num(0.0)
            advance()
    return losses


def _change(
    call: AttentionCall, candidate: Quantization, codecs: Sequence[Codec], part: str, chunk_tokens: int
) -> torch.Tensor:
    """Returns a layer's output with keys or values quantized, `(1, tokens, heads, head_dim)`."""
    unpacked = IdentityCodec(block_tokens=candidate.block_tokens)
    held = KVLayer(
        *(codec if name == part else unpacked for name, codec in zip(PARTS, codecs, strict=True)),
        residual_length=candidate.residual_length,
        num_sink_tokens=candidate.num_sink_tokens,
    )
    with torch.no_grad():
        return call.stored(held, chunk_tokens, (part,))


def _loss(change: torch.Tensor, gradients: torch.Tensor) -> float:
    """Returns half the mean square of how far log-probabilities move, in nats a position.

    Args:
        change: `(1, tokens, heads, head_dim)`.
        gradients: `(samples, 1, tokens, heads, head_dim)`.
    """
    moved = (gradients * change[None].float()).sum((-1, -2))  # (samples, 1, tokens)
    return float(0.5 * moved.double().square().sum() / len(gradients) / change.shape[1])


def _curvature(
    run: OnePass, token_ids: torch.Tensor, seed: int
) -> tuple[dict[int, AttentionCall], dict[int, torch.Tensor]]:
    """Returns each layer's attention call, and the gradients of sampled log-probabilities with respect to its output.

    Signs drawn for each position keep the gradients of positions apart on average.
    """
    calls: dict[int, AttentionCall] = {}
    probes: dict[int, torch.Tensor] = {}

    def observe(layer: int, call: AttentionCall, output: torch.Tensor) -> torch.Tensor:
        states = (call.query, call.key, call.value)
        calls[layer] = AttentionCall(call.module, *(state.detach() for state in states), call.mask, call.options)
        probes[layer] = torch.zeros_like(output, requires_grad=True)
        return output + probes[layer]

    generator = torch.Generator().manual_seed(seed)
    run.observe = observe
    try:
        with torch.enable_grad():
            log_probs = run.reference(token_ids, torch.arange(len(token_ids))).log_probs
            gradients = []
            for sample in range(SAMPLES):
                drawn = torch.multinomial(log_probs.detach().exp().cpu(), 1, generator=generator)
                signs = torch.randint(2, (len(token_ids),), generator=generator) * 2 - 1
                total = (log_probs.gather(1, drawn.to(log_probs.device))[:, 0] * signs.to(log_probs.device)).sum()
                keep = sample + 1 < SAMPLES
                gradients.append(torch.autograd.grad(total, list(probes.values()), retain_graph=keep))
    finally:
        run.observe = None
    stacked = (torch.stack([part.detach().float() for part in parts]) for parts in zip(*gradients, strict=True))
    return calls, dict(zip(probes, stacked, strict=True))
