import pytest
import torch

from hf_kvplus.codecs.affine import PER_CHANNEL, PER_TOKEN, AffineCodec, round_half


def roundtrip(codec, states, valid=None):
    out = torch.empty_like(states)
    codec.decode(codec.encode(states, valid), states.shape[-1], out)
    return out


@pytest.mark.parametrize("axis", [PER_CHANNEL, PER_TOKEN])
@pytest.mark.parametrize("nbits", [2, 3, 4, 5, 6, 8])
def test_the_error_is_at_most_half_a_step(nbits, axis):
    codec = AffineCodec(block_tokens=16, nbits=nbits, axis=axis)
    states = torch.randn(2, 3, 2, 16, 24)
    packed = codec.encode(states)
    step = packed["scale"].float()
    step = step.transpose(-1, -2) if axis == PER_CHANNEL else step
    assert ((roundtrip(codec, states) - states).abs() <= step / 2 * 1.001 + 1e-6).all()


@pytest.mark.parametrize("axis", [PER_CHANNEL, PER_TOKEN])
def test_representable_values_are_preserved(axis):
    codec = AffineCodec(block_tokens=16, nbits=4, axis=axis)
    states = torch.arange(16.0).expand(16, 16).clone()
    states = (states.T if axis == PER_CHANNEL else states)[None, None, None] * 0.25 - 1
    assert torch.equal(roundtrip(codec, states), states)


def test_literal_codes_of_one_channel():
    codec = AffineCodec(block_tokens=8, nbits=2, axis=PER_CHANNEL)
    packed = codec.encode(torch.tensor([0.0, 1, 2, 3, 3, 2, 1, 0]).reshape(1, 1, 1, 8, 1))
    assert packed["scale"].flatten().tolist() == [1.0]
    assert packed["zero_point"].flatten().tolist() == [0.0]
    # Byte j holds codes j, j + 2, j + 4 and j + 6, the first in the lowest bits.
    assert packed["codes"].flatten().tolist() == [0b01_11_10_00, 0b00_10_11_01]


@pytest.mark.parametrize("up", [True, False])
def test_half_precision_rounds_outwards(up):
    values = torch.randn(1000) * 10
    rounded = round_half(values, up=up).float()
    assert ((rounded >= values) if up else (rounded <= values)).all()
    assert ((rounded - values).abs() <= values.abs() * 2**-10 + 1e-7).all()


def test_a_group_size_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="`group_size` must divide block_tokens=64"):
        AffineCodec(block_tokens=64, axis=PER_CHANNEL, group_size=48)
    with pytest.raises(ValueError, match="`group_size` must divide head_dim=80"):
        AffineCodec(axis=PER_TOKEN, group_size=64).check(80)
