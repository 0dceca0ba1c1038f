"""How a line of codes is divided into vectors."""

import pytest

from hf_kvplus.codecs.packing import PLANES

pytest.importorskip("numba")
from hf_kvplus.attention.vectors import LANES, line_vectors  # noqa: E402


@pytest.mark.parametrize("nbits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("length", [16, 32, 48, 64, 80, 96, 112, 128, 256])
def test_each_code_is_in_one_lane(nbits, length):
    vectors = line_vectors(length, nbits)
    assert all(len(places) == LANES for places in vectors)
    assert sorted(place for places in vectors for place in places) == list(range(length))


@pytest.mark.parametrize("nbits", [2, 4])
@pytest.mark.parametrize("length", [48, 80, 112])
def test_the_lanes_of_a_vector_read_one_run_of_bytes(nbits, length):
    size = length * nbits // 8
    for places in line_vectors(length, nbits):
        read = sorted({place % size for place in places})
        assert read == list(range(read[0], read[0] + len(read))), places


def test_planes_that_are_put_together_keep_the_order():
    assert len(PLANES[3]) == 2
    assert line_vectors(48, 3) == [tuple(range(first, first + LANES)) for first in range(0, 48, LANES)]
