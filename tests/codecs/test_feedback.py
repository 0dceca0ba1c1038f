import copy
import os

import pytest
import torch

from hf_kvplus.codecs.dual_scale import DualScaleCodec
from hf_kvplus.codecs.metric import KeyMetric, save_metrics


@pytest.fixture
def moment():
    """Second moments of queries that look into few directions, of 2 KV heads of 32 channels."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 500, 32, generator=generator) * torch.logspace(1, -1, 32)
    mix = torch.linalg.qr(torch.randn(2, 32, 32, generator=generator)).Q
    queries = queries @ mix
    return queries.transpose(1, 2) @ queries / 500


@pytest.fixture
def metric(tmp_path, moment):
    save_metrics(tmp_path / "m.safetensors", [None, moment])
    return KeyMetric(tmp_path / "m.safetensors", 1)


def roundtrip(codec, states, valid=None):
    out = torch.empty_like(states)
    codec.decode(codec.encode(states, valid), states.shape[-1], out)
    return out


@pytest.mark.parametrize("nbits", [2, 3, 4])
def test_errors_that_queries_see_are_far_smaller(nbits, metric, moment):
    states = torch.randn(1, 2, 6, 48, 32, generator=torch.Generator().manual_seed(1))
    plain = DualScaleCodec(block_tokens=48, nbits=nbits, clips=3, correct_tokens=True)
    known = DualScaleCodec(block_tokens=48, nbits=nbits, clips=3, correct_tokens=True, metric=metric)

    def seen(codec):
        error = (roundtrip(codec, states) - states)[0]  # (h, n, t, c)
        return float(torch.einsum("hntc,hcd,hntd->", error, moment, error))

    assert seen(known) < 0.6 * seen(plain)


def test_the_payload_has_the_layout_of_one_without_a_metric(metric):
    states = torch.randn(2, 2, 3, 48, 32)
    plain, known = (DualScaleCodec(block_tokens=48, nbits=3, metric=m) for m in (None, metric))
    first, second = plain.encode(states), known.encode(states)
    assert {name: (part.shape, part.dtype) for name, part in first.items()} == {
        name: (part.shape, part.dtype) for name, part in second.items()
    }
    assert plain.bits_per_element(32) == known.bits_per_element(32)
    out, again = torch.empty_like(states), torch.empty_like(states)
    plain.decode(second, 32, out)
    known.decode(second, 32, again)
    assert torch.equal(out, again)


def test_padding_has_no_influence_and_infinities_stay_finite(metric):
    codec = DualScaleCodec(block_tokens=48, nbits=2, clips=3, correct_tokens=True, metric=metric)
    states = torch.randn(1, 2, 2, 48, 32)
    valid = torch.ones(1, 2, 48, dtype=torch.bool)
    valid[0, 0, :20] = False
    outputs = []
    for filler in (0.0, 1000.0, torch.inf, torch.nan):
        filled = states.clone()
        filled[:, :, 0, :20] = filler
        out = roundtrip(codec, filled, valid)
        assert out.isfinite().all()
        outputs.append(out[:, :, 0, 20:])
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])
    states[0, 0, 0] = 0
    states[0, 1, 0, 3, 4] = torch.inf
    states[0, 0, 1, :, 5] = 3.0
    out = roundtrip(codec, states)
    assert out.isfinite().all()
    assert torch.equal(out[0, 0, 0], torch.zeros_like(out[0, 0, 0]))


def test_a_metric_of_other_heads_is_refused(metric):
    codec = DualScaleCodec(block_tokens=48, metric=metric)
    with pytest.raises(
        ValueError, match=r"`calibration` is for \(kv_heads, head_dim\) \(2, 32\), these keys have \(3, 32"
    ):
        codec.encode(torch.randn(1, 3, 1, 48, 32))


def test_a_missing_file_or_layer_is_named(tmp_path, metric):
    with pytest.raises(FileNotFoundError, match="no such file; make one with `kvplus plan --calibrate`"):
        KeyMetric(tmp_path / "none.safetensors", 0)
    with pytest.raises(ValueError, match="has no layer 0"):
        KeyMetric(metric.path, 0)


def test_metrics_are_equal_by_content(tmp_path, metric, moment):
    save_metrics(tmp_path / "moved.safetensors", [None, moment])
    moved = KeyMetric(tmp_path / "moved.safetensors", 1)
    assert moved == metric
    assert hash(moved) == hash(metric)
    assert str(moved) == str(metric)
    assert copy.deepcopy(metric) is metric
    save_metrics(tmp_path / "other.safetensors", [None, 2 * moment + torch.eye(32)])
    assert KeyMetric(tmp_path / "other.safetensors", 1) != metric


def test_a_file_that_is_written_anew_is_another_metric(metric, moment):
    before = metric.factor(rotate=True)
    save_metrics(metric.path, [None, 2 * moment + torch.eye(32)])
    os.utime(metric.path, (1, 1))  # two writes may fall into one tick of the clock
    again = KeyMetric(metric.path, 1)
    assert again != metric
    assert not torch.equal(again.factor(rotate=True), before)
    assert torch.equal(metric.factor(rotate=True), before)
    with pytest.raises(ValueError, match="was written anew since this cache was made; make a new cache"):
        metric.moment(rotate=False)
