"""What calibration collects: sums over the right tokens, and gradients that foretell a divergence."""

from __future__ import annotations

import pytest
import torch
from planted import HEAD_DIM, HEADS, planted, windows
from transformers import DynamicCache

from hf_kvplus.compat import cache_keyword
from hf_kvplus.gqa.moments import collect_moments


@pytest.mark.parametrize("sinks", [0, 4])
def test_every_stored_token_but_the_sinks_counts(sinks):
    model = planted("none", 4)
    texts = windows(3, 40)
    moments = collect_moments(model, texts, context_tokens=30, num_sink_tokens=sinks)
    assert [part.tokens for layer in moments for part in layer.values()] == [3 * (30 - sinks)] * 4
    states = []
    for text in texts:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(text[None, :30], **{cache_keyword(model): cache})
        states.append(cache.layers[1].values[0, :, sinks:])
    rows = torch.cat(states, 1).movedim(0, 1).flatten(1).double()
    assert rows.shape[1] == HEADS * HEAD_DIM
    found = moments[1]["values"]
    torch.testing.assert_close(found.covariance(False), rows.T @ rows / len(rows))
    torch.testing.assert_close(found.covariance(True), torch.cov(rows.T, correction=0))


@pytest.mark.parametrize("name", ["keys", "values"])
def test_the_metric_foretells_the_divergence_of_a_small_error(name):
    """Random errors in one layer's stored states: the mean KL is half the trace of metric and covariance."""
    model = planted("rope", 4)
    text, context, size = windows(1, 64)[0], 40, 3e-3
    found = [
        collect_moments(model, [text], context_tokens=context, num_sink_tokens=0, seed=seed)[0][name].metric()
        for seed in range(24)
    ]
    foretold = size**2 / 2 * sum(metric.trace().item() for metric in found) / len(found) * context
    divergences = []
    with torch.no_grad():
        for _ in range(24):
            caches = [DynamicCache(config=model.config) for _ in range(2)]
            for cache in caches:
                model(text[None, :context], **{cache_keyword(model): cache})
            changed = getattr(caches[1].layers[0], name)
            changed += size * torch.randn(changed.shape)
            full, other = (
                model(text[None, context:], **{cache_keyword(model): cache}).logits[0].double().log_softmax(-1)
                for cache in caches
            )
            divergences.append((full.exp() * (full - other)).sum().item())
    assert sum(divergences) / len(divergences) == pytest.approx(foretold, rel=0.35)
