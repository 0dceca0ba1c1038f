"""The compiled functions for turning means against PyTorch's operators."""

import pytest
import torch

pytest.importorskip("numba")

from test_rotary_mean import make_turns, turned_bias

from hf_kvplus.codecs import rotary_mean
from hf_kvplus.codecs.compiled_means import find_mean_taker
from hf_kvplus.key_bias import KeyTurns
from hf_kvplus.recipes import Quantization


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_functions_agree_with_operators(interleaved, dtype, monkeypatch):
    turns = make_turns(24, interleaved)  # of 32 pairs
    codec, _ = Quantization(3, 3).codecs(0, 64, KeyTurns(turns, biased=True))
    states = torch.randn(2, 3, 5, 48, 64) + turned_bias(turns, 48, 64, {2: 60.0, 50: -30.0, 63: 400.0})
    states = states.to(dtype).transpose(0, 1)  # as views of a model are: with gaps
    valid = torch.rand(3, 5, 48) < 0.8
    assert find_mean_taker()
    found = [codec.encode(states, mask) for mask in (None, valid)]
    read = [torch.empty(states.shape, dtype=dtype) for _ in found]
    for packed, out in zip(found, read, strict=True):
        codec.decode(packed, 64, out)
    monkeypatch.setattr(rotary_mean, "find_mean_taker", lambda: None)
    for mask, packed, out in zip((None, valid), found, read, strict=True):
        expected = codec.encode(states, mask)
        assert torch.equal(packed["rotary_pair"], expected["rotary_pair"])
        torch.testing.assert_close(packed["rotary_mean"], expected["rotary_mean"], rtol=2e-3, atol=1e-3)
        assert (packed["codes"] != expected["codes"]).float().mean() < 0.01
        by_operators = torch.empty_like(out)
        codec.decode_by_operators(packed, 64, by_operators)
        torch.testing.assert_close(out, by_operators, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
