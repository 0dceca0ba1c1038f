"""Peak memory of offloaded caches, in processes of their own."""

import json

import pytest

from checkpoints import save_tiny_checkpoint, write_words
from kvplus_eval.offload_memory import main
from kvplus_eval.peak import can_watch

pytestmark = pytest.mark.skipif(not can_watch(), reason="this system doesn't tell a process's peak memory")


def measure(capsys, *arguments):
    main(list(arguments))
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_a_cache_on_disk_needs_far_less_memory_than_it_holds(capsys):
    (row,) = measure(capsys, "--synthetic", "16384", "--strategies", "fp+offload:disk,budget=4MiB")
    assert row["full_cache_bytes"] == 2 * 4 * 2 * 64 * 4 * 16384
    assert row["disk_bytes"] > 0.95 * row["full_cache_bytes"]
    # A layer is dense at a time, a quarter of it all, with some room; half of all was seen
    assert row["peak_bytes"] < 0.75 * row["full_cache_bytes"]


def test_a_text_is_named_as_for_an_evaluation(capsys, tmp_path):
    text = write_words(tmp_path / "text.txt", 1400)
    options = ["--model", str(save_tiny_checkpoint(tmp_path / "model")), "--text", str(text)]
    options += ["--context", "1200", "--tokens", "2", "--strategies", "int4+offload:disk,budget=0"]
    (row,) = measure(capsys, *options)
    assert row["tokens"] == 1202
    assert row["disk_bytes"] > 0
    assert row["decode_ms"] > 0
