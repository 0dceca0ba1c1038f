import json

import typer
from typer.testing import CliRunner

from checkpoints import save_tiny_checkpoint
from kvplus_eval.packing import packing


def test_each_strategy_gets_its_share_of_the_prefill(tmp_path):
    app = typer.Typer()
    app.command()(packing)
    save_tiny_checkpoint(tmp_path / "model")
    options = ["--model", str(tmp_path / "model"), "--tokens", "400", "--rounds", "1", "--strategies", "fp,int2"]
    options += ["--rows", str(tmp_path / "rows.jsonl")]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout.splitlines()[-1])
    assert facts["tokens"] == 400
    assert 0 < facts["shares"]["fp"] < facts["shares"]["int2"]
    assert json.loads((tmp_path / "rows.jsonl").read_text()) == facts
