import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvplus.codecs import codecs
from hf_kvplus.codecs.affine import PER_CHANNEL, PER_TOKEN, AffineCodec
from hf_kvplus.codecs.dual_scale import DualScaleCodec
from hf_kvplus.codecs.float8 import Float8Codec
from hf_kvplus.codecs.packing import PLANES, pack, unpack
from hf_kvplus.recipes import SUPPORTED_NBITS, Quantization, recipes

WIDTHS = sorted(set(PLANES) - {1})


@settings(max_examples=60, deadline=None)
@given(nbits=st.sampled_from(sorted(PLANES)), length=st.integers(1, 200), seed=st.integers(0, 2**16))
def test_packing_is_exact(nbits, length, seed):
    codes = torch.randint(2**nbits, (2, length), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    assert torch.equal(unpack(pack(codes, nbits), nbits, length), codes)


@settings(max_examples=60, deadline=None)
@given(
    make=st.sampled_from([AffineCodec, DualScaleCodec]),
    nbits=st.sampled_from(WIDTHS),
    axis=st.sampled_from([PER_CHANNEL, PER_TOKEN]),
    block_tokens=st.sampled_from([8, 16, 40, 64]),
    head_dim=st.integers(1, 70),
    magnitude=st.floats(1e-3, 1e3),
    seed=st.integers(0, 2**16),
)
def test_any_size_and_width_comes_back_close(make, nbits, axis, block_tokens, head_dim, magnitude, seed):
    codec = make(block_tokens=block_tokens, nbits=nbits, axis=axis)
    states = magnitude * torch.randn(1, 2, 2, block_tokens, head_dim, generator=torch.Generator().manual_seed(seed))
    out = torch.empty_like(states)
    packed = codec.encode(states)
    codec.decode(packed, head_dim, out)
    assert all(tensor.shape[:3] == (1, 2, 2) for tensor in packed.values())
    assert (out - states).square().mean() < min(0.5, 8 / 4 ** (nbits - 1)) * states.square().mean() + 1e-6


@pytest.mark.parametrize(
    ("name", "nbits"),
    [(name, bits) for name in recipes for bits in SUPPORTED_NBITS if bits < 16 and (name != "float8" or bits == 8)],
)
def test_every_recipe_tells_its_bits_and_decodes_any_selection(name, nbits):
    for codec in Quantization(nbits, nbits, recipe=name).codecs():
        states = torch.randn(3, 2, 4, codec.block_tokens, 32)
        packed = codec.encode(states)
        taken = sum(tensor.numel() * tensor.element_size() for tensor in packed.values())
        assert 8 * taken / states.numel() == pytest.approx(codec.bits_per_element(32), rel=1e-6)
        whole, part = torch.empty_like(states), torch.empty_like(states[[2, 0], :, 1:3])
        codec.decode(packed, 32, whole)
        codec.decode({field: tensor[[2, 0], :, 1:3] for field, tensor in packed.items()}, 32, part)
        torch.testing.assert_close(part, whole[[2, 0], :, 1:3])


@pytest.mark.parametrize(
    ("strategy", "most_bits"),
    [((8, 8), 8.3), ((6, 6), 6.5), ((5, 4), 5.2), ((4, 4), 4.5), ((3, 3), 3.5), ((2, 2), 2.5)],
)
def test_the_default_recipe_keeps_its_line_of_stored_bits(strategy, most_bits):
    keys, values = Quantization(*strategy).codecs()
    assert (keys.bits_per_element(64) + values.bits_per_element(64)) / 2 <= most_bits


def test_codecs_are_named():
    assert {"affine", "dual_scale", "float8", "identity"} <= set(codecs.names())


EVERY_CODEC = [
    *(DualScaleCodec(16, nbits, axis, clips=3) for nbits in WIDTHS for axis in (PER_CHANNEL, PER_TOKEN)),
    *(AffineCodec(16, nbits, axis) for nbits in WIDTHS for axis in (PER_CHANNEL, PER_TOKEN)),
    DualScaleCodec(16, 4, correct_tokens=True),
    DualScaleCodec(16, 8, iterations=0, refinements=0),
    Float8Codec(16),
]


# Head sizes that aren't a multiple of 16 are never encoded by the compiled functions.
@pytest.mark.parametrize("channels", [24, 32])
@pytest.mark.parametrize("codec", EVERY_CODEC, ids=lambda codec: f"{codec.describe()} {getattr(codec, 'axis', '')}")
def test_constant_channels_zero_heads_and_outliers_stay_finite_in_every_codec(codec, channels):
    states = torch.randn(1, 8, 2, 16, channels, generator=torch.Generator().manual_seed(0))
    states[0, 0] = 0
    states[0, 1, :, :, 3] = 7.0
    states[0, 2, 0, 5, 2] = torch.inf
    states[0, 3, 0, 5] = -torch.inf
    states[0, 4, 1, 0, 0] = torch.nan
    states[0, 5, :, :, 11] += 1000.0
    states[0, 6, 0, 1, 1] = 3e38
    states[0, 7] *= 1e-30
    out = torch.empty_like(states)
    codec.decode(codec.encode(states), channels, out)
    assert out.isfinite().all()
    assert torch.equal(out[0, 0], torch.zeros_like(out[0, 0]))
    # What one head holds leaves the others alone.
    alone = torch.empty_like(states[:, 5:6])
    codec.decode(codec.encode(states[:, 5:6]), channels, alone)
    torch.testing.assert_close(alone, out[:, 5:6])


def test_float8_keeps_what_it_can_represent_and_refuses_other_widths():
    codec = Float8Codec(8)
    states = torch.tensor([448.0, -448.0, 1.0, 0.0, -0.125, 0.75, 32.0, 3.5]).expand(1, 1, 1, 8, 8)
    out = torch.empty_like(states)
    codec.decode(codec.encode(states), 8, out)
    assert (out - states).abs().max() <= states.abs().max() / 16
    assert torch.equal(out[states == 0], states[states == 0])
    with pytest.raises(ValueError, match="`recipe` 'float8' has 8 bits, got 4"):
        Quantization(4, 4, recipe="float8").codecs()


def test_the_group_of_the_default_recipe_is_its_block():
    keys, values = Quantization(4, 4, group_size=128).codecs()
    assert keys.block_tokens == values.block_tokens == 128
    assert Quantization(4, 4, group_size=32, recipe="affine").block_tokens == 64
