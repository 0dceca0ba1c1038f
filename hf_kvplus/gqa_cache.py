"""The preset that stores fewer key-value heads than the model has."""

from __future__ import annotations

from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel

from hf_kvplus.caches import KVPlusCache
from hf_kvplus.gqa.projection import GQA, GQAProjection


class GQACache(KVPlusCache):
    """Latent keys and values of fewer heads; the model stays as it is, every head is rebuilt when read.

    Tokens are projected where a quantized cache would quantize them: sinks and recent tokens stay as they are, and a
    prompt attends to its own states. How many latent channels a layer gets is the projection's decision.

    Source: GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints,
    https://arxiv.org/abs/2305.13245, for fewer heads (its mean pooling is `method="mean"`); and Palu: Compressing
    KV-Cache with Low-Rank Projection, https://arxiv.org/abs/2407.21118, for latents and ranks by Fisher information;
    differs in that keys are projected after RoPE across heads, with metrics from gradients at the stored states.

    Args:
        config: The model's configuration.
        num_key_value_heads: Heads' worth of channels that a layer stores on average.
        projection: A `GQAProjection`, or the path of one by `kvplus calibrate-gqa`.
        residual_length: Most recent tokens that aren't projected.
        num_sink_tokens: First tokens of each row that aren't.
        model: The model that will fill it, if it is at hand: a projection for other weights is then refused, and not
            only one for another configuration.

    Raises:
        TypeError: If `config` isn't a transformers configuration.
        ValueError: If the projection is for another model or another number of heads.
        FileNotFoundError: If its file is missing.

    Example:
        >>> cache = GQACache(model.config, 2, "smollm2-gqa-2.safetensors")
        >>> model.generate(**inputs, past_key_values=cache, max_new_tokens=100)
    """

    def __init__(
        self,
        config: PretrainedConfig,
        num_key_value_heads: int,
        projection: GQAProjection | str | Path | None = None,
        residual_length: int = 64,
        num_sink_tokens: int = 4,
        model: PreTrainedModel | None = None,
    ) -> None:
        super().__init__(config, gqa=GQA(num_key_value_heads, projection, residual_length, num_sink_tokens))
        if model is not None and self.projection is not None:
            self.projection.check_model(model)
