"""The codec that stores fewer heads: states are projected to latents, and those are encoded by another codec.

Sitting where blocks are packed, it leaves everything else of a layer alone: sinks and recent tokens stay as the model
gave them, a prompt attends to its own unprojected states, and windows, beams, crops and files work as for any codec.
It isn't in the registry: it is made of a codec and a projection, not of options.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_kvplus.codecs.base import Codec, Packed
from hf_kvplus.projections import HeadProjection


@dataclass(frozen=True, init=False, kw_only=True)
class LatentCodec(Codec):
    """Projects the heads of a block to one wide latent head, which `inner` encodes.

    Args:
        block_tokens: Tokens in a block.
        inner: The codec of the latents.
        projection: From heads to latents and back.

    Raises:
        ValueError: If `inner` can't take so many latents, or is calibrated for the heads.
    """

    inner: Codec
    projection: HeadProjection

    def __init__(self, inner: Codec, projection: HeadProjection) -> None:
        object.__setattr__(self, "block_tokens", inner.block_tokens)
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "projection", projection)
        if getattr(inner, "metric", None) is not None:
            raise ValueError(
                "`calibration` is for the model's own heads, and `gqa` stores latents in place of them; leave one of "
                "the two out (`kvplus plan` without --calibrate makes a plan without)"
            )
        inner.check(projection.latents)

    def encode(self, states: torch.Tensor, valid: torch.Tensor | None = None) -> Packed:
        """Projects and encodes, `(batch, 1, blocks, ...)`; see `Codec.encode`."""
        if valid is not None:
            states = states.masked_fill(~valid[:, None, :, :, None], 0.0)
        return self.inner.encode(self.projection.encode(states).to(states.dtype), valid)

    def decode(self, packed: Packed, head_dim: int, out: torch.Tensor) -> None:
        """Decodes latents and rebuilds every head; see `Codec.decode`."""
        out.copy_(self.projection.decode(self.latents(packed)))

    def latents(self, packed: Packed) -> torch.Tensor:
        """Returns decoded latents, `(batch, 1, blocks, block_tokens, latents)`; a view where they are stored whole."""
        if self.inner.lossless:
            return packed["states"]
        some = next(iter(packed.values()))
        shape = (*some.shape[:3], self.block_tokens, self.projection.latents)
        latents = torch.empty(shape, dtype=torch.float32, device=some.device)
        self.inner.decode(packed, self.projection.latents, latents)
        return latents

    def bits_per_element(self, head_dim: int) -> float:
        """Returns the stored bits per element that the model gave."""
        share = self.projection.latents / (self.projection.heads * self.projection.channels)
        return share * self.inner.bits_per_element(self.projection.latents)

    def check(self, head_dim: int) -> None:
        """Raises ValueError if the projection is for other heads."""
        if head_dim != self.projection.channels:
            raise ValueError(
                f"the projection is for head_dim={self.projection.channels}, got {head_dim}; calibrate one for this "
                "model with `kvplus calibrate-gqa`"
            )

    def describe(self) -> str:
        """Returns the codec in a few words."""
        whole = self.projection.heads * self.projection.channels
        return f"{self.projection.latents} latents for {whole} channels, {self.inner.describe()}"
