"""What a codec is: it turns blocks of key or value states into packed tensors and back.

A codec is a frozen dataclass without state. It sees whole blocks of `block_tokens` tokens, so a block is encoded once
and its codes never change. Everything it returns is indexed (batch, kv_head, block, ...): reordering beams and
selecting rows are index operations on that payload, exact by construction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_kvplus.registry import Registry

# Along which axis of a block the numbers that share a scale lie, and lines of codes.
PER_CHANNEL, PER_TOKEN = "per_channel", "per_token"

# name -> tensor of shape (batch, kv_heads, blocks, ...)
Packed = dict[str, torch.Tensor]

codecs: Registry[type[Codec]] = Registry("codec")


@dataclass(frozen=True)
class Codec(ABC):
    """Encodes and decodes blocks of states.

    Args:
        block_tokens: Tokens in a block.
    """

    block_tokens: int = 64

    # Whether decoding returns exactly what was encoded.
    lossless: ClassVar[bool] = False

    @abstractmethod
    def encode(self, states: torch.Tensor, valid: torch.Tensor | None = None) -> Packed:
        """Packs whole blocks.

        Args:
            states: `(batch, kv_heads, blocks, block_tokens, head_dim)`, floating point.
            valid: `(batch, blocks, block_tokens)` bool. Tokens that are `False` (padding, and sinks, which are stored
                elsewhere) must not influence how the others are stored; what they decode to is unspecified but finite.

        Returns:
            The payload, each tensor `(batch, kv_heads, blocks, ...)`.
        """

    @abstractmethod
    def decode(self, packed: Packed, head_dim: int, out: torch.Tensor) -> None:
        """Unpacks blocks into `out`.

        Args:
            packed: What `encode` returned, or any selection along its first three axes.
            head_dim: Channels per head.
            out: `(batch, kv_heads, blocks, block_tokens, head_dim)`, written in place, in any floating-point dtype.
        """

    @abstractmethod
    def bits_per_element(self, head_dim: int) -> float:
        """Returns the stored bits per element of a full block: codes, scales and zero points."""

    def check(self, head_dim: int) -> None:
        """Raises ValueError if this codec can't take `head_dim` channels; any number fits by default."""
        return

    @abstractmethod
    def describe(self) -> str:
        """Returns the codec in a few words, for `cache.plan`."""
