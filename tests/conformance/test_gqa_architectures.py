"""Latent heads where layers differ: windows, shared layers, two head sizes, recurrences, compressed attention."""

from __future__ import annotations

import pytest
import rotated_heads
import torch
import zoo
from transformers import DynamicCache

from hf_kvplus import GQACache, build_cache, calibrate_gqa
from hf_kvplus.codecs.latent import LatentCodec
from hf_kvplus.compat import cache_keyword

NAMES = ("Gemma 2", "Gemma 3n", "Gemma 4", "gpt-oss", "DeepSeek-V3", "Qwen3-Next", "Falcon-H1", "LFM2")


@torch.no_grad()
def logits(name: str, cache, tokens: int = 220) -> torch.Tensor:
    model = zoo.model(name)
    ids = torch.randint(1, 128, (1, tokens), generator=torch.Generator().manual_seed(2))
    parts = ids.split([180, 1, 1, tokens - 182], 1)
    return torch.cat([model(part, **{cache_keyword(model): cache}).logits for part in parts], 1)


@pytest.mark.parametrize("name", NAMES)
def test_rotated_heads_lose_nothing_in_any_layer(name):
    """Every layer that stores keys and values gets its own projection, and no other."""
    config = zoo.model(name).config
    path = rotated_heads.projection_file(name)
    cache = build_cache(f"gqa:1,projection={path},recent=16,sinks=0", config)
    found, expected = logits(name, cache), logits(name, build_cache("fp", config))
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
    packed = [layer for layer in cache.layers if getattr(layer, "packed_blocks", 0)]
    assert packed
    assert all(isinstance(codec, LatentCodec) for layer in packed for codec in layer.codecs.values())


@pytest.mark.parametrize("name", NAMES)
def test_calibration_projects_the_layers_that_store_more_heads(name):
    model = zoo.model(name)
    windows = list(torch.randint(1, 128, (4, 96), generator=torch.Generator().manual_seed(1)))
    plain = DynamicCache(config=model.config)
    logits(name, plain)
    held = [getattr(layer, "keys", None) for layer in plain.layers]
    heads = [0 if keys is None or keys.dim() != 4 else keys.shape[1] for keys in held]
    fewer = max(heads) - 1
    if not fewer:
        with pytest.raises(ValueError, match="`num_key_value_heads` must be below the 1 key-value heads"):
            calibrate_gqa(model, windows, 1)
        return
    projection = calibrate_gqa(model, windows, fewer, ranks="equal", num_sink_tokens=0)
    assert [set(layer) == {"keys", "values"} for layer in projection.layers] == [count > fewer for count in heads]
    cache = GQACache(model.config, fewer, projection, residual_length=16, num_sink_tokens=0)
    found, expected = logits(name, cache), logits(name, build_cache("fp", model.config))
    assert found.isfinite().all()
    assert (found - expected).abs().max() > 1e-4
