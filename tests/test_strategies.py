"""Strategy strings: what they build, and what wrong ones are told."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, StaticCache

from conftest import tiny_llama_config
from hf_kvplus import KVPlusCache, available_strategies, build_cache
from hf_kvplus.strategies import parse, split_list


@pytest.fixture
def config():
    return tiny_llama_config()


@pytest.mark.parametrize(
    ("strategy", "key_nbits", "value_nbits"),
    [("int8", 8, 8), ("int4", 4, 4), ("int3", 3, 3), ("int2", 2, 2), ("k8v4", 8, 4), ("k5v6", 5, 6), ("k16v2", 16, 2)],
)
def test_widths_are_those_of_the_name(config, strategy, key_nbits, value_nbits):
    cache = build_cache(strategy, config)
    assert isinstance(cache, KVPlusCache)
    assert (cache.quantization.key_nbits, cache.quantization.value_nbits) == (key_nbits, value_nbits)
    assert len(cache.layers) == len(cache.plan) == config.num_hidden_layers


def test_options_reach_the_layers(config):
    layer = build_cache("int4,group=16,recent=32,sinks=2,recipe=affine", config).layers[0]
    assert (layer.residual_length, layer.num_sink_tokens) == (32, 2)
    assert layer.codecs["keys"].group_size == 16


def test_standalone_strategies_are_transformers_own(config):
    assert type(build_cache("dynamic", config)) is DynamicCache
    assert type(build_cache("hf-static:128", config)) is StaticCache
    assert build_cache("hf-static", config, max_length=64).layers[0].max_cache_len == 64


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("int5x", "unknown strategy `int5x`: did you mean `int"),
        ("hf-quant4", "did you mean `hf-quanto4`"),
        ("int7", "available: .*dynamic"),
        ("k7v4", "unknown strategy `k7v4`"),
        ("int4,bits=3", "unknown option bits; it takes group, recent, sinks, recipe"),
        ("int4:8", "takes nothing after a colon"),
        ("int4,group=x", "`group` must be an integer, got 'x'"),
        ("int4,group", "options are written key=value"),
        ("int4+", "empty part"),
        ("dynamic+int4", "`dynamic` stands alone"),
        ("int4+int8", "sets quantization a second time"),
        ("hf-static", "needs its length in tokens"),
        ("int4,recipe=best", "unknown recipe `best`"),
        ("int4,sinks=-1", "`num_sink_tokens` must be at least 0, got -1"),
        ("int4,group=12", "`group_size` must be a multiple of 8, got 12; use 8 or 16"),
        ("int4,group=64,recipe=affine", "`group_size` must divide head_dim=16, got 64; use one of 8, 16"),
    ],
)
def test_a_wrong_string_gets_one_clear_error(config, strategy, message):
    with pytest.raises(ValueError, match=message):
        build_cache(strategy, config)


def test_a_strategy_is_a_string(config):
    with pytest.raises(TypeError, match="`strategy` must be a string"):
        build_cache(4, config)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_baseline_that_cannot_run_here_says_why(config):
    with pytest.raises(ValueError, match="needs a CUDA device"):
        build_cache("hf-offloaded", config)


def test_a_baseline_without_its_package_names_the_extra(config, monkeypatch):
    monkeypatch.setattr("hf_kvplus.strategies.hf_baselines.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "hf_kvplus\[peers\]"'):
        build_cache("hf-hqq4", config)


def test_every_strategy_is_told_in_one_line():
    infos = available_strategies()
    assert {"dynamic", "fp", "int8", "int4", "int2", "kAvB", "hf-quanto4", "hf-hqq2"} <= {info.name for info in infos}
    for info in infos:
        assert info.summary
        assert "\n" not in info.summary
        assert info.stored_bits is None or info.stored_bits > 0


def test_parts_and_lists_are_split_where_they_end():
    window, integer = parse("window:1024,sinks=4,positions=shifted+int4")
    assert (window.name, window.value, window.options) == ("window", "1024", {"sinks": "4", "positions": "shifted"})
    assert (integer.name, integer.value, integer.options) == ("int4", None, {})
    assert split_list("dynamic, int4,group=32,window:64,sinks=2+int8,recent=32,fp") == [
        "dynamic",
        "int4,group=32",
        "window:64,sinks=2+int8,recent=32",
        "fp",
    ]


def test_nothing_is_built_from_a_thing_that_is_no_configuration():
    with pytest.raises(TypeError, match="must be a transformers configuration, got dict"):
        build_cache("int4", {})
