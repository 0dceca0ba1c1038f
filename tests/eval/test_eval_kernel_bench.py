"""The benchmark of kernels alone, and the run for GPUs at its tiny size."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from hf_kvplus.attention.cpu import CPUKernel
from kvplus_eval import gpu_bench
from kvplus_eval.commands import bench
from kvplus_eval.held_sdpa import HeldAttention
from kvplus_eval.kernel_bench import Shape, kernel_table, make_layer, read_shape, run_kernel_bench

SMALL = Shape(kv_heads=2, queries=2, head_dim=32, tokens=300)
CPU = torch.device("cpu")


def test_each_way_to_attend_has_figures_that_fit_together():
    rows = run_kernel_bench(["int4", "fp"], SMALL, device=CPU, dtype=torch.float32, rounds=3)
    assert [row["strategy"] for row in rows] == ["int4", "fp", "sdpa-float32", "sdpa-bfloat16"]
    found = {row["strategy"]: row["kernel"] for row in rows}
    dense_bytes = 2 * 2 * 300 * 32 * 4
    assert found["sdpa-float32"]["held_bytes"] == 2 * found["sdpa-bfloat16"]["held_bytes"] == dense_bytes
    assert found["int4"]["held_bytes"] < found["fp"]["held_bytes"] == dense_bytes
    for kernel in found.values():
        assert kernel["bytes_per_s"] == pytest.approx(kernel["held_bytes"] / kernel["ms"] * 1000)
        assert kernel["times_sdpa_float32"] == pytest.approx(found["sdpa-float32"]["ms"] / kernel["ms"])
        assert kernel["ms_fastest"] <= kernel["ms"] <= kernel["ms_slowest"]
    assert 0 < found["int4"]["error"] < 1e-5


AVX512 = pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX512"), reason="needs a CPU with AVX-512"
)


@AVX512
def test_a_second_yardstick_is_held_to_plain_avx512_and_stands_beside_the_first(monkeypatch):
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "AVX2")  # of this process; the other one has its own
    rows = run_kernel_bench(["int4"], SMALL, device=CPU, dtype=torch.float32, rounds=2, held=True)
    found = {row["strategy"]: row["kernel"] for row in rows}
    assert list(found) == ["int4", "sdpa-float32", "sdpa-bfloat16", "sdpa-bfloat16-avx512"]
    plain, held = found["sdpa-bfloat16"], found["sdpa-bfloat16-avx512"]
    assert held["instructions"]["limits"] == {"MKL_ENABLE_INSTRUCTIONS": "AVX512"}
    assert plain["instructions"]["limits"] == {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    assert held["instructions"]["bfloat16_units"] == plain["instructions"]["bfloat16_units"]
    assert held["held_bytes"] == plain["held_bytes"]
    assert found["int4"]["times_sdpa_bfloat16_avx512"] == pytest.approx(held["ms"] / found["int4"]["ms"])
    assert found["int4"]["times_sdpa_bfloat16"] == pytest.approx(plain["ms"] / found["int4"]["ms"])
    assert len(kernel_table(rows).columns) == 8


@AVX512
def test_the_process_of_the_second_yardstick_attends_as_often_as_it_is_asked_and_ends():
    attention = HeldAttention({"batch": 1, "kv_heads": 2, "queries": 2, "head_dim": 32, "tokens": 300})
    assert all(attention.step_ms() > 0 for _ in range(3))
    attention.close()
    assert attention.process.returncode == 0


def test_a_second_yardstick_that_fails_says_how():
    with pytest.raises(RuntimeError, match="process of its own failed: .*KeyError"):
        HeldAttention({"batch": 1})


def test_the_second_yardstick_is_about_cpus():
    with pytest.raises(ValueError, match="`held` is about a CPU's instructions, this is cuda"):
        run_kernel_bench(["int4"], SMALL, device=torch.device("cuda"), dtype=torch.float32, held=True)


def test_a_layer_has_the_shape():
    layer = make_layer("int4", SMALL, device=CPU, dtype=torch.float32)
    assert layer.shapes == {"keys": (2, 32), "values": (2, 32)}
    assert layer.get_seq_length() == 300


def test_a_kernel_that_is_wrong_gets_no_time(monkeypatch):
    attend = CPUKernel.attend
    monkeypatch.setattr(CPUKernel, "attend", lambda *given: attend(*given) * 1.01)
    row = run_kernel_bench(["int4"], SMALL, device=CPU, dtype=torch.float32, rounds=1)[0]
    assert row["status"] == "refused"
    assert "off by 0.01" in row["reason"]
    assert "ms" not in row["kernel"]


def test_a_cache_of_transformers_is_refused():
    row = run_kernel_bench(["hf-static"], SMALL, device=CPU, dtype=torch.float32, rounds=1)[0]
    assert row["status"] == "refused"
    assert "no layers that can be read packed" in row["reason"]


def test_shapes_are_read_and_wrong_ones_refused():
    assert read_shape("batch=2,tokens=64") == Shape(batch=2, tokens=64)
    assert read_shape("") == Shape()
    for text in ("length=3", "tokens=many", "tokens"):
        with pytest.raises(ValueError, match="`shape` must name numbers for batch, kv_heads, queries"):
            read_shape(text)


def test_the_command_appends_rows_and_ends_with_json(tmp_path):
    import typer

    app = typer.Typer()
    app.command()(bench)
    shape = "kv_heads=1,queries=2,head_dim=32,tokens=200"
    command = ["--kernels", "--strategies", "dynamic,int4", "--shape", shape, "--rounds", "1", "--tokens", "2"]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0
    summary = json.loads(done.output.strip().splitlines()[-1])
    assert [one["strategy"] for one in summary["strategies"]] == ["int4", "sdpa-float32", "sdpa-bfloat16"]
    assert len((tmp_path / "kernels.jsonl").read_text().splitlines()) == 3


def test_the_run_for_gpus_is_complete_at_its_tiny_size(tmp_path):
    assert gpu_bench.main(["--tiny", "--device", "cpu", "--out", str(tmp_path)]) == 0
    folder = tmp_path / "cpu-tiny"
    kernels = [json.loads(line) for line in (folder / "kernels.jsonl").read_text().splitlines()]
    assert {row["strategy"] for row in kernels} >= {"fp", "int8", "int4", "int3", "int2"}
    models = [json.loads(line) for line in (folder / "bench.jsonl").read_text().splitlines()]
    assert [row["strategy"] for row in models] == ["dynamic", "fp", "int8", "int4"]
    assert all(row["bench"]["fused"] for row in models[1:])
    lines = json.loads((folder / "lines.json").read_text())
    assert [line["least"] for line in lines] == [0.6, 2.5, 1.5]
    assert all(line["holds"] == (line["measured"] >= line["least"]) for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--device", "cpu"], "only --tiny"), (["--device", "cuda"], "finds no GPU")]
)
def test_where_no_gpu_is_the_full_run_is_refused(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu_bench.main(arguments)
    assert message in capsys.readouterr().err
