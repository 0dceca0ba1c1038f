"""A cache with offloaded blocks says what the same cache without says, and is made and kept like any other."""

from __future__ import annotations

import copy
import os

import pytest
import torch

from conftest import tiny_llama_config
from hf_kvplus import (
    KVPlusCache,
    Offload,
    OffloadedCache,
    OffloadError,
    build_cache,
    load_cache,
    measure_memory,
    save_cache,
)
from hf_kvplus.compat import cache_keyword
from hf_kvplus.recipes import SUPPORTED_NBITS, Quantization, recipes

TIERS = ["offload:cpu", "offload:disk,budget=20kb", "offload:auto,budget=20kb"]
PROMPT = torch.randint(0, 128, (1, 300), generator=torch.Generator().manual_seed(4))


def generate(model, cache, **options):
    plain = {"max_new_tokens": 70, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(PROMPT, past_key_values=cache, **{**plain, **options})


@pytest.mark.parametrize(
    "base", ["fp", "int4", "window:150,sinks=4+int8,recent=16", "window:150,sinks=4,positions=shifted"]
)
def test_text_and_logits_are_those_without_offloading(llama, base):
    expected = generate(llama, build_cache(base, llama.config))
    for tier in TIERS:
        cache = build_cache(f"{base}+{tier}", llama.config)
        output = generate(llama, cache)
        assert all(layer.packed_blocks and layer.shelf for layer in cache.layers)
        assert torch.equal(output.sequences, expected.sequences)
        for ours, theirs in zip(output.logits, expected.logits, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=["beams", "lookup"])
@pytest.mark.parametrize("base", ["fp", "int8"])
def test_beams_and_assisted_decoding_too(llama, base, options):
    options = {**options, "output_logits": False, "max_new_tokens": 40}
    expected = generate(llama, build_cache(base, llama.config), **options)
    for tier in TIERS:
        output = generate(llama, build_cache(f"{base}+{tier}", llama.config), **options)
        assert torch.equal(output.sequences, expected.sequences)


def widths(recipe: str) -> tuple[int, ...]:
    return (8,) if recipe == "float8" else SUPPORTED_NBITS


@pytest.mark.parametrize(
    "offload", [Offload("cpu"), Offload("disk", budget_bytes=0), Offload("auto", budget_bytes=20_000)]
)
@pytest.mark.parametrize("recipe", recipes)
def test_every_codec_gives_the_bits_it_gives_without_offloading(recipe, offload):
    """Rows change places and tokens are rolled back on the way."""
    for nbits in widths(recipe):
        quantization = Quantization(nbits, nbits, recipe=recipe)
        caches = [
            KVPlusCache(tiny_llama_config(), quantization=quantization, offload=place)
            for place in (Offload("memory"), offload)
        ]
        generator = torch.Generator().manual_seed(nbits)
        for tokens, back in ((300, 0), (97, 150), (130, 0), (1, 0)):
            for layer in range(2):
                new = [torch.randn(2, 2, tokens, 16, generator=generator) for _ in range(2)]
                ours, theirs = (cache.update(*new, layer) for cache in caches)
                assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True)), nbits
            for cache in caches:
                cache.reorder_cache(torch.tensor([1, 0]))
                cache.crop(-back)


def test_it_is_cropped_like_any_other():
    caches = [build_cache(strategy, tiny_llama_config()) for strategy in ("int4", "int4+offload:disk,budget=0")]
    states = torch.randn(2, 2, 400, 16)
    for length in (130, 97, 250):
        for cache in caches:
            for layer in range(2):
                cache.update(states, -states, layer)
            cache.crop(length - cache.get_seq_length())
        for ours, theirs in zip(*[cache.layers for cache in caches], strict=True):
            for one, other in zip(ours.dense(), theirs.dense(), strict=True):
                assert torch.equal(one, other)


def test_a_preset_and_strings_build_the_same():
    config = tiny_llama_config()
    for preset, strategy in (
        (OffloadedCache(config), "offload:cpu"),
        (OffloadedCache(config, tier="disk", nbits=4, prefetch_layers=2), "int4+offload:disk,prefetch=2"),
        (OffloadedCache(config, tier="auto", budget_bytes=2**31), "offload:auto,budget=2GiB"),
    ):
        built = build_cache(strategy, config)
        assert built.options() == preset.options()
        assert built.plan == preset.plan


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("offload:tape", "the tier must be cpu, disk or auto, got 'tape'"),
        ("offload:auto", "needs the bytes that stay; write `offload:auto,budget=2GiB`"),
        ("offload:disk,budget=lots", "`budget`: a number of bytes is written"),
        ("offload:cpu,dir=x", "`directory` isn't for tier 'cpu'"),
        ("offload:disk,path=x", "unknown option path; it takes dir, budget, host, prefetch"),
    ],
)
def test_a_wrong_string_gets_one_clear_error(strategy, message):
    with pytest.raises(ValueError, match=message):
        build_cache(strategy, tiny_llama_config())


def filled(strategy: str, tokens: int = 400):
    cache = build_cache(strategy, tiny_llama_config())
    generator = torch.Generator().manual_seed(1)
    for layer in range(2):
        cache.update(*(torch.randn(1, 2, tokens, 16, generator=generator) for _ in range(2)), layer)
    return cache


def test_bytes_are_told_by_place():
    plain, disk = (
        measure_memory(filled("fp+offload:auto,budget=1GiB")),
        measure_memory(filled("offload:disk,budget=0")),
    )
    assert plain.disk_bytes == plain.host_bytes == 0
    assert plain.device_bytes == plain.total_bytes
    assert disk.disk_bytes > 0.7 * plain.total_bytes
    assert disk.total_bytes < 0.4 * plain.total_bytes


def test_close_removes_the_files_and_a_closed_cache_refuses():
    cache = filled("offload:disk")
    folder = cache.directory
    assert os.listdir(folder)
    cache.close()
    assert not os.path.exists(folder)
    with pytest.raises(OffloadError, match="this cache is closed"):
        cache.update(torch.ones(1, 2, 3, 16), torch.ones(1, 2, 3, 16), 0)


def test_reset_starts_anew_in_the_same_folder():
    cache = filled("offload:disk")
    folder = cache.directory
    cache.flush()
    cache.reset()
    assert not [name for name in os.listdir(folder) if name.endswith((".blocks", ".safetensors"))]
    cache.update(torch.ones(3, 2, 300, 16), torch.ones(3, 2, 300, 16), 0)
    assert cache.layers[0].packed_blocks


@pytest.mark.parametrize("tier", ["offload:disk,budget=0", "offload:cpu"])
def test_reset_after_reading_leaves_nothing_of_what_was_on_its_way(tier):
    """The first layer is fetched again while the last one is read."""
    cache = filled(f"int4+{tier}")
    for layer in cache.layers:
        layer.dense()
    assert measure_memory(cache).total_bytes
    cache.flush()
    cache.reset()
    assert measure_memory(cache).total_bytes == 0
    assert cache.directory is None or not [name for name in os.listdir(cache.directory) if name.endswith(".blocks")]


def test_a_copy_that_starts_anew_leaves_what_the_original_kept():
    cache = filled("offload:disk")
    cache.flush()
    twin = copy.deepcopy(cache)
    twin.reset()
    assert cache.space.directory.index_path.exists()
    assert cache.layers[0].dense()[0].shape[2] == 400
    cache.reset()
    assert not cache.space.directory.index_path.exists()


def test_a_copy_outlives_the_original():
    cache = filled("int8+offload:disk,budget=0")
    expected = cache.layers[1].dense()
    twin = copy.deepcopy(cache)
    folder = cache.directory
    del cache
    assert all(torch.equal(*pair) for pair in zip(twin.layers[1].dense(), expected, strict=True))
    del twin
    assert not os.path.exists(folder)


@pytest.mark.parametrize("strategy", ["fp+offload:disk,budget=0", "int4+offload:cpu"])
def test_it_is_saved_and_loaded(strategy, tmp_path):
    cache = filled(strategy)
    save_cache(cache, tmp_path / "cache.safetensors")
    loaded = load_cache(tmp_path / "cache.safetensors", tiny_llama_config())
    assert loaded.options() == cache.options()
    for ours, theirs in zip(loaded.layers, cache.layers, strict=True):
        assert ours.shelf is not None
        assert all(torch.equal(*pair) for pair in zip(ours.dense(), theirs.dense(), strict=True))


def test_a_cpu_says_once_that_host_memory_saves_nothing_there(caplog, monkeypatch):
    from hf_kvplus.stores import space

    space.say_once.cache_clear()
    monkeypatch.setattr(space.logger, "propagate", True)
    for _ in range(2):
        filled("offload:cpu")
    assert [record.message for record in caplog.records if "saves nothing" in record.message] == [space.NOTHING_SAVED]


def test_layers_with_small_windows_of_their_own_stay_where_they_are():
    config = tiny_llama_config(sliding_window=100, layer_types=["sliding_attention", "full_attention"])
    cache = build_cache("offload:cpu", config)
    assert [layer.shelf is None for layer in cache.layers] == [True, False]
    assert "host memory" not in cache.plan[0]
    assert "host memory" in cache.plan[1]


def test_a_step_of_the_model_reads_ahead(llama):
    """What the next layer needs is on its way when this one is read."""
    cache = build_cache("int4+offload:disk,budget=0", llama.config)
    with torch.no_grad():
        llama(PROMPT, **{cache_keyword(llama): cache})
        started = []
        ahead = cache.layers[0].shelf.shelves.ahead
        start = ahead._start
        ahead._start = lambda run, device: (started.append(run.key), start(run, device))[1]
        llama(PROMPT[:, :1], **{cache_keyword(llama): cache})
    assert {key[0] for key in started} == {0, 1}
    assert Offload().prefetch_layers == 1
