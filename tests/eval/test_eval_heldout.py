import json

import pytest
import typer
from typer.testing import CliRunner

from checkpoints import save_tiny_checkpoint, write_words
from kvplus_eval.heldout import heldout


@pytest.fixture
def app():
    app = typer.Typer()
    app.command()(heldout)
    return app


def test_both_sets_are_measured_apart(tmp_path, app):
    save_tiny_checkpoint(tmp_path / "model")
    write_words(tmp_path / "text.txt", 2600)
    options = ["--model", tmp_path / "model", "--text", tmp_path / "text.txt", "--strategies", "int4,int2"]
    options += ["--tuned", "0", "--others", "8-9", "--window-tokens", "256", "--rows", tmp_path / "rows.jsonl"]
    result = CliRunner().invoke(app, [str(option) for option in options])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["strategy"], row["set"]) for row in rows] == [
        ("int4", "tuned"),
        ("int2", "tuned"),
        ("int4", "held out"),
        ("int2", "held out"),
    ]
    assert rows[0]["kl"] != rows[2]["kl"]
    assert 0 < rows[2]["kl"] < rows[3]["kl"]
    assert rows[2]["windows"] == [8, 9]


@pytest.mark.parametrize("others", ["7-9", "0-3", "x"])
def test_windows_that_were_tuned_on_aren_t_held_out(app, others):
    result = CliRunner().invoke(app, ["--text", "pydoc-topics", "--others", others])
    assert isinstance(result.exception, ValueError)
    assert "`others` must" in str(result.exception)
