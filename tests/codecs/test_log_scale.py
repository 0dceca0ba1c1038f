import pytest
import torch

from hf_kvplus.codecs.log_scale import CHANNEL_STEPS, TOKEN_STEPS, from_log_scale, largest, smallest, to_log_scale

STEPS = pytest.mark.parametrize("steps", [CHANNEL_STEPS, TOKEN_STEPS])


@STEPS
def test_every_byte_survives(steps):
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_log_scale(from_log_scale(codes, steps), steps), codes)


@STEPS
def test_rounding_is_off_by_at_most_half_a_step(steps):
    scale = torch.logspace(-2, 2, 999)
    ratio = from_log_scale(to_log_scale(scale, steps), steps) / scale
    assert ratio.log2().abs().max() <= 0.5 / steps + 1e-5


@STEPS
def test_beyond_the_range_the_nearest_end_is_taken_and_zero_stays_zero(steps):
    scale = torch.tensor([0.0, 1e-30, 1e30])
    assert from_log_scale(to_log_scale(scale, steps), steps).tolist() == pytest.approx(
        [0.0, smallest(steps), largest(steps)]
    )
