"""The cache with one part chosen each: quantized, or a window."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from hf_kvplus.caches import KVPlusCache
from hf_kvplus.checks import require_choice
from hf_kvplus.layer_plan import LayerPlan, load_plan
from hf_kvplus.policies import SinkWindowPolicy
from hf_kvplus.recipes import SUPPORTED_NBITS, Quantization


class QuantizedCache(KVPlusCache):
    """Keys and values in 2 to 8 bits; sinks and the most recent tokens at full precision.

    Source: KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache, https://arxiv.org/abs/2402.02750, for the
    axes; differs in that blocks are append-only, the prompt's tail and the sinks stay at full precision and any head
    size, prompt length and batch fits.

    Args:
        config: The model's configuration.
        nbits: Bits per code for keys and values: 2, 3, 4, 5, 6 or 8.
        key_nbits: Bits of keys, if they differ; 16 leaves them unquantized.
        value_nbits: Bits of values, if they differ.
        group_size: Elements that share a scale; `None` takes what the recipe measured best with, see `Quantization`.
        residual_length: Most recent tokens that always stay at full precision; `None` takes 64, and 128 at 2 bits.
        num_sink_tokens: First tokens of each row that always stay at full precision; `None` takes 4, and 8 at 2 bits.
        recipe: How states are encoded; `"auto"` takes the best one measured for the width.
        layer_plan: A plan by `kvplus plan` (its file, dictionary or `LayerPlan`), which takes the place of all other
            options.
        rotary_means: Pairs of channels whose mean is taken out of keys along RoPE; `None` takes a few where the
            model's keys have a bias, see `Quantization`.

    Raises:
        TypeError: If `config` isn't a transformers configuration.
        ValueError: If an option is out of range or doesn't fit the model, or the plan was made for another one.

    Example:
        >>> cache = QuantizedCache(model.config, nbits=4)
        >>> model.generate(**inputs, past_key_values=cache, max_new_tokens=100)
    """

    def __init__(
        self,
        config: PretrainedConfig,
        nbits: int = 4,
        key_nbits: int | None = None,
        value_nbits: int | None = None,
        group_size: int | None = None,
        residual_length: int | None = None,
        num_sink_tokens: int | None = None,
        recipe: str = "auto",
        layer_plan: LayerPlan | Mapping[str, Any] | str | Path | None = None,
        rotary_means: int | None = None,
    ) -> None:
        if layer_plan is not None:
            super().__init__(config, quantization=load_plan(layer_plan))
            return
        require_choice("nbits", nbits, SUPPORTED_NBITS)
        quantization = Quantization(
            key_nbits=nbits if key_nbits is None else key_nbits,
            value_nbits=nbits if value_nbits is None else value_nbits,
            group_size=group_size,
            residual_length=residual_length,
            num_sink_tokens=num_sink_tokens,
            recipe=recipe,
            rotary_means=rotary_means,
        )
        super().__init__(config, quantization=quantization)


class SlidingWindowCache(KVPlusCache):
    """Sinks and a window: constant memory, however long the text; each query sees both and nothing else.

    Source: Efficient Streaming Language Models with Attention Sinks, https://arxiv.org/abs/2309.17453; differs in that
    sinks are moved along RoPE instead of the window, that rows have their own sinks, and that a prompt may come in any
    chunks. Layers that have a window of their own (Gemma, Mistral, gpt-oss) keep it.

    Args:
        config: The model's configuration.
        sliding_window: Latest tokens that a query sees, itself included.
        num_sink_tokens: First real tokens of each row that stay visible.
        positions: `"original"`, or `"shifted"` for text beyond the length that the model was trained for.
        nbits: Bits per code of the window's packed part: 2, 3, 4, 5, 6, 8, or 16 for none.
        prefill: `"windowed"` or `"dense"`; see `SinkWindowPolicy`.
        rollback_tokens: Tokens that can be cropped at any time without `activate_past_recording`.

    Raises:
        TypeError: If `config` isn't a transformers configuration.
        ValueError: If an option is out of range, or doesn't fit the model.

    Example:
        >>> cache = SlidingWindowCache(model.config, sliding_window=1020, positions="shifted")
        >>> model.generate(**inputs, past_key_values=cache, max_new_tokens=20_000)
    """

    def __init__(
        self,
        config: PretrainedConfig,
        sliding_window: int,
        num_sink_tokens: int = 4,
        positions: str = "original",
        nbits: int = 16,
        prefill: str = "windowed",
        rollback_tokens: int = 0,
    ) -> None:
        require_choice("nbits", nbits, SUPPORTED_NBITS)
        window = SinkWindowPolicy(sliding_window, num_sink_tokens, positions, prefill, rollback_tokens)
        quantization = Quantization(nbits, nbits, num_sink_tokens=num_sink_tokens)
        super().__init__(config, quantization=quantization, window=window)
