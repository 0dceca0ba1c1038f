"""Growth of times with the context, memory while decoding, and the picture: all from rows of a benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from checkpoints import save_tiny_checkpoint
from hf_kvplus.plots import plot_decode
from kvplus_eval import decode_peak
from kvplus_eval.decode_peak import PeakJob, peak_table, watch_decoding, watch_rows
from kvplus_eval.growth import growth_rows, growth_table, require_contexts
from kvplus_eval.guards import RefusedError
from kvplus_eval.peak import can_watch

WATCHABLE = pytest.mark.skipif(not can_watch(), reason="this system doesn't tell a process's peak memory")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def row(strategy, context, ms, steps=None, status="ok"):
    bench = {"context_tokens": context, "decode_ms_per_token": ms, "decode_ms": steps or [ms] * 3, "fused": False}
    return {"strategy": strategy, "status": status, "reason": None, "run": "r", "bench": bench}


def rows_of(strategy, times, steps=None):
    return [
        row(strategy, context, ms, steps if context == 8192 else None)
        for context, ms in zip((16, 2064, 8208 - 16), times, strict=True)
    ]


def test_time_in_proportion_to_the_context_is_linear():
    (found,) = growth_rows([row("int4", 0, 40.0), row("int4", 2048, 42.0), row("int4", 8192, 48.0)])
    growth = found["growth"]
    assert growth["context_ms"] == 8
    assert growth["us_per_1k_tokens"] == [1000, 1000]
    assert growth["linearity"] == 1


def test_time_that_grows_faster_than_the_context_shows():
    fast, slow = growth_rows([*rows_of("dynamic", (40, 42, 60)), *rows_of("fp", (40, 44, 50))])
    assert fast["growth"]["linearity"] > 2
    assert slow["growth"]["linearity"] < 1


@pytest.mark.parametrize(
    ("times", "off_line"),
    [((40, 50, 52, 54, 56), 0), ((40, 42, 44, 46, 48), 0), ((40, 41, 41, 41, 48), 0.35), ((40, 50, 50, 50, 50), 0)],
    ids=["a_start_and_a_line", "in_proportion", "a_jump", "flat"],
)
def test_distance_from_a_straight_line_leaves_out_what_a_context_costs_at_once(times, off_line):
    contexts = (16, 2048, 4096, 6144, 8192)
    (found,) = growth_rows([row("int4", context, ms) for context, ms in zip(contexts, times, strict=True)])
    assert found["growth"]["off_line"] == pytest.approx(off_line, abs=1e-9)
    assert len(found["growth"]["us_per_1k_tokens"]) == 4


def test_three_contexts_are_too_few_for_a_line():
    (found,) = growth_rows(rows_of("int4", (40, 42, 48)))
    assert found["growth"]["off_line"] is None


def test_the_slowest_step_is_compared_with_the_median_of_the_longest_context():
    (found,) = growth_rows(rows_of("int4", (40, 42, 48), steps=[48.0] * 511 + [150.0]))
    assert found["growth"]["steps"] == 512
    assert found["growth"]["slowest_of_median"] == pytest.approx(150 / 48)


def test_a_context_without_figures_leaves_none():
    rows = [row("int4", 16, 40.0), row("int4", 2048, 0.0, status="failed"), row("int4", 8192, 0.0, status="failed")]
    (found,) = growth_rows(rows)
    assert found["status"] == "failed"
    assert found["growth"] == {}
    assert growth_table([found]).row_count == 1


def test_time_that_doesnt_depend_on_the_context_has_no_linearity():
    (found,) = growth_rows(rows_of("window", (40, 40, 40)))
    assert found["growth"]["linearity"] is None
    assert growth_table([found]).row_count == 1


def test_two_contexts_tell_nothing_about_growth():
    require_contexts((16, 2048, 8192))
    with pytest.raises(ValueError, match=r"needs three `--context` lengths or more, got 2; for example 16,2048,8192"):
        require_contexts((16, 8192))


def test_the_picture_has_a_line_for_each_strategy(tmp_path):
    plot_decode([*rows_of("dynamic", (40, 55, 100)), *rows_of("int4", (41, 43, 50))], tmp_path / "ms.png")
    assert (tmp_path / "ms.png").read_bytes().startswith(b"\x89PNG")


@WATCHABLE
def test_what_a_step_needs_beside_its_cache_is_told_by_the_system(checkpoint, monkeypatch):
    # Tensors of more than this are mapped and go back to the system when they are freed, so no hole is counted.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
    # In a process of its own: room that earlier tests left would be taken, and not seen.
    found = watch_decoding(PeakJob(str(checkpoint), "dynamic", context=30_000, decoded=6))
    # 2 layers x 2 x 2 heads x 64 channels x 4 bytes a token; a step of dynamic copies a layer's keys or values.
    assert found["decode_cache_bytes"] == pytest.approx((30_000 + 6) * 2048, rel=1e-6)
    layer_bytes = found["decode_cache_bytes"] / 4
    assert 0.5 * layer_bytes < found["decode_beside_bytes"] < 3 * layer_bytes
    assert found["decode_peak_bytes"] == sum(found[f"decode_{name}_bytes"] for name in ("working", "cache", "beside"))


@WATCHABLE
def test_a_process_of_its_own_measures_and_rows_take_it_in(checkpoint):
    rows = [row("int4", 16, 1.0), row("int4", 400, 1.0)]
    job = PeakJob(str(checkpoint), "int4", context=400, decoded=70, fused=True)
    assert watch_rows(rows, {"int4": job}) == []
    assert "decode_peak_bytes" not in rows[0]["bench"]
    assert rows[1]["bench"]["decode_cache_bytes"] > 0
    assert peak_table(rows).row_count == 1


def test_what_went_wrong_in_that_process_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(decode_peak, "can_watch", lambda: True)
    rows = [row("int4", 400, 1.0)]
    (line,) = watch_rows(rows, {"int4": PeakJob(str(tmp_path / "none"), "int4", context=40, decoded=2)})
    assert line.startswith("int4: watching `int4` decode failed")
    assert peak_table(rows).row_count == 0


def test_systems_that_dont_tell_are_refused(monkeypatch):
    monkeypatch.setattr(decode_peak, "can_watch", lambda: False)
    with pytest.raises(RefusedError, match="told by Linux only"):
        watch_decoding(PeakJob("none", "int4", context=40, decoded=2))


def test_the_command_writes_growth_and_a_picture_beside_its_rows(checkpoint, tmp_path):
    import typer

    from kvplus_eval.commands import bench

    app = typer.Typer()
    app.command()(bench)
    command = ["--model", str(checkpoint), "--strategies", "fp", "--context", "16,40,80", "--tokens", "2"]
    command += ["--rounds", "1", "--growth", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0
    assert "linearity" in done.output
    (found,) = [json.loads(line) for line in (tmp_path / "growth.jsonl").read_text().splitlines()]
    assert found["growth"]["contexts"] == [16, 40, 80]
    assert found["kind"] == "bench-growth"
    assert (tmp_path / "ms-by-context.png").exists()
