"""Operations are those of the known figures and of torch's own counter; the roofline is arithmetic."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, MistralConfig

from conftest import tiny_llama, tiny_llama_config
from hf_kvplus import build_cache, estimate_memory
from hf_kvplus.compat import cache_keyword
from hf_kvplus.compute import attention_flops, decode_cost, generation_cost, square_projection_operations
from hf_kvplus.devices import DATA_SHEETS, Device, find_device, measure_device

sys.path.insert(0, str(Path(__file__).parent / "conformance"))
import zoo
from case import Case, Strategy


def test_classical_projection_figures_of_gpt2_small():
    cached = square_projection_operations(GPT2Config(), 100, cached=True)
    uncached = square_projection_operations(GPT2Config(), 100, cached=False)
    assert cached == 12 * 768**2 * 100 == pytest.approx(7.1e8, rel=0.01)
    assert uncached == pytest.approx(3.6e10, rel=0.01)
    assert uncached / cached == 50.5


def test_decoding_a_token_takes_what_torch_counts():
    llama = tiny_llama(attn_implementation="eager")
    cache = build_cache("dynamic", llama.config)
    tokens = torch.randint(0, 128, (1, 65))
    with torch.no_grad():
        llama(tokens[:, :64], **{cache_keyword(llama): cache})
        with FlopCounterMode(display=False) as counter:
            llama(tokens[:, 64:], **{cache_keyword(llama): cache})
    cost = decode_cost(llama.config, estimate_memory(llama.config, 65), find_device("h100"))
    assert cost.flops == pytest.approx(counter.get_total_flops(), rel=0.01)


# Encoders, a tower for images, windows, learned positions. torch counts no products of experts and recurrences.
COUNTED = ("T5", "BART", "Whisper", "Qwen2-VL", "Gemma 3", "GPT-2")


@pytest.mark.parametrize("name", COUNTED)
def test_decoding_a_token_leaves_out_encoders_and_towers(name):
    case = Case(zoo.ZOO[name], Strategy("dynamic", loss=1.0), images=False)
    cache, tokens = case.cache(), case.tokens(1, 191)
    kind = case.model.config._attn_implementation
    case.model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            case.forward(tokens[:, :190], cache)
            with FlopCounterMode(display=False) as counter:
                case.forward(tokens[:, 190:], cache)
            with FlopCounterMode(display=False) as encoding:
                _ = case.encode(1) if case.has_encoder else None
    finally:
        case.model.set_attn_implementation(kind)
    config = case.model.config
    estimate = estimate_memory(config, 191, encoder_tokens=zoo.ENCODER_TOKENS)
    cost = decode_cost(config, estimate, find_device("h100"))
    assert cost.flops == pytest.approx(counter.get_total_flops() - encoding.get_total_flops(), rel=0.01)
    assert cost.weight_bytes <= sum(weight.nbytes for weight in case.model.parameters())


def test_devices_that_share_heads_share_operations_and_weights():
    config = tiny_llama_config()
    one, half = (
        decode_cost(config, estimate_memory(config, 1000, tensor_parallel=devices), find_device("h100"))
        for devices in (1, 2)
    )
    assert 2 * half.flops == one.flops
    assert 2 * half.weight_bytes == one.weight_bytes
    assert 2 * half.cache_bytes == one.cache_bytes
    assert 2 * half.floor_ms == pytest.approx(one.floor_ms)


def test_a_window_bounds_attention():
    config = MistralConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, sliding_window=100
    )
    assert attention_flops(config, 10_000) == attention_flops(config, 100) == 2 * 2 * 4 * 32 * 100


def test_the_cache_saves_more_the_longer_the_text():
    short, long = (generation_cost(tiny_llama_config(), tokens) for tokens in (10, 100))
    assert 5 < short.speedup < 5.6
    assert 45 < long.speedup < 50.5


def test_roofline_takes_the_slower_of_reading_and_computing():
    config = tiny_llama_config()
    estimate = estimate_memory(config, 1000, strategy="int4")
    slow_memory, slow_compute = Device("a", 0, 1e6, 1e15), Device("b", 0, 1e15, 1e6)
    reading, computing = (decode_cost(config, estimate, device) for device in (slow_memory, slow_compute))
    assert reading.memory_bound
    assert not computing.memory_bound
    assert reading.floor_ms == pytest.approx(reading.bytes_read / 1e3)
    assert computing.floor_ms == pytest.approx(computing.flops / 1e3)
    assert reading.cache_bytes == estimate.cache_bytes
    window = decode_cost(config, estimate_memory(config, 1000, strategy="window:96"), slow_memory)
    assert reading.flops - window.flops == 2 * 2 * 4 * 32 * (1000 - 100)


def test_devices():
    assert find_device("a100-80g").memory_bytes == 80 * 1024**3
    assert all(find_device(name).bytes_per_s > 1e11 for name in DATA_SHEETS)
    with pytest.raises(ValueError, match="did you mean `h100`"):
        find_device("h10")


def test_the_machine_at_hand_is_measured():
    device = measure_device()
    assert device.measured
    assert 1e8 < device.bytes_per_s < 1e14
    assert 1e9 < device.flops_per_s < 1e16
    assert device.memory_bytes > 1024**3
