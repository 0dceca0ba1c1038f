import json

import pytest
from typer.testing import CliRunner

from checkpoints import one_thread, save_tiny_checkpoint, write_words
from hf_kvplus.cli import build_app
from hf_kvplus.report import write_report
from kvplus_eval.results import SCHEMA, read_rows
from kvplus_eval.tables import eval_tables, make_console

ROW_KEYS = {"schema", "kind", "run", "date", "strategy", "status", "reason", "traceback", "claimed_bits", "plan"}
ROW_KEYS |= {"metrics", "units", "curve", "model", "text", "protocol", "versions", "device", "git_commit"}
ROW_KEYS |= {"windows", "contexts", "tasks", "layers", "findings", "suite", "question", "layer_sensitivity"}
ROW_KEYS |= {"reference_model"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    with one_thread():
        yield str(save_tiny_checkpoint(folder / "model")), str(write_words(folder / "text.txt", 1000))


def run(command, place, out, *arguments):
    model, text = place
    options = ["--model", model, "--out", str(out), "--device", "cpu", "--text", text]
    return CliRunner().invoke(build_app(), [command, *options, *arguments])


def evaluate(place, out, *arguments):
    small = ["--windows", "2", "--window-tokens", "320", "--chunk-tokens", "32", "--timing-rounds", "2"]
    return run("eval", place, out, *small, "--decode-tokens", "4", "--greedy-tokens", "12", *arguments)


@pytest.fixture(scope="module")
def finished(place, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    result = evaluate(place, out, "--strategies", "dynamic,fp,int4")
    assert result.exit_code == 0, (result.output, result.exception)
    return out, result.stdout, read_rows(out / "results.jsonl")


def test_the_last_line_is_one_json_object_after_a_table(finished):
    _, printed, rows = finished
    lines = printed.strip().splitlines()
    summary = json.loads(lines[-1])
    assert [one["strategy"] for one in summary["strategies"]] == ["dynamic", "fp", "int4"]
    assert summary["strategies"][2]["kl_mean_nats"] == rows[2]["metrics"]["kl_mean_nats"]
    assert not any(line.startswith("{") for line in lines[:-1])
    assert any(line.split()[:1] == ["int4"] and "MiB" in line or "KiB" in line for line in lines[:-1])


def test_figures_stand_whole_beside_a_long_name(finished):
    """In a file or a pipe, where nobody can make the screen wider."""
    rows = [{**row, "strategy": f"adapter:{'a/long/path/' * 6}cache.py,bits=4"} for row in finished[2]]
    console = make_console()
    with console.capture() as captured:
        for table in eval_tables(rows, console.width):
            console.print(table)
    assert "…" not in captured.get()
    assert captured.get().count("cache.py,bits=4") == 3


def test_rows_follow_the_schema(finished):
    _, _, rows = finished
    for row in rows:
        assert row.keys() == ROW_KEYS
        assert (row["schema"], row["kind"], row["status"]) == (SCHEMA, "eval", "ok")
        assert row["metrics"].keys() == row["units"].keys()
        assert row["protocol"]["chunk_tokens"] == 32
        assert len(row["text"]["sha256"]) == 64
        assert row["curve"][-1] == [320, row["curve"][-1][1]]
        assert len(row["curve"]) == 10
    assert len({row["run"] for row in rows}) == 1


def test_full_precision_is_the_reference_and_int4_is_near_and_smaller(finished):
    dynamic, fp, int4 = (row["metrics"] for row in finished[2])
    for figures in (dynamic, fp):
        assert figures["kl_mean_nats"] < 1e-6
        assert figures["top1_agreement"] == 1
        assert figures["greedy_agreement_tokens"] == figures["greedy_tokens"] == 12
    assert 1e-6 < int4["kl_mean_nats"] < 1
    assert int4["packed_bits_per_element"] < 6
    assert int4["cache_bytes"] < fp["cache_bytes"]
    assert all(figures["decode_ms_per_token"] > 0 and figures["prefill_ms"] > 0 for figures in (dynamic, fp, int4))


def test_the_report_has_its_table_and_both_pictures(finished):
    out, _, _ = finished
    report = (out / "report.md").read_text()
    assert "| `int4` |" in report
    for picture in ("bytes-by-context.png", "kl-by-bits.png"):
        assert f"({picture})" in report
        assert (out / picture).read_bytes().startswith(b"\x89PNG")


def test_a_second_run_reuses_the_reference_and_appends(place, tmp_path):
    first = evaluate(place, tmp_path, "--strategies", "fp", "--timing-rounds", "0")
    second = evaluate(place, tmp_path, "--strategies", "fp", "--timing-rounds", "0")
    other = evaluate(place, tmp_path, "--strategies", "fp", "--timing-rounds", "0", "--chunk-tokens", "40")
    assert "(0 of 2 windows reused" in first.stdout
    assert "(2 of 2 windows reused" in second.stdout
    assert "(0 of 2 windows reused" in other.stdout
    rows = read_rows(tmp_path / "results.jsonl")
    assert len(rows) == 3
    assert rows[0]["metrics"]["perplexity"] == rows[1]["metrics"]["perplexity"]
    assert rows[0]["metrics"]["decode_ms_per_token"] is None


def test_a_finished_run_of_the_same_job_is_shown_again_if_asked(place, finished, tmp_path):
    _, _, rows = finished
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = evaluate(place, tmp_path, "--strategies", "int4,dynamic", "--reuse")
    assert f"run {rows[0]['run']} of" in shown.output
    summary = json.loads(shown.stdout.strip().splitlines()[-1])
    assert [one["strategy"] for one in summary["strategies"]] == ["int4", "dynamic"]
    assert summary["strategies"][0]["kl_mean_nats"] == rows[2]["metrics"]["kl_mean_nats"]
    assert read_rows(tmp_path / "results.jsonl") == rows
    assert (tmp_path / "report.md").is_file()


@pytest.mark.parametrize(
    "arguments", [("--strategies", "int8"), ("--strategies", "int4", "--chunk-tokens", "64")], ids=["new", "protocol"]
)
def test_what_a_finished_run_didnt_measure_is_measured(place, finished, tmp_path, arguments):
    _, _, rows = finished
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = evaluate(place, tmp_path, "--reuse", *arguments)
    assert result.exit_code == 0, result.output
    (new,) = read_rows(tmp_path / "results.jsonl")[len(rows) :]
    assert new["run"] != rows[0]["run"]
    assert new["strategy"] == arguments[1]


def test_greedy_text_is_compared_even_when_the_reference_isnt_listed(place, tmp_path):
    result = evaluate(place, tmp_path, "--strategies", "fp")
    assert result.exit_code == 0
    assert read_rows(tmp_path / "results.jsonl")[0]["metrics"]["greedy_agreement_tokens"] == 12


def test_a_strategy_that_fails_gets_a_row_and_the_others_go_on(place, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = evaluate(place, tmp_path, "--strategies", "hf-offloaded,fp", "--timing-rounds", "0")
    assert result.exit_code == 1
    failed, good = read_rows(tmp_path / "results.jsonl")
    assert (failed["status"], good["status"]) == ("failed", "ok")
    assert failed["metrics"] == {}
    assert "hf-offloaded: failed: ValueError" in result.stdout
    assert "`hf-offloaded`: failed" in (tmp_path / "report.md").read_text()


def test_one_pass_over_the_window_prints_no_figure_and_exits_with_1(place, tmp_path):
    result = evaluate(place, tmp_path, "--strategies", "dynamic,fp", "--chunk-tokens", "320")
    assert result.exit_code == 1
    assert "fp: refused: the cache is never read" in result.stdout
    assert [row["metrics"] for row in read_rows(tmp_path / "results.jsonl")] == [{}, {}]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--strategies", "dynamic,itn4"], "unknown strategy `itn4`: did you mean `int4`"),
        (["--strategies", ","], "at least one strategy"),
        (["--strategies", "adapter:json,bits=few"], "`bits` must be a number, got 'few'"),
        (["--strategies", "fp,fp"], "fp more than once"),
        (["--text", "gone.txt"], "gone.txt`: no such file"),
        (["--window-tokens", "2000", "--windows", "1"], "has 1000 tokens, shorter than one window of 2000"),
        (["--windows", "0"], "`windows` must be at least 1, got 0"),
        (["--dtype", "int8"], "`dtype` must be one of"),
        (["--device", "abacus"], "`device` must be"),
    ],
)
def test_bad_input_is_one_line_with_status_2_and_leaves_no_results(place, tmp_path, arguments, words):
    result = evaluate(place, tmp_path / "out", "--strategies", "fp", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    # transformers draws its own bar while it loads weights
    ours = [line for line in result.stderr.splitlines() if line and "Loading weights" not in line]
    assert len(ours) == 1
    assert not (tmp_path / "out" / "results.jsonl").exists()


def test_bench_times_every_context_and_says_how_far_each_is_from_dynamic(place, tmp_path):
    arguments = ["--strategies", "dynamic,fp,int4", "--context", "200,300", "--tokens", "3", "--rounds", "2"]
    result = run("bench", place, tmp_path, *arguments)
    assert result.exit_code == 0, result.output
    rows = read_rows(tmp_path / "bench.jsonl")
    assert [row["bench"]["context_tokens"] for row in rows] == [200, 200, 200, 300, 300, 300]
    for row in rows:
        assert len(row["bench"]["decode_ms"]) == 6
        assert row["bench"]["decode_ms_fastest"] <= row["bench"]["decode_ms_per_token"]
    dynamic, fp, int4 = (row["bench"] for row in rows[3:])
    assert (dynamic["ratio_to_dynamic"], dynamic["kl_mean_nats"]) == (1, 0)
    assert fp["kl_mean_nats"] < 1e-6 < int4["kl_mean_nats"]
    summary = json.loads(result.stdout.strip().splitlines()[-1])
    assert len(summary["strategies"]) == 6


def test_bench_takes_a_context_too_short_to_be_packed_if_a_longer_one_follows(place, tmp_path):
    arguments = ["--strategies", "dynamic,int4", "--tokens", "2", "--rounds", "1"]
    result = run("bench", place, tmp_path / "both", *arguments, "--context", "16,300")
    assert result.exit_code == 0, result.output
    assert [row["status"] for row in read_rows(tmp_path / "both" / "bench.jsonl")] == ["ok"] * 4
    assert run("bench", place, tmp_path / "short", *arguments, "--context", "16").exit_code == 1
    (_, row) = read_rows(tmp_path / "short" / "bench.jsonl")
    assert "nothing was packed; feed more tokens (--window-tokens, --context)" in row["reason"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kernels", "--fused"), "`fused` does nothing with --kernels"),
        (("--kernels", "--text", "my.txt"), "`text` does nothing with --kernels"),
        (("--plain-avx512",), "`plain-avx512` goes with --kernels"),
        (("--shape", "tokens=1000"), "`shape` goes with --kernels"),
    ],
)
def test_bench_refuses_options_that_would_do_nothing(place, tmp_path, arguments, message):
    result = run("bench", place, tmp_path, "--strategies", "fp", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("context", ["300,200", "200,201", "many", "0"])
def test_bench_refuses_contexts_that_it_cant_walk_through(place, tmp_path, context):
    result = run("bench", place, tmp_path, "--strategies", "fp", "--context", context)
    assert result.exit_code == 2
    assert "`context`" in result.stderr


def test_rows_of_another_schema_are_refused(tmp_path):
    (tmp_path / "old.jsonl").write_text('{"schema": "kvplus-eval/0"}\n')
    with pytest.raises(ValueError, match=r"kvplus-eval/0.*kvplus-eval/1"):
        read_rows(tmp_path / "old.jsonl")


def test_a_report_refuses_rows_that_cant_be_compared(finished, tmp_path):
    rows = [dict(row) for row in finished[2]]
    rows[1]["text"] = {"name": "another", "sha256": "0" * 64, "characters": 1}
    with pytest.raises(ValueError, match="differ in `text`"):
        write_report(rows, tmp_path)
