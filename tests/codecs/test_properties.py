import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvplus.codecs import codecs
from hf_kvplus.codecs.affine import PER_CHANNEL, PER_TOKEN, AffineCodec
from hf_kvplus.codecs.dual_scale import DualScaleCodec
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


@pytest.mark.parametrize("name", list(recipes))
@pytest.mark.parametrize("nbits", [bits for bits in SUPPORTED_NBITS if bits < 16])
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
    assert {"affine", "dual_scale", "identity"} <= set(codecs.names())


def test_the_group_of_the_default_recipe_is_its_block():
    keys, values = Quantization(4, 4, group_size=128).codecs()
    assert keys.block_tokens == values.block_tokens == 128
    assert Quantization(4, 4, group_size=32, recipe="affine").block_tokens == 64
