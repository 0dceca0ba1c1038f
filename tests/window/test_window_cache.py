"""`SlidingWindowCache` as it is used: generation, batches, beams, drafts, rollback, memory, errors."""

import copy

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    MambaConfig,
    MistralConfig,
)
from window_oracle import cached_logits, oracle_logits, visible

from conftest import tiny_llama
from hf_kvplus import SlidingWindowCache, available_strategies, build_cache, measure_memory
from hf_kvplus.attention import use_fused_attention
from hf_kvplus.policies import NativeWindowPolicy
from hf_kvplus.window_layer import SinkWindowLayer

GREEDY = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
STRATEGIES = (
    "window:9,sinks=4",
    "window:9,sinks=4,positions=shifted",
    "window:9,sinks=2,positions=shifted,prefill=dense",
    "window:9,sinks=3,prefill=dense",
    "window:9,sinks=0",
    "window:9,sinks=4,rollback=6",
    "int8,recipe=affine+window:150,sinks=4",
    "int8,recipe=affine+window:180,sinks=4,positions=shifted",
)


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request):
    return tiny_llama(initializer_range=0.15, attn_implementation=request.param)


def padded(tokens=45, padding=(0, 14, 3)):
    ids = torch.randint(1, 128, (len(padding), tokens))
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        mask[row, :count] = 0
    return ids, mask


def generate(model, ids, strategy, **options):
    cache = build_cache(strategy, model.config)
    return model.generate(ids, past_key_values=cache, **{**GREEDY, **options})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_row_of_a_padded_batch_equals_that_row_alone(model, strategy):
    # Packed blocks begin at column 0: rows whose padding isn't whole blocks are grouped otherwise than alone.
    ids, mask = padded(300, (0, 256, 128)) if "int" in strategy else padded(45, (0, 40, 14))
    together = generate(model, ids, strategy, attention_mask=mask)
    for row in range(len(ids)):
        alone = generate(model, ids[row : row + 1, mask[row].argmax() :], strategy)
        assert torch.equal(together[row, -40:], alone[0, -40:])


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if "dense" not in s])
def test_chunks_and_drafts_change_nothing(model, strategy):
    ids = torch.randint(1, 128, (1, 20)).repeat(1, 10 if "int" in strategy else 2)
    plain = generate(model, ids, strategy)
    assert torch.equal(generate(model, ids, strategy, prompt_lookup_num_tokens=6), plain)
    if "int" not in strategy:  # a quantized prompt reads its own unpacked states, a chunk the packed ones before it
        assert torch.equal(generate(model, ids, strategy, prefill_chunk_size=7), plain)


def test_a_draft_model_with_a_window_of_its_own_changes_nothing(model):
    ids = torch.randint(1, 128, (1, 40))
    strategy = "window:9,sinks=4,positions=shifted"
    assert torch.equal(generate(model, ids, strategy, assistant_model=model), generate(model, ids, strategy))


@pytest.mark.parametrize("strategy", ["window:9,sinks=4", "window:9,sinks=4,positions=shifted"])
def test_beams_equal_those_of_rows_alone(model, strategy):
    ids, mask = padded()
    together = generate(model, ids, strategy, attention_mask=mask, num_beams=3)
    for row in range(len(ids)):
        alone = generate(model, ids[row : row + 1, mask[row].argmax() :], strategy, num_beams=3)
        assert torch.equal(together[row, -40:], alone[0, -40:])


def test_generation_equals_the_oracle_token_by_token(model):
    ids, mask = padded(30, (0,))
    out = generate(model, ids, "window:9,sinks=4", max_new_tokens=25)
    with torch.inference_mode():
        logits = oracle_logits(model, out, torch.ones_like(out), 9, 4)
    assert torch.equal(logits[0, 29:-1].argmax(-1), out[0, 30:])


def test_without_a_mask_positions_and_padding_agree(model):
    ids, mask = padded(40, (0, 12))
    with torch.inference_mode():
        cache = build_cache("window:9,sinks=4", model.config)
        implicit = model(
            input_ids=ids, attention_mask=mask, past_key_values=cache
        ).logits  # positions not adapted to padding
        implicit = torch.cat([implicit, model(input_ids=ids[:, :1], past_key_values=cache).logits], 1)[0]
        longer = torch.cat([ids, ids[:, :1]], 1)[:1]
        expected = oracle_logits(model, longer, torch.ones_like(longer), 9, 4)[0]
    assert (implicit - expected).abs().max() < 1e-4
    assert cache.layers[0].padding.counts == [0, 12]


def test_a_dense_prompt_attends_fully_and_is_evicted_then(model):
    ids, mask = padded(40, (0, 25))
    cache = build_cache("window:9,sinks=4,prefill=dense", model.config)
    with torch.inference_mode():
        got = cached_logits(model, ids, mask, cache, [40])
        expected = oracle_logits(model, ids, mask, 40, 0)
        assert ((got - expected) * mask[..., None]).abs().max() < 1e-4
    assert len(cache.layers[0].recent) == 8


def test_the_default_prefill_hides_what_a_dense_one_shows():
    mask = torch.ones(1, 12, dtype=torch.long)
    assert visible(mask, 3, 2)[0, 0, 11].tolist() == [True] * 2 + [False] * 7 + [True] * 3


# Rolling back


def fed(strategy, count):
    """Returns a layer that was given `count` random tokens one by one."""
    layer = build_cache(strategy, tiny_llama().config).layers[0]
    for _ in range(count):
        layer.update(*torch.randn(2, 1, 2, 1, 16).unbind(0))
    return layer


@pytest.mark.parametrize("strategy", ["window:9,sinks=4,rollback=5", "int4+window:200,sinks=4,rollback=5"])
def test_recorded_tokens_can_be_cropped_at_any_time(strategy):
    count = 400 if "int" in strategy else 60
    layer = fed(strategy, count)
    before = copy.deepcopy(layer)
    before_keys = before.keys
    for _ in range(5):
        layer.update(*torch.randn(2, 1, 2, 1, 16).unbind(0))
    layer.crop(-5)
    assert torch.equal(layer.keys, before_keys)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        layer.crop(-50)


def test_tokens_taken_back_by_a_tensor_leave_lengths_that_are_numbers():
    """As assisted decoding counts them before transformers 5.18."""
    cache = build_cache("window:9,sinks=4,prefill=dense,rollback=5", tiny_llama().config)
    for layer in range(len(cache.layers)):
        cache.update(*torch.randn(2, 1, 2, 30, 16).unbind(0), layer)
    cache.crop(-torch.tensor(3))
    assert cache.get_seq_length() == 27
    assert type(cache.get_seq_length()) is int


def test_a_window_that_recorded_nothing_refuses_to_go_back():
    layer = fed("window:9,sinks=4", 60)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        layer.crop(-1)
    layer.activate_past_recording()
    keys = layer.keys
    for _ in range(20):
        layer.update(*torch.randn(2, 1, 2, 1, 16).unbind(0))
    layer.crop(-20)
    assert torch.equal(layer.keys, keys)


# Memory


@pytest.mark.parametrize("strategy", ["window:60,sinks=4", "window:60,sinks=4,positions=shifted"])
@torch.no_grad()
def test_bytes_stay_constant_and_no_step_copies_the_window(strategy):
    layer = fed(strategy, 200)
    cache = build_cache(strategy, tiny_llama().config)
    cache.layers = [layer]
    sizes, shared = set(), 0
    for _ in range(500):
        keys, _ = layer.update(*torch.randn(2, 1, 2, 1, 16).unbind(0))
        sizes.add(measure_memory(cache).total_bytes)
        shared += keys.untyped_storage().data_ptr() == layer.recent.get("keys").untyped_storage().data_ptr()
        assert keys.shape[2] == 64
    assert len(sizes) == 1
    assert shared == 500
    assert layer.recent.capacity <= 60 + 4 + 64


def test_a_packed_window_has_bounded_bytes():
    layer = fed("int4+window:200,sinks=4", 300)
    cache = build_cache("int4+window:200,sinks=4", tiny_llama().config)
    cache.layers = [layer]
    sizes = []
    for _ in range(1000):
        layer.update(*torch.randn(2, 1, 2, 1, 16).unbind(0))
        sizes.append(measure_memory(cache).total_bytes)
    assert max(sizes[500:]) == max(sizes[:500])


def test_a_long_prompt_leaves_no_long_buffer():
    layer = build_cache("window:60,sinks=4,prefill=dense", tiny_llama().config).layers[0]
    layer.update(*torch.randn(2, 1, 2, 3000, 16).unbind(0))
    assert layer.recent.capacity <= 60 + 4 + 64


# What doesn't fit


def test_a_mask_of_the_users_own_is_refused(model):
    ids, _ = padded(30, (0,))
    cache = SlidingWindowCache(model.config, 9)
    mask = torch.ones(1, 1, 30, 30, dtype=torch.bool).tril()
    with pytest.raises(RuntimeError, match=r"prefill=\"dense\""):
        model(input_ids=ids, attention_mask=mask, past_key_values=cache)
    assert cache.get_seq_length() == 0
    assert model(input_ids=ids, past_key_values=cache).logits.isfinite().all()


def test_a_mask_function_that_computes_otherwise_is_refused():
    cache = SlidingWindowCache(tiny_llama().config, 9)
    _, offset = cache.get_mask_sizes(30, 0)
    assert offset == 30 - 34
    with pytest.raises(NotImplementedError, match="mul"):
        torch.arange(34) * offset
    with pytest.raises(NotImplementedError, match="columns"):
        torch.arange(5) + offset


def test_native_windows_stay_and_the_others_get_one():
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=16, query_pre_attn_scalar=16, initializer_range=0.15,
        layer_types=["sliding_attention", "full_attention"] * 2, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    gemma = Gemma3ForCausalLM(config).eval()
    cache = build_cache("window:24,sinks=4", config)
    assert [type(layer) is SinkWindowLayer for layer in cache.layers] == [False, True, False, True]
    assert cache.layers[0].policy == NativeWindowPolicy(16)
    ids, mask = padded(60, (0, 22))
    together = generate(gemma, ids, "window:24,sinks=4,positions=shifted", attention_mask=mask)
    alone = generate(gemma, ids[1:, 22:], "window:24,sinks=4,positions=shifted")
    assert torch.equal(together[1, -40:], alone[0, -40:])
    with torch.inference_mode():
        out = cached_logits(gemma, ids, mask, cache, [9, 30, 1, 1, 19])
        once = cached_logits(gemma, ids, mask, build_cache("window:24,sinks=4", config), [60])
    assert ((out - once) * mask[..., None]).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("strategy", "config", "message"),
    [
        ("window", None, "needs the window's length"),
        ("window:0", None, "`sliding_window` must be at least 1"),
        ("window:8,sinks=-1", None, "`num_sink_tokens` must be at least 0"),
        ("window:8,positions=absolute", None, "`positions` must be one of original, shifted"),
        ("window:8,prefill=half", None, "`prefill` must be one of windowed, dense"),
        ("window:8,size=3", None, "unknown option size"),
        ("window:8+window:9", None, "sets window a second time"),
        ("window:8", MistralConfig(sliding_window=16), "a window of its own in every layer"),
        ("window:8", MambaConfig(num_hidden_layers=2), "this model has only layers of type"),
    ],
)
def test_bad_options_are_named(strategy, config, message):
    with pytest.raises(ValueError, match=message):
        build_cache(strategy, config or tiny_llama().config)


def test_layers_that_read_a_windowed_layers_states_read_its_window():
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, global_head_dim=32, sliding_window=16, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2, vocab_size_per_layer_input=128,
        hidden_size_per_layer_input=16, initializer_range=0.15, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    gemma = Gemma4ForCausalLM(config).eval()
    ids, mask = padded(60, (0, 33))
    found = []
    for chunks in ([60], [9, 30, 1, 1, 19], [1] * 60):
        with torch.inference_mode():
            cache = build_cache("window:24,sinks=4,positions=shifted", config)
            found.append(cached_logits(gemma, ids, mask, cache, chunks) * mask[..., None])
            alone = cached_logits(
                gemma, ids[1:, 33:], mask[1:, 33:], build_cache("window:24,sinks=4,positions=shifted", config), [27]
            )
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(found[2], found[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(found[0][1:, 33:], alone, atol=1e-4, rtol=0)


def test_the_strategy_is_listed():
    assert "window" in [info.name for info in available_strategies()]


def test_fused_attention_leaves_windows_right(model):
    pytest.importorskip("numba")
    ids, mask = padded(40, (0, 25))
    expected = generate(model, ids, "window:9,sinks=4,positions=shifted", attention_mask=mask)
    with use_fused_attention(model):
        fused = generate(model, ids, "window:9,sinks=4,positions=shifted", attention_mask=mask)
    assert torch.equal(fused, expected)
