import numpy
import pytest
import torch

from kvplus_eval.reference import ReferenceStore


def store(folder, **question):
    return ReferenceStore.open(folder, {"model": "a", **question}, positions=5)


def test_what_was_written_is_read_back_exactly(tmp_path):
    values = torch.randn(5, 7)
    with store(tmp_path).recording(0, vocab=7) as rows:
        rows[:] = values.numpy()
    store(tmp_path).finish(0, full_bytes=123)
    again = store(tmp_path)
    assert again.has(0)
    assert torch.equal(again.read(0, 1, 4), values[1:4])
    assert again.full_bytes(0) == 123


def test_another_question_finds_nothing(tmp_path):
    first = store(tmp_path)
    with first.recording(0, vocab=7) as rows:
        rows[:] = 0
    first.finish(0, full_bytes=1)
    assert not store(tmp_path, chunk_tokens=64).has(0)


def test_a_window_that_was_interrupted_doesnt_count(tmp_path):
    found = store(tmp_path)

    def interrupted():
        with found.recording(0, vocab=7) as rows:
            rows[:2] = 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not found.has(0)
    with found.recording(0, vocab=7) as rows:
        rows[:] = numpy.arange(35).reshape(5, 7)
    assert not found.has(0)
    found.finish(0, full_bytes=1)
    assert found.has(0)


def test_a_full_disk_is_told_before_writing(tmp_path):
    with pytest.raises(OSError, match="are free"), store(tmp_path).recording(0, vocab=10**15):
        pass
