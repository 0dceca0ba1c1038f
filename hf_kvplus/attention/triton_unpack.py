"""Unpacking of codes inside the Triton kernels.

Codes become float16 numbers by being written into the mantissa of a number whose exponent makes them whole. The parts
of a byte are unpacked side by side, each padded to a power of two; `part_index` tells which element of a line a place
stands for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hf_kvplus.codecs import log_scale

CHANNEL_STEPS = tl.constexpr(log_scale.CHANNEL_STEPS)
TOKEN_STEPS = tl.constexpr(log_scale.TOKEN_STEPS)


def _assembly(parts: list[tuple[str, str]], subtract: list[str], exponent: str) -> str:
    """Writes PTX that turns four bytes of codes into pairs of float16 numbers.

    Args:
        parts: For each code of a byte the instruction that moves it, `""` for none, and the mask of its bits.
        subtract: What is taken from every number, as float16 bits twice.
        exponent: The upper byte of every number, four times.
    """
    lines = [".reg .b32 moved, upper, number;", f"mov.b32 upper, {exponent};"]
    source = f"${2 * len(parts)}"
    for index, (move, bits) in enumerate(parts):
        lines.append(move.format(source) if move else f"mov.b32 moved, {source};")
        lines.append(f"and.b32 moved, moved, {bits};")
        for half, selector in enumerate(("0x4140", "0x4342")):
            target = f"${2 * index + half}"
            lines.append(f"prmt.b32 {target}, moved, upper, {selector};")
            for number in subtract:
                lines += [f"mov.b32 number, {number};", f"sub.f16x2 {target}, {target}, number;"]
    return "{ " + " ".join(lines) + " }"


# 71.5, 65.5, and 1024 and 127.5 as float16, as numbers of two
NIBBLES = tl.constexpr(
    _assembly([("shl.b32 moved, {0}, 4;", "0xf0f0f0f0"), ("", "0xf0f0f0f0")], ["0x54785478"], "0x54545454")
)
PAIRS = tl.constexpr(
    _assembly(
        [
            ("shl.b32 moved, {0}, 4;", "0x30303030"),
            ("shl.b32 moved, {0}, 2;", "0x30303030"),
            ("", "0x30303030"),
            ("shr.u32 moved, {0}, 2;", "0x30303030"),
        ],
        ["0x54185418"],
        "0x54545454",
    )  # fmt: skip
)
BYTES = tl.constexpr(_assembly([("", "0xffffffff")], ["0x64006400", "0x57f857f8"], "0x64646464"))


@triton.jit
def from_log_scale(number, STEPS: tl.constexpr):
    """Returns the float32 scales of bytes, see `hf_kvplus.codecs.log_scale`."""
    scale = tl.exp2((number.to(tl.float32) - 128.0) * (1.0 / STEPS))
    return tl.where(number == 0, 0.0, scale)


@triton.jit
def part_index(index, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, start=0):
    """Returns which element of a line a place stands for, and whether there is one.

    A byte holds codes that lie SIZE apart. They are unpacked side by side, from byte `start` on, each part padded to
    SIZE_PAD places.
    """
    place = start + index % SIZE_PAD
    return index // SIZE_PAD * SIZE + place, place < SIZE


@triton.jit
def centred(bytes, PART: tl.constexpr, WIDTH: tl.constexpr, CENTRE: tl.constexpr):
    """Returns the codes of one part of some bytes, less CENTRE, as float16; WIDTH is 2 or 4.

    The code goes into the upper bits of a mantissa whose exponent makes it a whole number: 0x5400 is 64, and its bits
    from the fifth on count one each.
    """
    shift: tl.constexpr = PART * WIDTH
    # Triton compiles only one branch of a statement.
    if shift <= 4:  # noqa: SIM108
        moved = bytes.to(tl.uint16) << (4 - shift)
    else:
        moved = bytes.to(tl.uint16) >> (shift - 4)
    number = (moved & (((1 << WIDTH) - 1) << 4)) | 0x5400
    return number.to(tl.float16, bitcast=True) - (64.0 + CENTRE)


@triton.jit
def one_part(bytes, CENTRE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Returns codes of 8 bits, less CENTRE, as float16; 0x6400 is 1024 and its lowest bit counts one."""
    if ASSEMBLY:
        numbers = tl.inline_asm_elementwise(BYTES, "=r,=r,r", [bytes], dtype=tl.float16, is_pure=True, pack=4)
    else:
        numbers = ((bytes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0) - CENTRE
    return numbers


@triton.jit
def two_parts(bytes, CENTRE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Returns both codes of bytes of 4-bit codes, less CENTRE, as float16."""
    if ASSEMBLY:
        a, b = tl.inline_asm_elementwise(
            NIBBLES, "=r,=r,=r,=r,r", [bytes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        a, b = centred(bytes, 0, 4, CENTRE), centred(bytes, 1, 4, CENTRE)
    return a, b


@triton.jit
def four_parts(bytes, CENTRE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Returns the four codes of bytes of 2-bit codes, less CENTRE, as float16."""
    if ASSEMBLY:
        a, b, c, d = tl.inline_asm_elementwise(
            PAIRS, "=r,=r,=r,=r,=r,=r,=r,=r,r", [bytes],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        a, b = centred(bytes, 0, 2, CENTRE), centred(bytes, 1, 2, CENTRE)
        c, d = centred(bytes, 2, 2, CENTRE), centred(bytes, 3, 2, CENTRE)
    return a, b, c, d


@triton.jit
def join_two(first, second):
    """Puts two parts `(lines, size)` side by side, `(lines, 2 * size)`."""
    joined = tl.join(first, second).permute(0, 2, 1)
    return joined.reshape(first.shape[0], 2 * first.shape[1])


@triton.jit
def join_four(first, second, third, fourth):
    """Puts four parts side by side, `(lines, 4 * size)`."""
    return join_two(join_two(first, second), join_two(third, fourth))


@triton.jit
def lower_bits(line, place, seen, PART: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, LOWER: tl.constexpr):
    """Returns what a plane of LOWER bits holds for one part of a plane of WIDTH bits, SIZE bytes in a line."""
    size: tl.constexpr = SIZE * LOWER // WIDTH
    bytes = tl.load(line + place % size, mask=seen, other=0).to(tl.int32)
    shift = PART * WIDTH + place // size * LOWER
    return ((bytes >> shift) & ((1 << LOWER) - 1)).to(tl.float16)


@triton.jit
def load_planes(
    lines, count, LENGTH: tl.constexpr, SIZE_PAD: tl.constexpr, NBITS: tl.constexpr, ASSEMBLY: tl.constexpr, start=0
):
    """Unpacks lines of codes of less than 8 bits; see `load_centred`."""
    place = start + tl.arange(0, SIZE_PAD)[None, :]
    WIDTH: tl.constexpr = 2 if NBITS < 4 else 4
    LOWER: tl.constexpr = NBITS - WIDTH
    SIZE: tl.constexpr = LENGTH * WIDTH // 8
    centre: tl.constexpr = ((1 << WIDTH) - 1) / 2
    # A number is its upper bits times `most`, plus the lower ones; both are centred.
    most: tl.constexpr = 1 << LOWER
    seen = count & (place < SIZE)
    bytes = tl.load(lines + place, mask=seen, other=0)
    rest = lines + SIZE
    if WIDTH == 4:
        a, b = two_parts(bytes, centre, ASSEMBLY)
        numbers = join_two(a, b)
        if LOWER > 0:
            lower = join_two(
                lower_bits(rest, place, seen, 0, SIZE, WIDTH, LOWER),
                lower_bits(rest, place, seen, 1, SIZE, WIDTH, LOWER),
            )
            numbers = numbers * most + (lower - (most - 1) / 2)
    else:
        a, b, c, d = four_parts(bytes, centre, ASSEMBLY)
        numbers = join_four(a, b, c, d)
        if LOWER > 0:
            lower = join_four(
                lower_bits(rest, place, seen, 0, SIZE, WIDTH, LOWER),
                lower_bits(rest, place, seen, 1, SIZE, WIDTH, LOWER),
                lower_bits(rest, place, seen, 2, SIZE, WIDTH, LOWER),
                lower_bits(rest, place, seen, 3, SIZE, WIDTH, LOWER),
            )
            numbers = numbers * most + (lower - (most - 1) / 2)
    return numbers


@triton.jit
def load_centred(
    lines, count, LENGTH: tl.constexpr, SIZE_PAD: tl.constexpr, NBITS: tl.constexpr,
    ASSEMBLY: tl.constexpr, start=0,
):  # fmt: skip
    """Unpacks lines of codes to float16, centred, in the order of `part_index`; anything where there are none.

    Args:
        lines: Addresses, `(lines, 1)`.
        count: Which of them exist, `(lines, 1)`.
        LENGTH: Codes in a line.
        SIZE_PAD: Places of a part.
        NBITS: Bits per code.
        ASSEMBLY: Whether codes are converted by PTX instructions, four at a time.
        start: The first byte of a line that is read.
    """
    if NBITS == 8:
        place = start + tl.arange(0, SIZE_PAD)[None, :]
        bytes = tl.load(lines + place, mask=count & (place < LENGTH), other=0)
        numbers = one_part(bytes, 127.5, ASSEMBLY)
    else:
        numbers = load_planes(lines, count, LENGTH, SIZE_PAD, NBITS, ASSEMBLY, start)
    return numbers


@triton.jit
def curve(number, a, b, c, d):
    """Returns the levels of up to 8 centred codes, an odd polynomial through all of them."""
    square = number * number
    return number * (a + square * (b + square * (c + square * d)))
