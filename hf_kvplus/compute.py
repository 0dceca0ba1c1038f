"""What a token costs to compute and to read, with a cache and without, and the time that a device can't go below.

A product with a matrix of n weights takes 2 n operations (a multiplication and an addition). Attention of one query
over t tokens takes 2 t operations per head and channel for the scores and as many for the output. A decoded token
reads all weights once and the cache once; the larger of the time to read and the time to compute is the floor (the
"roofline").

Source: Roofline: An Insightful Visual Performance Model, https://doi.org/10.1145/1498765.1498785.

Left out: communication between devices, sampling, and what kernels waste.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PretrainedConfig

from hf_kvplus.caches import text_config
from hf_kvplus.checks import require_at_least
from hf_kvplus.compat import layer_configs, layer_types_and_options
from hf_kvplus.devices import Device
from hf_kvplus.estimate import MemoryEstimate
from hf_kvplus.probe import profile_model


@dataclass(frozen=True)
class GenerationCost:
    """Operations for generating `tokens` tokens one by one.

    Args:
        tokens: Tokens, the first one generated from an empty context.
        cached_flops: With a cache: each token goes through the model once.
        uncached_flops: Without: each step computes all tokens before it again.
    """

    tokens: int
    cached_flops: int
    uncached_flops: int

    @property
    def speedup(self) -> float:
        """How many times fewer operations the cache leaves."""
        return self.uncached_flops / self.cached_flops


@dataclass(frozen=True)
class DecodeCost:
    """Cost of decoding one token for every row of a batch.

    Args:
        flops: Operations.
        weight_bytes: Bytes of weights read, once for all rows.
        cache_bytes: Bytes of cache read.
        device: The device.
    """

    flops: int
    weight_bytes: int
    cache_bytes: int
    device: Device

    @property
    def bytes_read(self) -> int:
        """Bytes of weights and cache."""
        return self.weight_bytes + self.cache_bytes

    @property
    def intensity(self) -> float:
        """Operations per byte read."""
        return self.flops / self.bytes_read

    @property
    def memory_bound(self) -> bool:
        """Whether reading takes longer than computing."""
        return self.bytes_read / self.device.bytes_per_s >= self.flops / self.device.flops_per_s

    @property
    def floor_ms(self) -> float:
        """Milliseconds that a step takes at least."""
        return 1000 * max(self.bytes_read / self.device.bytes_per_s, self.flops / self.device.flops_per_s)


def square_projection_operations(config: PretrainedConfig, tokens: int, *, cached: bool) -> int:
    """Counts projections as is often done: one hidden x hidden matrix a layer, a multiply-add as one operation.

    GPT-2 small, 100 tokens: 7.1e8 with a cache and 3.6e10 without, 50 times as many. `generation_cost` counts all
    matrices and both operations.

    Args:
        config: The model's configuration.
        tokens: Tokens generated.
        cached: Whether each token is projected once, or at every step again.

    Returns:
        The number of operations.
    """
    decoder = text_config(config)
    return decoder.num_hidden_layers * decoder.hidden_size**2 * _projected_tokens(tokens, cached=cached)


def _projected_tokens(tokens: int, *, cached: bool) -> int:
    """Returns how many tokens pass through the model while `tokens` are generated."""
    require_at_least("tokens", tokens, 1)
    return tokens if cached else tokens * (tokens + 1) // 2


def attention_flops(config: PretrainedConfig, context_tokens: int) -> int:
    """Returns the operations of one query's attention over its context, in all layers.

    Args:
        config: The model's configuration.
        context_tokens: Tokens before the query and itself; a layer with a window sees no more than that.

    Returns:
        Scores and outputs; of latent attention as if it read the latents as they are.
    """
    require_at_least("context_tokens", context_tokens, 1)
    _, options = layer_types_and_options(text_config(config))
    return _attention_flops(
        config, [min(context_tokens, one.get("sliding_window") or context_tokens) for one in options]
    )


def _attention_flops(config: PretrainedConfig, visible_tokens: Sequence[int]) -> int:
    """Returns the operations of one query's attention, told how many tokens it sees in each layer.

    After the decoder's layers those may follow in which it reads an encoder's states.
    """
    profile = profile_model(config)
    layers = (profile.layers + profile.cross_layers)[: len(visible_tokens)]
    configs = layer_configs(text_config(config))
    total = 0
    for index, (states, tokens) in enumerate(zip(layers, visible_tokens, strict=True)):
        if states.keys is not None and states.values is not None:
            layer_config = configs[index % len(configs)]
            heads = getattr(layer_config, "num_attention_heads", None) or states.keys.shape[0]
            total += 2 * heads * (states.keys.shape[1] + states.values.shape[1]) * tokens
    return total


def generation_cost(config: PretrainedConfig, tokens: int) -> GenerationCost:
    """Counts all operations of generating `tokens` tokens, with a cache and without.

    Args:
        config: The model's configuration.
        tokens: Tokens generated.

    Returns:
        Both counts.
    """
    weights = 2 * profile_model(config).active_parameters
    cached = uncached = prefix = 0
    for context in range(1, tokens + 1):
        step = weights + attention_flops(config, context)
        cached += step
        prefix += step
        uncached += prefix
    return GenerationCost(tokens, cached, uncached)


def decode_cost(config: PretrainedConfig, estimate: MemoryEstimate, device: Device) -> DecodeCost:
    """Tells what one decoded token costs with a cache of a given size.

    Args:
        config: The model's configuration.
        estimate: The cache.
        device: The device.

    Returns:
        The cost of one step for all rows of the batch, of one of the devices that share each layer's heads.
    """
    active = profile_model(config).active_parameters
    per_row = 2 * active + _attention_flops(config, [layer.visible_tokens for layer in estimate.layers])
    flops = estimate.batch_size * per_row // estimate.tensor_parallel
    weight_bytes = active * estimate.dtype.itemsize // estimate.tensor_parallel
    return DecodeCost(flops, weight_bytes, estimate.cache_bytes, device)
