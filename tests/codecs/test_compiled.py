"""The compiled decoder against PyTorch's operators."""

import sys

import pytest
import torch

from hf_kvplus.codecs import compiled
from hf_kvplus.codecs.affine import PER_CHANNEL, PER_TOKEN
from hf_kvplus.codecs.dual_scale import DualScaleCodec
from hf_kvplus.codecs.levels import LLOYD_MAX, UNIFORM

pytest.importorskip("numba")
AXES = pytest.mark.parametrize("axis", [PER_CHANNEL, PER_TOKEN])


def both(codec, packed, shape, dtype=torch.float32):
    out, expected = torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)
    compiled.find_decoder().decode(codec, packed, out)
    codec.decode_by_operators(packed, shape[-1], expected)
    return out, expected


def states(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 1, shape[-1]) + 0.3


@AXES
@pytest.mark.parametrize("nbits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize(("tokens", "head_dim"), [(48, 64), (64, 80), (8, 16), (128, 256), (40, 48)])
def test_it_decodes_what_the_operators_decode(nbits, axis, tokens, head_dim):
    codec = DualScaleCodec(
        block_tokens=tokens, nbits=nbits, axis=axis, levels=LLOYD_MAX if nbits in (2, 3) else UNIFORM
    )
    given = states(2, 3, 2, tokens, head_dim)
    out, expected = both(codec, codec.encode(given), given.shape)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@AXES
@pytest.mark.parametrize("options", [{"rotate": False}, {"iterations": 0}, {"rotate": False, "iterations": 0}])
def test_parts_that_are_left_out_are_left_out(axis, options):
    codec = DualScaleCodec(nbits=4, axis=axis, **options)
    given = states(1, 2, 3, 64, 32)
    out, expected = both(codec, codec.encode(given), given.shape)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@AXES
def test_a_block_comes_out_the_same_however_many_are_decoded_with_it(axis):
    codec = DualScaleCodec(nbits=4, axis=axis)
    given = states(2, 2, 9, 64, 64)
    packed = codec.encode(given)
    together, _ = both(codec, packed, given.shape)
    for block in range(9):
        alone, _ = both(
            codec, {name: tensor[:, :, block : block + 1] for name, tensor in packed.items()}, (2, 2, 1, 64, 64)
        )
        assert torch.equal(alone[:, :, 0], together[:, :, block])


@AXES
def test_views_of_larger_buffers_are_read_and_written_in_place(axis):
    codec = DualScaleCodec(nbits=3, axis=axis)
    given = states(2, 2, 6, 64, 16)
    packed = codec.encode(given)
    view = {name: tensor[:, :, 2:5] for name, tensor in packed.items()}
    buffer = torch.full((2, 2, 500, 16), torch.nan)
    target = buffer[:, :, 100 : 100 + 192].unflatten(2, (3, 64))
    compiled.find_decoder().decode(codec, view, target)
    expected = torch.empty(2, 2, 3, 64, 16)
    codec.decode_by_operators(view, 16, expected)
    torch.testing.assert_close(target, expected, rtol=1e-5, atol=1e-5)
    assert buffer[:, :, :100].isnan().all()
    assert buffer[:, :, 292:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_decoded_through_floats(dtype):
    codec = DualScaleCodec(nbits=8)
    given = states(1, 2, 3, 64, 64)
    out, expected = both(codec, codec.encode(given), given.shape, dtype)
    torch.testing.assert_close(out.float(), expected.float(), rtol=1e-2, atol=1e-3)


def test_the_codec_uses_it_where_it_fits_and_operators_elsewhere(monkeypatch):
    codec, given = DualScaleCodec(nbits=4), states(1, 1, 1, 64, 20)
    used = []
    monkeypatch.setattr(codec.__class__, "decode_by_operators", lambda *arguments: used.append(arguments[2]))
    for head_dim in (16, 20):
        part = given[..., :16] if head_dim == 16 else given
        codec.decode(codec.encode(part), head_dim, torch.empty_like(part))
    assert used == [20]


def test_without_numba_the_operators_do_it(monkeypatch):
    compiled.find_decoder()
    monkeypatch.delitem(sys.modules, "hf_kvplus.compiled_kernels.decode")
    monkeypatch.delattr("hf_kvplus.compiled_kernels.decode")
    monkeypatch.setitem(sys.modules, "numba", None)
    assert compiled.find_decoder.__wrapped__() is None
