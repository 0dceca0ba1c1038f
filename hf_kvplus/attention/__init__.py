"""Attention that reads packed keys and values: a reference, kernels for CPUs and GPUs, and how a model is switched."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_kvplus.attention.integration import FusedAttention

__all__ = ["use_fused_attention"]


def use_fused_attention(
    model: PreTrainedModel, enabled: bool = True, *, kernel: str = "auto"
) -> FusedAttention | None:
    """Lets a model read packed keys and values directly, without decoding them; or undoes it.

    Works with the caches of this package; other caches, and every prompt, are served by PyTorch's attention.

    Args:
        model: A transformers model.
        enabled: Whether to switch on or back.
        kernel: `"auto"`, the fastest for the device, or `"reference"`, plain PyTorch for every codec and device.

    Returns:
        A context manager that switches back at its end, or `None` if `enabled` is false.

    Raises:
        TypeError: If `model` isn't a transformers model.
        ValueError: If its attention can't be chosen, or `kernel` is unknown.
        ImportError: If Numba (for a model on a CPU) or Triton (on a GPU) is missing.

    Example:
        >>> with use_fused_attention(model):
        ...     model.generate(**inputs, past_key_values=QuantizedCache(model.config, nbits=4))
    """
    # Loads the code of models, which nothing else here needs.
    from hf_kvplus.attention.integration import switch

    return switch(model, enabled, kernel)
