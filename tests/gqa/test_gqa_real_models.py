"""Real weights: what calibration promises on models whose heads are no construction."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from proteins import PROTEINS
from transformers import DynamicCache

from checkpoints import one_thread
from hf_kvplus import GQACache, GQAProjection, calibrate_gqa
from hf_kvplus.compat import cache_keyword
from hf_kvplus.gqa.calibrate import solve
from hf_kvplus.gqa.moments import collect_moments
from hf_kvplus.loading import load_model

pytestmark = pytest.mark.model


@torch.no_grad()
def log_probabilities(model, cache, ids: torch.Tensor, chunk: int) -> torch.Tensor:
    parts = [model(part, **{cache_keyword(model): cache}).logits for part in ids.split(chunk, 1)]
    return torch.cat(parts, 1)[0].log_softmax(-1)


def divergence(model, make, texts, chunk: int) -> float:
    """Returns the mean KL divergence in nats from the full cache."""
    total = count = 0
    for ids in texts:
        full = log_probabilities(model, DynamicCache(config=model.config), ids, chunk)
        found = log_probabilities(model, make(), ids, chunk)
        total += (full.exp() * (full - found)).sum().item()
        count += len(full)
    return total / count


@pytest.fixture(scope="module")
def iglm():
    with one_thread():
        model, tokenizer, _ = load_model("iglm", "cpu", "float32")
        starts = [
            tokenizer.convert_tokens_to_ids([chain, kind])
            for chain in ("[HEAVY]", "[LIGHT]")
            for kind in ("[HUMAN]", "[MOUSE]")
        ]
        torch.manual_seed(0)
        end = tokenizer.convert_tokens_to_ids("[SEP]")
        # No data set of antibodies is at hand: the model's own samples are what it is calibrated on.
        options = {"do_sample": True, "min_new_tokens": 126, "max_new_tokens": 126, "suppress_tokens": [end]}
        sampled = model.generate(torch.tensor(starts * 2), pad_token_id=0, **options)
        yield model, tokenizer, list(sampled)


def test_proteins_are_read_with_half_and_a_quarter_of_the_heads(iglm):
    """IgLM: GPT-2, 8 heads, no RoPE. Nothing is exempt, so that every token is read from latents."""
    model, tokenizer, sampled = iglm
    names = ["P00698 lysozyme C, hen", "P02185 myoglobin, sperm whale"]
    texts = [
        torch.tensor([tokenizer.convert_tokens_to_ids(["[HEAVY]", "[HUMAN]", *PROTEINS[name]])]) for name in names
    ]
    moments = collect_moments(model, sampled, context_tokens=96, num_sink_tokens=0)
    for heads, most in ((4, 0.05), (2, 0.2)):
        losses = {}
        for method in ("svd", "mean"):
            layers = solve(moments, heads, method=method, ranks="solved", rotary=False)
            cache = functools.partial(GQACache, model.config, heads, GQAProjection(tuple(layers), heads), 0, 0)
            losses[method] = divergence(model, cache, texts, 16)
        assert losses["svd"] < most
        assert losses["svd"] < losses["mean"] / 3


def test_text_is_read_with_two_of_three_heads():
    """SmolLM2-135M, on Python's help topics; calibrated on their end, read at their beginning."""
    from pydoc_data.topics import topics

    with one_thread():
        model, tokenizer, _ = load_model("smollm2-135m", "cpu", "float32")
        ids = tokenizer("\n\n".join(topics[name] for name in sorted(topics)), verbose=False)["input_ids"]
        windows = [torch.tensor(ids[first : first + 512]) for first in range(len(ids) - 4 * 512, len(ids), 512)]
        projection = calibrate_gqa(model, windows[:4], 2)
        loss = divergence(model, lambda: GQACache(model.config, 2, projection), [torch.tensor([ids[:512]])], 64)
    assert projection.latent_share() == pytest.approx(2 / 3)
    assert math.isfinite(loss)
    assert loss < 0.1
