"""A window equals an explicit mask over the full cache, whatever the padding, the chunks and the architecture."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config, SmolLM3Config
from window_oracle import cached_logits, oracle_logits, shifted_logits

from hf_kvplus import build_cache

TOLERANCE = 1e-4
CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config, "mistral": MistralConfig}


@st.composite
def architectures(draw):
    """Draws a configuration: heads, their sharing, sizes, layers, norms."""
    kind = draw(st.sampled_from(sorted(CONFIGS)))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4]))
    options = {
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from([8, 12, 32])),
        "max_position_embeddings": 512,
        "initializer_range": 0.25,
        "attn_implementation": draw(st.sampled_from(["sdpa", "eager"])),
        "rope_parameters": {"rope_type": "default", "rope_theta": draw(st.sampled_from([100.0, 10000.0]))},
    }
    if kind == "mistral":
        options["sliding_window"] = None
    return CONFIGS[kind](**options)


@st.composite
def workloads(draw):
    """Draws a batch: tokens, left padding per row, chunks, window, sinks, tokens that could be rolled back."""
    total = draw(st.integers(2, 48))
    padding = draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=3))
    chunks, left = [], total
    while left:
        chunks.append(draw(st.integers(1, left)))
        left -= chunks[-1]
    return total, padding, chunks, draw(st.integers(1, 20)), draw(st.integers(0, 5)), draw(st.sampled_from([0, 3, 9]))


def batch(total, padding, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 61, (len(padding), total), generator=generator)
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        mask[row, :count] = 0
    return ids, mask


@pytest.mark.parametrize("positions", ["original", "shifted"])
@given(config=architectures(), workload=workloads(), seed=st.integers(0, 2**16))
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_any_feeding_equals_the_oracle(positions, config, workload, seed):
    total, padding, chunks, window, sinks, rollback = workload
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids, mask = batch(total, padding, seed)
    oracle = shifted_logits if positions == "shifted" else oracle_logits
    with torch.inference_mode():
        expected = oracle(model, ids, mask, window, sinks)
        strategy = f"window:{window},sinks={sinks},positions={positions},rollback={rollback}"
        got = cached_logits(model, ids, mask, build_cache(strategy, config), chunks)
    difference = ((got - expected) * mask[..., None]).abs().max().item()
    assert difference < TOLERANCE


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_oracle_sees_what_the_window_hides(implementation):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.25, attn_implementation=implementation,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    ids, mask = batch(40, [0], 0)
    with torch.inference_mode():
        narrow, wide = (oracle_logits(model, ids, mask, window, 2) for window in (8, 9))
        shifted = shifted_logits(model, ids, mask, 8, 2)
    assert (narrow - wide).abs().max() > 100 * TOLERANCE
    assert (narrow - shifted).abs().max() > 100 * TOLERANCE


def test_layers_without_rope_leave_their_sinks_alone_behind_the_same_mask():
    config = SmolLM3Config(
        vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.25, no_rope_layers=[1, 0], pad_token_id=0,
    )  # fmt: skip
    cache = build_cache("window:8,sinks=2,positions=shifted", config)
    assert [layer.rotation is not None for layer in cache.layers] == [True, False]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids, mask = batch(40, [0, 17], 5)
    for chunks in ([40], [1] * 40, [11, 1, 20, 8]):
        cache = build_cache("window:8,sinks=2,positions=shifted", config)
        with torch.inference_mode():
            got = cached_logits(model, ids, mask, cache, chunks)
            expected = shifted_logits(model, ids, mask, 8, 2)
        assert ((got - expected) * mask[..., None]).abs().max() < TOLERANCE


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("chunks", [[60], [1] * 60, [7, 30, 1, 1, 21]], ids=str)
def test_rows_padded_by_more_than_the_window_equal_the_oracle(implementation, chunks):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.25, attn_implementation=implementation,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    ids, mask = batch(60, [0, 31, 58, 13, 12], 3)
    with torch.inference_mode():
        for positions, oracle in (("original", oracle_logits), ("shifted", shifted_logits)):
            cache = build_cache(f"window:9,sinks=4,positions={positions}", config)
            got = cached_logits(model, ids, mask, cache, chunks)
            expected = oracle(model, ids, mask, 9, 4)
            assert ((got - expected) * mask[..., None]).abs().max() < TOLERANCE
            assert got.isfinite().all()
