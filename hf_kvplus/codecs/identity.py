"""The codec that stores states as they come: the full-precision half of pairs such as `k16v4`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_kvplus.codecs.base import Codec, Packed, codecs


@codecs.register("identity")
@dataclass(frozen=True)
class IdentityCodec(Codec):
    """Keeps states in the dtype of the model.

    Args:
        block_tokens: Tokens in a block.
        state_bits: Bits of the model's dtype; only used to report sizes.
    """

    state_bits: int = 16
    lossless: ClassVar[bool] = True

    def encode(self, states: torch.Tensor, valid: torch.Tensor | None = None) -> Packed:
        """Copies the states; see `Codec.encode`."""
        return {"states": states.contiguous()}

    def decode(self, packed: Packed, head_dim: int, out: torch.Tensor) -> None:
        """Copies the states back; see `Codec.decode`."""
        out.copy_(packed["states"])

    def bits_per_element(self, head_dim: int) -> float:
        """Returns the bits of the model's dtype."""
        return float(self.state_bits)

    def describe(self) -> str:
        """Returns the codec in a few words."""
        return "unpacked"
