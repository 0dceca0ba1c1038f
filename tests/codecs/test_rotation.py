import pytest
import torch

from hf_kvplus.codecs.rotation import hadamard, hadamard_order


@pytest.mark.parametrize("head_dim", [1, 5, 16, 64, 80, 96, 128, 256])
def test_a_rotation_is_symmetric_and_its_own_inverse(head_dim):
    matrix = hadamard(head_dim)
    assert torch.equal(matrix, matrix.T)
    torch.testing.assert_close(matrix @ matrix, torch.eye(head_dim))


@pytest.mark.parametrize(("head_dim", "order"), [(1, 1), (5, 1), (64, 64), (80, 16), (96, 32), (112, 16)])
def test_blocks_are_the_largest_power_of_two_that_divides(head_dim, order):
    assert hadamard_order(head_dim) == order
    assert (hadamard(head_dim) != 0).sum(-1).unique().tolist() == [order]


def test_one_large_channel_is_spread_evenly():
    state = torch.zeros(64)
    state[3] = 8.0
    assert (state @ hadamard(64)).abs().tolist() == [1.0] * 64
