import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from checkpoints import save_tiny_checkpoint, write_words
from conftest import tiny_llama
from kvplus_eval.planted_bias import SCHEMA, planted_bias, run_planted_bias
from kvplus_eval.results import read_rows


def test_the_model_computes_the_same_whatever_the_bias_and_is_itself_again_at_the_end(llama):
    token_ids = torch.randint(128, (1, 40))
    before = {name: tensor.clone() for name, tensor in llama.state_dict().items()}
    with torch.inference_mode():
        plain = llama(token_ids).logits
        found = []
        for size in (0.0, 300.0):
            with planted_bias(llama, 1, size):
                found.append(llama(token_ids).logits)
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
        assert (found[0] - plain).abs().max() > 1e-4
        assert torch.equal(llama(token_ids).logits, plain)
    assert llama.state_dict().keys() == before.keys()
    with pytest.raises(ValueError, match="unbiased"), planted_bias(tiny_llama(attention_bias=True), 0, 1.0):
        pass


def test_rows_tell_what_a_bias_costs_with_and_without_taking_it_out(tmp_path):
    save_tiny_checkpoint(tmp_path / "model")
    write_words(tmp_path / "text.txt", 700)
    app = typer.Typer()
    app.command()(run_planted_bias)
    options = ["--model", tmp_path / "model", "--text", tmp_path / "text.txt", "--window-tokens", 512, "--windows", 1]
    options += ["--widths", "4", "--pairs", "0", "--sizes", "0,200", "--rows", tmp_path / "rows.jsonl"]
    result = CliRunner().invoke(app, [str(option) for option in options])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["count"] == 4
    found = {(row["size"], row["means"]): row["kl"] for row in read_rows(tmp_path / "rows.jsonl", SCHEMA)}
    assert found[200.0, 0] > 2 * found[0.0, 0]
    taken = max(means for _, means in found)
    assert found[200.0, taken] < 1.1 * found[0.0, taken]
