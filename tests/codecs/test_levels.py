import math

import pytest
import torch

from hf_kvplus.codecs.levels import LLOYD_MAX, UNIFORM, level_table, nearest_codes

KINDS = pytest.mark.parametrize("kind", [LLOYD_MAX, UNIFORM])


@KINDS
@pytest.mark.parametrize("nbits", [1, 2, 3, 4, 6])
def test_levels_ascend_and_are_symmetric(nbits, kind):
    levels = level_table(nbits, kind)
    assert (levels.diff() > 0).all()
    torch.testing.assert_close(levels, -levels.flip(0))


@pytest.mark.parametrize(("nbits", "error"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_lloyd_max_levels_have_the_error_of_the_textbook(nbits, error):
    # Max, Quantizing for minimum distortion, 1960, table I.
    grid = torch.linspace(-8, 8, 400_001, dtype=torch.float64)
    density = torch.exp(-grid.square() / 2) / math.sqrt(2 * math.pi) * (grid[1] - grid[0])
    levels = level_table(nbits, LLOYD_MAX)
    gap = grid - levels.double()[nearest_codes(grid.float(), nbits, LLOYD_MAX).int()]
    assert float((gap.square() * density).sum()) == pytest.approx(error, rel=2e-3)


@KINDS
@pytest.mark.parametrize("nbits", [1, 2, 3, 4, 5, 6, 8])
def test_the_nearest_level_is_chosen(nbits, kind):
    levels = level_table(nbits, kind)
    values = torch.linspace(float(levels[0]) * 1.3, float(levels[-1]) * 1.3, 777)
    chosen = (values - levels[nearest_codes(values, nbits, kind).int()]).abs()
    torch.testing.assert_close(chosen, (values[:, None] - levels).abs().amin(-1), rtol=0, atol=1e-4)


@KINDS
def test_a_level_keeps_its_code(kind):
    assert nearest_codes(level_table(4, kind), 4, kind).tolist() == list(range(16))
