"""The contract of transformers' `Cache` and its layers, call by call."""

from __future__ import annotations

import logging

import pytest
import torch
import zoo
from case import PROMPT, Case, Strategy, attention_layers, copied, fingerprint
from modes import MODES
from suite import STRATEGIES
from transformers import DynamicCache, MambaConfig
from transformers.utils.logging import warning_once

from conftest import tiny_llama_config
from hf_kvplus import KVPlusCache, build_cache, load_cache, measure_memory, save_cache
from hf_kvplus.hybrid import HybridKVLayer, RecurrentLayer
from hf_kvplus.layer import KVLayer
from hf_kvplus.memory import find_tensors
from test_memory import reachable_bytes

EVERYWHERE = [strategy for strategy in STRATEGIES if len(strategy.architectures) == len(zoo.ZOO)]
DECODERS = [name for name, architecture in zoo.ZOO.items() if architecture.kind in ("text", "vision")]
LAYERS = {"full": {}, "window": {"sliding_window": 100, "layer_types": ["sliding_attention"] * 2}}


def states(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, 2, length, 16, generator=torch.Generator().manual_seed(seed))


def tiny_cache(strategy: str = "int4,recent=16", layers: str = "full") -> KVPlusCache:
    return build_cache(strategy, tiny_llama_config(**LAYERS[layers]))


def contents(cache) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in layer.dense()]


@pytest.mark.parametrize("name", DECODERS)
def test_what_a_cache_says_of_itself_is_what_dynamic_cache_says(name):
    for strategy in EVERYWHERE:
        case = Case(zoo.ZOO[name], strategy)
        ours, theirs = case.cache(), case.cache("dynamic")
        for tokens in (None, case.tokens(2, 120), case.tokens(2, 3, seed=1)[:, :1]):
            if tokens is not None:
                with torch.no_grad():
                    case.forward(tokens, ours)
                    case.forward(tokens, theirs)
            assert len(ours) == len(theirs)
            facts = ("is_sliding", "is_linear", "is_dummy", "is_croppable", "is_initialized")
            for fact in (fact for fact in facts if hasattr(theirs, fact)):  # older transformers know fewer
                assert getattr(ours, fact) == getattr(theirs, fact), fact
            assert ours.get_max_length() == theirs.get_max_length()
            assert ours.get_seq_length() == theirs.get_seq_length() == (0 if tokens is None else ours.get_seq_length())
            for index, layer in enumerate(ours.layers):
                if isinstance(layer, KVLayer):
                    for burst in (1, 2, 7, 64, 130):
                        assert ours.get_mask_sizes(burst, index) == theirs.get_mask_sizes(burst, index)
        assert ours.batch_size == 2
        assert not ours.is_compileable
        if hasattr(ours, "is_recording_past"):
            assert not any(ours.is_recording_past(index) for index in range(len(ours)))


@pytest.mark.parametrize("name", DECODERS)
def test_early_initialization_changes_nothing(name):
    case = Case(zoo.ZOO[name], STRATEGIES[1])
    early, late = case.cache(), case.cache()
    early.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
    assert early.is_initialized == any(layer.supports_early_init for layer in early.layers)
    assert early.get_seq_length() == 0
    sequences = [case.generate(case.tokens(2), cache).sequences for cache in (early, late)]
    assert torch.equal(*sequences)
    assert early.batch_size == 2


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("strategy", ["fp", "int4,recent=16", "int4,recent=0"])
@pytest.mark.parametrize("recording", [False, True])
def test_mask_sizes_are_those_of_the_next_update(layers, strategy, recording):
    cache = tiny_cache(strategy, layers)
    if recording:
        cache.activate_past_recording()
    for step, burst in enumerate((37, 1, 5, 70, 1, 1, 9, 150, 3, 101, 1)):
        length, offset = cache.get_mask_sizes(burst, 0)
        new = states(2, burst, step)
        keys, values = cache.update(new, new, 0)
        assert keys.shape[2] == values.shape[2] == length
        assert length == cache.get_seq_length() - offset
        assert torch.equal(keys[:, :, -burst:], new)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("strategy", ["fp", "int8,recent=16", "k3v2,recent=16"])
def test_rows_keep_their_fingerprint_through_every_row_operation(layers, strategy):
    """Row r holds the number r everywhere; a constant is stored nearly exactly at any width."""
    cache, rows = tiny_cache(strategy, layers), [0, 1, 2, 3]
    for step in range(5):
        marked = torch.tensor(rows, dtype=torch.float32)[:, None, None, None].expand(-1, 2, 60, 16)
        for layer in range(2):
            cache.update(marked, -marked, layer)
        if step % 2:
            cache.reorder_cache(torch.tensor([2, 0, 0, 3][: len(rows)]))
            rows = [rows[row] for row in [2, 0, 0, 3][: len(rows)]]
        else:
            cache.batch_select_indices(
                torch.tensor([-1, 1, 0, 2]) if step else torch.tensor([True, False, True, True])
            )
            rows = [rows[row] for row in ([-1, 1, 0, 2] if step else [0, 2, 3])]
            cache.batch_repeat_interleave(2)
            rows = [row for row in rows for _ in range(2)][:4]
            cache.batch_select_indices(torch.arange(4))
        assert cache.batch_size == len(rows)
        for layer in cache.layers:
            for sign, tensor in zip((1, -1), layer.dense(), strict=True):
                expected = sign * torch.tensor(rows, dtype=torch.float32)[:, None, None, None]
                torch.testing.assert_close(tensor, expected.expand_as(tensor), rtol=0, atol=0.1)
    assert strategy == "fp" or all(layer.packed_blocks for layer in cache.layers)


def test_a_packed_block_is_never_written_again():
    """Whatever happens behind it: long and short updates, rollbacks, row operations that keep the rows."""
    cache = tiny_cache("int2,recent=16")
    layer = cache.layers[0]
    cache.update(states(2, 100), states(2, 100, 1), 0)
    seen: dict[tuple[str, str, int], torch.Tensor] = {}
    for step in range(60):
        burst = (1, 1, 7, 40)[step % 4]
        cache.update(50 * states(2, burst, step), states(2, burst, step + 1), 0)
        if step % 5 == 4:
            cache.crop(-3)
        if step % 7 == 6:
            cache.reorder_cache(torch.tensor([0, 1]))
        for name, store in layer.packed.items():
            for field, tensor in store.fields().items():
                for block in range(len(store)):
                    now = tensor[:, :, block]
                    assert torch.equal(seen.setdefault((name, field, block), now.clone()), now)
    assert len({block for *_, block in seen}) > 8


def test_crop_says_what_it_cannot_do():
    for layers in LAYERS:
        cache = tiny_cache("int4,recent=16", layers)
        cache.crop(0)
        cache.crop(-5)  # nothing is held yet, as with transformers' own
        cache.update(states(1, 80), states(1, 80), 0)
        with pytest.raises(ValueError, match="must be negative or 0, got 3"):
            cache.crop(3)
        before = contents_of(cache.layers[0])
        cache.crop(0)
        assert all(map(torch.equal, before, contents_of(cache.layers[0])))
    cache.update(states(1, 150), states(1, 150), 0)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-150)
    assert cache.get_seq_length() == 230


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("strategy", ["fp", "int4,recent=16"])
@pytest.mark.parametrize("length", [80, 230])
def test_a_crop_of_more_than_was_seen_leaves_nothing(layers, strategy, length):
    """As with transformers' own layers; of what a window has dropped nothing is needed then."""
    cache, fresh = tiny_cache(strategy, layers), tiny_cache(strategy, layers)
    cache.update(states(2, length), states(2, length), 0)
    cache.crop(-length - 1)
    assert cache.get_seq_length() == 0
    assert cache.layers[0].keys.numel() == cache.layers[0].values.numel() == 0
    assert cache.get_mask_sizes(7, 0) == (7, 0)
    for each in (cache, fresh):
        each.update(states(1, 150, 5), states(1, 150, 6), 0)
    assert all(map(torch.equal, cache.layers[0].dense(), fresh.layers[0].dense()))


@pytest.mark.parametrize("prompt", [PROMPT, 1], ids=["prompt", "decoding"])
@pytest.mark.parametrize("name", ["Llama", "Gemma 3n", "Falcon-H1", "Whisper"])
def test_a_forward_pass_that_breaks_off_between_layers_is_noticed(name, prompt):
    """Else the layers behind it would lack tokens, without a word."""
    case = Case(zoo.ZOO[name], Strategy("int8,recent=16", 0.1))
    tokens, cache = case.tokens(length=PROMPT + 10), case.cache()
    update = KVPlusCache.update
    with torch.no_grad():
        if prompt == 1:
            case.forward(tokens[:, :PROMPT], cache)
        held = cache.get_seq_length()

        def broken(self, keys, values, layer_idx, *arguments, **options):
            if layer_idx == 1:
                raise KeyboardInterrupt
            return update(self, keys, values, layer_idx, *arguments, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KVPlusCache, "update", broken)
            with pytest.raises(KeyboardInterrupt):
                case.forward(tokens[:, held : held + prompt], cache)
        said = f"broke off behind layer 0.* holds {held + prompt} tokens up to there and {held} from"
        with pytest.raises(RuntimeError, match=said):
            case.forward(tokens[:, held + prompt : held + prompt + 1], cache)
        cache.reset()
        case.check(case.forward(tokens, cache)[0], tokens[0], 0)


@pytest.mark.parametrize("name", ["Qwen3-Next", "Falcon-H1", "Jamba"])
def test_a_recurrent_state_is_never_rolled_back_by_half(name):
    case = Case(zoo.ZOO[name], STRATEGIES[0])
    cache = case.cache()
    with torch.no_grad():
        case.forward(case.tokens(), cache)
    before = fingerprint(cache)
    cache.crop(0)
    with pytest.raises(RuntimeError, match="recurrent state"):
        cache.crop(-3)
    assert fingerprint(cache) == before


def test_crop_cuts_all_layers_or_none():
    """The first layer keeps everything and could; the second is a window that can't."""
    config = tiny_llama_config(sliding_window=100, layer_types=["full_attention", "sliding_attention"])
    cache = build_cache("int4,recent=16", config)
    for layer in range(2):
        cache.update(states(1, 230), states(1, 230), layer)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-150)
    assert [layer.get_seq_length() for layer in cache.layers] == [230, 230]


def contents_of(layer: KVLayer) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in layer.dense()]


@pytest.mark.parametrize("strategy", ["fp", "int4,recent=16", "k8v2,recent=16"])
def test_after_a_crop_to_nothing_another_prompt_fits(strategy):
    """Another batch size, other padding: nothing of the old prompt shows, its sinks and paddings included."""
    cache, fresh = tiny_cache(strategy), tiny_cache(strategy)
    padded = {"position_ids": (torch.arange(200) - torch.tensor([[0], [90], [30]])).clamp_min(0)}
    cache.update(states(3, 200), states(3, 200), 0, kwargs=padded)
    cache.crop(-200)
    assert cache.get_seq_length() == 0
    for each in (cache, fresh):
        positions = {"position_ids": (torch.arange(150) - torch.tensor([[70], [0]])).clamp_min(0)}
        each.update(states(2, 150, 5), states(2, 150, 6), 0, kwargs=positions)
    assert cache.layers[0].padding == fresh.layers[0].padding
    assert all(map(torch.equal, cache.layers[0].dense(), fresh.layers[0].dense()))


def test_a_crop_into_the_padding_lets_the_row_begin_again():
    layer = tiny_cache("int4,recent=16").layers[0]
    positions = (torch.arange(100) - torch.tensor([[0], [40]])).clamp_min(0)
    layer.update(states(2, 100), states(2, 100), kwargs={"position_ids": positions})
    assert layer.padding.counts == [0, 40]
    layer.crop(-70)
    assert layer.padding.counts[0] == 0
    assert not layer.padding.settled
    positions = (torch.arange(30, 100) - torch.tensor([[0], [55]])).clamp_min(0)
    layer.update(states(2, 70), states(2, 70), kwargs={"position_ids": positions})
    assert layer.padding.counts == [0, 55]


@pytest.mark.parametrize("convention", [0, 1, -1], ids=lambda pad: f"padding has position {pad}")
@pytest.mark.parametrize("chunks", [[200], [64, 136], [1] * 200, [30, 1, 1, 168]], ids=lambda c: f"{len(c)} chunks")
def test_padding_is_found_in_any_convention_and_chunking(convention, chunks):
    layer = tiny_cache("int4,recent=16").layers[0]
    counted = torch.arange(200) - torch.tensor([[0], [1], [2], [64], [131]])
    positions = torch.where(counted < 0, convention, counted)
    for part in positions.split(chunks, dim=1):
        layer.update(states(5, part.shape[1]), states(5, part.shape[1]), kwargs={"position_ids": part})
    assert layer.padding.counts == [0, 1, 2, 64, 131]


def test_positions_that_start_again_are_no_padding():
    """As in several texts packed into one row: only the row's beginning may be padding."""
    layer = tiny_cache("int4,recent=16").layers[0]
    positions = torch.cat([torch.arange(90), torch.arange(60)])[None]
    layer.update(states(1, 150), states(1, 150), kwargs={"position_ids": positions})
    assert layer.padding.counts == [0]


@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "Qwen3-Next", "Falcon-H1", "LFM2", "T5", "Gemma 3n"])
def test_to_moves_every_tensor_of_every_layer(name):
    case = Case(zoo.ZOO[name], Strategy("int4,recent=16", 1))
    cache = case.cache()
    with torch.no_grad():
        case.forward(case.tokens(), cache)
    moved = copied(cache).to("meta")
    assert {tensor.device.type for tensor in find_tensors(moved)} == {"meta"}
    assert len(find_tensors(moved)) == len(find_tensors(cache)) > 4
    assert all(layer.device.type == "meta" for layer in attention_layers(moved))


def test_offload_and_prefetch_leave_what_is_held():
    for name in ("Llama", "Falcon-H1"):
        case = Case(zoo.ZOO[name], Strategy("int8,recent=16", 0.1))
        tokens, cache = case.tokens(length=PROMPT + 10), case.cache()
        with torch.no_grad():
            case.forward(tokens[:, :PROMPT], cache)
            for layer in cache.layers:
                layer.offload()
                layer.prefetch()
            case.check(case.forward(tokens[:, PROMPT:], cache)[0], tokens[0], PROMPT)


def test_every_kind_of_layer_gets_a_class_and_says_so():
    kinds = {}
    for name in DECODERS:
        case = Case(zoo.ZOO[name], Strategy("int4,recent=16", 1))
        cache = case.cache()
        assert len(cache.plan) == len(cache)
        kinds[name] = {type(layer) for layer in cache.layers}
        for layer, line in zip(cache.layers, cache.plan, strict=True):
            assert ("4 bits" in line) == bool(getattr(layer, "codecs", None))
    assert kinds["Llama"] == kinds["Llama 4"] == {KVLayer}
    assert kinds["Falcon-H1"] == {HybridKVLayer}
    assert kinds["Qwen3-Next"] == kinds["Jamba"] == kinds["LFM2"] == {RecurrentLayer, KVLayer}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("Qwen3-Next", "assisted (draft model)"),
        ("Jamba", "prompt lookup"),
        ("Falcon-H1", "crop, then continue"),
        ("Jamba", "crop, then continue"),
        ("Qwen3-Next", "crop, then continue"),
        ("Jamba", "chunked prefill"),
        ("T5", "classifier-free guidance"),
        ("Whisper", "classifier-free guidance"),
        ("Qwen2-VL", "classifier-free guidance"),
        ("Falcon-H1", "right continuation, 2D mask"),
        ("LFM2", "custom 4D mask"),
        ("Jamba", "custom 4D mask"),
    ],
)
def test_what_is_said_not_to_apply_fails_with_transformers_own_cache_too(name, mode):
    """So that a cell goes green again as soon as transformers allows it."""
    case = Case(zoo.ZOO[name], Strategy("dynamic", 2e-5))
    assert MODES[mode].unless(case)
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        MODES[mode].run(case)


def test_a_window_refuses_the_callers_own_mask_for_several_tokens():
    """As the table says of custom 4D masks: refused, never answered with other tokens than the mask means."""
    case = Case(zoo.ZOO["Llama"], next(strategy for strategy in STRATEGIES if strategy.text == "window:90,sinks=4"))
    assert "refused with an error" in MODES["custom 4D mask"].unless(case)
    cache, tokens = case.cache(), case.tokens(length=PROMPT + 12)
    with torch.no_grad():
        case.forward(tokens[:, :PROMPT], cache)
        with pytest.raises(RuntimeError, match="this model's mask wasn't built with the cache's windows"):
            case.forward(tokens[:, PROMPT:], cache, attention_mask=torch.zeros(1, 1, 12, PROMPT + 12))


@pytest.mark.parametrize("strategy", ["fp", "int4,recent=16"])
@pytest.mark.parametrize("name", zoo.ZOO)
def test_every_model_goes_on_from_a_file_bit_for_bit(name, strategy, tmp_path):
    """Recurrent states beside keys and values, shared layers and both halves of a pair included."""
    case = Case(zoo.ZOO[name], Strategy(strategy, 1))
    tokens, cache = case.tokens(2, PROMPT + 8), case.cache()
    with torch.no_grad():
        case.forward(tokens[:, :PROMPT], cache)
        save_cache(cache, tmp_path / "cache.safetensors", model=case.model)
        loaded = load_cache(tmp_path / "cache.safetensors", case.model)
        assert fingerprint(loaded) == fingerprint(cache)
        assert torch.equal(case.extend(tokens[:, PROMPT:], loaded), case.extend(tokens[:, PROMPT:], cache))


@pytest.mark.parametrize("name", zoo.ZOO)
def test_bytes_are_those_of_every_reachable_tensor_of_any_model(name):
    """Recurrent states, shared layers, windows and both halves of a pair included."""
    for strategy in ("fp", "int4,recent=16"):
        case = Case(zoo.ZOO[name], Strategy(strategy, 1))
        cache = case.cache()
        with torch.no_grad():
            case.forward(case.tokens(2), cache)
            case.extend(case.tokens(2, 2, seed=1), cache)
        assert measure_memory(cache).total_bytes == reachable_bytes(cache) > 0


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (MambaConfig(num_hidden_layers=2), "recurrent state as it is"),
        (tiny_llama_config(sliding_window=20, layer_types=["sliding_attention"] * 2), "which recent tokens fill"),
        (tiny_llama_config(), None),
        (tiny_llama_config(sliding_window=20, layer_types=["sliding_attention", "full_attention"]), None),
    ],
    ids=["recurrent", "short windows", "full", "one full layer"],
)
def test_a_strategy_that_changes_nothing_on_a_model_says_so(config, why):
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("hf_kvplus.caches")
    logger.addHandler(handler)
    warning_once.cache_clear()
    for strategy in ("fp", "int8,recent=16", "int8,recent=16"):
        build_cache(strategy, config)
    logger.removeHandler(handler)
    assert len(said) == (why is not None)
    assert all("packs nothing of a model of type" in line and why in line for line in said)


def test_transformers_own_layers_are_left_alone():
    """Making our caches changes no class that `DynamicCache` uses."""
    before = [type(layer) for layer in DynamicCache(config=tiny_llama_config()).layers]
    tiny_cache()
    assert [type(layer) for layer in DynamicCache(config=tiny_llama_config()).layers] == before
    assert all(kind.__module__.startswith("transformers.") for kind in before)
