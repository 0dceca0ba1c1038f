import pytest

from hf_kvplus.plots import spread
from hf_kvplus.units import format_bytes, format_number, format_percent


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0, 0.0], [5, 1, 3, 3.1, 2.9], [1], [], [10, 0, 20]])
def test_labels_end_up_apart_and_in_order(values):
    placed = spread(values, gap=1.0)
    ranked = sorted(range(len(values)), key=lambda index: values[index])
    heights = [placed[index] for index in ranked]
    assert all(after - before >= 1 - 1e-9 for before, after in zip(heights, heights[1:], strict=False))
    assert sum(placed) == pytest.approx(sum(values))


def test_labels_that_dont_touch_stay_where_they_are():
    assert spread([10, 0, 20], gap=5) == [10, 0, 20]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "–"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 * 1024**2, "3.0 MiB"),
        (5 * 1024**3, "5.00 GiB"),
    ],
)
def test_bytes_are_written_in_powers_of_1024(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (8.3e-15, "8.3e-15"),
        (0.00151, "0.00151"),
        (24.5165, "24.5"),
        (1234.5, "1234"),
        (7, "7"),
    ],
)
def test_numbers_are_written_plainly_where_that_is_readable(value, text):
    assert format_number(value) == text


def test_a_tiny_negative_change_isnt_minus_zero():
    assert format_percent(-0.0001, signed=True) == "+0.00 %"
    assert format_percent(-1.234, signed=True) == "-1.23 %"
