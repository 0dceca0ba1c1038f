"""Later chunks of a prompt are answered some of the history at a time, and stored as before."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from hf_kvplus import build_cache, use_fused_attention
from hf_kvplus.attention import chunks
from hf_kvplus.attention.chunks import CausalMasks, attend_chunk
from hf_kvplus.compat import cache_keyword
from hf_kvplus.layer import KVLayer
from hf_kvplus.recipes import Quantization
from hf_kvplus.stores import PackedStore


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=96, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def feed(model, strategy, *, fused, sizes=(70, 300, 40, 1, 90), rows=1, padding=0):
    """Feeds a prompt in pieces; returns the logits of all but padding, and the cache."""
    cache = build_cache(strategy, model.config)
    ids = torch.randint(1, 128, (rows, sum(sizes)), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : row * padding] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found, start = [], 0
    use_fused_attention(model, enabled=fused)
    for size in sizes:
        stop = start + size
        given = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        found.append(model(ids[:, start:stop], **given, **{cache_keyword(model): cache}).logits)
        start = stop
    use_fused_attention(model, enabled=False)
    return torch.cat(found, 1)[mask == 1], cache


@pytest.mark.parametrize("strategy", ["int4", "k8v3", "k16v4", "fp"])
def test_logits_are_those_of_decoded_states(model, monkeypatch, strategy):
    expected, _ = feed(model, strategy, fused=False)
    for slab_tokens in (96, 4096):
        monkeypatch.setattr(chunks, "SLAB_TOKENS", slab_tokens)
        found, _ = feed(model, strategy, fused=True)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("strategy", ["int4", "k4v2", "fp"])
def test_the_same_states_are_stored(model, strategy):
    """The first layer's states don't depend on attention, so they are stored to the bit."""
    caches = [feed(model, strategy, fused=fused)[1].layers[0] for fused in (False, True)]
    plain, chunked = (layer.state_dict() for layer in caches)
    assert plain.keys() == chunked.keys()
    for name, held in plain.items():
        if isinstance(held, dict) and all(isinstance(one, torch.Tensor) for one in held.values()):
            for field, tensor in held.items():
                assert torch.equal(chunked[name][field], tensor)
    assert [layer.recent.allocated_bytes for layer in caches] == [caches[0].recent.allocated_bytes] * 2


def test_never_more_than_a_slab_is_dense(model, monkeypatch):
    decoded = []
    decode = PackedStore.decode

    def note(self, out, *given):
        decoded.append(out.shape[2])
        decode(self, out, *given)

    monkeypatch.setattr(KVLayer, "_dense", None)
    monkeypatch.setattr(PackedStore, "decode", note)
    monkeypatch.setattr(chunks, "SLAB_TOKENS", 96)
    feed(model, "int4", fused=True)
    assert max(decoded) == 96
    assert len(decoded) > 8


def test_rows_padded_on_the_left_and_other_masks_go_over_dense_states(model, monkeypatch):
    expected, _ = feed(model, "int4", fused=False, rows=3, padding=30)
    monkeypatch.setattr("hf_kvplus.attention.integration.attend_chunk", None)
    found, _ = feed(model, "int4", fused=True, rows=3, padding=30)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_what_is_left_of_a_failed_pass_is_stored(model):
    ids = torch.randint(1, 128, (1, 300))
    cache = build_cache("int4", model.config)
    with use_fused_attention(model), torch.no_grad():
        model(ids[:, :200], **{cache_keyword(model): cache})
        hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("mlp")))
        with pytest.raises(KeyError, match="mlp"):
            model(ids[:, 200:], **{cache_keyword(model): cache})
        hook.remove()
    assert cache.layers[0].incoming is None
    assert cache.layers[0].get_seq_length() == 300


def test_gradients_flow_over_dense_states(model):
    ids = torch.randint(1, 128, (1, 300))
    cache = build_cache("int4", model.config)
    with use_fused_attention(model):
        with torch.no_grad():
            model(ids[:, :200], **{cache_keyword(model): cache})
        model(ids[:, 200:], **{cache_keyword(model): cache}).logits.sum().backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0
    model.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, 63, 111, 1000])
def test_error_is_at_most_twice_pytorchs_own(monkeypatch, dtype, length):
    torch.manual_seed(length)
    monkeypatch.setattr(chunks, "SLAB_TOKENS", 384)
    layer = KVLayer(*Quantization().codecs())
    keys, values = (torch.randn(2, 2, length + 64, 64) for _ in range(2))
    layer.update(keys[:, :, :length].to(dtype), values[:, :, :length].to(dtype))
    layer.incoming = {"keys": keys[:, :, length:].to(dtype), "values": values[:, :, length:].to(dtype)}
    query = torch.randn(2, 8, 64, 64).to(dtype)
    found = attend_chunk(layer, query, 0.125)
    mask = torch.ones(64, length + 64, dtype=torch.bool).tril(length)
    dense = layer.dense(0)
    own, truth = (
        scaled_dot_product_attention(
            *(one.to(kind) for one in (query, *dense)), mask, scale=0.125, enable_gqa=True
        ).transpose(1, 2)
        for kind in (dtype, torch.float64)
    )
    assert found.dtype == dtype
    assert found.shape == own.shape
    error, own_error = ((one.double() - truth).abs().max().item() for one in (found, own))
    assert error <= 2 * own_error + 1e-6


def test_a_mask_is_looked_at_once_and_for_what_it_says():
    masks, plain = CausalMasks(), torch.ones(1, 1, 3, 7, dtype=torch.bool).tril(4)
    assert masks.is_plain(plain)
    assert masks.is_plain(plain.expand(2, -1, -1, -1))
    assert not masks.is_plain(None)
    assert not masks.is_plain(plain[..., :2])
    for row, column in ((0, 0), (2, 6), (0, 5)):
        other = plain.clone()
        other[0, 0, row, column] ^= True
        assert not masks.is_plain(other)
