"""The cache under `generate`: same text, same cache again, any size, clear errors."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import DynamicCache, PretrainedConfig

from conftest import tiny_llama, tiny_llama_config
from hf_kvplus import (
    KVPlusCache,
    OffloadedCache,
    QuantizedCache,
    SlidingWindowCache,
    build_cache,
    measure_memory,
)
from hf_kvplus.codecs.rotary_mean import without_means
from hf_kvplus.compat import cache_keyword

GREEDY = {"max_new_tokens": 80, "do_sample": False}


def prompt(length: int = 200, batch: int = 1) -> torch.Tensor:
    return torch.randint(1, 128, (batch, length))


@pytest.fixture(scope="module")
def expected(llama):
    torch.manual_seed(5)
    ids = prompt(200, 2)
    return ids, llama.generate(ids, past_key_values=DynamicCache(config=llama.config), **GREEDY)


@pytest.fixture(scope="module")
def llama():
    return tiny_llama()


@pytest.mark.parametrize("keyword", sorted({"past_key_values", cache_keyword(tiny_llama())}))
def test_generate_takes_the_cache_under_both_names(llama, expected, keyword):
    ids, text = expected
    cache = build_cache("fp", llama.config)
    assert torch.equal(llama.generate(ids, **{keyword: cache}, **GREEDY), text)
    assert cache.get_seq_length() == text.shape[1] - 1


def test_eight_bits_answer_as_full_precision_does(llama, expected):
    _, text = expected
    ours, theirs = build_cache("int8", llama.config), DynamicCache(config=llama.config)
    for chunk in text.split(20, dim=1):
        with torch.no_grad():
            ours_logits = llama(chunk, past_key_values=ours).logits
            theirs_logits = llama(chunk, past_key_values=theirs).logits
        assert (ours_logits - theirs_logits).abs().max() < 0.02 * theirs_logits.abs().max()
    assert measure_memory(ours).packed_elements > 0


def test_full_precision_logits_are_those_of_dynamic_cache(llama):
    ids, ours, theirs = prompt(150), build_cache("fp", llama.config), DynamicCache(config=llama.config)
    for chunk in ids.split([70, 1, 1, 50, 28], dim=1):
        with torch.no_grad():
            ours_logits, theirs_logits = (
                llama(chunk, past_key_values=ours).logits,
                llama(chunk, past_key_values=theirs).logits,
            )
        assert torch.equal(ours_logits, theirs_logits)


def test_sampling_draws_the_same_text(llama):
    ids, texts = prompt(), []
    for strategy in ("dynamic", "fp"):
        torch.manual_seed(3)
        cache = build_cache(strategy, llama.config)
        texts.append(llama.generate(ids, past_key_values=cache, do_sample=True, max_new_tokens=40))
    assert torch.equal(*texts)


@pytest.mark.parametrize("strategy", ["fp", "int8"])
def test_a_second_call_continues_from_the_same_cache(llama, strategy):
    ids, cache = prompt(), build_cache(strategy, llama.config)
    once = llama.generate(ids, past_key_values=build_cache(strategy, llama.config), max_new_tokens=60, do_sample=False)
    first = llama.generate(ids, past_key_values=cache, max_new_tokens=30, do_sample=False)
    assert torch.equal(llama.generate(first, past_key_values=cache, max_new_tokens=30, do_sample=False), once)


@pytest.mark.parametrize("strategy", ["fp", "int4"])
def test_reset_makes_it_new_even_for_another_batch_size(llama, expected, strategy):
    ids, _ = expected
    cache = build_cache(strategy, llama.config)
    llama.generate(prompt(130), past_key_values=cache, **GREEDY)
    cache.reset()
    fresh = llama.generate(ids, past_key_values=build_cache(strategy, llama.config), **GREEDY)
    assert torch.equal(llama.generate(ids, past_key_values=cache, **GREEDY), fresh)


@pytest.mark.parametrize("head_dim", [48, 64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("nbits", [2, 3, 4, 5, 6, 8])
def test_any_head_size_fits(head_dim, nbits):
    torch.manual_seed(0)
    cache = QuantizedCache(tiny_llama(head_dim=head_dim).config, nbits=nbits)
    states = torch.randn(2, 2, 200, head_dim)
    cache.update(states, states, 0)
    keys, values = cache.update(states[:, :, :1], states[:, :, :1], 0)
    assert keys.shape == values.shape == (2, 2, 201, head_dim)
    assert (keys[:, :, :200] - states).abs().max() < 12 / 2**nbits
    assert torch.equal(keys[:, :, 136:200], states[:, :, 136:])  # the prompt's tail
    assert torch.equal(values[:, :, :4], states[:, :, :4])  # the sinks


@pytest.mark.parametrize("length", [1, 2, 37, 63, 64, 65, 127, 128, 129, 300])
def test_any_prompt_length_fits(llama, length):
    ids = prompt(length)
    text = llama.generate(ids, past_key_values=build_cache("int8", llama.config), max_new_tokens=70, do_sample=False)
    assert text.shape[1] == length + 70


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_states_come_back_in_the_models_dtype(dtype):
    model = tiny_llama().to(dtype)
    cache = QuantizedCache(model.config, nbits=4)
    text = model.generate(prompt(150, 2), past_key_values=cache, **GREEDY)
    assert text.shape[1] == 230
    assert cache.layers[0].keys.dtype == cache.layers[0].values.dtype == dtype
    assert measure_memory(cache).packed_elements > 0


@pytest.mark.parametrize("chunk", [1, 7, 64, 200])
def test_chunking_does_not_change_what_is_packed(llama, chunk):
    states = torch.randn(1, 2, 400, 16)
    whole, pieces = (QuantizedCache(llama.config, nbits=3) for _ in range(2))
    whole.update(states, -states, 0)
    for start in range(0, 400, chunk):
        part = states[:, :, start : start + chunk]
        pieces.update(part, -part, 0)
    for name in ("keys", "values"):
        for field, tensor in whole.layers[0].packed[name].fields().items():
            assert torch.equal(tensor, pieces.layers[0].packed[name].get(field)), field


def test_a_block_never_changes_once_packed(llama):
    cache = QuantizedCache(llama.config, nbits=2)
    cache.update(torch.randn(1, 2, 200, 16), torch.randn(1, 2, 200, 16), 0)
    before = {k: v.clone() for k, v in cache.layers[0].packed["keys"].fields().items()}
    for _ in range(300):
        cache.update(100 * torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16), 0)
    after = cache.layers[0].packed["keys"].fields(0, len(before["codes"][0, 0]))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_plan_says_what_each_layer_does(llama):
    plan = QuantizedCache(llama.config, key_nbits=8, value_nbits=4).plan
    assert len(plan) == 2
    assert plan[0].startswith("layer 0 (full_attention): ")
    assert "8 bits" in plan[0]
    assert "4 sinks" in plan[0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"nbits": 7}, ValueError, "`nbits` must be one of 2, 3, 4, 5, 6, 8, 16, got 7"),
        ({"key_nbits": 7}, ValueError, "`key_nbits` must be one of .*, got 7"),
        ({"value_nbits": 1}, ValueError, "`value_nbits` must be one of .*, got 1"),
        (
            {"group_size": 48, "recipe": "affine"},
            ValueError,
            "`group_size` must divide head_dim=16, got 48; use one of 8, 16",
        ),
        ({"residual_length": -1}, ValueError, "`residual_length` must be at least 0, got -1"),
        ({"num_sink_tokens": 1.5}, TypeError, "`num_sink_tokens` must be an integer, got 1.5"),
        ({"recipe": "magic"}, ValueError, "unknown recipe `magic`"),
    ],
)
def test_bad_options_are_refused_before_work_starts(llama, options, error, message):
    with pytest.raises(error, match=message):
        QuantizedCache(llama.config, **options)


def test_a_configuration_without_layers_is_refused():
    with pytest.raises(ValueError, match="has no `num_hidden_layers`"):
        KVPlusCache(PretrainedConfig())


def test_presets_name_the_width_that_they_were_given(llama):
    for make in (partial(SlidingWindowCache, sliding_window=64), OffloadedCache, QuantizedCache):
        with pytest.raises(ValueError, match="^`nbits` must be one of .*, got 7"):
            make(llama.config, nbits=7)


@pytest.mark.parametrize("strategy", ["fp", "int4"])
def test_a_model_with_more_layers_than_the_cache_is_refused(llama, strategy):
    cache = build_cache(strategy, llama.config)
    with pytest.raises(ValueError, match="has 2 layers and got states of layer 2, so it is for another model"):
        tiny_llama(num_hidden_layers=3).generate(prompt(20), past_key_values=cache, max_new_tokens=2)


@pytest.mark.parametrize("strategy", ["fp", "int4"])
def test_a_batch_that_changes_between_calls_is_refused(llama, strategy):
    cache = build_cache(strategy, llama.config)
    llama.generate(prompt(100, 2), past_key_values=cache, max_new_tokens=2)
    with pytest.raises(ValueError, match="batch size 2, got 3"):
        llama(prompt(1, 3), past_key_values=cache)


@pytest.mark.parametrize("strategy", ["fp", "int4"])
def test_states_of_another_model_or_dtype_are_refused(llama, strategy):
    cache = build_cache(strategy, llama.config)
    states = torch.randn(1, 2, 4, 16)
    cache.update(states, states, 0)
    with pytest.raises(ValueError, match=r"keys \(2, 16\), got \(4, 16\)"):
        cache.update(torch.randn(1, 4, 4, 16), states, 0)
    with pytest.raises(ValueError, match="dtype torch.float32, got torch.float16"):
        cache.update(states.half(), states.half(), 0)
    with pytest.raises(ValueError, match="must have shape"):
        build_cache(strategy, llama.config).update(states[0], states[0], 0)


def test_prefill_in_inference_mode_continues_outside_of_it(llama):
    ids, cache = prompt(150), build_cache("int4", llama.config)
    with torch.inference_mode():
        llama(ids, past_key_values=cache)
    llama.generate(torch.cat([ids, prompt(1)], dim=1), past_key_values=cache, max_new_tokens=80)
    assert cache.get_seq_length() == 230


@pytest.mark.parametrize(("head_dim", "levels", "clips", "means"), [(64, "lloyd_max", 1, 4), (128, "uniform", 3, 0)])
def test_narrow_codes_are_made_for_the_models_head_size(head_dim, levels, clips, means):
    config = tiny_llama_config(head_dim=head_dim)
    for codec in build_cache("int2", config).layers[0].codecs.values():
        codec = without_means(codec)
        assert (codec.levels, codec.clips) == (levels, clips)
    for strategy in ("int3", "int4"):
        small = build_cache(strategy, tiny_llama_config()).layers[0]
        large = build_cache(strategy, config).layers[0]
        for name, codec in large.codecs.items():
            assert without_means(codec) == without_means(small.codecs[name])
    for strategy, expected in (("k2v8", means), ("k3v8", means), ("k4v2", 0), ("k3v8,recipe=affine", 0)):
        assert getattr(build_cache(strategy, config).layers[0].codecs["keys"], "means", 0) == expected
