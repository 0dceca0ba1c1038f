"""The recommendation is the least lossy strategy that meets the wishes, keeps its promise, and can say no."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config

from conftest import tiny_llama_config
from hf_kvplus import Recommendation, build_cache, measure_memory, recommend
from hf_kvplus.devices import Device
from hf_kvplus.units import parse_bytes, parse_tokens

CONFIG = tiny_llama_config(head_dim=64)
FULL = 2 * 2 * 2 * 64 * 8192 * 4


def row(strategy: str, kl: float, parameters: int = 10**9, name: str = "other") -> dict:
    model = {"name": name, "parameters": parameters}
    return {"strategy": strategy, "status": "ok", "metrics": {"kl_mean_nats": kl}, "model": model}


def fill(recommendation: Recommendation, config, tokens: int):
    scope = {"model": type("Model", (), {"config": config})}
    exec(recommendation.code, scope)
    for count in (tokens - 1, 1):
        for layer in range(config.num_hidden_layers):
            shape = (1, config.num_key_value_heads, count, config.head_dim)
            scope["cache"].update(torch.randn(shape), torch.randn(shape), layer)
    return scope["cache"]


@pytest.mark.parametrize(
    ("share", "strategy"), [(1, "dynamic"), (0.3, "int8"), (0.25, "k8v4"), (0.17, "int4"), (0.14, "int3")]
)
def test_the_least_lossy_strategy_within_the_budget_is_taken_and_keeps_its_promise(share, strategy):
    found = recommend(CONFIG, 8192, budget_bytes=int(share * FULL))
    assert found.strategy == strategy
    measured = measure_memory(fill(found, CONFIG, 8192)).total_bytes
    assert measured <= share * FULL
    assert measured == pytest.approx(found.estimate.cache_bytes, rel=0.02)


def test_nothing_is_an_answer():
    found = recommend(CONFIG, 8192, budget_bytes=FULL // 100)
    assert found.strategy is None
    assert found.code == ""
    assert "No strategy meets the budget" in found.reasons[0]
    assert "`int2` comes nearest" in found.reasons[1]


def test_a_window_is_offered_to_those_who_need_recent_text_only():
    found = recommend(CONFIG, 8192, budget_bytes=FULL // 10, recent_tokens=512)
    assert found.strategy == "window:512"
    assert all("window" not in one.strategy for one in recommend(CONFIG, 8192, FULL).candidates)


def test_beyond_the_trained_length_a_window_moves_its_sinks_along_or_isnt_offered():
    assert CONFIG.max_position_embeddings == 16384
    found = recommend(CONFIG, 16385, budget_bytes=FULL // 10, recent_tokens=512)
    assert found.strategy == "window:512,positions=shifted"
    assert recommend(CONFIG, 100_000, recent_tokens=512).strategy == "int4+window:512,positions=shifted"
    learned = recommend(GPT2Config(n_layer=2), 100_000, recent_tokens=512)
    assert all("window" not in one.strategy for one in learned.candidates)


def test_measured_loss_decides_where_it_is_bounded():
    rows = [row("int8", 1e-5), row("int4", 0.002), row("int2", 0.1)]
    assert recommend(CONFIG, 8192, max_kl=0.01, results=rows).strategy == "int4"
    assert recommend(CONFIG, 8192, max_kl=0.5, results=rows).strategy == "int2"
    found = recommend(CONFIG, 8192, FULL // 5, max_kl=1e-3, results=rows)
    assert found.strategy is None
    assert "Measure k8v4" not in " ".join(found.reasons)  # it is too large anyway
    assert "Measure int3" in " ".join(found.reasons)
    assert recommend(CONFIG, 8192, max_kl=0.01).strategy == "dynamic"  # nothing else is known to keep it


def test_offloading_loses_what_the_same_loses_on_the_device_and_comes_last():
    config = tiny_llama_config(head_dim=64, num_hidden_layers=16)
    weights = recommend(config, 8192).estimate.weight_bytes
    device = Device("small", int((weights + 1.12 * FULL) / 0.9) + 1, 1e9, 1e9)  # full: 8 FULL
    rows = [row("int4", 0.002), row("int2", 0.1)]
    found = recommend(config, 8192, max_kl=0.01, device=device, results=rows)
    assert found.strategy == "offload:cpu"
    assert "leaves the device, as none that stays there will do" in found.reasons[1]
    assert found.reasons[-1] == "It loses nothing."
    kls = {one.strategy: one.kl_nats for one in found.candidates}
    assert kls["int4+offload:cpu"] == kls["int4"] == 0.002
    assert kls["int8+offload:cpu"] is None
    found = recommend(config, 8192, device=device)
    assert found.strategy in ("int3", "int2")
    assert "the least lossy candidate that stays on the device" in found.reasons[1]


def test_results_of_this_model_come_before_those_of_others(llama):
    parameters = sum(weight.numel() for weight in llama.parameters())
    rows = [row("int4", 0.5, 10**9, "large"), row("int4", 0.001, parameters, "this")]
    found = recommend(llama.config, 8192, max_kl=0.01, results=rows)
    assert found.strategy == "int4"
    assert found.reasons[-1].endswith("measured with this.")
    others = recommend(llama.config, 8192, max_kl=0.01, results=[row("int4", 0.001, 10**9, "large")])
    assert others.reasons[-1].endswith("measured with large, another model.")


def test_of_several_measurements_the_last_counts_and_none_against_another_model():
    rows = [row("int2", 0.05), row("int2", 0.01)]
    assert recommend(CONFIG, 8192, max_kl=0.03, results=rows).strategy == "int2"
    rows = [row("int2", 0.01), {**row("int2", 0.4), "reference_model": {"name": "original"}}]
    assert recommend(CONFIG, 8192, max_kl=0.03, results=rows).strategy == "int2"
    rows = [{**row("dynamic", 0.4), "reference_model": {"name": "original"}}]
    assert recommend(CONFIG, 8192, max_kl=0.03, results=rows).strategy == "dynamic"


def test_refused_and_failed_rows_are_no_measurements():
    rows = [{**row("int4", 0.0), "status": "failed"}, {**row("int4", 0.0), "metrics": {}}]
    assert recommend(CONFIG, 8192, max_kl=0.01, results=rows).strategy == "dynamic"


@pytest.mark.parametrize(
    ("tokens", "strategy"), [(1000, "dynamic"), (4096, "int8"), (16_384, "int4"), (100_000, "int4+offload:cpu")]
)
def test_rules_of_thumb_say_what_they_are(tokens, strategy):
    found = recommend(CONFIG, tokens)
    assert found.strategy == strategy
    assert any("rule of thumb" in reason for reason in found.reasons)
    assert found.estimate.device_bytes <= found.estimate.cache_bytes
    scope = {"model": type("Model", (), {"config": CONFIG})}
    exec(found.code, scope)
    assert scope["cache"].get_seq_length() == 0


def test_a_device_leaves_what_the_weights_do_not_take():
    weights = recommend(CONFIG, 8192).estimate.weight_bytes
    device = Device("small", int((weights + FULL // 5) / 0.9) + 1, 1e9, 1e9)
    found = recommend(CONFIG, 8192, device=device)
    assert found.strategy == "int4"
    assert "small leaves beside the weights" in found.reasons[1]
    assert recommend(CONFIG, 8192, device="h100").strategy == "dynamic"


@pytest.mark.model
def test_smollm2_with_8k_context_in_64_mib_keeps_its_promise():
    from hf_kvplus.loading import load_model

    model, _, _ = load_model("smollm2-135m", "cpu")
    found = recommend(model.config, 8192, budget_bytes=64 * 1024**2)
    assert found.strategy == "int4"
    cache = build_cache(found.strategy, model.config)
    shape = (1, 3, 8180, 64)
    for layer in range(30):  # what a prompt of 8180 tokens leaves; the model itself would take minutes
        cache.update(torch.randn(shape), torch.randn(shape), layer)
    prompt = torch.full((1, 8181), 5)
    model.generate(
        prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, max_new_tokens=12, min_new_tokens=12
    )
    measured = measure_memory(cache).total_bytes
    assert cache.get_seq_length() == 8192
    assert measured == pytest.approx(found.estimate.cache_bytes, rel=0.02)
    assert measured <= 64 * 1024**2


@pytest.mark.parametrize(("text", "tokens"), [("8192", 8192), ("8k", 8192), ("128K", 131_072), ("1m", 1_048_576)])
def test_tokens_are_read(text, tokens):
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize(("text", "size"), [("64MiB", 2**26), ("1.5 GiB", 3 * 2**29), ("2GB", 2 * 10**9), ("7", 7)])
def test_bytes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "8q", "-3", "0", "k"])
def test_other_words_are_no_numbers(text):
    with pytest.raises(ValueError, match="is written"):
        parse_tokens(text)
    with pytest.raises(ValueError, match="is written"):
        parse_bytes(text)
