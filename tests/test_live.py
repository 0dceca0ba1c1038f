"""A recorder sees the cache after every step, passes tokens on, and draws; the live view shows its figures."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from transformers.generation.streamers import BaseStreamer

from hf_kvplus import MemoryRecorder, build_cache, estimate_memory, live, measure_memory
from hf_kvplus.live import LiveView, Step


class Collector(BaseStreamer):
    def __init__(self):
        self.values, self.ended = [], False

    def put(self, value):
        self.values.append(value)

    def end(self):
        self.ended = True


def generate(model, cache, streamer, new: int = 6, prompt: int = 100):
    tokens = torch.randint(2, 100, (1, prompt))
    arguments = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    model.generate(
        tokens, attention_mask=torch.ones_like(tokens), past_key_values=cache, streamer=streamer, **arguments
    )


@pytest.mark.parametrize("strategy", ["int4", "dynamic", "window:64"])
def test_every_step_is_recorded_with_the_bytes_there_were(llama, strategy):
    cache = build_cache(strategy, llama.config)
    with MemoryRecorder(cache) as recorder:
        generate(llama, cache, recorder)
    assert [step.tokens for step in recorder.steps] == list(range(100, 106))
    assert recorder.steps[-1].cache_bytes == measure_memory(cache).total_bytes
    for step in recorder.steps[1:]:
        expected = estimate_memory(llama.config, step.tokens, strategy=strategy, prompt_tokens=100).cache_bytes
        assert step.cache_bytes == pytest.approx(expected, rel=0.01)
    assert recorder.peak_cache_bytes >= recorder.steps[-1].cache_bytes
    assert all(a.elapsed_s <= b.elapsed_s for a, b in zip(recorder.steps, recorder.steps[1:], strict=False))


def test_tokens_reach_another_streamer_and_steps_a_callback(llama):
    cache, collector, seen = build_cache("int4", llama.config), Collector(), []
    generate(llama, cache, MemoryRecorder(cache, collector, seen.append, every=3))
    assert [value.numel() for value in collector.values] == [100, 1, 1, 1, 1, 1, 1]
    assert collector.ended
    assert [step.tokens for step in seen] == [100, 103, 105]


def test_recording_begins_anew_and_leaves_out_what_failed(llama):
    cache = build_cache("int4", llama.config)
    recorder = MemoryRecorder(cache)
    generate(llama, cache, recorder)
    with pytest.raises(RuntimeError, match="stop"), recorder:
        raise RuntimeError("stop")
    assert recorder.steps == []
    assert recorder.peak_cache_bytes == 0


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_steps_are_drawn(llama, tmp_path, kind):
    pytest.importorskip("matplotlib")
    cache = build_cache("int4", llama.config)
    recorder = MemoryRecorder(cache)
    with pytest.raises(ValueError, match="nothing was recorded"):
        recorder.plot(tmp_path / "memory.png")
    generate(llama, cache, recorder)
    path = tmp_path / f"memory.{kind}"
    recorder.plot(path, "int4")
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_peaks_of_all_devices_are_recorded_and_drawn(llama, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    reset = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 10**6 * (1 + device))
    recorder = MemoryRecorder(build_cache("int4", llama.config))
    step = recorder.record()
    assert reset == [0, 1]
    assert step.peak_bytes == 3 * 10**6
    recorder.steps.append(Step(10, 5000, 4 * 10**6, 1.0))
    drawn = []
    monkeypatch.setattr(live, "plot_bytes", lambda lines, path: drawn.extend(lines))
    recorder.plot(tmp_path / "memory.png", "int4")
    assert [line["strategy"] for line in drawn] == ["int4", live.PEAK]
    assert drawn[0]["curve"] == [[0, step.cache_bytes], [10, 5000]]
    assert drawn[1]["curve"] == [[0, 3 * 10**6], [10, 4 * 10**6]]
    monkeypatch.undo()
    recorder.plot(tmp_path / "memory.png", "int4")
    assert (tmp_path / "memory.png").exists()


def test_live_view_shows_share_and_speed():
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with LiveView(lambda tokens: 1000 * tokens, "int4", console) as view:
        view.show(Step(10, 5000, 0, 1.0))
        view.show(Step(20, 5000, 3 * 1024**2, 2.0))
    text = console.file.getvalue()
    assert "25.0 % of full" in text
    assert "20 tokens, 10.0 tokens/s" in text
    assert "3.0 MiB" in text


def test_bad_arguments_are_named(llama):
    with pytest.raises(TypeError, match="must be a transformers Cache"):
        MemoryRecorder([])
    with pytest.raises(ValueError, match="`every` must be at least 1"):
        MemoryRecorder(build_cache("int4", llama.config), every=0)
