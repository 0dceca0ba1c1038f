"""The default codec without the offsets of channels, to tell what they are worth; only the ablation uses it.

The recipe stores a mean for each channel of a block and adds it back, which is how key biases are taken out. Here the
levels lie around zero: a channel far from it must spread its levels over a range that is mostly empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvplus.codecs.base import Packed
from hf_kvplus.codecs.dual_scale import CLIPS, UP, DualScaleCodec
from hf_kvplus.codecs.levels import nearest_codes


@dataclass(frozen=True)
class WithoutOffsets(DualScaleCodec):
    """Blocks whose channels have a step and no offset; payload, size and decoding are those of the codec.

    Args:
        metric: Must be `None`; codes that are chosen by a metric have offsets.

    Raises:
        ValueError: If there is a metric.
    """

    def __post_init__(self) -> None:
        """Checks the options once."""
        super().__post_init__()
        if self.metric is not None:
            raise ValueError("`metric` must be None where offsets are left out; calibration fits them")

    def encode(self, states: torch.Tensor, valid: torch.Tensor | None = None) -> Packed:
        """Encodes by PyTorch's operators, since compiled encoders have offsets; see `Codec.encode`."""
        return self.encode_by_operators(states, valid)

    def fit_channels(self, normal: torch.Tensor, weight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns offsets of zero and the step of each channel, both `(..., 1, channels)`."""
        counted = normal if weight is None else normal * weight
        levels = self.level_table(normal.device)
        cover = counted.abs().amax(-2, keepdim=True) / levels[-1]
        if not self.refinements:
            return torch.zeros_like(cover), cover * UP
        best_error, best = torch.full_like(cover, torch.inf), cover
        for clip in CLIPS[: self.clips]:
            scale = cover * clip
            for _ in range(self.refinements):
                inverse = torch.where(scale > 0, 1 / scale, 0.0)
                stored = levels[nearest_codes(normal * inverse, self.nbits, self.levels).int()]
                product = (counted * stored).sum(-2, keepdim=True)
                size = (stored.square() if weight is None else stored.square() * weight).sum(-2, keepdim=True)
                slope = product / size.clamp_min(torch.finfo(torch.float32).tiny)
                scale = torch.where((size > 0) & (slope > 0), slope, scale)
                # Less what doesn't depend on the step.
                error = scale.square() * size - 2 * scale * product
            best, best_error = torch.where(error < best_error, scale, best), torch.minimum(error, best_error)
        return torch.zeros_like(best), best
