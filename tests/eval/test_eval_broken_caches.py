"""Caches that are broken on purpose: the harness must not only notice, but say what is wrong."""

import pytest
import torch
from rich.console import Console

import hf_kvplus
from checkpoints import one_thread, save_tiny_checkpoint
from hf_kvplus import KVPlusCache
from hf_kvplus.loading import load_model
from hf_kvplus.recipes import Quantization
from hf_kvplus.report import write_report
from kvplus_eval import runner
from kvplus_eval.data import EvalText
from kvplus_eval.evaluation import Job, run_evaluation
from kvplus_eval.protocol import Protocol
from kvplus_eval.readback import read_back, record_states
from kvplus_eval.tables import complaints

PROTOCOL = Protocol(windows=1, window_tokens=352, chunk_tokens=32, timing_rounds=0)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    model, _, source = load_model(str(save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))), device="cpu")
    with one_thread():
        yield model, source


class Int4(KVPlusCache):
    """An honest cache to break."""

    def __init__(self, config):
        super().__init__(config, quantization=Quantization(4, 4))


class ReturnsUnquantized(Int4):
    """Packs everything, and answers from a copy that it never packed."""

    # Out of sight of whoever counts the bytes of an instance
    seen = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        begun = self.get_seq_length(layer_idx) > 0
        super().update(key_states, value_states, layer_idx, *args, **kwargs)
        pair = (key_states, value_states)
        if begun:
            pair = tuple(torch.cat(both, dim=2) for both in zip(self.seen[layer_idx], pair, strict=True))
        self.seen[layer_idx] = pair
        return pair


class SwapsHeads(Int4):
    def update(self, *args, **kwargs):
        keys, values = super().update(*args, **kwargs)
        return keys.flip(1), values


class DropsABlock(Int4):
    def update(self, *args, **kwargs):
        keys, values = super().update(*args, **kwargs)
        if values.shape[2] > 128:
            values = values.clone()
            values[:, :, 48:96] = 0
        return keys, values


class ForgetsABlock(Int4):
    def update(self, *args, **kwargs):
        keys, values = super().update(*args, **kwargs)
        return (keys[:, :, 48:], values[:, :, 48:]) if keys.shape[2] > 128 else (keys, values)


class OffByOne(Int4):
    def update(self, *args, **kwargs):
        keys, values = super().update(*args, **kwargs)
        return keys.roll(1, dims=2), values.roll(1, dims=2)


class MasksOneTooMany(Int4):
    def get_mask_sizes(self, *args, **kwargs):
        length, offset = super().get_mask_sizes(*args, **kwargs)
        return length - 1, offset + 1


class CountsOneTooMany(Int4):
    def get_seq_length(self, *args, **kwargs):
        length = super().get_seq_length(*args, **kwargs)
        return length + 1 if length else 0


class QuantizesPadding(Int4):
    """Never learns which tokens are padding, so that their states widen everybody's scales."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return super().update(key_states, value_states, layer_idx)


def evaluate(loaded, folder, monkeypatch, build, strategy="int4"):
    model, source = loaded
    if build is not None:
        honest = hf_kvplus.build_cache
        monkeypatch.setattr(
            runner,
            "build_cache",
            lambda name, config, **o: build(config) if name == strategy else honest(name, config, **o),
        )
    windows = [torch.arange(PROTOCOL.window_tokens) * 7 % 63]
    job = Job(model, source, EvalText("numbers", "numbers"), windows, [strategy], PROTOCOL, folder)
    (row,) = run_evaluation(job, Console(quiet=True)).rows
    return row


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (SwapsHeads, "swaps heads: layer 0 returns the keys of head 1 as those of head 0"),
        (DropsABlock, "drops tokens: layer 0 returns no trace of the values of tokens 48 to 95"),
        (ForgetsABlock, "drops tokens: layer 0 returns 272 of 320 tokens"),
        (OffByOne, "off by one position: layer 0 returns the keys of the token before each"),
        (MasksOneTooMany, "off by one position: layer 0 says that the mask covers 319 tokens from 1 on"),
        (CountsOneTooMany, "the cache reports 33 tokens after 32 were fed"),
        (ReturnsUnquantized, "returns unquantized states: `int4` claims"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_broken_cache_is_refused_by_name(loaded, tmp_path, monkeypatch, build, name):
    row = evaluate(loaded, tmp_path, monkeypatch, build)
    assert row["status"] == "refused"
    assert row["metrics"] == {}
    assert name in row["reason"]


def test_quantizing_the_padding_is_noted_and_the_figures_stay(loaded, tmp_path, monkeypatch):
    row = evaluate(loaded, tmp_path, monkeypatch, QuantizesPadding)
    assert row["status"] == "ok"
    assert len(row["findings"]) == 1
    assert row["findings"][0].startswith("quantizes the padding: what layer 1 returns")
    assert complaints([row]) == [f"int4: {row['findings'][0]}"]
    assert row["findings"][0] in write_report([row], tmp_path).read_text()


@pytest.mark.parametrize("strategy", ["dynamic", "fp", "int8", "int4", "int2", "hf-static", "window:100,sinks=4"])
def test_an_honest_cache_has_no_fault(loaded, strategy):
    model, _ = loaded
    states = record_states(model, torch.arange(320) * 7 % 63)
    found = read_back(
        lambda: runner.make_cache(strategy, model, 352), states, keeps_all=not strategy.startswith("window")
    )
    assert found.findings == []
    errors = [one["key_error"] for one in found.layers]
    assert errors == [0, 0] if strategy in ("dynamic", "fp", "hf-static") else all(0 <= error < 1 for error in errors)


def test_fewer_bits_give_back_less(loaded):
    model, _ = loaded
    states = record_states(model, torch.arange(320) * 7 % 63)
    errors = [
        read_back(lambda name=name: runner.make_cache(name, model, 352), states, keeps_all=True).layers[0]["key_error"]
        for name in ("fp", "int8", "int4", "int2")
    ]
    assert errors == sorted(errors)
    assert errors[0] == 0 < errors[1]


def test_where_full_precision_isnt_equal_no_cache_of_ours_is_measured(loaded, tmp_path, monkeypatch):
    from transformers import DynamicCache

    class Scaled(DynamicCache):
        def update(self, *args, **kwargs):
            keys, values = super().update(*args, **kwargs)
            return keys, 1.01 * values

    row = evaluate(loaded, tmp_path, monkeypatch, lambda config: Scaled(config=config), strategy="fp")
    assert row["status"] == "refused"
    assert "`fp` isn't equal to `dynamic` on this model" in row["reason"]
