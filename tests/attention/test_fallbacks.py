"""Whatever no compiled kernel reads is said, once, and answered all the same."""

from __future__ import annotations

import logging

import pytest
import torch
import transformers
from latent_layers import make_latent_layer, make_projection
from transformers.utils.logging import warning_once

from conftest import tiny_llama
from hf_kvplus import GQACache, GQAProjection, build_cache, use_fused_attention
from hf_kvplus.attention.base import Scoring
from hf_kvplus.attention.cpu import CPUKernel
from hf_kvplus.attention.integration import make_kernel
from hf_kvplus.attention.reference import ReferenceKernel
from hf_kvplus.compat import cache_keyword

DECODED = "fused attention isn't used everywhere: "
UNCOMPILED = "fused attention reads "


@pytest.fixture
def said():
    """A list of all that is said, nothing having been said before."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger("hf_kvplus.attention.base")
    logger.addHandler(handler)
    warning_once.cache_clear()
    yield found
    logger.removeHandler(handler)


def decode(model, cache, *, grad: bool = False, **given) -> torch.Tensor:
    """Feeds a prompt and three tokens; returns the last logits."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 128, (1, 203), generator=generator)
    options = {cache_keyword(model): cache}
    with torch.no_grad():
        model(ids[:, :200], **options)
    with torch.set_grad_enabled(grad):
        for position in range(200, 203):
            made = {name: make(position + 1) for name, make in given.items()}
            output = model(ids[:, position : position + 1], **options, **made)
    return output.logits.detach()


def compare(model, strategy: str, said, **options) -> None:
    """Checks that fused attention answers as attention over decoded states does, and says something once."""
    expected = decode(model, build_cache(strategy, model.config), **options)
    assert said == []
    with use_fused_attention(model):
        found = decode(model, build_cache(strategy, model.config), **options)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
    assert len(said) == 1


def additive(length: int) -> torch.Tensor:
    mask = torch.zeros(1, 1, 1, length)
    mask[..., 5:9] = torch.finfo(torch.float32).min
    return mask


@pytest.mark.parametrize("strategy", ["fp", "int4", "window:120,sinks=4", "int4+offload:cpu"])
def test_layers_that_are_read_say_nothing(llama, said, strategy):
    with use_fused_attention(llama):
        decode(llama, build_cache(strategy, llama.config))
    assert said == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"grad": True}, "gradients are enabled; wrap the call in `torch.no_grad()`"),
        ({"attention_mask": additive}, "the mask isn't boolean or differs between heads"),
        ({"output_attentions": lambda length: True}, "attention weights were asked for"),
    ],
    ids=["gradients", "mask", "weights"],
)
def test_calls_that_no_kernel_answers_are_said(options, reason, said):
    model = tiny_llama()
    if "output_attentions" in options:
        model.set_attn_implementation("eager")
    compare(model, "int4", said, **options)
    assert said[0].startswith(DECODED + reason)


@pytest.mark.parametrize(
    ("changes", "strategy", "reason"),
    [
        ({"head_dim": 24}, "fp", "the CPU kernel needs head sizes that are a multiple of"),
        ({}, "int8,recipe=float8", "the CPU kernel doesn't read keys in"),
    ],
    ids=["head size", "codec"],
)
def test_layers_that_the_kernel_refuses_are_said(changes, strategy, reason, said):
    compare(tiny_llama(**changes), strategy, said)
    assert said[0].startswith(DECODED + reason)


def test_a_mask_of_another_length_is_said_once_whatever_its_length(llama, said):
    """The reason names no number that changes from step to step."""
    wide = {"attention_mask": lambda length: torch.ones(1, 1, 1, length + 7, dtype=torch.bool)}
    with use_fused_attention(llama), pytest.raises(RuntimeError):
        decode(llama, build_cache("int4", llama.config), **wide)
    assert len(said) == 1
    assert said[0].startswith(f"{DECODED}the mask isn't for the pairs of queries and tokens that the cache holds. ")


def test_offloaded_blocks_that_a_kernel_cant_take_in_pieces_are_said(llama, said):
    """As on a GPU, where the reference reads them."""
    expected = decode(llama, build_cache("int4+offload:cpu", llama.config))
    with use_fused_attention(llama) as fused:
        fused.reader.kernel.reads_pieces = False
        found = decode(llama, build_cache("int4+offload:cpu", llama.config))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
    assert len(said) == 1
    assert said[0].startswith(f"{UNCOMPILED}offloaded blocks by plain PyTorch products where they come some at a time")


def test_a_device_without_a_kernel_is_said_unless_the_reference_was_asked_for(said):
    assert isinstance(make_kernel("reference", torch.device("mps")), ReferenceKernel)
    assert said == []
    for _ in range(2):
        assert isinstance(make_kernel("auto", torch.device("mps")), ReferenceKernel)
    assert len(said) == 1
    assert said[0].startswith(f"{UNCOMPILED}packed states by plain PyTorch products where the device is mps")


def test_latents_whose_mean_meets_soft_capping_are_said_by_the_kernel(said):
    kernel, layer = CPUKernel(), make_latent_layer(300, means=(True, True))
    query = torch.randn(1, 9, 1, 64)
    for softcap, count in ((None, 0), (3.0, 1), (3.0, 1)):
        scoring = Scoring(0.3, softcap)
        expected = ReferenceKernel().attend(layer, query, scoring, None, 0)
        torch.testing.assert_close(kernel.attend(layer, query, scoring, None, 0), expected, atol=1e-5, rtol=1e-5)
        assert len(said) == count
    assert said[0].startswith(f"{UNCOMPILED}latents by plain PyTorch products where scores are soft-capped and a mean")


def test_a_soft_capping_model_with_a_mean_of_the_keys_answers_right_and_says_so(said):
    config = transformers.Gemma2Config(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, attn_logit_softcapping=4.0, query_pre_attn_scalar=32, pad_token_id=0,
        layer_types=["full_attention", "full_attention"], initializer_range=0.2, max_position_embeddings=2048,
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    layers = tuple({name: make_projection(2, 32, 32, True) for name in ("keys", "values")} for _ in range(2))
    projection = GQAProjection(layers, 1)
    expected = decode(model, GQACache(config, 1, projection, residual_length=16))
    with use_fused_attention(model):
        found = decode(model, GQACache(config, 1, projection, residual_length=16))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
    assert len(said) == 1
    assert "soft-capped" in said[0]


def test_a_compiled_model_decodes_and_says_so(llama, said, monkeypatch):
    cache = build_cache("fp", llama.config)
    with use_fused_attention(llama) as fused:
        decode(llama, cache)
        states = torch.zeros(1, 2, 1, 16)
        assert fused.reader.accepts(cache.layers[0], states)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert not any(fused.reader.accepts(layer, states) for layer in cache.layers)
        monkeypatch.undo()
    assert said == [f"{DECODED}the model runs under torch.compile. The states are decoded there instead."]
