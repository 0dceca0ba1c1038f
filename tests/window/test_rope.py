"""Keys moved forward equal keys computed there, for every model type that is claimed, and far into the text."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, LlamaConfig, Phi3Config, Qwen2VLTextConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from conftest import TINY_OPTIONS
from hf_kvplus import SlidingWindowCache
from hf_kvplus.positions import rotated_layers
from hf_kvplus.rope import VERIFIED, KeyRotation, key_rotation

COMMON = {**TINY_OPTIONS, "sliding_window": 32}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
CHANGES = {"gemma3_text": ALTERNATING, "gemma4_text": ALTERNATING}
SCALINGS = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}


def keys_at(model, position):
    """Returns each layer's key of one token that stands alone at `position`; only RoPE tells positions apart."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(
            input_ids=torch.tensor([[5]]),
            position_ids=torch.tensor([[position]]),
            attention_mask=torch.ones(1, 1, dtype=torch.long),
            past_key_values=cache,
        )
    return [layer.keys for layer in cache.layers]


def assert_keys_move(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    rotation, rotated = key_rotation(config), rotated_layers(config)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(rotated)
    before, after = keys_at(model, 3), keys_at(model, 1203)
    compared = 0
    for layer, kind in enumerate(kinds):
        if kind == "full_attention":
            moved = rotation.forward(before[layer], [[1200]]) if rotated[layer] else before[layer]
            assert (moved - after[layer]).abs().max() < 1e-3 * after[layer].abs().max()
            compared += 1
    assert compared


@pytest.mark.parametrize("model_type", sorted(VERIFIED))
def test_keys_of_every_claimed_model_type_move_as_computed(model_type):
    options = {**COMMON, **CHANGES.get(model_type, {})}
    if model_type == "falcon":  # derives it
        del options["head_dim"]
    assert_keys_move(CONFIG_MAPPING[model_type](**options))


@pytest.mark.parametrize("rope_type", sorted(SCALINGS))
def test_scaled_frequencies_are_the_models_own(rope_type):
    parameters = {"rope_type": rope_type, "rope_theta": 10000.0, **SCALINGS[rope_type]}
    assert_keys_move(LlamaConfig(**COMMON, rope_parameters=parameters))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPT2Config(), "learned positions"),
        (Qwen2VLTextConfig(rope_parameters={"rope_type": "default", "mrope_section": [2, 3, 3]}), "several axes"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "'dynamic'"),
        (
            Phi3Config(
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 48,
                    "long_factor": [4.0] * 48,
                    "original_max_position_embeddings": 4096,
                },
                max_position_embeddings=131072,
                original_max_position_embeddings=4096,
            ),
            "'longrope'",
        ),
        (CONFIG_MAPPING["deepseek_v3"](), "wasn't verified"),
    ],
    ids=["gpt2", "qwen2-vl", "dynamic", "longrope", "deepseek-v3"],
)
def test_what_cannot_be_shifted_is_refused_by_name_and_works_unshifted(config, reason):
    with pytest.raises(ValueError, match=reason) as error:
        SlidingWindowCache(config, 64, positions="shifted")
    assert config.model_type in str(error.value)
    assert 'positions="original"' in str(error.value)
    assert SlidingWindowCache(config, 64).window.sliding_window == 64


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("tokens", [1, 999, 1_000_000, 16_000_000])
def test_a_million_tokens_turn_as_exactly_as_one(tokens, interleaved):
    inv_freq = 1.0 / 10000 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16)
    keys = torch.randn(2, 3, 4, 20)
    moved = KeyRotation(inv_freq, interleaved).forward(keys, [[tokens], [0]])
    pairs = (keys[0, ..., 0:16:2], keys[0, ..., 1:16:2]) if interleaved else (keys[0, ..., :8], keys[0, ..., 8:16])
    turned = torch.complex(*(part.double() for part in pairs)) * torch.polar(
        torch.ones(8, dtype=torch.float64), torch.remainder(tokens * inv_freq.double(), 2 * torch.pi)
    )
    got = (moved[0, ..., 0:16:2], moved[0, ..., 1:16:2]) if interleaved else (moved[0, ..., :8], moved[0, ..., 8:16])
    assert (torch.complex(*got) - turned).abs().max() < 1e-6
    assert torch.equal(moved[0, ..., 16:], keys[0, ..., 16:])
    assert torch.equal(moved[1], keys[1])


def test_stored_sinks_never_change_while_they_move():
    config = LlamaConfig(**{**COMMON, "sliding_window": None})
    cache = SlidingWindowCache(config, 8, positions="shifted")
    layer = cache.layers[0]
    for _ in range(200):
        layer.update(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16))
        if layer.cumulative_length == 4:
            stored = layer.sinks.get("keys").clone()
    assert torch.equal(layer.sinks.get("keys"), stored)
    expected = layer.rotation.forward(stored, [[200 - 7 - 4]])
    assert torch.equal(layer.keys[:, :, :4], expected)


def test_copies_come_one_after_another():
    rotation = KeyRotation(torch.tensor([1.0, 0.1]), interleaved=False)
    keys = torch.randn(1, 1, 3, 4)
    both = rotation.forward(keys, [[2, 5]])
    assert torch.equal(both, torch.cat([rotation.forward(keys, [[2]]), rotation.forward(keys, [[5]])], dim=2))
