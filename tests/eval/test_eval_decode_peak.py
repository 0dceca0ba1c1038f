"""Memory while decoding: contexts of random states stand for computed ones, and a fused step needs little beside."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
import typer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from checkpoints import save_tiny_checkpoint
from hf_kvplus import build_cache, measure_memory
from hf_kvplus.compat import cache_keyword
from kvplus_eval.decode_peak import PeakJob, watch_decoding
from kvplus_eval.decode_peaks import decode_peaks
from kvplus_eval.fill import fill_cache
from kvplus_eval.peak import can_watch

WATCHABLE = pytest.mark.skipif(not can_watch(), reason="this system doesn't tell a process's peak memory")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def model(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint).eval()


@pytest.mark.parametrize("strategy", ["dynamic", "fp", "int4", "k8v3"])
def test_a_filled_cache_holds_what_a_computed_prompt_of_that_length_holds(model, strategy):
    filled, computed = (build_cache(strategy, model.config) for _ in range(2))
    fill_cache(model, filled, 500)
    with torch.inference_mode():
        model(torch.randint(64, (1, 500)), **{cache_keyword(model): computed})
    assert filled.get_seq_length() == computed.get_seq_length() == 500
    assert measure_memory(filled) == measure_memory(computed)


def test_what_isnt_keys_and_values_isnt_filled_in():
    config = transformers.Lfm2Config(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    model = transformers.Lfm2ForCausalLM(config).eval()
    with pytest.raises(ValueError, match=r"random states can't stand for what layer 0 of Lfm2ForCausalLM keeps"):
        fill_cache(model, build_cache("fp", config), 20)


@WATCHABLE
def test_a_step_needs_a_dense_layer_beside_its_cache_and_a_fused_one_next_to_nothing(checkpoint):
    beside = {}
    for fused in (True, False):
        # In processes of their own: room that earlier tests left would be taken, and not seen.
        job = PeakJob(str(checkpoint), "int4", context=16_000, decoded=60, fused=fused)
        beside[fused] = watch_decoding(job)["decode_beside_bytes"]
    # 2 x 2 heads x 64 channels x 4 bytes a token: keys and values of one layer.
    layer_bytes = 16_000 * 1024
    assert beside[False] > 0.9 * layer_bytes
    assert beside[True] < 0.3 * layer_bytes


@WATCHABLE
def test_the_command_writes_a_row_for_each_strategy(checkpoint, tmp_path):
    app = typer.Typer()
    app.command()(decode_peaks)
    command = ["--model", str(checkpoint), "--strategies", "int4", "--context", "300", "--decoded", "4"]
    done = CliRunner().invoke(app, [*command, "--rows", str(tmp_path / "rows.jsonl")])
    assert done.exit_code == 0, done.output
    (row,) = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert row["kind"] == "decode-peak"
    assert row["strategy"] == "int4"
    assert row["bench"]["fused"]
    parts = [row["bench"][f"decode_{name}_bytes"] for name in ("working", "cache", "beside")]
    assert row["bench"]["decode_peak_bytes"] == sum(parts)
