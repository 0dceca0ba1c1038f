import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvplus.codecs.identity import IdentityCodec
from hf_kvplus.codecs.rotary_mean import RotaryMeanCodec
from hf_kvplus.codecs.turns import ChannelTurns, turn_tables
from hf_kvplus.key_bias import KeyTurns
from hf_kvplus.recipes import Quantization


def make_turns(pairs, interleaved=False):
    return ChannelTurns(tuple(10000.0 ** (-index / pairs) for index in range(pairs)), interleaved)


def turned_bias(turns, tokens, head_dim, bias):
    """What a bias `{channel: size}` becomes behind RoPE, `(tokens, head_dim)`, from position 0 on."""
    first, second, cos, sin = turn_tables(turns, tokens, head_dim, "cpu")
    before = torch.zeros(head_dim)
    for channel, size in bias.items():
        before[channel] = size
    out = torch.zeros(tokens, head_dim)
    out[:, first] = before[first] * cos - before[second] * sin
    out[:, second] = before[second] * cos + before[first] * sin
    return out


def stored(codec, states, valid=None):
    out = torch.empty_like(states)
    codec.decode(codec.encode(states, valid), states.shape[-1], out)
    return out


def test_pairs_are_those_of_the_model():
    assert make_turns(2).pairs(4) == ((0, 1), (2, 3), (1.0, 0.01))
    assert make_turns(2, interleaved=True).pairs(4)[:2] == ((0, 2), (1, 3))
    # Three channels in eight turn; the others are paired as they come, with frequency 0.
    first, second, inv_freq = make_turns(1).pairs(6)
    assert sorted(first + second) == list(range(6))
    assert inv_freq == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("channel", [0, 5, 15, 16, 31])
def test_a_turning_mean_comes_back_in_full(channel, interleaved):
    codec = RotaryMeanCodec(IdentityCodec(block_tokens=48), make_turns(16, interleaved), 1)
    states = turned_bias(codec.turns, 96, 32, {channel: 300.0}).view(1, 1, 2, 48, 32) + torch.randn(1, 1, 2, 48, 32)
    packed = codec.encode(states)
    assert packed["rotary_mean"].norm(dim=-1).sub(300).abs().max() < 2
    assert packed["states"].abs().max() < 10
    torch.testing.assert_close(stored(codec, states), states, rtol=0, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(
    nbits=st.sampled_from([2, 3, 4, 8]),
    recipe=st.sampled_from(["dual_scale", "affine"]),
    size=st.floats(50, 400),
    channel=st.integers(0, 63),
    position=st.integers(0, 100_000),
    seed=st.integers(0, 2**16),
)
def test_a_bias_anywhere_adds_nothing_to_the_error(nbits, recipe, size, channel, position, seed):
    """Whatever the channel and however far into the text a block begins."""
    turns = make_turns(32)
    codec, _ = Quantization(nbits, nbits, recipe=recipe).codecs(0, 64, KeyTurns(turns, biased=True))
    content = torch.randn(1, 1, 1, codec.block_tokens, 64, generator=torch.Generator().manual_seed(seed))
    first, second, inv_freq = turns.pairs(64)
    bias = torch.zeros(64, dtype=torch.float64)
    bias[channel] = size
    angles = torch.arange(position, position + codec.block_tokens, dtype=torch.float64)[:, None] * torch.tensor(
        inv_freq
    )
    turned = torch.zeros(codec.block_tokens, 64, dtype=torch.float64)
    turned[:, first] = bias[list(first)] * angles.cos() - bias[list(second)] * angles.sin()
    turned[:, second] = bias[list(second)] * angles.cos() + bias[list(first)] * angles.sin()
    states = content + turned.float()
    plain = (stored(codec, content) - content).square().mean()
    assert (stored(codec, states) - states).square().mean() < 1.5 * plain + 1e-6


def test_padding_and_sinks_have_no_influence():
    codec, _ = Quantization(4, 4).codecs(0, 64, KeyTurns(make_turns(32), biased=True))
    states = torch.randn(1, 2, 1, 48, 64)
    valid = torch.ones(1, 1, 48, dtype=torch.bool)
    valid[..., :9] = False
    other = states.clone()
    other[..., :9, :] = 1e4
    seen, found = (stored(codec, given, valid)[..., 9:, :] for given in (states, other))
    torch.testing.assert_close(seen, found)
    nothing = stored(codec, other, torch.zeros_like(valid))
    assert nothing.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_finite(dtype):
    codec, _ = Quantization(4, 4).codecs(0, 64, KeyTurns(make_turns(32), biased=True))
    states = torch.randn(1, 1, 2, 48, 64).to(dtype)
    states[0, 0, 0, 20] = torch.finfo(torch.float16).max
    states[0, 0, 1, 30, 3] = torch.inf
    states[0, 0, 1, 31, 3] = torch.nan
    assert stored(codec, states).isfinite().all()
    loud = torch.full_like(states, torch.finfo(torch.float16).max)
    assert codec.encode(loud)["rotary_mean"].isfinite().all()
    assert stored(codec, loud).isfinite().all()


def test_a_mean_that_isnt_far_stays_where_it_is():
    codec, _ = Quantization(4, 4).codecs(0, 64, KeyTurns(make_turns(32), biased=True))
    states = torch.randn(1, 2, 3, 48, 64) + turned_bias(codec.turns, 48, 64, {2: 5.0})
    packed, plain = codec.encode(states), codec.inner.encode(states)
    assert not packed["rotary_mean"].any()
    assert all(torch.equal(packed[name], tensor) for name, tensor in plain.items())


@pytest.mark.parametrize(("size", "far", "taken"), [(6, 4.0, True), (6, 8.0, False), (12, 8.0, True)])
def test_how_far_a_mean_must_be_is_counted_in_deviations(size, far, taken):
    noise = torch.randn(1, 1, 1, 48, 32, generator=torch.Generator().manual_seed(0))
    codec = RotaryMeanCodec(IdentityCodec(block_tokens=48), make_turns(16), 1, far)
    states = noise + turned_bias(codec.turns, 48, 32, {0: size})
    assert bool(codec.encode(states)["rotary_mean"].any()) == taken


@pytest.mark.parametrize("recipe", ["dual_scale", "affine"])
def test_an_offset_that_doesnt_turn_stays_what_it_is(recipe):
    codec, _ = Quantization(3, 3, recipe=recipe).codecs(0, 16, KeyTurns(make_turns(8), biased=True))
    states = torch.full((1, 1, 1, codec.block_tokens, 16), 2.0)
    torch.testing.assert_close(stored(codec, states), states, rtol=0, atol=0.02)


def test_bits_are_what_is_stored():
    for means in (1, 4, 7):
        codec, _ = Quantization(4, 4, rotary_means=means).codecs(0, 64, KeyTurns(make_turns(32)))
        packed = codec.encode(torch.randn(2, 3, 4, 48, 64))
        taken = sum(tensor.numel() * tensor.element_size() for tensor in packed.values())
        assert 8 * taken / (2 * 3 * 4 * 48 * 64) == pytest.approx(codec.bits_per_element(64), rel=1e-6)
        assert f"{means} turning means" in codec.describe()


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="`far` must be at least 0, got -1"):
        RotaryMeanCodec(IdentityCodec(block_tokens=48), make_turns(16), 1, -1)
    with pytest.raises(ValueError, match="rotary_means.*no configuration"):
        Quantization(4, 4, rotary_means=2).codecs()
    with pytest.raises(ValueError, match="rotary_means"):
        Quantization(4, 4, rotary_means=-1)
    codec, _ = Quantization(4, 4, rotary_means=9).codecs(0, 16, KeyTurns(make_turns(8)))
    with pytest.raises(ValueError, match="needs heads of 18"):
        codec.check(16)
    assert Quantization(16, 4).codecs(0, 64, KeyTurns(make_turns(32), biased=True))[0].lossless
