import torch

from hf_kvplus.codecs.identity import IdentityCodec


def test_states_come_back_bit_for_bit():
    codec = IdentityCodec(block_tokens=8)
    states = torch.randn(2, 3, 2, 8, 5, dtype=torch.bfloat16)
    out = torch.empty_like(states)
    codec.decode(codec.encode(states), 5, out)
    assert torch.equal(out, states)
    assert codec.lossless


def test_it_reports_the_bits_of_the_model():
    assert IdentityCodec(state_bits=32).bits_per_element(64) == 32.0
