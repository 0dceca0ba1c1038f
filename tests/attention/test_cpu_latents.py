"""Latent heads read by the CPU kernel, against the reference: error at most twice PyTorch's own."""

from __future__ import annotations

import re

import pytest
import torch
from latent_layers import check, make_latent_layer
from layers import padding_mask

from hf_kvplus.attention import cpu_latents
from hf_kvplus.attention.base import Scoring
from hf_kvplus.attention.cpu import CPUKernel
from hf_kvplus.attention.reference import ReferenceKernel
from hf_kvplus.policies import NativeWindowPolicy

LENGTHS = (1, 63, 111, 1000)


@pytest.fixture(scope="module")
def kernel() -> CPUKernel:
    return CPUKernel()


@pytest.mark.parametrize("heads", [3, 9, 33])
def test_any_number_of_query_heads(kernel, heads):
    """All of them read one wide head: up to 33 rows."""
    for length in LENGTHS:
        check(kernel, make_latent_layer(length), torch.randn(1, heads, 1, 64))


@pytest.mark.parametrize("latents", [(16, 176), (192, 64)], ids=str)
def test_any_number_of_latents_for_keys_and_values(kernel, latents):
    for length in LENGTHS:
        check(kernel, make_latent_layer(length, latents=latents), torch.randn(1, 9, 1, 64))


def test_several_hundred_latents(kernel):
    layer = make_latent_layer(300, latents=(512, 320), kv_heads=8, head_dim=128)
    check(kernel, layer, torch.randn(1, 32, 1, 128))


@pytest.mark.parametrize(
    ("latents", "quantized"), [((128, None), True), ((None, 96), False), ((None, 96), True)], ids=str
)
def test_only_keys_or_only_values_as_latents(kernel, latents, quantized):
    for length in (63, 1000):
        layer = make_latent_layer(length, latents=latents, quantized=quantized)
        check(kernel, layer, torch.randn(1, 9, 1, 64))


@pytest.mark.parametrize(("recipe", "nbits"), [*(("dual_scale", nbits) for nbits in (2, 3, 5, 8)), ("affine", 4)])
def test_codes_of_latents(kernel, recipe, nbits):
    for length in (111, 1000):
        layer = make_latent_layer(length, recipe=recipe, key_nbits=nbits, value_nbits=nbits, latents=(128, 176))
        check(kernel, layer, torch.randn(1, 9, 1, 64))


@pytest.mark.parametrize("means", [(True, True), (True, False), (False, False)], ids=str)
def test_means_that_were_taken_off(kernel, means):
    for length in (63, 400):
        check(kernel, make_latent_layer(length, means=means), torch.randn(1, 9, 1, 64))
        check(kernel, make_latent_layer(length, means=means, quantized=True), torch.randn(1, 9, 1, 64))


@pytest.mark.parametrize(("dtype", "quantized"), [(torch.float16, True), (torch.bfloat16, False)], ids=str)
def test_half_precision(kernel, dtype, quantized):
    for length in LENGTHS:
        layer = make_latent_layer(length, dtype=dtype, quantized=quantized)
        check(kernel, layer, torch.randn(1, 9, 1, 64).to(dtype))


@pytest.mark.parametrize("queries", [2, 5, 16])
def test_several_queries(kernel, queries):
    for length in (16, 111, 400):
        check(kernel, make_latent_layer(length), torch.randn(1, 9, queries, 64))


@pytest.mark.parametrize("queries", [1, 5])
def test_rows_padded_on_the_left(kernel, queries):
    layer = make_latent_layer(400, padding=(0, 3, 64, 190, 390))
    check(kernel, layer, torch.randn(5, 9, queries, 64), mask=padding_mask(layer, queries))
    check(kernel, layer, torch.randn(5, 9, queries, 64))


def test_any_mask(kernel):
    layer = make_latent_layer(300, padding=(0, 40))
    mask = torch.rand(2, 1, 5, 300) < 0.3
    mask[..., 0] = True
    check(kernel, layer, torch.randn(2, 9, 5, 64), mask=mask)
    check(kernel, layer, torch.randn(2, 9, 5, 64), mask=mask[:1].expand(2, -1, -1, -1))


def test_a_query_that_sees_no_latent_or_nothing_at_all(kernel):
    layer = make_latent_layer(200)
    mask = torch.zeros(1, 1, 3, 200, dtype=torch.bool)
    mask[:, :, 1, -2:] = True
    mask[:, :, 2, 50:60] = True
    query = torch.randn(1, 9, 3, 64)
    check(kernel, layer, query, mask=mask)
    output = kernel.attend(layer, query, Scoring(0.125), mask, 0)
    assert torch.equal(output[:, 0], torch.zeros_like(output[:, 0]))
    assert output[:, 1:].abs().sum(-1).all()


def test_a_window(kernel):
    layer = make_latent_layer(500, policy=NativeWindowPolicy(300), num_sink_tokens=0)
    for queries in (1, 4):
        visible = layer.policy.first_visible(500 - queries)
        check(kernel, layer, torch.randn(1, 9, queries, 64), visible=visible)


@pytest.mark.parametrize("length", [5, 300])
def test_soft_capping_and_sink_logits(kernel, length):
    layer, query = make_latent_layer(length), torch.randn(1, 9, 1, 64)
    check(kernel, layer, query, scoring=Scoring(0.3, softcap=3.0))
    check(kernel, layer, query, scoring=Scoring(0.3, sink_logits=torch.randn(9)))
    check(kernel, layer, query, scoring=Scoring(0.3, 20.0, torch.randn(9).bfloat16()))


def test_soft_capping_with_a_mean_of_the_keys_is_left_to_the_reference(kernel):
    layer, query, scoring = make_latent_layer(300, means=(True, True)), torch.randn(1, 9, 1, 64), Scoring(0.3, 3.0)
    expected = ReferenceKernel().attend(layer, query, scoring, None, 0)
    torch.testing.assert_close(kernel.attend(layer, query, scoring, None, 0), expected)


def test_large_scores_stay_finite(kernel):
    check(kernel, make_latent_layer(300), 40 * torch.randn(1, 9, 1, 64), scoring=Scoring(1.0))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"latents": (24, 128)}, "multiple of .*, got 24 channels"),
        ({"recipe": "float8", "key_nbits": 8, "value_nbits": 8}, "doesn't read keys in 128 latents"),
    ],
    ids=["latents", "codec"],
)
def test_what_isnt_compiled_is_said_and_read_by_products(kernel, options, reason, monkeypatch):
    said = []
    monkeypatch.setattr(cpu_latents, "say", said.append)
    layer, query = make_latent_layer(200, **options), torch.randn(1, 9, 1, 64)
    assert kernel.refuses(layer) is None
    assert len(said) == 1
    assert re.search(reason, said[0])
    expected = ReferenceKernel().attend(layer, query, Scoring(0.125), None, 0)
    torch.testing.assert_close(kernel.attend(layer, query, Scoring(0.125), None, 0), expected)
