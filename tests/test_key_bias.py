"""Biases in the projection of keys: which models have them, how keys turn, and what a cache leaves of them."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from conftest import TINY_OPTIONS
from hf_kvplus import KVPlusCache, QuantizedCache, build_cache, estimate_memory, load_cache, measure_memory, save_cache
from hf_kvplus.attention import use_fused_attention
from hf_kvplus.codecs.identity import IdentityCodec
from hf_kvplus.codecs.rotary_mean import RotaryMeanCodec
from hf_kvplus.compat import cache_keyword
from hf_kvplus.configs import text_config
from hf_kvplus.key_bias import KEY_PROJECTIONS, has_key_bias, layer_key_turns
from hf_kvplus.plans.onepass import OnePass
from hf_kvplus.recipes import Quantization
from hf_kvplus.rope import VERIFIED

TINY = {**TINY_OPTIONS, "sliding_window": 600}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
# Biases behind RoPE: turned in halves, interleaved, in some channels only, with two sets of frequencies.
BIASED = {
    "qwen2": {},
    "gpt_oss": ALTERNATING,
    "llama": {"attention_bias": True},
    "glm": {"attention_bias": True},
    "gpt_neox": {"head_dim": None},
    "phi": {"head_dim": None},
    "gemma3_text": {**ALTERNATING, "attention_bias": True},
    "smollm3": {"attention_bias": True, "no_rope_layer_interval": 2},
}


def make_config(model_type, **changes):
    options = {name: value for name, value in {**TINY, **changes}.items() if value is not None}
    return CONFIG_MAPPING[model_type](**options)


def key_biases_of(model):
    """Returns the biases of all projections of keys, in the order of layers."""
    return [
        parameter
        for name, parameter in model.named_parameters()
        if name.endswith(".bias") and name.split(".")[-2] in KEY_PROJECTIONS
    ]


@pytest.mark.parametrize("model_type", sorted(VERIFIED | {"gpt2", "opt"}))
def test_a_configuration_tells_of_biases_what_the_model_has(model_type):
    config = make_config(model_type, **{"falcon": {"head_dim": None}}.get(model_type, {}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert has_key_bias(config) == bool(key_biases_of(model))


@pytest.mark.parametrize("model_type", ["qwen2_vl_text", "qwen2_5_vl_text"])
def test_multimodal_text_decoders_are_asked_too(model_type):
    (turns, *_) = layer_key_turns(CONFIG_MAPPING[model_type]())
    assert turns.biased
    assert turns.turns.inv_freq[0] == 1.0


@pytest.mark.parametrize("model_type", sorted(BIASED))
def test_a_stored_mean_is_the_models_bias(model_type):
    """Each layer's own frequencies and pairs are used: of a key that is nothing but bias, means keep everything."""
    config = make_config(model_type, **BIASED[model_type])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for parameter in key_biases_of(model):
        with torch.no_grad():
            parameter.zero_()
            key_part = parameter.view(-1, head_dim)
            if model_type == "gpt_neox":  # query, key and value of each head follow each other
                key_part = parameter.view(-1, 3, head_dim)[:, 1]
            key_part[:, 1] = 100.0
    held = DynamicCache(config=config)
    with torch.inference_mode():
        model(torch.randint(64, (1, 96)), **{cache_keyword(model): held})
    turns = layer_key_turns(text_config(config))
    assert all(layer.biased or not layer.turns.inv_freq for layer in turns)
    assert any(layer.biased for layer in turns)
    for layer, known in zip(held.layers, turns, strict=True):
        keys = layer.keys[:, :, -48:].unflatten(2, (1, 48))
        codec = RotaryMeanCodec(IdentityCodec(block_tokens=48), known.turns, 1)
        rest = codec.encode(keys)["states"]
        assert rest.abs().max() < 0.1 * keys.abs().max()


@pytest.mark.parametrize("strategy", ["int8", "int4", "int3", "int2", "k4v2,recipe=affine"])
@pytest.mark.parametrize("channel", [0, 3, 7, 8])
def test_a_bias_in_any_channel_costs_nothing(strategy, channel):
    """Queries don't look at the biased pair, so that the model stays the same; a rotation spreads it to others."""
    config = make_config("qwen2", initializer_range=0.2)
    losses = {}
    for size, means in ((0.0, ""), (200.0, ""), (200.0, ",means=0")):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        attention, pair = model.model.layers[1].self_attn, [channel % 8, channel % 8 + 8]
        with torch.no_grad():
            attention.k_proj.bias[channel] = size
            attention.q_proj.weight.view(4, 16, -1)[:2, pair] = 0.0
            attention.q_proj.bias.view(4, 16)[:2, pair] = 0.0
        token_ids = torch.randint(64, (500,), generator=torch.Generator().manual_seed(1))
        with torch.inference_mode(), OnePass(model) as run:
            reference = run.reference(token_ids, torch.arange(250, 500))
            losses[size, means] = float(run.divergences(reference, build_cache(strategy + means, config)).mean())
    assert losses[200.0, ""] < 1.05 * losses[0.0, ""]
    if channel != 7 and "affine" not in strategy:  # the slowest pair, and a recipe without rotation, lose nothing
        assert losses[200.0, ",means=0"] > 1.4 * losses[200.0, ""]


def test_models_without_turning_biases_store_no_means():
    for config in (LlamaConfig(**TINY), GPT2Config(n_layer=2)):
        cache = build_cache("int4", config)
        assert not any("turning means" in line for line in cache.plan)
    assert "2 turning means" in build_cache("int4,means=2", LlamaConfig(**TINY)).plan[0]
    assert "turning means" not in build_cache("int4,means=0", make_config("qwen2")).plan[0]
    assert "1 turning means" in QuantizedCache(make_config("qwen2"), nbits=4).plan[0]
    with pytest.raises(ValueError, match="rotary_means.*deepseek_v3"):
        build_cache("int4,means=2", CONFIG_MAPPING["deepseek_v3"]())
    crossed = KVPlusCache(LlamaConfig(**TINY), quantization=Quantization(rotary_means=1), cross_attention=True)
    assert not crossed.layers[0].codecs["keys"].turns.inv_freq
    with pytest.raises(ValueError, match="needs heads of 18"):
        build_cache("int4,means=9", make_config("qwen2"))


@pytest.mark.parametrize("strategy", ["int4", "int2", "int4+offload:disk,budget=1KiB", "int4+window:200,sinks=4"])
def test_fused_and_plain_attention_read_the_same_means(strategy, tmp_path):
    config = make_config("qwen2", initializer_range=0.2, sliding_window=None)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in key_biases_of(model):
        with torch.no_grad():
            parameter[3] = 20.0
    token_ids = torch.randint(64, (2, 300))

    def logits():
        cache = build_cache(strategy, config)
        with torch.inference_mode():
            model(token_ids[:, :280], **{cache_keyword(model): cache})
            found = [model(token_ids[:, i : i + 1], **{cache_keyword(model): cache}).logits for i in range(280, 300)]
        assert isinstance(cache.layers[0].codecs["keys"], RotaryMeanCodec)
        return torch.cat(found, dim=1)

    plain = logits()
    with use_fused_attention(model):
        fused = logits()
    torch.testing.assert_close(fused, plain, rtol=1e-3, atol=1e-3)


def test_a_cache_with_means_is_saved_and_sized(tmp_path):
    config = make_config("qwen2", sliding_window=None)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    cache = build_cache("int4", config)
    with torch.inference_mode():
        model(torch.randint(64, (1, 200)), **{cache_keyword(model): cache})
    save_cache(cache, tmp_path / "cache.safetensors", model=model)
    loaded = load_cache(tmp_path / "cache.safetensors", model)
    assert isinstance(loaded, KVPlusCache)
    for ours, theirs in zip(cache.layers, loaded.layers, strict=True):
        assert all(torch.equal(*pair) for pair in zip(ours.dense(), theirs.dense(), strict=True))
    estimate = estimate_memory(config, 200, strategy="int4", dtype=torch.float32)
    assert sum(layer.packed_bytes for layer in estimate.layers) == measure_memory(cache).packed_bytes
