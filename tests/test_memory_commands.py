"""The commands memory and report, and generate with a view, run without a network on a tiny checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from checkpoints import one_thread, save_tiny_checkpoint
from hf_kvplus import estimate_memory
from hf_kvplus.cli import build_app
from hf_kvplus.loading import load_config
from hf_kvplus.units import format_bytes
from test_model_card import ROWS
from test_recommend import row


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    with one_thread():
        yield str(save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint")))


def run(*arguments: str):
    return CliRunner().invoke(build_app(), list(arguments), env={"COLUMNS": "160"})


def test_memory_tells_bytes_for_people_and_programs(checkpoint):
    result = run("memory", checkpoint, "--context", "4k,8k", "--batch", "1,2", "--strategies", "dynamic,int4")
    assert result.exit_code == 0, result.output
    assert "8192 tokens" in result.stdout
    assert "16.0 MiB" in result.stdout
    facts = json.loads(result.stdout.strip().splitlines()[-1])["estimates"]
    assert len(facts) == 8
    config = load_config(checkpoint)
    for fact in facts:
        expected = estimate_memory(config, fact["seq_len"], fact["batch_size"], fact["strategy"]).cache_bytes
        assert fact["cache_bytes"] == expected


def test_memory_splits_fits_and_counts(checkpoint):
    result = run(
        "memory", checkpoint, "--context", "8k", "--strategies", "dynamic", "--pipeline", "2",
        "--tensor-parallel", "2", "--devices", "t4", "--compute",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "4.0 MiB" in result.stdout  # 16 MiB by two layers and two heads
    assert "t4 (16.00 GiB) holds 8192 tokens: dynamic" in result.stdout
    assert "memory" in result.stdout
    assert "operations with a cache" in result.stdout


def test_memory_takes_a_config_alone_and_tells_kinds_of_layers(checkpoint, tmp_path):
    path = tmp_path / "mine.json"
    settings = json.loads((Path(checkpoint) / "config.json").read_text())
    mixed = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 100, "model_type": "qwen2"}
    path.write_text(json.dumps({**settings, **mixed, "use_sliding_window": True}))
    result = run("memory", str(path), "--context", "8k", "--strategies", "dynamic,int4", "--layers")
    assert result.exit_code == 0, result.output
    estimate = estimate_memory(load_config(path), 8192)
    lines = [line for line in result.stdout.splitlines() if "DynamicSlidingWindowLayer" in line]
    assert len(lines) == 1
    assert "1" in lines[0]
    assert format_bytes(estimate.layers[0].total_bytes) in lines[0]
    assert estimate.layers[0].total_bytes < estimate.layers[1].total_bytes / 50


def test_memory_tells_where_offloaded_bytes_are(checkpoint):
    result = run("memory", checkpoint, "--context", "256k", "--strategies", "int4+offload:disk")
    assert "of offloaded ones what stays on the device" in " ".join(result.stdout.split())
    fact = json.loads(result.stdout.strip().splitlines()[-1])["estimates"][0]
    assert fact["device_bytes"] < fact["cache_bytes"]
    assert fact["disk_bytes"] > 0


def test_memory_recommends_in_one_command_what_can_be_pasted(checkpoint):
    result = run("memory", checkpoint, "--context", "8k", "--recommend", "--budget", "3MiB")
    assert result.exit_code == 0, result.output
    assert 'cache = build_cache("int4", model.config)' in result.stdout
    assert "`int8` takes" in result.stdout
    nothing = run("memory", checkpoint, "--context", "8k", "--recommend", "--budget", "30KiB")
    assert nothing.exit_code == 0
    assert "No strategy meets the budget of 30.0 KiB" in nothing.stdout
    assert "build_cache" not in nothing.stdout


def test_memory_recommends_by_measured_rows(checkpoint, tmp_path):
    path = tmp_path / "results.jsonl"
    rows = [{**row("int4", 0.001), "schema": "kvplus-eval/1", "kind": "eval"}]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    result = run("memory", checkpoint, "--context", "8k", "--recommend", "--max-kl", "0.01", "--results", str(path))
    assert "KL to the full cache is 0.001 nats, measured with other" in result.stdout
    path.write_text("{}\n")
    broken = run("memory", checkpoint, "--recommend", "--results", str(path))
    assert broken.exit_code == 2
    assert "line 1 isn't a row of `kvplus eval`" in broken.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--context", "8q"), "a number of tokens is written"),
        (("--batch", "x"), "`batch` must be integers"),
        (("--strategies", "itn4"), "did you mean `int4`"),
        (("--devices", "h10"), "did you mean `h100`"),
        (("--recommend", "--budget", "much"), "a number of bytes is written"),
        (("--budget", "64MiB"), "`budget` is a wish for --recommend"),
        (("--max-kl", "0"), "`max-kl` is a wish for --recommend"),
        (("--recommend", "--pipeline", "2"), "`pipeline` does nothing with --recommend"),
        (("--recommend", "--strategies", "int4"), "`strategies` does nothing with --recommend"),
        (("--recommend", "--devices", "t4,l4"), "`devices` must name one device"),
        (("--pipeline", "2", "--strategies", "int4+offload:disk"), "`pipeline` isn't told for `int4+offload:disk`"),
    ],
)
def test_memory_names_bad_input_in_one_line(checkpoint, arguments, message):
    result = run("memory", checkpoint, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_report_prints_and_writes_cards(tmp_path, checkpoint):
    results, card = tmp_path / "results.jsonl", tmp_path / "README.md"
    results.write_text("".join(json.dumps(one) + "\n" for one in ROWS))
    card.write_text("# Mine\n")
    table = run("report", "--results", str(results), "--format", "csv")
    assert table.stdout.splitlines()[1].startswith("dynamic,32.0,94371840,")
    for state in ("updated", "up to date"):
        written = run("report", "--results", str(results), "--model-card", str(card), "--model", checkpoint)
        assert written.exit_code == 0, written.output
        assert f"README.md: {state}" in written.stderr
    assert "# Mine\n\n<!-- kvplus: begin -->\n" in card.read_text()
    for options, message in (
        (("--format", "csv", "--model-card", str(card)), "`format` is for printing"),
        (("--format", "csv", "--model", checkpoint), "`model` adds estimates"),
        (("--context", "4k"), "`context` is for the estimates of a model"),
    ):
        refused = run("report", "--results", str(results), *options)
        assert refused.exit_code == 2
        assert message in refused.stderr
    pushed = run("report", "--results", str(results), "--push", "someone/model")
    assert pushed.exit_code == 2
    assert "name it with --model-card" in pushed.stderr


def test_generate_shows_and_draws_the_cache(checkpoint, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "memory.png"
    result = run(
        "generate", "--model", checkpoint, "--prompt", "w1 w2 w3 " * 40, "--max-new-tokens", "5", "--watch",
        "--memory-plot", str(picture),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "% of full" in result.stderr
    assert "124 tokens" in result.stderr
    assert result.stdout.strip().splitlines()[-1].startswith("speed: 5 tokens")
    assert picture.read_bytes()[:4] == b"\x89PNG"
