"""A head projection: there and back, absorbed into queries and outputs, one for all copies."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_kvplus.codecs.affine import AffineCodec
from hf_kvplus.codecs.identity import IdentityCodec
from hf_kvplus.codecs.latent import LatentCodec
from hf_kvplus.projections import HeadProjection


def projection(heads: int = 3, channels: int = 8, latents: int = 10, seed: int = 0) -> HeadProjection:
    generator = torch.Generator().manual_seed(seed)
    width = heads * channels
    tensors = [torch.randn(shape, generator=generator) for shape in ((width, latents), (latents, width), (width,))]
    return HeadProjection(*tensors, heads)


def test_channels_of_all_heads_are_joined_and_parted():
    encoder = torch.eye(4)
    found = HeadProjection(encoder, encoder, torch.zeros(4), heads=2)
    states = torch.tensor([[[[1.0, 2.0]], [[3.0, 4.0]]]])  # one token of two heads of two channels
    assert found.encode(states).tolist() == [[[[1.0, 2.0, 3.0, 4.0]]]]
    assert torch.equal(found.decode(found.encode(states)), states)


def test_the_mean_comes_back():
    found = HeadProjection(torch.zeros(4, 1), torch.zeros(1, 4), torch.tensor([1.0, 2.0, 3.0, 4.0]), heads=2)
    states = torch.randn(1, 2, 5, 2)
    assert found.decode(found.encode(states))[0, :, 3].tolist() == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize("queries", [1, 5])
def test_absorbed_products_are_those_of_the_rebuilt_states(queries):
    found, latents = projection(), torch.randn(2, 1, 7, 10)
    states = found.decode(latents).repeat_interleave(2, 1)  # two queries share a head
    query = torch.randn(2, 6, queries, 8)
    wide, offset = found.absorb(query)
    torch.testing.assert_close(wide @ latents.transpose(-1, -2) + offset, query @ states.transpose(-1, -2))
    weights = torch.rand(2, 6, queries, 7)
    output = found.expand(weights @ latents, weights.sum(-1, keepdim=True))
    torch.testing.assert_close(output, weights @ states, atol=1e-4, rtol=1e-4)


def test_equal_numbers_make_equal_projections_and_copies_share_them():
    one, same, other = projection(), projection(), projection(seed=1)
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert copy.deepcopy({"codec": LatentCodec(IdentityCodec(), one)})["codec"].projection is one
    assert one.nbytes == 4 * (2 * 24 * 10 + 24)


@pytest.mark.parametrize(
    ("shapes", "heads"),
    [(((24, 10), (10, 20), (24,)), 3), (((24, 10), (10, 24), (20,)), 3), (((24, 4), (4, 24), (24,)), 5)],
)
def test_shapes_that_do_not_fit_are_refused(shapes, heads):
    with pytest.raises(ValueError, match=f"a projection of {heads} heads needs an encoder"):
        HeadProjection(*(torch.zeros(shape) for shape in shapes), heads)


def test_states_of_another_model_are_refused():
    with pytest.raises(ValueError, match="is for 3 heads of 8 channels, got states with 2 heads of 8"):
        projection().encode(torch.zeros(1, 2, 4, 8))
    with pytest.raises(ValueError, match="is for head_dim=8, got 16"):
        LatentCodec(IdentityCodec(), projection()).check(16)


def test_a_codec_of_latents_tells_its_bits_and_keeps_padding_out():
    codec = LatentCodec(AffineCodec(block_tokens=16, nbits=4, axis="per_channel"), projection(latents=12))
    states = torch.randn(2, 3, 4, 16, 8)
    packed = codec.encode(states)
    taken = sum(tensor.nbytes for tensor in packed.values())
    assert 8 * taken / states.numel() == pytest.approx(codec.bits_per_element(8))
    assert all(tensor.shape[:3] == (2, 1, 4) for tensor in packed.values())
    valid = torch.ones(2, 4, 16, dtype=torch.bool)
    valid[0, 0, :5] = False
    spoiled = states.clone()
    spoiled[0, :, 0, :5] = float("nan")
    outs = [torch.empty_like(states) for _ in range(2)]
    for out, given in zip(outs, (states, spoiled), strict=True):
        codec.decode(codec.encode(given, valid), 8, out)
    assert torch.equal(outs[0], outs[1])
