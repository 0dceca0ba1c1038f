"""What `layer.keys` and `layer.values` show and take."""

from __future__ import annotations

import pytest
import torch

from conftest import tiny_llama, tiny_llama_config
from hf_kvplus import build_cache
from hf_kvplus.compat import cache_keyword

STRATEGIES = ["fp", "int8,recent=16", "int4,recent=16"]


def states(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, 2, length, 16, generator=torch.Generator().manual_seed(seed))


def filled(strategy: str, length: int = 150, batch: int = 2, **config):
    """Returns a layer that holds `length` tokens, and what it was given."""
    layer = build_cache(strategy, tiny_llama_config(**config)).layers[0]
    given = states(batch, length), states(batch, length, 1)
    layer.update(*given)
    return layer, given


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_assigning_one_half_leaves_the_other_as_it_is(strategy):
    layer, (_, values) = filled(strategy)
    expected, _ = filled(strategy)
    before, changed = layer.values, states(2, 150, 5)
    layer.keys = changed
    assert torch.equal(layer.values, before)
    fresh = build_cache(strategy, tiny_llama_config()).layers[0]
    fresh.update(changed, values)
    assert torch.equal(layer.keys, fresh.keys)
    assert layer.packed_blocks == expected.packed_blocks
    assert layer.get_seq_length() == 150


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_assigning_fewer_tokens_to_both_halves_keeps_those(strategy):
    """As code that evicts tokens by a score does, in either order."""
    for names in (("keys", "values"), ("values", "keys")):
        layer, given = filled(strategy)
        kept = torch.arange(0, 150, 2)
        wanted = {name: tensor[:, :, kept] for name, tensor in zip(("keys", "values"), given, strict=True)}
        for name in names:
            setattr(layer, name, wanted[name])
        fresh = build_cache(strategy, tiny_llama_config()).layers[0]
        fresh.update(wanted["keys"], wanted["values"])
        assert torch.equal(layer.keys, fresh.keys)
        assert torch.equal(layer.values, fresh.values)
        assert layer.get_seq_length() == 75
        assert layer.get_mask_sizes(1) == (76, 0)
        layer.update(states(2, 1), states(2, 1))
        assert layer.keys.shape == (2, 2, 76, 16)


def test_a_row_may_be_taken_out():
    layer, (keys, values) = filled("fp")
    layer.keys, layer.values = keys[1:], values[1:]
    assert layer.batch_size == 1
    assert torch.equal(layer.keys, keys[1:])


def test_padding_is_still_known_after_the_same_tokens_were_assigned():
    layer = build_cache("int4,recent=16", tiny_llama_config()).layers[0]
    positions = (torch.arange(150) - torch.tensor([[0], [40]])).clamp_min(0)
    layer.update(states(2, 150), states(2, 150, 1), kwargs={"position_ids": positions})
    layer.keys = states(2, 150, 7)
    assert layer.padding.counts == [0, 40]
    for row, begin in enumerate((0, 40)):
        assert torch.equal(layer.keys[row, :, begin : begin + 4], states(2, 150, 7)[row, :, begin : begin + 4])


def test_one_half_alone_can_not_go_on():
    layer, (keys, _) = filled("fp")
    layer.keys = keys[:, :, :10]
    assert layer.keys.shape[2] == 10
    with pytest.raises(ValueError, match="`keys` were assigned with shape .*assign `values` too"):
        layer.update(states(2, 1), states(2, 1))
    for use in (
        lambda: layer.crop(-1),
        lambda: layer.reorder_cache(torch.tensor([0])),
        lambda: layer.batch_repeat_interleave(2),
        layer.state_dict,
    ):
        with pytest.raises(ValueError, match="assign `values` too"):
            use()
    layer.keys = keys
    layer.update(states(2, 1), states(2, 1))
    assert layer.get_seq_length() == 151


def test_what_can_not_be_assigned_says_why():
    window = {"sliding_window": 40, "layer_types": ["sliding_attention"] * 2}
    for strategy, config, reason in (
        ("fp", window, "has a window"),
        ("window:200,sinks=4", {}, "has a window"),
        ("int8+offload:cpu", {}, "offloads its blocks"),
    ):
        layer, _ = filled(strategy, **config)
        with pytest.raises(NotImplementedError, match=f"`keys` can't be assigned to a layer that {reason}"):
            layer.keys = layer.keys
    empty = build_cache("fp", tiny_llama_config()).layers[0]
    with pytest.raises(RuntimeError, match="before the first `update`"):
        empty.values = states(1, 3)
    layer, (keys, _) = filled("fp")
    with pytest.raises(ValueError, match=r"must have shape \(batch, 2, seq, 16\) and dtype torch.float32, got"):
        layer.keys = keys.double()


@pytest.mark.parametrize("strategy", ["fp", "int8,recent=16"])
def test_a_window_shows_what_it_records_until_the_next_crop(strategy):
    """The whole past since then, as transformers' layers do; a crop goes back to what the next query sees."""
    window = {"sliding_window": 100, "layer_types": ["sliding_attention"] * 2}
    layer = build_cache(strategy, tiny_llama_config(**window)).layers[0]
    assert layer.sliding_window == 100
    assert not hasattr(build_cache(strategy, tiny_llama_config()).layers[0], "sliding_window")
    layer.activate_past_recording()
    keys = states(1, 300)
    layer.update(keys, keys)
    assert layer.keys.shape[2] == layer.values.shape[2] == 300
    layer.crop(-3)
    assert 99 <= layer.keys.shape[2] < 99 + max(1, layer.block_tokens)
    torch.testing.assert_close(layer.keys[:, :, -16:], keys[:, :, 281:297])


def test_a_model_goes_on_from_assigned_copies():
    model = tiny_llama()
    tokens = torch.randint(2, 128, (1, 60), generator=torch.Generator().manual_seed(3))
    cache = build_cache("fp", model.config)
    with torch.no_grad():
        model(tokens[:, :40], **{cache_keyword(model): cache})
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        logits = model(tokens[:, 40:], **{cache_keyword(model): cache}).logits
        torch.testing.assert_close(logits, model(tokens).logits[:, 40:], rtol=1e-4, atol=1e-5)
