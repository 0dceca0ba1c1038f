"""What packing costs beside a prefill: the first round doesn't count, and the rest is told by its median."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from checkpoints import save_tiny_checkpoint
from kvplus_eval import packing


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def test_the_command_writes_a_row_with_a_share_for_each_strategy(checkpoint, tmp_path):
    app = typer.Typer()
    app.command()(packing.packing)
    options = ["--model", str(checkpoint), "--tokens", "400", "--rounds", "1", "--strategies", "fp,int2"]
    result = CliRunner().invoke(app, [*options, "--rows", str(tmp_path / "rows.jsonl")])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout.splitlines()[-1])
    assert facts["tokens"] == 400
    assert facts["shares"].keys() == {"fp", "int2"}
    assert all(share > 0 for share in facts["shares"].values())
    assert json.loads((tmp_path / "rows.jsonl").read_text()) == facts


def test_shares_are_medians_of_packing_over_prefill_and_the_first_round_is_left_out(checkpoint, monkeypatch):
    # (prefill, fp, int4) of each round, in seconds of a clock that is read before and after each of them.
    rounds = [(1.0, 5.0, 5.0), (2.0, 0.2, 0.4), (4.0, 0.8, 0.4), (4.0, 0.4, 3.2)]
    readings, now_s = [], 0.0
    for spent_s in (spent_s for one in rounds for spent_s in one):
        readings += [now_s, now_s + spent_s]
        now_s += spent_s + 100  # what happens between is nobody's
    monkeypatch.setattr(packing, "time", SimpleNamespace(process_time=iter(readings).__next__))
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    shares = packing.packing_shares(model, torch.arange(60), ["fp", "int4"], rounds=3)
    assert shares == pytest.approx({"fp": 0.1, "int4": 0.2})


def test_packing_stores_the_prompt_in_every_layer(checkpoint, monkeypatch):
    model, caches = AutoModelForCausalLM.from_pretrained(checkpoint).eval(), []

    def note(*arguments, **options):
        caches.append(build_cache(*arguments, **options))
        return caches[-1]

    build_cache = packing.build_cache
    monkeypatch.setattr(packing, "build_cache", note)
    packing.packing_shares(model, torch.arange(60).repeat(5), ["int4"], rounds=1)
    assert [cache.get_seq_length(layer) for cache in caches for layer in (0, 1)] == [300] * 4
    assert all(layer.packed_tokens > 100 for cache in caches for layer in cache.layers)
