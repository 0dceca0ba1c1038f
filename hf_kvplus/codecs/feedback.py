"""Quantization that makes up for its own errors: channels one after the other, each corrected for those before.

With a metric M = W^T diag W (W unit upper triangular), the cost of an error e is the sum over channels of
diag[j] * (e[j] + sum_{i > j} W[j, i] e[i])^2. So going from the last channel to the first, a channel is rounded after
the errors already made were added with their weights: the bracket is then one rounding error, however large the
errors before it. Plain rounding costs the mean of M's eigenvalues, this about their geometric mean.

Source: GPTQ, https://arxiv.org/abs/2210.17323, and QuIP, https://arxiv.org/abs/2307.13304 (the same rule for weights);
differs in that keys are quantized, the metric is that of queries, and steps are fitted to the corrected states.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def round_with_feedback(
    states: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    factor: torch.Tensor,
    nearest: Callable[[torch.Tensor], torch.Tensor],
    levels: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes channel by channel.

    Args:
        states: `(batch, kv_heads, blocks, tokens, channels)` float32.
        mean: Offset of each channel, `(batch, kv_heads, blocks, 1, channels)`.
        scale: Step of each channel, likewise.
        factor: `(kv_heads, channels, channels)` float32, unit upper triangular.
        nearest: Codes of the levels nearest to its argument, uint8, any shape.
        levels: What codes stand for.

    Returns:
        The codes, uint8, and the corrected states that were rounded to them, both like `states`.

    Raises:
        ValueError: If the metric has other heads or channels than the states.
    """
    batch, heads, blocks, tokens, channels = states.shape
    require_fit(factor, heads, channels)
    # Channels in front: a step reads one row and writes one row.
    order = (1, 4, 0, 2, 3)
    wanted = states.permute(order).reshape(heads, channels, -1, tokens)
    offset = mean.permute(order).reshape(heads, channels, -1, 1)
    step = scale.permute(order).reshape(heads, channels, -1, 1)
    inverse = torch.where(step > 0, 1 / step, 0.0)
    error = torch.zeros_like(wanted).flatten(2)  # (h, channels, b * n * tokens)
    codes = torch.empty(wanted.shape, dtype=torch.uint8, device=states.device)
    corrected = wanted.clone()
    for channel in reversed(range(channels)):
        target = corrected[:, channel]
        if channel + 1 < channels:
            target += (factor[:, channel : channel + 1, channel + 1 :] @ error[:, channel + 1 :]).view_as(target)
        codes[:, channel] = nearest((target - offset[:, channel]) * inverse[:, channel])
        stored = levels[codes[:, channel].int()] * step[:, channel] + offset[:, channel]
        error[:, channel] = (wanted[:, channel] - stored).flatten(1)
    back = (2, 0, 3, 4, 1)
    shape = (heads, channels, batch, blocks, tokens)
    return codes.view(shape).permute(back), corrected.view(shape).permute(back)


def require_fit(factor: torch.Tensor, heads: int, channels: int) -> None:
    """Checks that a metric is one of as many heads and channels.

    Raises:
        ValueError: If it isn't.
    """
    if factor.shape != (heads, channels, channels):
        raise ValueError(
            f"`calibration` is for (kv_heads, head_dim) {tuple(factor.shape[:2])}, these keys have "
            f"{(heads, channels)}; make one for this model with `kvplus plan --calibrate`"
        )
