import copy
import json

import pytest
import torch
from typer.testing import CliRunner

from hf_kvplus.cli import build_app
from kvplus_eval.compare import Tolerances, compare_runs, latest_run
from kvplus_eval.metrics.perplexity import CONFIDENCE, expanded_tail, paired_interval
from kvplus_eval.results import SCHEMA


def row(strategy, run="a", kl=0.01, windows=8, **metrics):
    generator = torch.Generator().manual_seed(1)
    noise = (0.002 * torch.randn(windows, generator=generator)).tolist()
    figures = {"kl_mean_nats": kl, "perplexity": 20.0, "cache_bytes": 1000, "top1_agreement": 0.98, "prefill_ms": 50.0}
    return {
        "schema": SCHEMA,
        "kind": "eval",
        "run": run,
        "strategy": strategy,
        "status": "ok",
        "reason": None,
        "metrics": {**figures, "decode_ms_per_token": 5.0, **metrics},
        "units": {"top1_agreement": {"unit": "share", "better": "higher"}},
        "windows": {"kl_nats": [kl + one for one in noise], "loss_nats": [3.0 + one for one in noise]},
        "model": {"name": "m", "revision": "1", "dtype": "float32"},
        "text": {"sha256": "0"},
        "protocol": {"windows": windows, "window_tokens": 64, "chunk_tokens": 8},
        "device": {"name": "d", "threads": 2},
    }


def worse(before, after, **tolerances):
    findings = compare_runs(before, after, Tolerances(**tolerances))
    return {(one.strategy, one.figure) for one in findings if one.worse}


def test_a_run_isnt_worse_than_itself():
    rows = [row("fp", kl=1e-15), row("int4")]
    assert worse(rows, copy.deepcopy(rows), time=0) == set()


@pytest.mark.parametrize(
    ("figure", "value"),
    [("cache_bytes", 1011), ("top1_agreement", 0.95)],
)
def test_a_figure_beyond_its_tolerance_is_a_regression(figure, value):
    assert worse([row("int4")], [row("int4", **{figure: value})]) == {("int4", figure)}
    assert worse([row("int4", **{figure: value})], [row("int4")]) == set()


def test_more_loss_in_every_window_is_a_regression_and_less_isnt():
    assert worse([row("int4", kl=0.010)], [row("int4", kl=0.012)]) == {("int4", "kl_mean_nats")}
    assert worse([row("int4", kl=0.012)], [row("int4", kl=0.010)]) == set()
    assert worse([row("int4", kl=0.010)], [row("int4", kl=0.0104)]) == set()


def test_more_loss_that_windows_disagree_on_is_noise():
    before, after = row("int4"), row("int4", kl=0.0107)
    after["windows"]["kl_nats"] = [
        one + (0.05 if number == 0 else -0.004) for number, one in enumerate(before["windows"]["kl_nats"])
    ]
    assert worse([before], [after]) == set()


def test_losses_below_rounding_dont_count():
    assert worse([row("fp", kl=1e-15)], [row("fp", kl=9e-15)]) == set()


def test_times_count_only_when_asked_for_and_only_on_one_machine():
    slower = row("int4", decode_ms_per_token=9.0)
    assert worse([row("int4")], [slower]) == set()
    assert worse([row("int4")], [slower], time=0.2) == {("int4", "decode_ms_per_token")}
    slower["device"] = {"name": "other", "threads": 2}
    with pytest.raises(ValueError, match="different machines"):
        worse([row("int4")], [slower], time=0.2)


def test_a_strategy_that_fails_or_is_gone_is_a_regression():
    failed = {**row("int4"), "status": "failed", "reason": "RuntimeError: no", "metrics": {}}
    assert worse([row("fp"), row("int4")], [row("fp"), failed]) == {("int4", "status")}
    assert worse([row("fp"), row("int4")], [row("fp")]) == {("int4", "status")}
    assert worse([row("fp"), failed], [row("fp")]) == set()


def test_runs_that_measured_something_else_are_refused():
    other = row("int4")
    other["text"] = {"sha256": "1"}
    with pytest.raises(ValueError, match=r"differ in text\.sha256"):
        worse([row("int4")], [other])
    with pytest.raises(ValueError, match="no strategy in common"):
        worse([row("int4")], [row("fp")])


@pytest.mark.parametrize(
    ("part", "value"), [("tasks", ["copy"]), ("task_lengths", [512]), ("task_depths", [0.5]), ("task_samples", 2)]
)
def test_other_planted_facts_arent_compared(part, value):
    asked = {"tasks": ["needle"], "task_lengths": [1024], "task_depths": [0.1, 0.9], "task_samples": 1}
    before, after = row("int4"), row("int4")
    before["protocol"] |= asked
    after["protocol"] |= asked
    assert worse([before], [after]) == set()
    after["protocol"][part] = value
    with pytest.raises(ValueError, match=rf"differ in protocol\.{part}"):
        worse([before], [after])


def test_times_of_other_chunks_arent_compared():
    before, after = row("int4"), row("int4")
    after["protocol"]["prefill_chunk_tokens"] = 512
    assert worse([before], [after]) == set()
    with pytest.raises(ValueError, match=r"differ in protocol\.prefill_chunk_tokens"):
        worse([before], [after], time=0.2)


def test_a_figure_that_only_the_yardstick_has_is_lost_and_not_passed_over():
    assert worse([row("int4")], [row("int4", top1_agreement=None)]) == {("int4", "top1_agreement")}
    assert worse([row("int4", top1_agreement=None)], [row("int4")]) == set()
    timeless = row("int4", prefill_ms=None, decode_ms_per_token=None)
    assert worse([row("int4")], [timeless], time=0.2) == {("int4", "prefill_ms"), ("int4", "decode_ms_per_token")}
    with pytest.raises(ValueError, match="the first run has no times"):
        worse([timeless], [row("int4")], time=0.2)


def test_a_yardstick_without_figures_passes_nobody():
    failed = {**row("int4"), "status": "failed", "reason": "RuntimeError: no", "metrics": {}}
    with pytest.raises(ValueError, match="has no figures to compare with"):
        worse([failed], [row("int4")])


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(path)


def test_the_command_tells_by_its_exit_status(tmp_path):
    a = write(tmp_path / "a" / "results.jsonl", [row("int4", run="old", kl=5.0), row("int4")])
    b = write(tmp_path / "b" / "results.jsonl", [row("int4", run="b", kl=0.02)])
    good, bad = (CliRunner().invoke(build_app(), ["compare", *pair]) for pair in ((b, a), (str(tmp_path / "a"), b)))
    assert (good.exit_code, bad.exit_code) == (0, 1)
    summary = json.loads(bad.stdout.strip().splitlines()[-1])
    assert [(one["strategy"], one["figure"]) for one in summary["worse"]] == [("int4", "kl_mean_nats")]
    missing = CliRunner().invoke(build_app(), ["compare", a, str(tmp_path / "gone")])
    assert missing.exit_code == 2
    assert "no such file" in missing.stderr


def test_only_the_last_run_of_a_file_counts(tmp_path):
    path = tmp_path / "results.jsonl"
    write(path, [row("int4", run="old"), row("fp", run="new")])
    assert [one["strategy"] for one in latest_run(path)] == ["fp"]


@pytest.mark.parametrize(
    ("skewed", "windows", "lowest"),
    [
        *((False, windows, 0.92) for windows in (2, 3, 4, 7, 8, 16, 30)),
        *((True, windows, lowest) for windows, lowest in ((64, 0.91), (16, 0.86))),
    ],
)
def test_the_paired_interval_covers_the_truth_as_often_as_it_says(skewed, windows, lowest):
    """Nominal where differences are normal, however few; of very skewed ones it falls short."""
    generator = torch.Generator().manual_seed(5)
    runs, truth, covered = 400, 0.3, 0
    for _ in range(runs):
        values = torch.randn(windows, generator=generator, dtype=torch.float64)
        values = truth + (values.square() - 1 if skewed else values)
        low, high = paired_interval(values.tolist(), draws=1000)
        covered += low <= truth <= high
    assert lowest <= covered / runs <= CONFIDENCE + 0.03


@pytest.mark.parametrize(("count", "tail"), [(2, 0), (4, 0.00012), (8, 0.00574), (30, 0.01875), (10_000, 0.02498)])
def test_few_windows_widen_the_interval(count, tail):
    assert expanded_tail(count) == pytest.approx(tail, abs=1e-5)
