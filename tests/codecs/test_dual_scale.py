import pytest
import torch

from hf_kvplus.codecs.affine import PER_CHANNEL, PER_TOKEN
from hf_kvplus.codecs.dual_scale import DualScaleCodec
from hf_kvplus.codecs.levels import LLOYD_MAX
from hf_kvplus.codecs.log_scale import TOKEN_STEPS, from_log_scale
from hf_kvplus.codecs.packing import unpack
from hf_kvplus.layer import KVLayer

AXES = pytest.mark.parametrize("axis", [PER_CHANNEL, PER_TOKEN])


def roundtrip(codec, states, valid=None):
    out = torch.empty_like(states)
    codec.decode(codec.encode(states, valid), states.shape[-1], out)
    return out


def relative_error(codec, states):
    return float((roundtrip(codec, states) - states).square().mean() / states.square().mean())


@AXES
@pytest.mark.parametrize(("nbits", "limit"), [(2, 0.125), (3, 0.035), (4, 0.0105), (5, 0.003), (6, 0.0008), (8, 6e-5)])
def test_the_error_on_gaussian_states_is_that_of_a_good_scalar_quantizer(nbits, limit, axis):
    states = torch.randn(2, 2, 4, 64, 64, generator=torch.Generator().manual_seed(0))
    codec = DualScaleCodec(nbits=nbits, axis=axis, clips=3 if nbits < 4 else 1, refinements=0 if nbits == 8 else 2)
    assert relative_error(codec, states) < limit


@pytest.mark.parametrize("nbits", [2, 4])
def test_least_squares_lower_the_error(nbits):
    states = torch.randn(1, 2, 4, 64, 64, generator=torch.Generator().manual_seed(1)) ** 3
    fitted, covered = DualScaleCodec(nbits=nbits, clips=3), DualScaleCodec(nbits=nbits, refinements=0)
    assert relative_error(fitted, states) < 0.9 * relative_error(covered, states)


def test_token_scales_keep_a_loud_token_from_drowning_the_others():
    states = torch.randn(1, 1, 4, 64, 64, generator=torch.Generator().manual_seed(1))
    states[:, :, :, 10] *= 30

    def quiet_error(codec):
        return float((roundtrip(codec, states) - states)[:, :, :, :10].square().mean())

    assert quiet_error(DualScaleCodec(nbits=4)) < 0.1 * quiet_error(DualScaleCodec(nbits=4, iterations=0))


def test_rotation_lowers_the_error_where_single_elements_stick_out():
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(1, 1, 4, 64, 64, generator=generator)
    states[torch.rand(states.shape, generator=generator) < 0.01] *= 20
    assert relative_error(DualScaleCodec(nbits=3), states) < 0.7 * relative_error(
        DualScaleCodec(nbits=3, rotate=False), states
    )


@AXES
def test_decoding_follows_the_documented_formula(axis):
    codec = DualScaleCodec(block_tokens=16, nbits=3, axis=axis, correct_tokens=True)
    states = torch.randn(1, 2, 3, 16, 24)
    packed = codec.encode(states)
    codes = unpack(packed["codes"], 3, 16 if axis == PER_CHANNEL else 24)
    codes = codes.transpose(-1, -2) if axis == PER_CHANNEL else codes
    channel = from_log_scale(packed["channel_scale"])[..., None, :]
    mean = (packed["mean"].float() * from_log_scale(packed["mean_scale"]))[..., None, :]
    token = from_log_scale(packed["token_scale"], TOKEN_STEPS)[..., None]
    expected = ((codec.level_table()[codes.int()] * channel + mean) * token) @ codec.rotation(24)
    torch.testing.assert_close(roundtrip(codec, states), expected, rtol=1e-4, atol=1e-5)


@AXES
@pytest.mark.parametrize("iterations", [0, 4])
def test_the_payload_takes_the_bits_that_are_told(iterations, axis):
    codec = DualScaleCodec(nbits=4, axis=axis, iterations=iterations)
    states = torch.randn(2, 3, 5, 64, 64)
    payload_bytes = sum(tensor.numel() * tensor.element_size() for tensor in codec.encode(states).values())
    assert 8 * payload_bytes / states.numel() == pytest.approx(codec.bits_per_element(64), rel=1e-6)


def test_the_projection_of_a_corrected_token_has_the_right_length():
    states = torch.randn(1, 1, 4, 64, 64, generator=torch.Generator().manual_seed(0))
    length = states.square().sum(-1)

    def shrinkage(codec):
        return float(((roundtrip(codec, states) * states).sum(-1) / length - 1).abs().mean())

    assert shrinkage(DualScaleCodec(nbits=2, clips=3, correct_tokens=True)) < 0.02
    assert shrinkage(DualScaleCodec(nbits=2, clips=3)) > 0.05


@AXES
@pytest.mark.parametrize("nbits", [2, 4, 8])
def test_a_key_bias_far_above_the_rest_costs_little(nbits, axis):
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(1, 2, 2, 64, 64, generator=generator)
    biased = plain + 100 * (torch.arange(64) == 7) - 60 * (torch.arange(64) == 40)
    codec = DualScaleCodec(nbits=nbits, axis=axis, iterations=0 if nbits == 8 else 4)

    def gap(states):
        return float((roundtrip(codec, states) - states).square().mean())

    assert gap(biased) < 3 * gap(plain)


@AXES
def test_rows_do_not_influence_each_other(axis):
    codec = DualScaleCodec(nbits=4, axis=axis, correct_tokens=True)
    states = torch.randn(2, 2, 2, 64, 32)
    louder = states.clone()
    louder[1] *= 50
    first, second = codec.encode(states), codec.encode(louder)
    assert all(torch.equal(first[name][0], second[name][0]) for name in first)


@AXES
def test_padding_has_no_influence(axis):
    codec = DualScaleCodec(nbits=3, axis=axis, clips=3, correct_tokens=True)
    states = torch.randn(1, 2, 2, 64, 32)
    valid = torch.ones(1, 2, 64, dtype=torch.bool)
    valid[0, 0, :20] = False
    outputs = []
    for filler in (0.0, 1000.0, torch.nan):
        filled = states.clone()
        filled[:, :, 0, :20] = filler
        out = roundtrip(codec, filled, valid)
        assert out.isfinite().all()
        outputs.append(out[:, :, 0, 20:])
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@AXES
@pytest.mark.parametrize("nbits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_whatever_comes_in_finite_states_come_out(dtype, nbits, axis):
    codec = DualScaleCodec(block_tokens=16, nbits=nbits, axis=axis, clips=3, correct_tokens=True)
    states = torch.randn(1, 1, 10, 16, 8).to(dtype)
    states[0, 0, 0] = 0
    states[0, 0, 1] = 3.25
    states[0, 0, 2, :, 3] = 60000.0
    states[0, 0, 3, 5, 2] = torch.inf
    states[0, 0, 4, 5] = -torch.inf
    states[0, 0, 5, 0, 0] = torch.nan
    states[0, 0, 6] *= 1e-7
    states[0, 0, 7, 4] = 0
    states[0, 0, 8, :, 1] = 0
    out = roundtrip(codec, states)
    assert out.dtype == dtype
    assert out.isfinite().all()
    assert torch.equal(out[0, 0, 0], torch.zeros_like(out[0, 0, 0]))
    torch.testing.assert_close(out[0, 0, 1].float(), states[0, 0, 1].float(), rtol=0.02, atol=0.02)


def test_a_block_without_a_valid_token_decodes_to_something_finite():
    states = torch.full((1, 2, 1, 64, 16), torch.inf)
    valid = torch.zeros(1, 1, 64, dtype=torch.bool)
    assert roundtrip(DualScaleCodec(correct_tokens=True), states, valid).isfinite().all()


@pytest.mark.parametrize("head_dim", [1, 3, 16, 80, 96, 128])
@pytest.mark.parametrize("nbits", [2, 3, 5])
def test_any_head_dim_fits(nbits, head_dim):
    states = torch.randn(1, 1, 2, 32, head_dim)
    for axis in (PER_CHANNEL, PER_TOKEN):
        assert relative_error(DualScaleCodec(block_tokens=32, nbits=nbits, axis=axis, clips=3), states) < 0.2


def test_a_prompt_in_pieces_packs_the_same_bytes_as_at_once():
    states = torch.randn(2, 2, 300, 16)
    layers = []
    for step in (300, 37, 1):
        layer = KVLayer(
            DualScaleCodec(correct_tokens=True), DualScaleCodec(axis=PER_TOKEN), residual_length=32, num_sink_tokens=4
        )
        for start in range(0, 300, step):
            layer.update(states[:, :, start : start + step], states[:, :, start : start + step])
        layers.append(layer)
    blocks = min(layer.packed_blocks for layer in layers)
    assert blocks >= 3
    for name in ("keys", "values"):
        payloads = [layer.packed[name].fields(0, blocks) for layer in layers]
        for field, tensor in payloads[0].items():
            assert all(torch.equal(tensor, other[field]) for other in payloads[1:]), (name, field)


def test_sinks_have_no_influence_on_what_is_packed_with_them():
    """However loud the first tokens are, the scales and the other tokens' codes of their block stay as they were."""
    states = torch.randn(1, 2, 150, 16, generator=torch.Generator().manual_seed(0))
    payloads = []
    for size in (1.0, 500.0):
        loud = states.clone()
        loud[:, :, :4] *= size
        layer = KVLayer(
            DualScaleCodec(correct_tokens=True), DualScaleCodec(axis=PER_TOKEN), residual_length=32, num_sink_tokens=4
        )
        layer.update(loud, loud)
        keys, values = layer.dense()
        assert torch.equal(keys[:, :, :4], loud[:, :, :4])
        assert torch.equal(values[:, :, :4], loud[:, :, :4])
        payloads.append((layer.packed["keys"].fields(0, 1), layer.packed["values"].fields(0, 1), keys[:, :, 4:]))
    for first, second in zip(payloads[0][:2], payloads[1][:2], strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first if name != "codes")
    assert torch.equal(payloads[0][2], payloads[1][2])


@AXES
@pytest.mark.parametrize("nbits", [2, 3])
def test_trying_narrower_ranges_lowers_the_error_of_channels_with_outliers(nbits, axis):
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(1, 2, 8, 64, 32, generator=generator)
    states[torch.rand(states.shape, generator=generator) < 0.02] *= 6
    error = {
        clips: relative_error(DualScaleCodec(nbits=nbits, axis=axis, rotate=False, clips=clips), states)
        for clips in (1, 2, 3)
    }
    assert error[3] < 0.97 * error[1]
    assert error[3] <= error[2] <= error[1]


def test_lloyd_max_levels_are_an_option():
    states = torch.randn(1, 1, 4, 64, 64, generator=torch.Generator().manual_seed(0))
    assert relative_error(DualScaleCodec(nbits=2, levels=LLOYD_MAX, clips=3), states) < 0.125


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nbits": 7}, "`nbits` must be one of"),
        ({"axis": "rows"}, "`axis` must be one of"),
        ({"levels": "cubic"}, "`levels` must be one of"),
        ({"clips": 0}, "`clips` must be one of"),
        ({"block_tokens": 60}, "`block_tokens` must be a multiple of 8, got 60"),
        ({"iterations": 0, "correct_tokens": True}, "`correct_tokens` needs token scales"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DualScaleCodec(**options)
