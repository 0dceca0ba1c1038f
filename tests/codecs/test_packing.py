import pytest
import torch

from hf_kvplus.codecs.packing import PLANES, pack, packed_length, padded_length, unpack


@pytest.mark.parametrize("nbits", sorted(PLANES))
@pytest.mark.parametrize("length", [1, 7, 8, 33, 64, 80])
def test_every_code_survives_packing(nbits, length):
    count = 2**nbits
    codes = torch.arange(count * length).remainder(count).to(torch.uint8).reshape(count, length)
    packed = pack(codes, nbits)
    assert packed.shape == (count, packed_length(length, nbits))
    assert torch.equal(unpack(packed, nbits, length), codes)


def test_four_bits_put_the_first_half_in_the_low_nibbles():
    assert pack(torch.tensor([1, 2, 3, 4], dtype=torch.uint8), 4).tolist() == [0x31, 0x42]


def test_three_bits_are_a_plane_of_two_and_a_plane_of_one():
    codes = torch.tensor([7, 0, 5, 2, 1, 6, 3, 4], dtype=torch.uint8)
    upper, lowest = pack(codes >> 1, 2), pack(codes & 1, 1)
    assert torch.equal(pack(codes, 3), torch.cat([upper, lowest]))


@pytest.mark.parametrize("nbits", sorted(PLANES))
def test_whole_lines_waste_no_bit(nbits):
    assert packed_length(64, nbits) * 8 == 64 * nbits
    assert padded_length(64, nbits) == 64


def test_packing_leaves_its_input_alone():
    codes = torch.arange(16, dtype=torch.uint8)
    pack(codes, 4)
    assert codes.tolist() == list(range(16))


def test_an_unsupported_width_is_refused():
    with pytest.raises(ValueError, match="`nbits` must be one of"):
        pack(torch.zeros(8, dtype=torch.uint8), 7)
