import pytest
import torch
from typer.testing import CliRunner

from checkpoints import one_thread, save_tiny_checkpoint, write_words
from hf_kvplus import measure_memory
from hf_kvplus.cli import build_app
from hf_kvplus.loading import load_model
from kvplus_eval.protocol import Protocol
from kvplus_eval.results import read_rows
from kvplus_eval.runner import feed, make_cache
from kvplus_eval.sensitivity import has_sensitivity, lossy_layers, one_layer_cache

STRATEGIES = "dynamic,fp,int2,int8,window:256+int2"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    with one_thread():
        yield str(save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint")))


@pytest.fixture(scope="module")
def rows(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    arguments = ["--model", checkpoint, "--text", str(write_words(folder / "text.txt", 500)), "--out", str(folder)]
    arguments += ["--windows", "1", "--window-tokens", "320", "--chunk-tokens", "32", "--timing-rounds", "0"]
    arguments += ["--strategies", STRATEGIES, "--sensitivity-tokens", "288", "--device", "cpu"]
    result = CliRunner().invoke(build_app(), ["eval", *arguments])
    assert result.exit_code == 0, result.output
    return {row["strategy"]: row for row in read_rows(folder / "results.jsonl")}


def test_every_quantized_layer_has_a_loss_of_its_own(checkpoint, rows):
    model, _, _ = load_model(checkpoint, "cpu")
    for strategy in ("int2", "int8"):
        found = rows[strategy]["layer_sensitivity"]
        assert [one["layer"] for one in found] == list(range(model.config.num_hidden_layers))
        assert all(one["kl_nats"] > 0 for one in found)
    wide, narrow = (sum(one["kl_nats"] for one in rows[name]["layer_sensitivity"]) for name in ("int8", "int2"))
    assert wide < narrow / 20


def test_what_isnt_quantized_or_evicts_has_none(rows):
    for strategy in ("dynamic", "fp", "window:256+int2"):
        assert rows[strategy]["status"] == "ok"
        assert rows[strategy]["layer_sensitivity"] == []


def test_one_layer_alone_is_packed(checkpoint):
    model, _, _ = load_model(checkpoint, "cpu")
    protocol = Protocol(windows=1, window_tokens=320, chunk_tokens=64)
    assert lossy_layers("int4", model, protocol) == list(range(model.config.num_hidden_layers))
    alone, whole = one_layer_cache("int4", 1, model, protocol), make_cache("int4", model, 400)
    with torch.inference_mode():
        for cache in (alone, whole):
            for _ in feed(model, cache, torch.arange(256) % 50, 64):
                pass
    assert 0 < measure_memory(alone).packed_bytes == measure_memory(whole).packed_bytes // len(whole.layers)


@pytest.mark.parametrize(
    ("strategy", "can"),
    [
        ("int4", True),
        ("k8v4", True),
        ("fp", False),
        ("dynamic", False),
        ("int4+offload:cpu", False),
        ("hf-hqq4", False),
    ],
)
def test_only_quantizing_caches_of_this_package_are_taken_apart(strategy, can):
    assert has_sensitivity(strategy) is can


@pytest.mark.parametrize(("tokens", "words"), [(64, "at least 65, got 64"), (4096, "at most window_tokens=2048")])
def test_the_number_of_tokens_must_reach_stored_ones_and_fit_the_window(tokens, words):
    with pytest.raises(ValueError, match=f"`sensitivity_tokens` must be {words}"):
        Protocol(sensitivity_tokens=tokens)
