"""Codes of 1 to 8 bits, packed into whole bytes with nothing wasted.

A width that isn't a power of two is split into planes that are: 3 bits are a plane of 2 and a plane of 1, 5 are 4 + 1
and 6 are 4 + 2. Inside a plane the layout is planar: byte `j` of a 4-bit plane holds code `j` in its low nibble and
code `j + n/2` in its high nibble, so that unpacking is a mask and a shift over whole vectors, without interleaving.

    4 bits, 8 codes    bytes:  [c4 c0] [c5 c1] [c6 c2] [c7 c3]     (high nibble, low nibble)
    3 bits, 8 codes    bytes:  2 of the upper two bits, then 1 of the lowest bits
"""

from __future__ import annotations

import torch

from hf_kvplus.checks import require_choice

# nbits -> widths of the planes, upper bits first
PLANES: dict[int, tuple[int, ...]] = {
    1: (1,),
    2: (2,),
    3: (2, 1),
    4: (4,),
    5: (4, 1),
    6: (4, 2),
    8: (8,),
}


def padded_length(length: int, nbits: int) -> int:
    """Returns `length` rounded up so that every plane of `nbits` fills whole bytes."""
    require_choice("nbits", nbits, PLANES)
    multiple = 8 // min(PLANES[nbits])
    return -(-length // multiple) * multiple


def packed_length(length: int, nbits: int) -> int:
    """Returns the bytes that `length` codes of `nbits` take."""
    return padded_length(length, nbits) * nbits // 8


def pack(codes: torch.Tensor, nbits: int) -> torch.Tensor:
    """Packs integer codes along the last axis.

    Args:
        codes: `(..., n)` uint8, each below `2**nbits`.
        nbits: Bits per code: 1, 2, 3, 4, 5, 6 or 8.

    Returns:
        `(..., packed_length(n, nbits))` uint8.

    Raises:
        ValueError: If `nbits` isn't supported.
    """
    length = codes.shape[-1]
    padding = padded_length(length, nbits) - length
    if padding:
        codes = torch.nn.functional.pad(codes, (0, padding))
    if PLANES[nbits] == (nbits,):
        return _pack_plane(codes, nbits)
    planes, shift = [], nbits
    for width in PLANES[nbits]:
        shift -= width
        planes.append(_pack_plane((codes >> shift) & ((1 << width) - 1), width))
    return torch.cat(planes, dim=-1)


def unpack(packed: torch.Tensor, nbits: int, length: int) -> torch.Tensor:
    """Inverts `pack`.

    Args:
        packed: `(..., packed_length(length, nbits))` uint8.
        nbits: Bits per code, as given to `pack`.
        length: Number of codes to return.

    Returns:
        `(..., length)` uint8.
    """
    total = padded_length(length, nbits)
    first, *rest = PLANES[nbits]
    offset = total * first // 8
    codes = _unpack_plane(packed[..., :offset], first)
    for width in rest:
        size = total * width // 8
        codes = (codes << width) | _unpack_plane(packed[..., offset : offset + size], width)
        offset += size
    return codes[..., :length]


def _pack_plane(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Packs `(..., n)` codes of a power-of-two width into `(..., n * width / 8)` bytes."""
    if width == 8:
        return codes
    parts = codes.chunk(8 // width, dim=-1)
    packed = parts[0].clone()
    for index, part in enumerate(parts[1:], start=1):
        packed |= part << (index * width)
    return packed


def _unpack_plane(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Inverts `_pack_plane`."""
    if width == 8:
        return packed
    count, size = 8 // width, packed.shape[-1]
    codes = torch.empty((*packed.shape[:-1], count * size), dtype=torch.uint8, device=packed.device)
    for index in range(count):
        target = codes[..., index * size : (index + 1) * size]
        torch.bitwise_right_shift(packed, index * width, out=target)
        if index < count - 1:
            target &= (1 << width) - 1
    return codes
