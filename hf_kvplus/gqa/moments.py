"""What calibration must know of a model: moments of its stored states, and of the loss's gradients at them.

Text goes in in two pieces, a context and the tokens that read it, as a cache is used. For every layer

    states     second moments of the keys and values of the context, over all heads at once
    gradients  second moments of the gradients of the later tokens' divergence at them (Fisher information)

The second say which errors matter: to second order, an error `e` in one stored state raises the KL divergence of the
predictions by `(g . e)**2 / 2` on average. They come from the model's own predictions, so no labels are needed: the
gradient of the logits along a random direction with the covariance of a softmax.

Rotary keys are met at many positions: each window of text starts at another one, since RoPE knows differences only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_kvplus.caches import text_config
from hf_kvplus.compat import cache_keyword

PARTS = ("keys", "values")


@dataclass
class Moments:
    """Sums over tokens for the keys or the values of one layer; float64, on the CPU.

    Args:
        heads: Heads.
        channels: Channels of a head.
        states: `(heads * channels, heads * channels)`, sum of products of the states.
        total: `(heads * channels,)`, sum of the states.
        gradients: Like `states`, of the gradients.
        tokens: Tokens summed over.
    """

    heads: int
    channels: int
    states: torch.Tensor
    total: torch.Tensor
    gradients: torch.Tensor
    tokens: int = 0

    @classmethod
    def empty(cls, heads: int, channels: int) -> Moments:
        """Returns sums over nothing."""
        width = heads * channels
        square = torch.zeros(width, width, dtype=torch.float64)
        return cls(heads, channels, square, torch.zeros(width, dtype=torch.float64), square.clone())

    def add(self, states: torch.Tensor, gradients: torch.Tensor) -> None:
        """Adds tokens, both `(batch, heads, tokens, channels)`."""
        rows, slopes = (tensor.detach().movedim(1, 2).flatten(2).flatten(0, 1) for tensor in (states, gradients))
        rows, slopes = rows.double(), slopes.double()
        self.states += (rows.T @ rows).cpu()
        self.total += rows.sum(0).cpu()
        self.gradients += (slopes.T @ slopes).cpu()
        self.tokens += len(rows)

    def covariance(self, centered: bool) -> torch.Tensor:
        """Returns the mean product of states, less that of the mean state if `centered`."""
        mean = self.total / self.tokens
        second = self.states / self.tokens
        return second - mean[:, None] * mean[None] if centered else second

    def metric(self) -> torch.Tensor:
        """Returns the mean product of gradients."""
        return self.gradients / self.tokens


LayerMoments = dict[str, Moments]


def collect_moments(
    model: PreTrainedModel,
    windows: Sequence[torch.Tensor],
    *,
    context_tokens: int,
    num_sink_tokens: int = 4,
    seed: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> list[LayerMoments]:
    """Runs text through a model and sums up what its layers store.

    Args:
        model: The model; its parameters get no gradients.
        windows: Token ids, each `(tokens,)`, longer than `context_tokens`.
        context_tokens: Tokens of each window that are stored and read; the others read them.
        num_sink_tokens: First tokens that are left out, since a cache keeps them as they are.
        seed: Of the random directions.
        advance: Called after each window, for a progress bar.

    Returns:
        For each layer the moments of "keys" and "values"; empty for a layer without.

    Raises:
        TypeError: If `model` isn't a transformers model.
        ValueError: If a window is too short, or the model has an encoder.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"`model` must be a transformers PreTrainedModel, got {type(model).__name__}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"`model` must be a decoder, {type(model).__name__} has an encoder; use a quantized cache (`int4`), which "
            "takes both halves"
        )
    short = [len(window) for window in windows if len(window) <= context_tokens]
    if short or not windows or context_tokens <= num_sink_tokens:
        raise ValueError(
            f"`windows` must be longer than context_tokens={context_tokens}, which must be more than "
            f"{num_sink_tokens} sinks, got {len(windows)} windows{f', one of {min(short)} tokens' if short else ''}"
        )
    generator = torch.Generator().manual_seed(seed)
    layers: list[LayerMoments] = []
    training, wanted = model.training, [weight.requires_grad for weight in model.parameters()]
    model.eval().requires_grad_(False)
    try:
        for number, window in enumerate(windows):
            offset = _offset(model, len(window), number, len(windows))
            stored = _read_with_gradients(model, window, context_tokens, offset, generator)
            layers = layers or [{} for _ in stored]
            for sums, states in zip(layers, stored, strict=True):
                for name, tensor in states.items():
                    if tensor.grad is None:
                        continue
                    moments = sums.setdefault(name, Moments.empty(tensor.shape[1], tensor.shape[3]))
                    first = min(num_sink_tokens, tensor.shape[2])
                    moments.add(tensor[:, :, first:], tensor.grad[:, :, first:])
            advance()
    finally:
        for weight, value in zip(model.parameters(), wanted, strict=True):
            weight.requires_grad_(value)
        model.train(training)
    return layers


def _offset(model: PreTrainedModel, tokens: int, number: int, count: int) -> int:
    """Returns the position at which a window begins: spread over those that the model knows if they're rotary."""
    config = text_config(model.config)
    longest = getattr(config, "max_position_embeddings", None) or 0
    if not getattr(config, "rope_parameters", None) or longest <= tokens:
        return 0
    return round((longest - tokens) * number / max(1, count - 1)) if count > 1 else 0


def _read_with_gradients(
    model: PreTrainedModel, window: torch.Tensor, context_tokens: int, offset: int, generator: torch.Generator
) -> list[dict[str, torch.Tensor]]:
    """Stores a context, lets the rest of the window read it, and returns the stored states with their gradients."""
    config = text_config(model.config)
    cache, keyword = DynamicCache(config=config), cache_keyword(model)
    ids = window[None].to(model.device)
    positions: dict[str, Any] = {}
    if offset:
        positions = {"position_ids": torch.arange(offset, offset + len(window), device=model.device)[None]}

    def part(chosen: slice) -> dict[str, Any]:
        placed = {name: tensor[:, chosen] for name, tensor in positions.items()}
        return {"input_ids": ids[:, chosen], keyword: cache, "use_cache": True, **placed}

    with torch.no_grad():
        model(**part(slice(0, context_tokens)))
    stored = []
    for layer in cache.layers:
        states = {}
        for name in PARTS:
            tensor = getattr(layer, name, None)
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 4 and tensor.is_floating_point():
                states[name] = tensor.detach().clone().requires_grad_()
                setattr(layer, name, states[name])
        stored.append(states)
    with torch.enable_grad():
        logits = model(**part(slice(context_tokens, len(window)))).logits[0].float()
        (logits * _softmax_direction(logits.detach(), generator)).sum().backward()
    return stored


def _softmax_direction(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns random directions `(tokens, vocabulary)` whose covariance is the Hessian of the KL divergence.

    That Hessian is `diag(p) - p p^T`, which is `L L^T` with `L = diag(sqrt p) - p sqrt(p)^T`.
    """
    probabilities = logits.softmax(-1)
    root = probabilities.sqrt()
    noise = torch.randn(logits.shape, generator=generator).to(logits.device)
    return root * noise - probabilities * (root * noise).sum(-1, keepdim=True)
