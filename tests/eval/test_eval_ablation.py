import json
from dataclasses import fields

import pytest
import torch
from typer.testing import CliRunner

from checkpoints import save_tiny_checkpoint, write_words
from conftest import tiny_llama_config
from hf_kvplus.codecs.metric import KeyMetric, save_metrics
from hf_kvplus.recipes import Quantization
from kvplus_eval.ablation import (
    MEANS_VARIANTS,
    RECIPE,
    SCHEMA,
    VARIANTS,
    _line,
    run_ablation,
    stored_bits,
    summarize,
    window_figures,
)
from kvplus_eval.ablation import variant_cache as build
from kvplus_eval.results import read_rows
from kvplus_eval.without_offsets import WithoutOffsets


@pytest.fixture
def app():
    import typer

    app = typer.Typer()
    app.command()(run_ablation)
    return app


def test_rows_and_page_are_made_and_windows_can_be_added(tmp_path, app):
    save_tiny_checkpoint(tmp_path / "model")
    write_words(tmp_path / "text.txt", 1100)
    options = ["--model", tmp_path / "model", "--text", tmp_path / "text.txt", "--widths", "3"]
    options += ["--window-tokens", "512", "--rows", tmp_path / "rows.jsonl", "--page", tmp_path / "page.md"]
    variants = [variant.name for variant in VARIANTS if 3 in variant.widths]
    for windows in (1, 2, 2):
        result = CliRunner().invoke(app, [str(option) for option in (*options, "--windows", windows)])
        assert result.exit_code == 0, result.output
        rows = read_rows(tmp_path / "rows.jsonl", SCHEMA)
        assert sorted((row["variant"], row["window"]) for row in rows) == sorted(
            (name, window) for name in variants for window in range(windows)
        )
    named = {row["variant"]: row for row in rows if row["window"] == 1}
    assert named["no least squares"]["kl"] > named[RECIPE]["kl"] > 0
    page = (tmp_path / "page.md").read_text()
    assert "## 3 bits" in page
    assert "number 0, 1" in page
    assert all(page.count(f"| {name} |") == 1 for name in variants)


def is_recipe(config, nbits, variant):
    plain, changed = build(config, nbits, VARIANTS[0]), build(config, nbits, variant)
    return all(
        layer.codecs == other.codecs
        and (layer.residual_length, layer.num_sink_tokens) == (other.residual_length, other.num_sink_tokens)
        for layer, other in zip(plain.layers, changed.layers, strict=True)
    )


def test_each_variant_changes_what_it_names():
    config = tiny_llama_config()
    for variant in VARIANTS:
        assert is_recipe(config, variant.widths[-1], variant) == (variant.name == RECIPE), variant.name
    assert stored_bits(build(config, 4, VARIANTS[0]), 64) == pytest.approx(4.461, abs=0.001)


@pytest.mark.parametrize("nbits", [2, 3])
def test_the_recipe_is_one_of_the_variants_of_turning_means(nbits):
    config = tiny_llama_config(head_dim=64)
    same = [variant.name for variant in MEANS_VARIANTS if is_recipe(config, nbits, variant)]
    assert same == [RECIPE, "4 of 8 deviations"]


def test_changes_are_paired():
    losses = torch.rand(2048, dtype=torch.float64) ** 4
    rows, base = (
        [{"variant": "x", "window": i, **window_figures(part, 0 * part)} for i, part in enumerate(whole.split(1024))]
        for whole in (1.1 * losses, losses)
    )
    figures = summarize(rows, base)
    assert figures["kl"] == pytest.approx(1.1 * float(losses.mean()))
    assert figures["change_percent"] == pytest.approx(10)
    # The same positions are compared, so what positions differ by doesn't widen the interval of the change.
    assert 9 < figures["change_low_percent"] < 10 < figures["change_high_percent"] < 11
    assert _line("x", 4.5, figures).startswith("| x | 4.50 |")
    # Of windows that only one went through nothing is compared.
    assert summarize(rows[1:], base)["kl"] == pytest.approx(rows[1]["kl"])
    with pytest.raises(ValueError, match="have no window that the recipe went through"):
        summarize(rows[1:], base[:1])


def test_rows_of_another_schema_are_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"schema": "other"}) + "\n")
    with pytest.raises(ValueError, match="schema 'other', this version reads"):
        read_rows(tmp_path / "rows.jsonl", SCHEMA)


def error(codec, states, valid=None):
    out = torch.empty_like(states)
    codec.decode(codec.encode(states, valid), states.shape[-1], out)
    return float((out - states).square().mean())


@pytest.mark.parametrize("nbits", [2, 3, 4, 8])
def test_offsets_are_worth_nothing_around_zero_and_much_far_from_it(nbits):
    plain = torch.randn(1, 2, 8, 48, 64, generator=torch.Generator().manual_seed(0))
    biased = plain + 100 * (torch.arange(64) == 7)
    codecs = Quantization(nbits, nbits, group_size=48).codecs()
    for codec in codecs:
        without = WithoutOffsets(**{field.name: getattr(codec, field.name) for field in fields(codec)})
        assert 0.8 * error(codec, plain) < error(without, plain) < 1.5 * error(codec, plain)
        assert error(without, biased) > 5 * error(codec, biased)
        packed = without.encode(biased)
        assert not packed["mean"].any()
        assert without.bits_per_element(64) == codec.bits_per_element(64)


def test_padding_has_no_influence_without_offsets_either():
    codec = WithoutOffsets(block_tokens=48, nbits=3, clips=3, correct_tokens=True)
    states, valid = torch.randn(1, 1, 1, 48, 32), torch.ones(1, 1, 48, dtype=torch.bool)
    valid[0, 0, :20] = False
    louder = states.clone()
    louder[:, :, 0, :20] = 1000.0
    found, expected = codec.encode(louder, valid), codec.encode(states, valid)
    # Invalid tokens are zeros to the codec, so every byte is the same.
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_metric_has_offsets(tmp_path):
    save_metrics(tmp_path / "metrics.safetensors", [torch.eye(32).expand(1, 32, 32)])
    with pytest.raises(ValueError, match="`metric` must be None where offsets are left out"):
        WithoutOffsets(metric=KeyMetric(tmp_path / "metrics.safetensors", 0))
