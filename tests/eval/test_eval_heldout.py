import hashlib
import json

import pytest
import typer
from typer.testing import CliRunner

from checkpoints import save_tiny_checkpoint, write_words
from hf_kvplus.layer_plan import LayerPlan
from hf_kvplus.recipes import Quantization
from kvplus_eval.heldout import PROTOCOL, SCHEMA, heldout, summarize_windows, write_page
from kvplus_eval.results import read_rows


@pytest.fixture
def app():
    app = typer.Typer()
    app.command()(heldout)
    return app


@pytest.fixture
def options(tmp_path):
    """Options of a small measurement, but for the strategies."""
    save_tiny_checkpoint(tmp_path / "model")
    write_words(tmp_path / "text.txt", 17000)
    options = ["--model", tmp_path / "model", "--text", tmp_path / "text.txt", "--tuned", "0", "--others", "64-65"]
    options += ["--window-tokens", "256", "--rows", tmp_path / "rows.jsonl", "--page", tmp_path / "page.md"]
    return [str(option) for option in options]


def test_both_sets_are_measured_apart_in_turns(tmp_path, app, options):
    result = CliRunner().invoke(app, [*options, "--strategies", "int4,int2"])
    assert result.exit_code == 0, result.output
    rows = read_rows(tmp_path / "rows.jsonl", SCHEMA)
    assert [(row["strategy"], row["set"], row["window"]) for row in rows] == [
        (strategy, *window)
        for window in (("tuned", 0), ("held out", 64), ("held out", 65))
        for strategy in ("int4", "int2")
    ]
    assert rows[0]["kl"] != rows[2]["kl"]
    assert 0 < rows[2]["kl"] < rows[3]["kl"]
    together = summarize_windows([row for row in rows if row["strategy"] == "int4" and row["set"] == "held out"])
    assert together["windows"] == [64, 65]
    assert together["kl"] == pytest.approx((rows[2]["kl"] + rows[4]["kl"]) / 2)
    assert together["kl_low"] < together["kl"] < together["kl_high"]
    assert together["perplexity_low_percent"] < together["perplexity_percent"] < together["perplexity_high_percent"]


def test_a_second_run_measures_only_what_is_missing_and_the_page_has_all(tmp_path, app, options):
    for strategies, count in (("int4", 3), ("int4,int2", 6), ("int2", 6)):
        assert CliRunner().invoke(app, [*options, "--strategies", strategies]).exit_code == 0
        assert len(read_rows(tmp_path / "rows.jsonl", SCHEMA)) == count
    page = (tmp_path / "page.md").read_text()
    assert "| `int4` | 4.461" in page
    assert "| `int2` | 2.487" in page
    assert "256 tokens a window" in page


def test_another_plan_under_the_same_name_is_measured_anew(tmp_path, app, options):
    path = tmp_path / "plan.json"
    for nbits, count in ((8, 3), (2, 6), (2, 6)):
        LayerPlan((Quantization(nbits, nbits),) * 2).save(path)
        assert CliRunner().invoke(app, [*options, "--strategies", f"plan:{path}"]).exit_code == 0
        assert len(read_rows(tmp_path / "rows.jsonl", SCHEMA)) == count
    rows = read_rows(tmp_path / "rows.jsonl", SCHEMA)
    assert rows[0]["kl"] < rows[3]["kl"]


def test_rows_of_another_schema_are_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"schema": "kvplus-heldout/2"}) + "\n")
    with pytest.raises(ValueError, match="schema 'kvplus-heldout/2', this version reads"):
        read_rows(tmp_path / "rows.jsonl", SCHEMA)


@pytest.mark.parametrize(
    ("others", "tokens"), [("7-9", 2048), ("0-3", 2048), ("x", 2048), ("8-11", 1024), ("3", 4096)]
)
def test_windows_that_were_tuned_on_aren_t_held_out(app, others, tokens):
    """However long windows are: what was tuned on is so many tokens."""
    options = ["--text", "pydoc-topics", "--tuned", "0", "--others", others, "--window-tokens", str(tokens)]
    result = CliRunner().invoke(app, options)
    assert isinstance(result.exception, ValueError)
    assert "`others` must" in str(result.exception)
    if tokens != 2048:
        assert f"must begin at window {16384 // tokens} of {tokens} tokens" in str(result.exception)


def test_the_page_goes_by_tokens_where_rows_went_by_numbers():
    """Window 8 of 1024 tokens is text that recipes were tuned on, whatever its row says."""
    common = dict.fromkeys(PROTOCOL, "x") | {
        "model": {"name": "m", "revision": "r"},
        "stride": 4,
        "stored_bits": 4.4,
    }
    common |= {"strategy": "int4", "set": "held out", "window_tokens": 1024, "chunk_tokens": 64, "loss_change": 0.0}
    rows = [
        {**common, "window": window, "kl": window / 1000, "kl_pieces": [0.1], "loss_change_pieces": [0.0]}
        for window in (8, 16)
    ]
    line = write_page(rows).splitlines()[-1]
    assert [cell.strip() for cell in line.split("|")[3:-1]] == [
        "0.008",
        "+0.00 %",
        "8: 8",
        "0.016",
        "+0.00 %",
        "16: 16",
    ]


def test_a_plan_that_was_found_on_held_out_text_is_refused(tmp_path, app, options):
    """Another text, or a later part of this one, is none of the page's business."""
    sha256 = hashlib.sha256((tmp_path / "text.txt").read_bytes()).hexdigest()
    path = tmp_path / "plan.json"

    def run(**facts):
        LayerPlan((Quantization(4, 4),) * 2, facts=facts).save(path)
        return CliRunner().invoke(app, [*options, "--strategies", f"plan:{path}"])

    refused = run(first_token=16895, text_sha256=sha256)
    assert isinstance(refused.exception, ValueError)
    assert "was found on this text from token 16895 on, and `others` reach to 16896" in str(refused.exception)
    assert run(first_token=16896, text_sha256=sha256).exit_code == 0
    assert run(first_token=0, text_sha256="another").exit_code == 0
