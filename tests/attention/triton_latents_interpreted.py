"""Latent heads in Triton's interpreter, against the reference; run by `test_triton_latents.py` in its own process."""

from __future__ import annotations

import pytest
import torch
from latent_layers import check, make_latent_layer
from layers import padding_mask

from hf_kvplus.attention import latents, triton_latents
from hf_kvplus.attention.base import Scoring
from hf_kvplus.attention.reference import ReferenceKernel
from hf_kvplus.attention.triton import Launch, TritonKernel
from hf_kvplus.policies import NativeWindowPolicy


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1234)


@pytest.fixture(scope="module")
def kernel() -> TritonKernel:
    return TritonKernel()


@pytest.mark.parametrize("length", [1, 63, 111, 1000])
def test_any_length(kernel, length):
    check(kernel, make_latent_layer(length), torch.randn(1, 9, 1, 64))


@pytest.mark.parametrize("heads", [3, 33])
def test_any_number_of_query_heads(kernel, heads):
    check(kernel, make_latent_layer(111), torch.randn(1, heads, 1, 64))


@pytest.mark.parametrize(
    ("latents", "quantized"), [((16, 144), False), ((176, 32), True), ((192, 192), True)], ids=str
)
def test_any_number_of_latents_for_keys_and_values(kernel, latents, quantized):
    check(kernel, make_latent_layer(170, latents=latents, quantized=quantized), torch.randn(1, 9, 1, 64))


@pytest.mark.parametrize(("latents", "nbits"), [((320, 512), 3), ((320, 512), 4), ((1008, 400), 6), ((144, 272), 16)])
def test_several_hundred_latents(kernel, latents, nbits):
    """In pieces: of the keys one after the other, of the values each by a program of its own."""
    options = {"key_nbits": nbits, "value_nbits": nbits} if nbits < 16 else {}
    layer = make_latent_layer(120, latents=latents, kv_heads=8, head_dim=128, **options)
    check(kernel, layer, torch.randn(1, 8, 1, 128))


@pytest.mark.parametrize(
    ("latents", "quantized"), [((128, None), True), ((None, 96), False), ((None, 96), True)], ids=str
)
def test_only_keys_or_only_values_as_latents(kernel, latents, quantized):
    check(kernel, make_latent_layer(170, latents=latents, quantized=quantized), torch.randn(1, 9, 1, 64))


@pytest.mark.parametrize(("recipe", "nbits"), [*(("dual_scale", nbits) for nbits in (2, 3, 5, 8)), ("affine", 4)])
def test_codes_of_latents(kernel, recipe, nbits):
    layer = make_latent_layer(180, recipe=recipe, key_nbits=nbits, value_nbits=nbits, latents=(128, 176))
    check(kernel, layer, torch.randn(1, 9, 1, 64))


@pytest.mark.parametrize("means", [(True, True), (True, False), (False, False)], ids=str)
def test_means_that_were_taken_off(kernel, means):
    check(kernel, make_latent_layer(111, means=means), torch.randn(1, 9, 1, 64))


@pytest.mark.parametrize(("dtype", "quantized"), [(torch.float16, True), (torch.bfloat16, False)], ids=str)
def test_half_precision(kernel, dtype, quantized):
    times = 4 if dtype == torch.bfloat16 else 2
    for length in (63, 200):
        layer = make_latent_layer(length, dtype=dtype, quantized=quantized)
        check(kernel, layer, torch.randn(1, 9, 1, 64).to(dtype), times=times)


def test_several_queries_and_rows_padded_on_the_left(kernel):
    layer = make_latent_layer(111, padding=(3, 64))
    check(kernel, layer, torch.randn(2, 9, 5, 64), mask=padding_mask(layer, 5))
    check(kernel, layer, torch.randn(2, 3, 5, 64))


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
    visible = layer.policy.first_visible(496)
    check(kernel, layer, torch.randn(1, 9, 4, 64), visible=visible)


def test_slots_before_a_window(kernel):
    layer = make_latent_layer(150, padding=(3, 64))
    layer.lead = {name: torch.randn(2, 3, 70, 64) for name in ("keys", "values")}
    mask = torch.rand(2, 1, 3, 70 + 150 - 90) < 0.4
    check(kernel, layer, torch.randn(2, 9, 3, 64), mask=mask, visible=90, scoring=Scoring(0.125, softcap=50.0))


@pytest.mark.parametrize("length", [5, 111])
def test_soft_capping_and_sink_logits(kernel, length):
    layer, query = make_latent_layer(length), torch.randn(1, 9, 1, 64)
    check(kernel, layer, query, scoring=Scoring(0.3, softcap=3.0))
    check(kernel, layer, query, scoring=Scoring(0.3, sink_logits=torch.randn(9)))
    check(kernel, layer, query, scoring=Scoring(0.3, 20.0, torch.randn(9)))


def test_soft_capping_with_a_mean_of_the_keys_is_said_and_left_to_the_reference(kernel, monkeypatch):
    said = []
    monkeypatch.setattr(latents, "say", said.append)
    layer, query, scoring = make_latent_layer(90, means=(True, True)), torch.randn(1, 9, 1, 64), Scoring(0.3, 3.0)
    expected = ReferenceKernel().attend(layer, query, scoring, None, 0)
    torch.testing.assert_close(kernel.attend(layer, query, scoring, None, 0), expected)
    assert len(said) == 1
    assert "soft-capped" in said[0]


def test_results_dont_depend_on_the_division():
    layer, query, scoring = make_latent_layer(400), torch.randn(1, 9, 1, 64), Scoring(0.125)
    outputs = [TritonKernel(Launch(processors=count)).attend(layer, query, scoring, None, 0) for count in (1, 2, 1000)]
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"latents": (1040, 128), "kv_heads": 9, "head_dim": 128}, "1024 latents, got 128 and 1040"),
        ({"recipe": "float8", "key_nbits": 8, "value_nbits": 8}, "doesn't read keys in 128 latents"),
        ({"group_size": 136}, "up to 128 tokens"),
    ],
    ids=["latents", "codec", "block"],
)
def test_what_isnt_compiled_is_said_and_read_by_products(kernel, options, reason, monkeypatch):
    said = []
    monkeypatch.setattr(triton_latents, "say", said.append)
    layer = make_latent_layer(90, **options)
    query = torch.randn(1, 9, 1, layer.shapes["keys"][1])
    assert kernel.refuses(layer) is None
    assert len(said) == 1
    assert reason in said[0]
    expected = ReferenceKernel().attend(layer, query, Scoring(0.125), None, 0)
    torch.testing.assert_close(kernel.attend(layer, query, Scoring(0.125), None, 0), expected)
