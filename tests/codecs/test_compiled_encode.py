"""The compiled encoder against PyTorch's operators."""

import sys
from dataclasses import replace

import pytest
import torch

from hf_kvplus.codecs import compiled_encode
from hf_kvplus.codecs.affine import PER_CHANNEL, PER_TOKEN, AffineCodec
from hf_kvplus.codecs.dual_scale import DualScaleCodec
from hf_kvplus.codecs.levels import LLOYD_MAX, UNIFORM
from hf_kvplus.codecs.log_scale import CHANNEL_STEPS, TOKEN_STEPS, to_log_scale
from hf_kvplus.codecs.metric import KeyMetric, save_metrics
from hf_kvplus.codecs.packing import unpack

pytest.importorskip("numba")
AXES = pytest.mark.parametrize("axis", [PER_CHANNEL, PER_TOKEN])
WIDTHS = pytest.mark.parametrize("nbits", [2, 3, 4, 5, 6, 8])
SHAPES = pytest.mark.parametrize(("tokens", "head_dim"), [(48, 64), (64, 80), (8, 16), (128, 256), (40, 48)])


def states(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-2, 1, shape[-1])
    return (torch.randn(*shape, generator=generator) * spread + 0.3).to(dtype)


def encoded(codec, given, valid=None):
    encoder = compiled_encode.find_encoder()
    assert encoder.fits(given)
    encode = encoder.encode_affine if isinstance(codec, AffineCodec) else encoder.encode_dual_scale
    return encode(codec, given, valid), codec.encode_by_operators(given, valid)


def squared_error(codec, packed, given, counted=None):
    """Returns the squared error of what a payload decodes to, of the tokens that count."""
    out = torch.empty(given.shape)
    codec.decode_by_operators(packed, given.shape[-1], out)
    difference = (out - given.float()).square().sum(-1)
    return (difference if counted is None else difference * counted[:, None]).sum()


def require_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def require_same_but_for_ties(codec, given, valid=None):
    """Nearly all bytes are equal, none differs by more than one, and the whole is no worse."""
    found, expected = encoded(codec, given, valid)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape
        different = (found[name] != tensor).float().mean()
        assert different < 0.02, f"{name}: {different:.2%} differ"
    for name in ("channel_scale", "token_scale", "mean_scale", "mean"):
        if name in expected:
            assert (found[name].int() - expected[name].int()).abs().max() <= 1, name
    ours, theirs = (squared_error(codec, packed, given, valid) for packed in (found, expected))
    assert ours <= theirs * 1.001 + 1e-9


@AXES
@WIDTHS
@SHAPES
def test_affine_blocks_are_the_operators_to_the_bit(nbits, axis, tokens, head_dim):
    codec = AffineCodec(block_tokens=tokens, nbits=nbits, axis=axis)
    require_equal(*encoded(codec, states(2, 3, 2, tokens, head_dim)))


@AXES
@pytest.mark.parametrize("group_size", [8, 24, 48])
def test_affine_groups_of_any_size(axis, group_size):
    codec = AffineCodec(block_tokens=48, nbits=4, axis=axis, group_size=group_size)
    require_equal(*encoded(codec, states(1, 2, 3, 48, 96)))


@AXES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_affine_half_precision(axis, dtype):
    require_equal(*encoded(AffineCodec(axis=axis), states(1, 2, 3, 64, 64, dtype=dtype)))


@AXES
def test_affine_tokens_that_dont_count(axis):
    valid = torch.rand(2, 3, 64, generator=torch.Generator().manual_seed(1)) > 0.3
    valid[1, 2] = False
    require_equal(*encoded(AffineCodec(axis=axis, group_size=16), states(2, 2, 3, 64, 64), valid))


@AXES
def test_affine_states_beyond_half_precision(axis):
    given = states(1, 1, 2, 64, 32)
    given[0, 0, 0, 3, :8] = torch.tensor([1e9, -1e9, torch.inf, -torch.inf, torch.nan, 1e-30, 0.0, -0.0])
    given[0, 0, 1] = 0.5
    require_equal(*encoded(AffineCodec(axis=axis), given))


@AXES
@pytest.mark.parametrize(
    ("levels", "nbits"),
    [*((UNIFORM, nbits) for nbits in (2, 3, 4, 5, 6, 8)), *((LLOYD_MAX, nbits) for nbits in (2, 3, 4))],
)
def test_dual_scale_without_sums_is_the_operators_but_for_the_last_bit_of_a_power(nbits, axis, levels):
    # PyTorch's exp2 of a single number isn't always that of the same number in a long tensor.
    codec = DualScaleCodec(
        block_tokens=48, nbits=nbits, axis=axis, levels=levels, rotate=False, iterations=0, refinements=0
    )
    found, expected = encoded(codec, states(2, 3, 2, 48, 80))
    codes, operators_codes = (
        unpack(one.pop("codes"), nbits, 48 if axis == PER_CHANNEL else 80) for one in (found, expected)
    )
    require_equal(found, expected)
    difference = (codes.int() - operators_codes.int()).abs()
    assert difference.max() <= 1
    assert difference.sum() <= 3


@AXES
@WIDTHS
@SHAPES
def test_dual_scale_differs_on_edges_only_and_is_no_worse(nbits, axis, tokens, head_dim):
    codec = DualScaleCodec(
        block_tokens=tokens,
        nbits=nbits,
        axis=axis,
        clips=3 if nbits < 4 else 1,
        levels=LLOYD_MAX if nbits == 3 else UNIFORM,
        correct_tokens=axis == PER_CHANNEL,
    )
    require_same_but_for_ties(codec, states(2, 3, 2, tokens, head_dim))


@AXES
@pytest.mark.parametrize(
    "options",
    [{"rotate": False}, {"iterations": 0}, {"refinements": 0}, {"levels": LLOYD_MAX, "clips": 2}, {"iterations": 9}],
)
def test_parts_that_are_left_out_are_left_out(axis, options):
    require_same_but_for_ties(DualScaleCodec(axis=axis, **options), states(2, 2, 3, 64, 64))


@AXES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(axis, dtype):
    require_same_but_for_ties(DualScaleCodec(axis=axis), states(2, 2, 3, 64, 64, dtype=dtype))


@AXES
def test_tokens_that_dont_count_have_no_influence(axis):
    codec = DualScaleCodec(block_tokens=48, axis=axis, correct_tokens=True)
    valid = torch.rand(2, 3, 48, generator=torch.Generator().manual_seed(1)) > 0.3
    valid[1, 2] = False
    given = states(2, 2, 3, 48, 64)
    require_same_but_for_ties(codec, given, valid)
    found, _ = encoded(codec, given, valid)
    given[~valid[:, None].expand(-1, 2, -1, -1)] = torch.nan
    changed, _ = encoded(codec, given, valid)
    require_equal(changed, found)


@pytest.mark.parametrize("value", [0.0, 0.25, -3e4, 1e-20])
def test_constant_states(value):
    codec = DualScaleCodec(correct_tokens=True)
    given = torch.full((1, 1, 2, 64, 32), value)
    found, expected = encoded(codec, given)
    assert squared_error(codec, found, given) <= squared_error(codec, expected, given) * 1.001 + 1e-12


def test_states_that_arent_finite():
    given = states(1, 1, 2, 64, 32)
    given[0, 0, 0, 3, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30])
    codec = DualScaleCodec()
    found, _ = encoded(codec, given)
    out = torch.empty(given.shape)
    codec.decode(found, 32, out)
    assert out.isfinite().all()


@AXES
def test_a_block_comes_out_the_same_however_many_are_encoded_with_it(axis):
    codec, given = DualScaleCodec(axis=axis, correct_tokens=True), states(2, 2, 9, 64, 64)
    together, _ = encoded(codec, given)
    for block in range(9):
        alone, _ = encoded(codec, given[:, :, block : block + 1])
        require_equal(alone, {name: tensor[:, :, block : block + 1] for name, tensor in together.items()})


@pytest.mark.parametrize(
    "codec", [AffineCodec(block_tokens=48), DualScaleCodec(block_tokens=48)], ids=["affine", "dual"]
)
def test_states_may_be_views_as_layers_make_them(codec):
    prompt = states(2, 200, 3, 64).transpose(1, 2)  # (batch, heads, tokens, channels)
    view = prompt[:, :, 5 : 5 + 144].unflatten(2, (3, 48))
    found, _ = encoded(codec, view)
    expected, _ = encoded(codec, view.contiguous())
    require_equal(found, expected)
    turned = states(1, 1, 2, 64, 48).transpose(3, 4)
    require_equal(encoded(codec, turned)[0], encoded(codec, turned.contiguous())[0])


@pytest.mark.parametrize("steps", [CHANNEL_STEPS, TOKEN_STEPS])
def test_scales_get_the_bytes_that_the_logarithm_gives_them(steps):
    tables = compiled_encode.log_scale_tables(steps)
    least = tables[256:512].view(torch.float32)[2:]
    codes = torch.arange(2, 256)
    assert torch.equal(to_log_scale(least, steps).int(), codes.int())
    below = (least.view(torch.int32) - 1).view(torch.float32)
    assert torch.equal(to_log_scale(below, steps).int(), codes.int() - 1)


def test_the_codecs_use_it_where_it_fits_and_operators_elsewhere(monkeypatch):
    for kind in (AffineCodec, DualScaleCodec):
        used = []
        by_operators = kind.encode_by_operators
        monkeypatch.setattr(
            kind, "encode_by_operators", lambda *given, use=by_operators, kept=used: kept.append(1) or use(*given)
        )
        for head_dim, dtype in ((16, torch.float32), (20, torch.float32), (16, torch.float64)):
            kind().encode(states(1, 1, 1, 64, head_dim, dtype=dtype))
        assert len(used) == 2, kind


def test_without_numba_the_operators_do_it(monkeypatch):
    compiled_encode.find_encoder()
    monkeypatch.delitem(sys.modules, "hf_kvplus.compiled_kernels.encode")
    monkeypatch.delattr("hf_kvplus.compiled_kernels.encode")
    monkeypatch.setitem(sys.modules, "numba", None)
    assert compiled_encode.find_encoder.__wrapped__() is None


def test_a_codec_with_other_options_isnt_taken_for_this_one():
    given = states(1, 1, 1, 64, 64)
    first = DualScaleCodec(nbits=4)
    for other in (replace(first, nbits=3), replace(first, axis=PER_TOKEN), replace(first, iterations=1)):
        found, expected = encoded(other, given)
        assert {name: tensor.shape for name, tensor in found.items()} == {
            name: tensor.shape for name, tensor in expected.items()
        }


def make_metric(folder, heads, channels):
    """Returns the metric of queries that look into few directions."""
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(heads, 4 * channels, channels, generator=generator) * torch.logspace(1, -1, channels)
    queries = queries @ torch.linalg.qr(torch.randn(heads, channels, channels, generator=generator)).Q
    path = folder / f"{heads}-{channels}.safetensors"
    save_metrics(path, [queries.transpose(1, 2) @ queries / (4 * channels)])
    return KeyMetric(path, 0)


def measured_error(codec, packed, given, counted=None):
    """Returns the error of what a payload decodes to in the metric, of the tokens that count."""
    out = torch.empty(given.shape)
    codec.decode_by_operators(packed, given.shape[-1], out)
    moment = codec.metric.moment(rotate=False)
    difference = out - given.float()
    cost = torch.einsum("bhntc,hcd,bhntd->bhnt", difference, moment, difference)
    return float((cost if counted is None else cost * counted[:, None]).sum())


def require_as_good_in_the_metric(codec, given, valid=None):
    """Nearly all bytes are equal and the whole is no worse.

    Behind a tie the rest of a token's codes may differ, and with them what is fitted to the channels, by a byte.
    """
    found, expected = encoded(codec, given, valid)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape
        assert found[name].dtype == tensor.dtype
        apart = (found[name].int() - tensor.int()).abs() > (0 if name == "codes" else 1)
        assert apart.float().mean() < 0.02, f"{name}: {apart.float().mean():.2%} differ"
    ours, theirs = (measured_error(codec, packed, given, valid) for packed in (found, expected))
    assert ours <= theirs * 1.002 + 1e-9


@WIDTHS
@SHAPES
def test_feedback_is_that_of_the_operators_but_for_ties(tmp_path, nbits, tokens, head_dim):
    codec = DualScaleCodec(
        block_tokens=tokens,
        nbits=nbits,
        clips=3 if nbits < 4 else 1,
        levels=LLOYD_MAX if nbits == 3 else UNIFORM,
        correct_tokens=True,
        metric=make_metric(tmp_path, 3, head_dim),
    )
    given = states(2, 3, 2, tokens, head_dim)
    require_as_good_in_the_metric(codec, given)
    plain = replace(codec, metric=None)
    plain_error = measured_error(codec, encoded(plain, given)[0], given)
    assert measured_error(codec, encoded(codec, given)[0], given) < 0.8 * plain_error


@pytest.mark.parametrize(
    "options",
    [
        {"rotate": False},
        {"iterations": 0},
        {"refinements": 0},
        {"correct_tokens": True, "clips": 2},
        {"axis": PER_TOKEN, "levels": LLOYD_MAX, "nbits": 2},
    ],
    ids=str,
)
def test_feedback_without_parts(tmp_path, options):
    codec = DualScaleCodec(block_tokens=48, metric=make_metric(tmp_path, 2, 64), **options)
    require_as_good_in_the_metric(codec, states(2, 2, 3, 48, 64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_feedback_of_half_precision(tmp_path, dtype):
    codec = DualScaleCodec(block_tokens=48, nbits=3, correct_tokens=True, metric=make_metric(tmp_path, 2, 64))
    require_as_good_in_the_metric(codec, states(1, 2, 3, 48, 64, dtype=dtype))


def test_feedback_ignores_tokens_that_dont_count(tmp_path):
    codec = DualScaleCodec(block_tokens=40, nbits=2, correct_tokens=True, metric=make_metric(tmp_path, 2, 64))
    valid = torch.rand(2, 3, 40, generator=torch.Generator().manual_seed(1)) > 0.3
    valid[1, 2] = False
    given = states(2, 2, 3, 40, 64)
    require_as_good_in_the_metric(codec, given, valid)
    found, _ = encoded(codec, given, valid)
    given[~valid[:, None].expand(-1, 2, -1, -1)] = torch.nan
    require_equal(encoded(codec, given, valid)[0], found)


def test_feedback_gives_a_block_the_same_codes_however_many_are_encoded_with_it(tmp_path):
    codec = DualScaleCodec(block_tokens=48, nbits=3, correct_tokens=True, metric=make_metric(tmp_path, 2, 80))
    given = states(2, 2, 5, 48, 80)
    together, _ = encoded(codec, given)
    for block in range(5):
        alone, _ = encoded(codec, given[:, :, block : block + 1])
        require_equal(alone, {name: tensor[:, :, block : block + 1] for name, tensor in together.items()})


def test_feedback_stays_finite_whatever_comes_in(tmp_path):
    codec = DualScaleCodec(block_tokens=48, nbits=2, clips=3, correct_tokens=True, metric=make_metric(tmp_path, 4, 32))
    given = states(1, 4, 2, 48, 32)
    given[0, 0] = 0
    given[0, 1, 0, 3, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30])
    given[0, 2, :, :, 5] = 7.0
    given[0, 3, :, :, 11] += 3e4
    found, _ = encoded(codec, given)
    out = torch.empty(given.shape)
    codec.decode(found, 32, out)
    assert out.isfinite().all()
    assert torch.equal(out[0, 0], torch.zeros_like(out[0, 0]))


def test_codecs_with_a_metric_use_the_compiled_encoder(tmp_path, monkeypatch):
    codec = DualScaleCodec(block_tokens=48, metric=make_metric(tmp_path, 1, 16))
    monkeypatch.delattr(DualScaleCodec, "encode_by_operators")
    assert codec.encode(states(1, 1, 1, 48, 16))["codes"].any()
