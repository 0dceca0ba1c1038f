"""Blocks of states behind a codec: encoded when appended, decoded when read, a slab at a time.

Slabs bound the temporaries of encoding and decoding, whatever the length of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from hf_kvplus.codecs.base import Codec, Packed
from hf_kvplus.stores.growing import GrowingStore

# Takes blocks and which of their tokens count, see `Codec.encode`.
Encode = Callable[..., Packed]


@runtime_checkable
class EncodeInPlace(Protocol):
    """An `Encode` that can also write a payload to where it belongs."""

    def fields(self, states: torch.Tensor) -> Packed:
        """Returns tensors as of a payload of such states, of no blocks."""
        ...

    def into(self, states: torch.Tensor, valid: torch.Tensor | None, buffers: Packed, place: int) -> None:
        """Writes the payload into contiguous buffers `(batch, kv_heads, capacity, ...)`, from block `place` on."""
        ...


SLAB_ELEMENTS = 1 << 19


class PackedStore(GrowingStore):
    """Holds the packed blocks of keys or of values.

    Args:
        codec: How blocks become bytes.
        bound: Blocks that suffice for a window, or 0; see `GrowingStore`.
    """

    # Whether blocks lie in buffers that grow, so that they can be encoded to where they belong.
    in_buffers = True

    def __init__(self, codec: Codec, bound: int = 0) -> None:
        super().__init__(growth=64, bound=bound)
        self.codec = codec

    def append_states(
        self, states: torch.Tensor, valid: torch.Tensor | None = None, encode: Encode | None = None
    ) -> None:
        """Encodes whole blocks and appends them.

        Args:
            states: `(batch, kv_heads, blocks * block_tokens, head_dim)`.
            valid: `(batch, masked * block_tokens)` bool for the first `masked` blocks; see `Codec.encode`.
            encode: What encodes in the place of the codec.
        """
        encode = encode or self.codec.encode
        blocks = states.unflatten(2, (-1, self.codec.block_tokens))
        total, start = blocks.shape[2], 0
        if valid is not None:
            mask = valid.unflatten(1, (-1, self.codec.block_tokens))
            start = mask.shape[1]
            self._encode(encode, blocks[:, :, :start], mask, total - start)
        slab = self._slab_blocks(states.shape)
        for first in range(start, total, slab):
            stop = min(first + slab, total)
            self._encode(encode, blocks[:, :, first:stop], None, total - stop)

    def _encode(self, encode: Encode, blocks: torch.Tensor, valid: torch.Tensor | None, upcoming: int) -> None:
        """Encodes and appends some blocks, without a copy where that can be."""
        if not self.in_buffers or not isinstance(encode, EncodeInPlace):
            self.append(encode(blocks) if valid is None else encode(blocks, valid), upcoming=upcoming)
            return
        count = blocks.shape[2]
        buffers, place = self.make_room(encode.fields(blocks), count, upcoming)
        encode.into(blocks, valid, buffers, place)
        self.grow(count)

    def decode(self, out: torch.Tensor, first_block: int = 0, last_block: int | None = None) -> None:
        """Decodes blocks into the front of `out`, `(batch, kv_heads, tokens, head_dim)`."""
        last_block = len(self) if last_block is None else last_block
        tokens = self.codec.block_tokens
        slab = self._slab_blocks(out.shape)
        for start in range(first_block, last_block, slab):
            stop = min(start + slab, last_block)
            target = out[:, :, (start - first_block) * tokens : (stop - first_block) * tokens]
            self.codec.decode(self.fields(start, stop), out.shape[3], target.unflatten(2, (-1, tokens)))

    def _slab_blocks(self, shape: torch.Size) -> int:
        """Returns how many blocks of these states are processed at a time."""
        return max(1, SLAB_ELEMENTS // max(1, shape[0] * shape[1] * self.codec.block_tokens * shape[3]))
