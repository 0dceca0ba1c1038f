"""A cache in a file: generation goes on bit for bit, and a file that doesn't fit is refused by name."""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BartConfig, BartForConditionalGeneration, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from conftest import tiny_llama, tiny_llama_config
from hf_kvplus import (
    CacheFileError,
    KVPlusCache,
    QuantizedCache,
    build_cache,
    cachefile,
    fingerprint_model,
    load_cache,
    measure_memory,
    save_cache,
)
from hf_kvplus.cachefile import read_metadata, write_file
from hf_kvplus.compat import cache_keyword
from hf_kvplus.encoder_decoder import KVPlusEncoderDecoderCache
from hf_kvplus.fingerprint import ModelFingerprint
from hf_kvplus.saving import load_saved

STRATEGIES = ["fp", "int8", "int4", "int2", "k8v4", "k16v4", "int4,recent=0,sinks=0"]


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(1, 128, (rows, length))


def fill(model, cache, ids, **options):
    with torch.no_grad():
        model(ids, **{cache_keyword(model): cache}, **options)
    return cache


def continue_from(model, cache, ids, count=20, **options):
    options = {"max_new_tokens": count, "do_sample": False, "return_dict_in_generate": True, **options}
    return model.generate(ids, output_logits=True, **{cache_keyword(model): cache}, **options)


def assert_same_continuation(model, cache, loaded, ids, **options):
    expected = continue_from(model, cache, ids, **options)
    got = continue_from(model, loaded, ids, **options)
    assert torch.equal(expected.sequences, got.sequences)
    for left, right in zip(expected.logits, got.logits, strict=True):
        assert torch.equal(left, right)


# Going on


@pytest.mark.parametrize(
    ("strategy", "length"), [*((strategy, 220) for strategy in STRATEGIES), ("int4", 1), ("int4", 63), ("fp", 1)]
)
def test_generation_goes_on_bit_for_bit(llama, tmp_path, strategy, length):
    ids = tokens(2, length)
    cache = fill(llama, build_cache(strategy, llama.config), ids)
    save_cache(cache, tmp_path / "cache.safetensors", model=llama)
    loaded = load_cache(tmp_path / "cache.safetensors", llama)
    assert loaded.get_seq_length() == length
    # From 220 tokens, a block is packed behind the loaded ones.
    assert_same_continuation(llama, cache, loaded, torch.cat([ids, tokens(2, 3)], dim=1), count=40)


@pytest.mark.parametrize(
    "strategy",
    [
        "window:50,sinks=4",
        "window:50,sinks=4,positions=shifted",
        "window:50,sinks=0,prefill=dense",
        "window:150,sinks=4,positions=shifted+int4,recent=16",
        "window:50,sinks=4,rollback=8",
    ],
)
@pytest.mark.parametrize("length", [20, 220])
def test_a_window_goes_on_bit_for_bit_before_and_after_it_has_dropped_tokens(llama, tmp_path, strategy, length):
    ids = tokens(2, length)
    cache = build_cache(strategy, llama.config)
    for column in range(0, length, 20):
        fill(llama, cache, ids[:, column : column + 20])
    save_cache(cache, tmp_path / "cache.safetensors", model=llama)
    loaded = load_cache(tmp_path / "cache.safetensors", llama)
    assert loaded.plan == cache.plan
    assert_same_continuation(llama, cache, loaded, torch.cat([ids, tokens(2, 3)], dim=1), count=40)


def test_the_restored_prompt_is_not_read_again(llama, tmp_path):
    ids = tokens(1, 100)
    save_cache(fill(llama, build_cache("int4", llama.config), ids), tmp_path / "cache.safetensors", model=llama)
    loaded = load_cache(tmp_path / "cache.safetensors", llama)
    lengths = []
    hook = llama.model.layers[0].register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[0].shape[1]))
    try:
        continue_from(llama, loaded, torch.cat([ids, tokens(1, 2)], dim=1), count=3)
    finally:
        hook.remove()
    assert lengths == [2, 1, 1]


def test_a_saved_and_loaded_cache_saves_to_the_same_bytes(llama, tmp_path):
    cache = fill(llama, build_cache("k4v2", llama.config), tokens(2, 200))
    save_cache(cache, tmp_path / "one", model=llama)
    save_cache(load_cache(tmp_path / "one", llama), tmp_path / "two", model=llama)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_saving_leaves_the_cache_as_it_was(llama, tmp_path):
    ids = tokens(1, 150)
    saved, untouched = (fill(llama, build_cache("int4", llama.config), ids) for _ in range(2))
    save_cache(saved, tmp_path / "cache.safetensors", model=llama)
    assert_same_continuation(llama, saved, untouched, torch.cat([ids, tokens(1, 1)], dim=1))


def test_left_padding_is_kept(llama, tmp_path):
    ids, mask = tokens(3, 140), torch.ones(3, 140, dtype=torch.long)
    for row, padding in enumerate((0, 5, 70)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = fill(llama, build_cache("int4", llama.config), ids, attention_mask=mask, position_ids=positions)
    save_cache(cache, tmp_path / "cache.safetensors")
    loaded = load_cache(tmp_path / "cache.safetensors", llama)
    assert [layer.padding for layer in loaded.layers] == [layer.padding for layer in cache.layers]
    mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], dim=1)
    assert_same_continuation(llama, cache, loaded, torch.cat([ids, tokens(3, 1)], dim=1), attention_mask=mask)


def test_a_loaded_cache_can_be_cropped_and_reordered(llama, tmp_path):
    cache = fill(llama, build_cache("int4", llama.config), tokens(3, 250))
    save_cache(cache, tmp_path / "cache.safetensors")
    loaded = load_cache(tmp_path / "cache.safetensors", llama.config)
    for one in (cache, loaded):
        one.crop(-170)
        one.reorder_cache(torch.tensor([2, 0, 0]))
    for left, right in zip(cache.layers, loaded.layers, strict=True):
        for expected, got in zip(left.dense(), right.dense(), strict=True):
            assert torch.equal(expected, got)


def test_an_empty_cache_can_be_saved(llama, tmp_path):
    save_cache(build_cache("int4", llama.config), tmp_path / "cache.safetensors")
    loaded = load_cache(tmp_path / "cache.safetensors", llama.config)
    assert loaded.get_seq_length() == 0
    fill(llama, loaded, tokens(1, 5))
    assert loaded.get_seq_length() == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_caches(tmp_path, dtype):
    model = tiny_llama().to(dtype)
    ids = tokens(1, 200)
    cache = fill(model, build_cache("int4", model.config), ids)
    save_cache(cache, tmp_path / "cache.safetensors", model=model)
    loaded = load_cache(tmp_path / "cache.safetensors", model)
    assert loaded.layers[0].dtype == dtype
    assert_same_continuation(model, cache, loaded, torch.cat([ids, tokens(1, 1)], dim=1))


def test_windows_of_the_model_are_kept(tmp_path):
    config = CONFIG_MAPPING["mistral"](**{**tiny_llama_config().to_dict(), "sliding_window": 150})
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = tokens(2, 300)
    for strategy in ("fp", "int4"):
        cache = fill(model, build_cache(strategy, config), ids)
        save_cache(cache, tmp_path / "cache.safetensors", model=model)
        loaded = load_cache(tmp_path / "cache.safetensors", model)
        assert_same_continuation(model, cache, loaded, torch.cat([ids, tokens(2, 1)], dim=1))


@pytest.mark.parametrize("name", ["int4", "fp"])
def test_recurrent_states_of_transformers_layers_are_saved_too(tmp_path, name):
    config = CONFIG_MAPPING["qwen3_next"](
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = tokens(2, 150)
    cache = fill(model, build_cache(name, config), ids)
    save_cache(cache, tmp_path / "cache.safetensors", model=model)
    loaded = load_cache(tmp_path / "cache.safetensors", model)
    assert_same_continuation(model, cache, loaded, torch.cat([ids, tokens(2, 1)], dim=1))


def test_a_layer_that_cannot_be_saved_is_named(llama, tmp_path):
    cache = fill(llama, build_cache("int4", llama.config), tokens(1, 5))
    layer = DynamicCache(config=llama.config).layers[0]
    layer.stream = object()
    cache.layers[1] = layer
    with pytest.raises(NotImplementedError, match=r"layer 1 \(DynamicLayer\) can't be saved: `stream` is a object"):
        save_cache(cache, tmp_path / "cache.safetensors")
    assert os.listdir(tmp_path) == []


def test_both_halves_of_an_encoder_decoder_cache(tmp_path):
    torch.manual_seed(0)
    sizes = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
    ends = {"eos_token_id": None, "forced_eos_token_id": None, "decoder_start_token_id": 1, "pad_token_id": 0}
    config = BartConfig(
        vocab_size=128,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        max_position_embeddings=512,
        **sizes,
        **ends,
    )
    model = BartForConditionalGeneration(config).eval()
    cache = KVPlusEncoderDecoderCache(QuantizedCache(config, 4), KVPlusCache(config, cross_attention=True))
    ids = tokens(1, 90)
    keyword = cache_keyword(model)
    # Two decoder tokens at least: `generate` goes on from them.
    first = model.generate(ids, max_new_tokens=4, do_sample=False, **{keyword: cache})
    save_cache(cache, tmp_path / "cache.safetensors", model=model)
    loaded = load_cache(tmp_path / "cache.safetensors", model)
    assert loaded.is_updated == {0: True, 1: True}
    for half in ("self_attention_cache", "cross_attention_cache"):
        for left, right in zip(getattr(cache, half).layers, getattr(loaded, half).layers, strict=True):
            for expected, got in zip(left.dense(), right.dense(), strict=True):
                assert torch.equal(expected, got)
    encoder_outputs = model.get_encoder()(ids)
    steps = [
        model(encoder_outputs=encoder_outputs, decoder_input_ids=first[:, -1:], **{keyword: one}).logits
        for one in (cache, loaded)
    ]
    assert torch.equal(*steps)


def test_ids_are_kept_beside_the_cache(llama, tmp_path):
    ids = tokens(2, 10)
    save_cache(fill(llama, build_cache("fp", llama.config), ids), tmp_path / "cache.safetensors", input_ids=ids)
    assert torch.equal(load_saved(tmp_path / "cache.safetensors", llama).input_ids, ids)


def test_an_empty_cache_with_the_same_options_can_be_filled(llama, tmp_path):
    cache = fill(llama, QuantizedCache(llama.config, nbits=3), tokens(1, 200))
    save_cache(cache, tmp_path / "cache.safetensors")
    given = QuantizedCache(llama.config, nbits=3)
    assert load_cache(tmp_path / "cache.safetensors", given) is given
    assert given.get_seq_length() == 200
    with pytest.raises(CacheFileError, match="already holds tokens"):
        load_cache(tmp_path / "cache.safetensors", given)
    with pytest.raises(CacheFileError, match=r"`cache\.layers\[0\]\.keys\.inner\.nbits` is 3 in the file and 2 here"):
        load_cache(tmp_path / "cache.safetensors", QuantizedCache(llama.config, nbits=2))


def test_a_device_can_be_named_and_to_moves_a_loaded_cache(llama, tmp_path):
    ids = tokens(1, 200)
    cache = fill(llama, build_cache("int4", llama.config), ids)
    save_cache(cache, tmp_path / "cache.safetensors", model=llama)
    loaded = load_cache(tmp_path / "cache.safetensors", llama, device="cpu").to("cpu")
    assert_same_continuation(llama, cache, loaded, torch.cat([ids, tokens(1, 1)], dim=1))
    moved = load_cache(tmp_path / "cache.safetensors", llama.config, device="meta")
    stores = [store for layer in moved.layers for store in (*layer.packed.values(), layer.sinks, layer.recent)]
    assert {store.get(name).device.type for store in stores for name in store.names} == {"meta"}
    assert {layer.device.type for layer in moved.layers} == {"meta"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device beside the CPU")
def test_a_cache_goes_on_on_another_device(tmp_path):
    model = tiny_llama()
    ids = tokens(1, 200)
    save_cache(fill(model, build_cache("int4", model.config), ids), tmp_path / "cache.safetensors", model=model)
    expected = continue_from(model, load_cache(tmp_path / "cache.safetensors", model), torch.cat([ids, ids[:, :1]], 1))
    model = model.to("cuda")
    loaded = load_cache(tmp_path / "cache.safetensors", model)
    got = continue_from(model, loaded, torch.cat([ids, ids[:, :1]], 1).to("cuda"))
    assert torch.equal(expected.sequences, got.sequences.cpu())


# Size and form


@pytest.mark.parametrize("strategy", ["fp", "int4"])
def test_the_file_is_as_large_as_what_is_held(llama, tmp_path, strategy):
    cache = fill(llama, build_cache(strategy, llama.config), tokens(4, 1500))
    save_cache(cache, tmp_path / "cache.safetensors")
    memory = measure_memory(cache)
    header = 16 * 1024
    held = memory.packed_bytes + memory.full_precision_bytes
    assert held <= os.path.getsize(tmp_path / "cache.safetensors") <= held + header


def test_any_reader_of_safetensors_opens_the_file(llama, tmp_path):
    cache = fill(llama, build_cache("fp", llama.config), tokens(2, 30))
    save_cache(cache, tmp_path / "cache.safetensors")
    tensors = load_file(tmp_path / "cache.safetensors")
    assert torch.equal(tensors["cache.layers.1.recent.values"], cache.layers[1].recent.get("values"))


@settings(max_examples=60, deadline=None)
@given(
    dtypes=st.lists(st.sampled_from(list(cachefile.DTYPE_NAMES)), max_size=6),
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=6, max_size=6),
)
def test_every_dtype_and_shape_comes_back(tmp_path_factory, dtypes, shapes):
    path = tmp_path_factory.mktemp("tensors") / "tensors"
    tensors = {
        f"tensor {index}": torch.randint(0, 2, tuple(shape)).to(dtype)
        for index, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=False))
    }
    write_file(path, tensors, {"format": "test", "text": 'a "quoted" ä'})
    assert read_metadata(path, "test")["text"] == 'a "quoted" ä'
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].float(), tensor.float())
        assert loaded[name].shape == tensor.shape


# Files that are refused


@pytest.fixture
def saved(llama, tmp_path):
    path = tmp_path / "cache.safetensors"
    save_cache(fill(llama, build_cache("int4", llama.config), tokens(1, 200)), path, model=llama)
    return path


@pytest.mark.parametrize("length", [0, 4, 8, 100, 5000, -1])
def test_a_truncated_file_is_refused(llama, saved, length):
    content = saved.read_bytes()
    saved.write_bytes(content[:length])
    with pytest.raises(CacheFileError, match="truncated|isn't a safetensors file"):
        load_cache(saved, llama)


def test_something_behind_the_end_is_refused(llama, saved):
    saved.write_bytes(saved.read_bytes() + b"0")
    with pytest.raises(CacheFileError, match="something behind its end"):
        load_cache(saved, llama)


def test_any_flipped_bit_is_refused(llama, saved):
    content = saved.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    generator = torch.Generator().manual_seed(0)
    spots = [*range(9), *torch.randint(8, header, (40,), generator=generator).tolist()]
    spots += torch.randint(header, len(content), (40,), generator=generator).tolist()
    for spot in spots:
        damaged = bytearray(content)
        damaged[spot] ^= 1 << (spot % 8)
        saved.write_bytes(damaged)
        with pytest.raises(CacheFileError):
            load_cache(saved, llama)


def test_foreign_files_are_refused(llama, tmp_path):
    path = tmp_path / "foreign"
    for content in (b"PK\x03\x04 something else, quite long", b"\x10" + bytes(7) + b"[1,2,3,4,5,6,7 ]"):
        path.write_bytes(content)
        with pytest.raises(CacheFileError, match="isn't a safetensors file"):
            load_cache(path, llama)
    for header in (b'{"__metadata__":null}   ', b'{"weight":{}}           '):
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(CacheFileError, match="not a saved cache: its `format` is None"):
            load_cache(path, llama)
    write_file(path, {"weight": torch.zeros(3)}, {"format": "pt"})
    with pytest.raises(CacheFileError, match="not a saved cache: its `format` is 'pt'"):
        load_cache(path, llama)
    with pytest.raises(FileNotFoundError):
        load_cache(tmp_path / "nowhere", llama)


def rewrite(path, **changes) -> None:
    """Writes the file anew with other metadata, and a digest that fits."""
    metadata = {**read_metadata(path, "hf_kvplus cache"), **changes}
    del metadata["sha256"]
    write_file(path, load_file(path), metadata)


def test_another_format_version_is_refused(llama, saved):
    rewrite(saved, format_version="99")
    with pytest.raises(CacheFileError, match="`format_version` is 99, this version reads 1"):
        load_cache(saved, llama)


def test_options_from_the_future_are_refused(llama, saved):
    parts = json.loads(read_metadata(saved, "hf_kvplus cache")["parts"])
    parts["cache"]["options"]["quantization"]["sparkle"] = 3
    rewrite(saved, parts=json.dumps(parts))
    with pytest.raises(CacheFileError, match="sparkle"):
        load_cache(saved, llama)


def test_other_library_versions_are_told(llama, saved):
    rewrite(saved, versions=json.dumps({"hf_kvplus": "0.0.1", "transformers": "5.0", "torch": "2.0"}))
    with pytest.warns(UserWarning, match=r"`hf_kvplus` is '0\.0\.1' in the file"):
        load_cache(saved, llama)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_hidden_layers": 3}, "config.num_hidden_layers"),
        ({"num_key_value_heads": 4}, "config.num_key_value_heads"),
        ({"hidden_size": 128}, "config.hidden_size"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "config.rope_parameters.rope_theta"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
            "config.rope_parameters.factor",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_configuration_is_refused_by_field(saved, changes, field):
    with pytest.raises(CacheFileError, match=field.replace(".", r"\.")):
        load_cache(saved, tiny_llama_config(**changes))


def test_other_weights_are_refused(saved):
    model = tiny_llama()
    load_cache(saved, model)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3, 5] += 1e-3
    with pytest.raises(CacheFileError, match=r"`model\.weights` is"):
        load_cache(saved, model)


def test_names_labels_and_token_ids_do_not_matter(saved):
    load_cache(saved, tiny_llama_config(pad_token_id=7, eos_token_id=3, id2label={0: "a"}, name_or_path="elsewhere"))


def test_a_fingerprint_is_made_once_and_used_often(llama, tmp_path):
    fingerprint = fingerprint_model(llama)
    cache = fill(llama, build_cache("fp", llama.config), tokens(1, 5))
    save_cache(cache, tmp_path / "one", model=fingerprint)
    save_cache(cache, tmp_path / "two", model=llama)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_hub_revision_can_stand_for_the_weights(tmp_path):
    model = tiny_llama()
    with pytest.raises(ValueError, match="names no commit"):
        fingerprint_model(model, read_weights=False)
    model.config._commit_hash = "abc"
    fingerprint = fingerprint_model(model, read_weights=False)
    assert fingerprint == ModelFingerprint(weights=None, revision="abc")
    save_cache(fill(model, build_cache("fp", model.config), tokens(1, 5)), tmp_path / "cache", model=fingerprint)
    load_cache(tmp_path / "cache", model)
    model.config._commit_hash = "abd"
    with pytest.raises(CacheFileError, match=r"`model\.revision` is 'abc' in the file and 'abd' here"):
        load_cache(tmp_path / "cache", model)


def test_another_tokenizer_is_refused(llama, tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    def tokenizer(*words):
        vocabulary = {word: index for index, word in enumerate(words)}
        return PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="a")), unk_token="a", pad_token="b"
        )

    mine = tokenizer("a", "b", "c")
    save_cache(fill(llama, build_cache("fp", llama.config), tokens(1, 5)), tmp_path / "cache", tokenizer=mine)
    # A call leaves padding and truncation settings behind, which don't change what a text becomes.
    mine(["a b", "a"], padding=True, truncation=True, max_length=2)
    load_cache(tmp_path / "cache", llama, tokenizer=mine)
    load_cache(tmp_path / "cache", llama)
    with pytest.raises(CacheFileError, match="`tokenizer` is"):
        load_cache(tmp_path / "cache", llama, tokenizer=tokenizer("a", "c", "b"))


def test_wrong_kinds_are_refused(llama, tmp_path, saved):
    with pytest.raises(TypeError, match="must be a cache of this package, got DynamicCache"):
        save_cache(DynamicCache(config=llama.config), tmp_path / "cache")
    with pytest.raises(TypeError, match="must be a transformers configuration"):
        load_cache(saved, "llama")
    cache = fill(llama, build_cache("fp", llama.config), tokens(1, 5))
    with pytest.raises(ValueError, match="at least the 5 tokens"):
        save_cache(cache, tmp_path / "cache", input_ids=tokens(1, 4))


# A save that is interrupted


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_an_interrupted_save_leaves_the_old_file_whole(llama, saved, monkeypatch, failing):
    content = saved.read_bytes()

    def fail(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cachefile.os, failing, fail)
    with pytest.raises(OSError, match="No space left"):
        save_cache(fill(llama, build_cache("fp", llama.config), tokens(1, 50)), saved)
    assert saved.read_bytes() == content
    assert os.listdir(saved.parent) == [saved.name]


def test_an_interrupt_while_writing_leaves_the_old_file_whole(llama, saved, monkeypatch):
    content, written = saved.read_bytes(), []

    def interrupted(tensor):
        written.append(tensor)
        if len(written) == 3:
            raise KeyboardInterrupt
        return original(tensor)

    original = cachefile.tensor_bytes
    monkeypatch.setattr(cachefile, "tensor_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_cache(fill(llama, build_cache("fp", llama.config), tokens(1, 50)), saved)
    assert saved.read_bytes() == content
    assert os.listdir(saved.parent) == [saved.name]
    load_cache(saved, llama.config)


def test_a_folder_that_is_missing_is_told(llama, tmp_path):
    with pytest.raises(FileNotFoundError):
        save_cache(build_cache("fp", llama.config), tmp_path / "missing" / "cache")
