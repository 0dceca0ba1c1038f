"""One prompt, many continuations; what a cache holds is compared before it's used."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DynamicCache, EncoderDecoderCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from conftest import tiny_llama_config
from hf_kvplus import CacheFileError, PrefixCache, build_cache, reuse_prefix, save_cache
from hf_kvplus.compat import cache_keyword
from hf_kvplus.reuse import common_prefix

EXACT = ["dynamic", "fp"]


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(1, 128, (rows, length))


def generate(model, ids, cache=None, count=8, **options):
    given_cache = {} if cache is None else {cache_keyword(model): cache}
    return model.generate(ids, max_new_tokens=count, **{"do_sample": False, **options}, **given_cache)


def prefixed(model, strategy, ids, **options) -> PrefixCache:
    return PrefixCache.fill(model, build_cache(strategy, model.config), ids, **options)


def dense(cache) -> list[torch.Tensor]:
    return [state.clone() for layer in cache.layers for state in (layer.keys, layer.values)]


def assert_equal_states(left, right) -> None:
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one, other)


# What is kept


@pytest.mark.parametrize("strategy", [*EXACT, "int4"])
def test_the_whole_prompt_in_the_cache_leaves_one_token_to_read(llama, strategy):
    ids = tokens(1, 150)
    prefix = prefixed(llama, strategy, ids)
    cache, reused = prefix.reuse(ids)
    assert (reused.kept_tokens, reused.dropped_tokens, reused.new_tokens) == (149, 1, 1)
    assert str(reused) == "kept 149 tokens, dropped 1, 1 left to read"
    assert cache.get_seq_length() == 149
    if strategy in EXACT:
        assert torch.equal(generate(llama, ids, cache), generate(llama, ids))


@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize("common", [0, 1, 40, 99])
def test_a_prompt_that_parts_is_answered_as_if_it_were_new(llama, strategy, common):
    ids = tokens(2, 100)
    prompt = ids[:, : common + 30].clone()
    prompt[:, common] = (prompt[:, common] + 1) % 127 + 1 if common < 100 else 1
    prompt[:, common] = torch.where(prompt[:, common] == ids[:, common], 1, prompt[:, common])
    prefix = prefixed(llama, strategy, ids)
    cache, reused = prefix.reuse(prompt)
    assert reused.kept_tokens == common
    assert torch.equal(generate(llama, prompt, cache), generate(llama, prompt))


def test_sequences_that_generate_returned_are_ids_of_the_cache(llama):
    ids, cache = tokens(1, 20), build_cache("fp", llama.config)
    sequences = generate(llama, ids, cache)
    assert sequences.shape[1] == cache.get_seq_length() + 1
    follow_up = torch.cat([sequences, tokens(1, 5)], dim=1)
    reused = reuse_prefix(cache, follow_up, sequences)
    assert reused.kept_tokens == sequences.shape[1] - 1
    assert reused.dropped_tokens == 0
    assert torch.equal(generate(llama, follow_up, cache), generate(llama, follow_up))


@given(
    left=st.lists(st.lists(st.integers(0, 1), min_size=5, max_size=5), min_size=2, max_size=2),
    right=st.lists(st.lists(st.integers(0, 1), min_size=7, max_size=7), min_size=2, max_size=2),
)
def test_common_prefix_is_that_of_the_lists(left, right):
    expected = 0
    while expected < 5 and all(a[expected] == b[expected] for a, b in zip(left, right, strict=True)):
        expected += 1
    assert common_prefix(torch.tensor(left), torch.tensor(right)) == expected


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_reused_cache_holds_what_reading_the_kept_tokens_would(llama, data):
    length = data.draw(st.integers(2, 180))
    rows = data.draw(st.integers(1, 2))
    strategy = data.draw(st.sampled_from(EXACT))
    torch.manual_seed(data.draw(st.integers(0, 100)))
    ids = tokens(rows, length)
    prompt = torch.cat([ids[:, : data.draw(st.integers(1, length))], tokens(rows, 3)], dim=1)
    cache, reused = prefixed(llama, strategy, ids).reuse(prompt)
    assert 0 <= reused.kept_tokens < prompt.shape[1]
    assert cache.get_seq_length() == reused.kept_tokens
    assert torch.equal(prompt[:, : reused.kept_tokens], ids[:, : reused.kept_tokens])
    if reused.kept_tokens:
        expected = prefixed(llama, strategy, prompt[:, : reused.kept_tokens]).cache
        for one, other in zip(dense(cache), dense(expected), strict=True):
            torch.testing.assert_close(one, other)


# Many continuations


@pytest.mark.parametrize("strategy", ["fp", "int4", "int4,sinks=0,recent=0"])
def test_forks_leave_the_original_and_each_other_alone(llama, strategy):
    ids = tokens(1, 200)
    prefix = prefixed(llama, strategy, ids)
    before = dense(prefix.cache)
    suffixes = [tokens(1, 1 + number % 7) for number in range(12)]
    alone = []
    for suffix in suffixes:
        prompt = torch.cat([ids, suffix], dim=1)
        alone.append(generate(llama, prompt, prefix.reuse(prompt)[0], count=3))
        assert_equal_states(dense(prefix.cache), before)
    # The same again, all of them open at once and one step at a time in turn.
    caches, prompts = [], [torch.cat([ids, suffix], dim=1) for suffix in suffixes]
    for prompt in prompts:
        caches.append(prefix.reuse(prompt)[0])
    for _ in range(3):
        prompts = [generate(llama, prompt, cache, count=1) for prompt, cache in zip(prompts, caches, strict=True)]
    for expected, got in zip(alone, prompts, strict=True):
        assert torch.equal(expected, got)
    assert_equal_states(dense(prefix.cache), before)


@pytest.mark.parametrize("strategy", ["fp", "int4"])
def test_beams_and_several_sequences(llama, strategy):
    ids = tokens(1, 150)
    prompt = torch.cat([ids, tokens(1, 2)], dim=1)
    prefix = prefixed(llama, strategy, ids)
    repeated = prefix.fork(3).cache
    expected = generate(llama, prompt, repeated, num_beams=3, num_return_sequences=3)
    got = generate(llama, prompt, prefix.reuse(prompt, repeats=3)[0], num_beams=3, num_return_sequences=3)
    assert torch.equal(expected, got)
    if strategy == "fp":
        assert torch.equal(got, generate(llama, prompt, num_beams=3, num_return_sequences=3))
    torch.manual_seed(0)
    sampled = generate(llama, prompt, prefix.reuse(prompt, repeats=4)[0], do_sample=True, num_return_sequences=4)
    assert sampled.shape[0] == 4


@pytest.mark.parametrize("strategy", ["dynamic", "fp", "int4"])
def test_beams_of_a_prompt_with_nothing_in_common(llama, strategy):
    ids = tokens(1, 60)
    prefix, other = prefixed(llama, strategy, ids), ids % 127 + 1
    if strategy == "dynamic":  # emptied, it would still have one row
        with pytest.raises(RuntimeError, match="an emptied DynamicCache keeps its rows"):
            prefix.reuse(other, repeats=3)
        return
    cache, reused = prefix.reuse(other, repeats=3)
    assert reused.kept_tokens == 0
    got = generate(llama, other, cache, num_beams=3, num_return_sequences=3)
    fresh = build_cache(strategy, llama.config)
    assert torch.equal(got, generate(llama, other, fresh, num_beams=3, num_return_sequences=3))


def test_one_row_is_repeated_for_several_prompts(llama):
    ids = tokens(1, 90)
    prompts = torch.cat([ids.repeat(3, 1), tokens(3, 4)], dim=1)
    cache, reused = prefixed(llama, "fp", ids).reuse(prompts)
    assert reused.kept_tokens == 90
    assert torch.equal(generate(llama, prompts, cache), generate(llama, prompts))


def test_suffixes_of_different_lengths_in_one_batch(llama):
    ids = tokens(1, 90)
    suffixes = [tokens(1, 6), tokens(1, 2)]
    # The shorter suffix is padded on its left, behind the prefix.
    rows = [torch.cat([ids, torch.zeros(1, 6 - suffix.shape[1], dtype=torch.long), suffix], 1) for suffix in suffixes]
    prompts = torch.cat(rows)
    mask = torch.ones_like(prompts)
    mask[1, 90:94] = 0
    cache, reused = prefixed(llama, "fp", ids).reuse(prompts)
    assert reused.kept_tokens == 90
    got = generate(llama, prompts, cache, attention_mask=mask)
    for row, suffix in enumerate(suffixes):
        alone = generate(llama, torch.cat([ids, suffix], dim=1))
        assert torch.equal(got[row, 96:], alone[0, 90 + suffix.shape[1] :])


@pytest.mark.parametrize("chunk_tokens", [7, 64, 4096])
def test_a_left_padded_prompt_read_in_pieces(llama, chunk_tokens):
    ids, mask = tokens(2, 100), torch.ones(2, 100, dtype=torch.long)
    ids[1, :11], mask[1, :11] = 0, 0
    prefix = prefixed(llama, "fp", ids, attention_mask=mask, chunk_tokens=chunk_tokens)
    prompt, mask = torch.cat([ids, tokens(2, 3)], 1), torch.cat([mask, torch.ones(2, 3, dtype=torch.long)], 1)
    cache, _ = prefix.reuse(prompt)
    got = generate(llama, prompt, cache, attention_mask=mask)
    assert torch.equal(got, generate(llama, prompt, attention_mask=mask))


def test_a_prefix_is_saved_with_its_ids(llama, tmp_path):
    ids = tokens(1, 150)
    prefix = prefixed(llama, "int4", ids)
    prefix.save(tmp_path / "prefix", model=llama)
    loaded = PrefixCache.load(tmp_path / "prefix", llama)
    assert len(loaded) == 150
    assert torch.equal(loaded.input_ids, ids)
    prompt = torch.cat([ids, tokens(1, 3)], dim=1)
    expected, got = (generate(llama, prompt, one.reuse(prompt)[0]) for one in (prefix, loaded))
    assert torch.equal(expected, got)
    save_cache(prefix.cache, tmp_path / "without")
    with pytest.raises(CacheFileError, match="has no `input_ids`"):
        PrefixCache.load(tmp_path / "without", llama)


# What can be known wrong


def test_another_batch_size(llama):
    prefix = prefixed(llama, "fp", tokens(2, 10))
    with pytest.raises(ValueError, match="`input_ids` has 3 rows, but `cached_ids` has 2"):
        prefix.reuse(tokens(3, 12))
    with pytest.raises(ValueError, match="`input_ids` has 1 rows, but `cache` has 2"):
        reuse_prefix(prefix.cache, prefix.input_ids[:1], prefix.input_ids[:1])
    with pytest.raises(ValueError, match="1 rows of 10 tokens, but the cache holds 2 rows of 10"):
        PrefixCache(prefix.cache, prefix.input_ids[:1])


@pytest.mark.parametrize("told", [5, 9, 12])
def test_more_or_fewer_tokens_than_told(llama, told):
    cache = prefixed(llama, "fp", tokens(1, 10)).cache
    with pytest.raises(ValueError, match=f"holds 10 tokens, but `cached_ids` has {told}"):
        reuse_prefix(cache, tokens(1, 20), tokens(1, told))


def test_another_model(llama):
    ids = tokens(1, 10)
    other = tiny_llama_config(num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"`config\.num_hidden_layers` is 2 in the cache and 3 here"):
        prefixed(llama, "fp", ids).reuse(ids, config=other)
    with pytest.raises(ValueError, match="it has 2 layers, the model 3"):
        prefixed(llama, "dynamic", ids).reuse(ids, config=other)
    theta = {"rope_type": "default", "rope_theta": 7.0}
    with pytest.raises(ValueError, match=r"config\.rope_parameters\.rope_theta"):
        prefixed(llama, "fp", ids).reuse(ids, config=tiny_llama_config(rope_parameters=theta))
    with pytest.raises(ValueError, match="was made for another model"):
        PrefixCache.fill(llama, build_cache("fp", other), ids)


@pytest.mark.parametrize("strategy", ["fp", "dynamic", "int4"])
def test_tokens_evicted_by_hand(llama, strategy):
    ids = tokens(1, 200)
    one_layer = prefixed(llama, strategy, ids).cache
    one_layer.layers[1].crop(-5)
    with pytest.raises(ValueError, match="layer 0 holds 200 tokens, layer 1 195; tokens were removed by hand"):
        reuse_prefix(one_layer, ids, ids)
    assigned = prefixed(llama, strategy, ids).cache
    for layer in assigned.layers:
        layer.keys, layer.values = layer.keys[:, :, 70:], layer.values[:, :, 70:]
    with pytest.raises(ValueError, match="holds 130 tokens, but"):
        reuse_prefix(assigned, ids, ids)
    if strategy == "dynamic":
        return
    all_layers = prefixed(llama, strategy, ids).cache
    for layer in all_layers.layers:
        if strategy == "fp":
            layer.recent.drop_front(70)
        else:
            for store in layer.packed.values():
                store.drop_front(1)
    with pytest.raises(ValueError, match="holds 130 tokens, but|has lost its first"):
        reuse_prefix(all_layers, ids, ids)


def test_a_forward_pass_that_broke_off(llama):
    cache = prefixed(llama, "fp", tokens(1, 10)).cache
    cache.layers[0].update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16))
    with pytest.raises(ValueError, match="a forward pass broke off"):
        PrefixCache(cache, tokens(1, 11))


def windowed_model():
    torch.manual_seed(0)
    config = CONFIG_MAPPING["mistral"](**{**tiny_llama_config().to_dict(), "sliding_window": 32})
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("strategy", EXACT)
def test_a_window_that_has_moved_on_cannot_go_back(strategy):
    model = windowed_model()
    ids = tokens(1, 50)
    prefix = prefixed(model, strategy, ids)
    before = dense(prefix.cache)
    parting = torch.cat([ids[:, :40], tokens(1, 20)], dim=1)
    with pytest.raises(RuntimeError, match="layer 0 can't go back: a window has dropped"):
        reuse_prefix(prefix.cache, parting, ids)
    assert_equal_states(dense(prefix.cache), before)
    # Going on works, and our cache also takes a prompt that has nothing in common.
    longer = torch.cat([ids, tokens(1, 5)], dim=1)
    assert torch.equal(generate(model, longer, prefix.reuse(longer)[0]), generate(model, longer))
    fresh = ids % 127 + 1
    if strategy == "dynamic":
        with pytest.raises(RuntimeError, match="Use a new cache"):
            prefix.reuse(fresh)
        return
    cache, reused = prefix.reuse(fresh)
    assert reused.kept_tokens == 0
    assert torch.equal(generate(model, fresh, cache), generate(model, fresh))


WINDOWS = [
    "window:40,sinks=4",
    "window:40,sinks=4,positions=shifted",
    "window:40,sinks=4,rollback=30",
    "window:150,sinks=4+int8,recent=16",
]


@pytest.mark.parametrize("strategy", WINDOWS)
def test_a_window_with_sinks_that_has_moved_on_is_reused(llama, strategy):
    """It has dropped tokens by itself; none that the next one sees."""
    ids = tokens(1, 300)
    prefix = prefixed(llama, strategy, ids)
    assert all(layer.first_stored for layer in prefix.cache.layers)
    longer = torch.cat([ids, tokens(1, 5)], dim=1)
    cache, reused = prefix.reuse(longer)
    assert reused.kept_tokens == 300
    expected = generate(llama, longer, prefixed(llama, strategy, ids).cache)
    assert torch.equal(generate(llama, longer, cache), expected)
    # A conversation that is kept by its ids, as in examples/chat.py.
    assert reuse_prefix(cache, torch.cat([expected, tokens(1, 3)], dim=1), expected).kept_tokens == 312
    parting = torch.cat([ids[:, :100], tokens(1, 20)], dim=1)
    with pytest.raises(RuntimeError, match="can't go back: a window has dropped"):
        prefix.reuse(parting)
    fresh = ids % 127 + 1
    cache, reused = prefix.reuse(fresh)
    assert reused.kept_tokens == 0
    assert torch.equal(generate(llama, fresh, cache), generate(llama, fresh, build_cache(strategy, llama.config)))


@pytest.mark.parametrize("strategy", ["window:40,sinks=4", "window:40,sinks=4,rollback=30"])
def test_tokens_that_a_window_still_needs_were_taken_by_hand(llama, strategy):
    ids = tokens(1, 100)
    cache = prefixed(llama, strategy, ids).cache
    for layer in cache.layers:
        layer.recent.drop_front(35)
    with pytest.raises(ValueError, match="has lost its first .* but the next one sees those from 61 on"):
        reuse_prefix(cache, ids, ids)


def test_a_recurrent_state_cannot_go_back():
    options = {
        "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention"],
        "block_multiple_of": 8,
        "block_ff_dim": 96,
    }
    sizes = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = CONFIG_MAPPING["lfm2"](**options, **sizes, **ends)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = tokens(1, 20)
    prefix = prefixed(model, "fp", ids)
    with pytest.raises(RuntimeError, match="layer 0 can't go back: its recurrent state"):
        prefix.reuse(ids)
    longer = torch.cat([ids, tokens(1, 2)], dim=1)
    cache, reused = prefix.reuse(longer)
    assert reused.kept_tokens == 20
    assert torch.equal(generate(model, longer, cache), generate(model, longer))


def test_arguments_of_the_wrong_kind(llama):
    prefix = prefixed(llama, "fp", tokens(1, 10))
    pair = EncoderDecoderCache(DynamicCache(config=llama.config), DynamicCache(config=llama.config))
    with pytest.raises(TypeError, match="must be the cache of a decoder, got EncoderDecoderCache"):
        reuse_prefix(pair, tokens(1, 5), tokens(1, 5))
    for wrong in (torch.zeros(3, dtype=torch.long), torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, 3)):
        with pytest.raises(ValueError, match="must be token ids"):
            prefix.reuse(wrong)
    with pytest.raises(ValueError, match="must be empty, but holds 10"):
        PrefixCache.fill(llama, copy.deepcopy(prefix.cache), tokens(1, 3))
    with pytest.raises(ValueError, match="`chunk_tokens` must be at least 1"):
        PrefixCache.fill(llama, build_cache("fp", llama.config), tokens(1, 3), chunk_tokens=0)
