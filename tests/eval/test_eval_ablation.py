import json

import pytest
import torch
from typer.testing import CliRunner

from checkpoints import save_tiny_checkpoint, write_words
from conftest import tiny_llama_config
from kvplus_eval.ablation import RECIPE, VARIANTS, _line, read_ablation, run_ablation, stored_bits, summarize
from kvplus_eval.ablation import variant_cache as build


@pytest.fixture
def app():
    import typer

    app = typer.Typer()
    app.command()(run_ablation)
    return app


def test_rows_and_page_are_made_and_a_second_run_adds_nothing(tmp_path, app):
    save_tiny_checkpoint(tmp_path / "model")
    write_words(tmp_path / "text.txt", 1100)
    options = ["--model", tmp_path / "model", "--text", tmp_path / "text.txt", "--widths", "3", "--windows", "2"]
    options += ["--window-tokens", "512", "--rows", tmp_path / "rows.jsonl", "--page", tmp_path / "page.md"]
    for _ in range(2):
        result = CliRunner().invoke(app, [str(option) for option in options])
        assert result.exit_code == 0, result.output
        rows = read_ablation(tmp_path / "rows.jsonl")
        assert len(rows) == sum(3 in variant.widths for variant in VARIANTS)
    named = {row["variant"]: row for row in rows}
    assert named[RECIPE]["change_percent"] == pytest.approx(0, abs=1e-6)
    assert named["no least squares"]["kl"] > named[RECIPE]["kl"] > 0
    page = (tmp_path / "page.md").read_text()
    assert "## 3 bits" in page
    assert all(variant.name in page for variant in VARIANTS if 3 in variant.widths)


def test_each_variant_changes_what_it_names():
    config = tiny_llama_config()
    for variant in VARIANTS:
        nbits = variant.widths[-1]
        plain, changed = build(config, nbits, VARIANTS[0]), build(config, nbits, variant)
        same = all(
            layer.codecs == other.codecs
            and (layer.residual_length, layer.num_sink_tokens) == (other.residual_length, other.num_sink_tokens)
            for layer, other in zip(plain.layers, changed.layers, strict=True)
        )
        assert same == (variant.name == RECIPE), variant.name
    assert stored_bits(build(config, 4, VARIANTS[0]), 64) == pytest.approx(4.461, abs=0.001)


def test_changes_are_paired():
    base = torch.rand(1024, dtype=torch.float64) ** 4
    figures = summarize(1.1 * base, torch.zeros(1024), base)
    assert figures["change_percent"] == pytest.approx(10)
    # The same positions are compared, so what positions differ by doesn't widen the interval of the change.
    width = figures["change_high_percent"] - figures["change_low_percent"]
    assert width < 0.2 * 100 * (figures["kl_high"] - figures["kl_low"]) / figures["kl"]
    assert figures["kl_low"] < figures["kl"] < figures["kl_high"]
    assert _line({"variant": "x", "stored_bits": 4.5, **figures}).startswith("| x | 4.50 |")


def test_rows_of_another_schema_are_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"schema": "other"}) + "\n")
    with pytest.raises(ValueError, match="schema 'other', this version reads"):
        read_ablation(tmp_path / "rows.jsonl")
