"""Encoder-decoder models: any pair of caches, and the trap of giving them one."""

from __future__ import annotations

import pytest
import torch
import zoo
from case import Case, Strategy, attention_layers
from modes import MODES
from transformers import DynamicCache, EncoderDecoderCache, T5GemmaConfig, T5GemmaForConditionalGeneration

from hf_kvplus import KVPlusCache, KVPlusEncoderDecoderCache, QuantizedCache, build_cache

SPEAKERS = ["T5", "BART", "Whisper"]
HALVES = {
    "both quantized": lambda c: build_cache("int8,recent=16", c),
    "decoder only": lambda c: KVPlusEncoderDecoderCache(
        QuantizedCache(c, nbits=8, residual_length=16), DynamicCache()
    ),
    "encoder only": lambda c: KVPlusEncoderDecoderCache(
        DynamicCache(), KVPlusCache(c, cross_attention=True, quantization=QuantizedCache(c, nbits=8).quantization)
    ),
    "in transformers' own pair": lambda c: EncoderDecoderCache(
        QuantizedCache(c, nbits=8, residual_length=16), KVPlusCache(c, cross_attention=True)
    ),
}


@pytest.mark.parametrize("name", SPEAKERS)
@pytest.mark.parametrize("halves", HALVES)
def test_either_half_may_be_quantized(name, halves):
    case = Case(zoo.ZOO[name], Strategy("int8,recent=16", 0.1))
    cache = HALVES[halves](case.model.config)
    output = case.generate(case.tokens(), cache)
    case.check_steps(output, 190)
    packed = [
        any(getattr(layer, "packed_blocks", 0) for layer in half.layers)
        for half in (cache.self_attention_cache, cache.cross_attention_cache)
    ]
    assert (
        packed
        == {
            "both quantized": [True, True],
            "decoder only": [True, False],
            "encoder only": [False, True],
            "in transformers' own pair": [True, False],
        }[halves]
    )
    assert cache.cross_attention_cache.layers[0].keys.shape[2] == zoo.ENCODER_TOKENS


@pytest.mark.parametrize("name", ["T5", "BART"])
def test_one_cache_for_both_halves_is_refused_instead_of_mixing_them(name):
    case = Case(zoo.ZOO[name], Strategy("fp", 1))
    with pytest.raises(RuntimeError, match="needs two caches.*KVPlusEncoderDecoderCache"):
        case.generate(case.tokens(), KVPlusCache(case.model.config))


@pytest.mark.parametrize("mode", ["greedy", "chunked prefill"])
@pytest.mark.parametrize("name", ["BART", "Whisper"])
def test_a_decoder_may_have_a_window(name, mode):
    """Whisper leaves the masks to transformers, which asks the pair for what they are made of."""
    MODES[mode].run(Case(zoo.ZOO[name], Strategy("window:90,sinks=4", 2e-5, window=(90, 4))))


def t5gemma():
    torch.manual_seed(0)
    half = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 100,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    tokens = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": None}
    config = T5GemmaConfig(encoder={**half, **tokens}, decoder={**half, **tokens}, vocab_size=128, **tokens)
    model = T5GemmaForConditionalGeneration(config).eval()
    zoo.listen(model)
    return model


@pytest.mark.parametrize("strategy", ["fp", "int8,recent=16"])
def test_a_model_that_makes_the_encoders_cache_anew_keeps_ours(strategy):
    """T5Gemma makes another of the same class, for its decoder's windows, which ours never has there."""
    model = t5gemma()
    ids = torch.randint(2, 118, (2, 150), generator=torch.Generator().manual_seed(2))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 120, "do_sample": False}
    expected = model.generate(ids, **options)
    cache = build_cache(strategy, model.config)
    encoders = cache.cross_attention_cache
    said = model.generate(ids, past_key_values=cache, **options)
    assert (said == expected).float().mean() > (0.999 if strategy == "fp" else 0.9)
    assert cache.cross_attention_cache is encoders
    assert encoders.layers[0].keys.shape[2] == 150
    if strategy != "fp":
        assert all(layer.packed_blocks for half in (cache.self_attention_cache, encoders) for layer in half.layers)
    other = KVPlusCache(model.config, cross_attention=True)
    cache.cross_attention_cache = other
    assert cache.cross_attention_cache is other


def test_offloading_as_transformers_means_it_is_refused():
    with pytest.raises(ValueError, match="`offloading` is for transformers' own caches"):
        KVPlusCache(zoo.model("Llama").config, offloading=True)


def test_the_encoders_half_keeps_everything_whatever_the_decoders_window():
    config = zoo.model("Gemma 3").config
    cache = KVPlusCache(config, cross_attention=True, quantization=QuantizedCache(config).quantization)
    assert not any(cache.is_sliding)
    states = torch.randn(1, 1, 400, 32)
    cache.update(states, states, 0)
    assert cache.layers[0].keys.shape[2] == 400


@pytest.mark.parametrize("strategy", ["fp", "int8"])
def test_whispers_own_generate_takes_the_pair(strategy):
    model = zoo.model("Whisper")
    features = torch.randn(2, 8, 300, generator=torch.Generator().manual_seed(2))
    options = {"max_new_tokens": 100, "do_sample": False}
    expected = model.generate(features, **options)
    cache = build_cache(strategy, model.config)
    said = model.generate(features, past_key_values=cache, **options)
    assert said.shape[1] > 90
    assert (said == expected).float().mean() > (0.999 if strategy == "fp" else 0.9)
    assert strategy == "fp" or all(layer.packed_blocks for layer in cache.cross_attention_cache.layers)


def test_a_pair_resets_reports_and_refuses_what_a_half_cannot():
    case = Case(zoo.ZOO["T5"], Strategy("int8,recent=16", 0.1))
    cache = case.cache()
    assert cache.batch_size == -1
    assert len(cache.plan) == 4
    first = case.generate(case.tokens(), cache).sequences
    cache.reset()
    assert torch.equal(case.generate(case.tokens(), cache).sequences, first)
    assert len(attention_layers(cache)) == 2
    static = KVPlusEncoderDecoderCache(
        cache.self_attention_cache, build_cache("hf-static:200", zoo.model("Llama").config)
    )
    with pytest.raises(TypeError, match="batch_select_indices"):
        static.batch_select_indices(torch.tensor([0]))


@pytest.mark.parametrize("name", ["T5", "BART"])
@pytest.mark.parametrize(("strategy", "loss"), [("fp", 5e-6), ("int8,recent=16", 0.1)])
def test_a_row_whose_encoder_input_is_padded_says_what_it_says_alone(name, strategy, loss):
    case = Case(zoo.ZOO[name], Strategy(strategy, loss))
    tokens, context = case.tokens(2), case.context(2)
    context["input_ids"][1, 70:], context["attention_mask"][1, 70:] = 0, 0
    output = case.model.generate(
        **context,
        decoder_input_ids=tokens,
        past_key_values=case.cache(),
        max_new_tokens=12,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    said = torch.stack(output.logits, dim=1)
    for row, length in enumerate((zoo.ENCODER_TOKENS, 70)):
        with torch.no_grad():
            alone = case.model(
                input_ids=context["input_ids"][row : row + 1, :length],
                decoder_input_ids=output.sequences[row : row + 1],
            ).logits[0, tokens.shape[1] - 1 : -1]
        error, spread = (said[row] - alone).pow(2).mean().sqrt(), alone.std(-1).mean()
        assert error <= loss * spread
