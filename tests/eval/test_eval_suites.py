import json

import pytest
from typer.testing import CliRunner

from checkpoints import one_thread, save_tiny_checkpoint, write_words
from hf_kvplus.cli import build_app
from hf_kvplus.devices import Device
from hf_kvplus.loading import load_config
from kvplus_eval.plan import format_time, make_plan
from kvplus_eval.protocol import Protocol, choose_strategies
from kvplus_eval.results import read_rows
from kvplus_eval.suites import settle, suite_names
from kvplus_eval.tasks import TASKS
from kvplus_eval.work import list_work


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint")))


def test_the_suites_are_there():
    assert set(suite_names()) == {"ci", "full", "long-context", "paper", "quick", "reference"}


@pytest.mark.parametrize("name", suite_names())
def test_every_suite_names_strategies_and_tasks_that_exist(name):
    settings = settle(name, {})
    assert choose_strategies(settings.strategies)
    assert all(task in TASKS for task in settings.protocol.tasks)
    assert settings.suite == name
    assert settings.protocol.chunk_tokens < settings.protocol.window_tokens


def test_the_command_line_wins_over_the_suite_and_the_suite_over_defaults():
    suite, alone, both = settle("quick", {}), settle(None, {}), settle("quick", {"windows": 7, "tasks": "none"})
    assert alone.protocol == Protocol()
    assert suite.protocol.window_tokens == 1024 != alone.protocol.window_tokens
    assert (both.protocol.windows, both.protocol.tasks) == (7, ())
    assert both.protocol.window_tokens == 1024
    assert both.protocol.contexts == (256, 1024)


def test_a_suite_of_ones_own_is_a_path(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("strategies: [fp, 'window:64,sinks=4']\ntask_depths: [0, 0.5]\n")
    settings = settle(str(path), {})
    assert choose_strategies(settings.strategies) == ["fp", "window:64,sinks=4"]
    assert settings.protocol.task_depths == (0, 0.5)
    assert settings.suite == "mine"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("window: 3\n", "suite `.*`: unknown option `window`: did you mean `windows`"),
        ("windows: 0\n", "`windows` must be at least 1"),
        ("noise: loud\n", "`noise` must be one of chunking, dtype"),
        ("task_depths: 2\n", "`task_depths` must lie between 0 and 1"),
        ("contexts: many\n", "`contexts` must be integers"),
        ("- a\n", "must be a list of options"),
    ],
)
def test_a_wrong_suite_is_told_before_work(tmp_path, text, words):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        settle(str(path), {})


def test_an_unknown_suite_is_named_with_those_there_are():
    with pytest.raises(ValueError, match="unknown suite `quik`: did you mean `quick`.*available: ci, full"):
        settle("quik", {})


def test_work_grows_with_what_is_asked_for():
    small, large = Protocol(windows=2), Protocol(windows=4, tasks=("copy",), contexts=(64, 128), peak_memory=True)
    tokens = {work.name: work.tokens for work in list_work(small, ["fp", "int4"])}
    more = {work.name: work.tokens for work in list_work(large, ["fp", "int4"])}
    assert tokens["reference"] == 2 * 2048
    assert tokens["quality"] == 2 * tokens["reference"]
    assert tokens["planted facts"] == tokens["times by context"] == tokens["peak memory"] == tokens["noise"] == 0
    assert all(more[name] > 0 for name in more if name not in ("noise", "layers alone"))


def test_layers_alone_are_those_of_quantizing_strategies():
    protocol = Protocol(windows=2, sensitivity_tokens=512)
    work = {one.name: one for one in list_work(protocol, ["fp", "int4", "int2"], layers=30)}["layers alone"]
    assert (work.tokens, work.passes, work.shared) == (2 * 30 * 512, 2 * 30 * 8, True)


def test_a_plan_takes_as_long_as_the_arithmetic_says(checkpoint):
    device = Device("test", 0, bytes_per_s=1e9, flops_per_s=1e9)
    config = load_config(checkpoint)
    plan = make_plan(config, Protocol(windows=1, timing_rounds=0), ["fp"], device)
    twice = make_plan(config, Protocol(windows=2, timing_rounds=0), ["fp"], device)
    shared = make_plan(config, Protocol(windows=2, timing_rounds=0), ["fp"], device, processes=2)
    assert [name for name, _, _ in plan.parts] == ["reference", "quality"]
    assert twice.seconds == pytest.approx(2 * plan.seconds)
    assert shared.seconds == pytest.approx(plan.seconds)
    assert plan.reference_bytes == 2047 * 64 * 4


@pytest.mark.parametrize(("seconds", "text"), [(5, "5 s"), (600, "10 min"), (7200, "2.0 h")])
def test_times_are_written_for_people(seconds, text):
    assert format_time(seconds) == text


def test_a_dry_run_prints_a_plan_and_does_nothing(checkpoint, tmp_path):
    options = ["eval", "--suite", "full", "--model", checkpoint, "--out", str(tmp_path / "out"), "--dry-run"]
    result = CliRunner().invoke(build_app(), options)
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout.strip().splitlines()[-1])
    assert plan["kind"] == "plan"
    assert {"reference", "quality", "noise", "planted facts", "times"} <= {part[0] for part in plan["parts"]}
    assert plan["seconds"] > 0
    assert not (tmp_path / "out").exists()


def test_every_part_of_a_suite_leaves_its_figures(checkpoint, tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(
        "strategies: dynamic,int4\nwindows: 2\nwindow_tokens: 320\nchunk_tokens: 32\nprefill_chunk_tokens: 128\n"
        "decode_tokens: 2\ngreedy_tokens: 4\ntiming_rounds: 1\ncontexts: 200,256\ntasks: copy\ntask_lengths: 200\n"
        "task_depths: 0.2,0.8\nnoise: chunking,dtype\n"
    )
    text = write_words(tmp_path / "text.txt", 700)
    options = ["--suite", str(path), "--model", checkpoint, "--text", str(text), "--device", "cpu"]
    with one_thread():
        result = CliRunner().invoke(build_app(), ["eval", *options, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    dynamic, int4 = read_rows(tmp_path / "out" / "results.jsonl")
    for row in (dynamic, int4):
        assert row["suite"] == "small"
        figures = row["metrics"]
        assert 0 < figures["noise_chunking_nats"] < figures["noise_dtype_nats"] < 0.1
        assert [one["context_tokens"] for one in row["contexts"]] == [200, 256]
        assert [one["depth"] for one in row["tasks"]] == [0.2, 0.8]
        assert 0 <= figures["copy_accuracy"] <= 1
        assert figures["needle_accuracy"] is None
        assert figures["ttft_ms"] >= figures["prefill_ms"]
        assert len(row["windows"]["kl_nats"]) == 2
        assert len(row["layers"]) == 2
    assert dynamic["metrics"]["copy_answer_nats"] != int4["metrics"]["copy_answer_nats"]
    assert int4["metrics"]["kl_median_nats"] <= int4["metrics"]["kl_p90_nats"] <= int4["metrics"]["kl_p99_nats"]
    assert int4["metrics"]["kl_p99_nats"] <= int4["metrics"]["kl_worst_nats"]
