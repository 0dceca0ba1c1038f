import shutil
from pathlib import Path

import pytest

from checkpoints import save_tiny_checkpoint
from kvplus_eval.peak import can_watch, watch_peak


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.skipif(not can_watch(), reason="this system doesn't tell a process's peak memory")
def test_a_process_of_its_own_tells_what_a_long_context_needs(checkpoint):
    # 2 layers x 2 x 2 heads x 64 channels x 4 bytes a token, and less than 64 MiB of everything else
    peak = watch_peak(checkpoint, "dynamic", tokens=4000, decoded=1, chunk_tokens=500)
    assert 4000 * 2048 < peak < 4000 * 2048 + 64 * 2**20


def test_what_went_wrong_in_that_process_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("kvplus_eval.peak.sys.executable", shutil.which("ls"))
    with pytest.raises(RuntimeError, match="watching the memory of `int4` failed: .+"):
        watch_peak(tmp_path, "int4", tokens=10, decoded=1, chunk_tokens=5)
