"""A window on trained weights: equal to the oracle, however it is fed and however far into the text it stands."""

from __future__ import annotations

import functools

import pytest
import torch
from window_oracle import shifted_logits

from hf_kvplus import build_cache
from hf_kvplus.compat import cache_keyword
from hf_kvplus.loading import load_model

pytestmark = pytest.mark.model

STRATEGY = "window:92,sinks=4,positions=shifted"
TEXT = (
    "The lighthouse stood at the end of a narrow spit of land that the tide covered twice a day. Its keeper wrote "
    "down the weather every morning, the ships that passed, and what he had for breakfast. In the winter of that year "
    "the supply boat did not come for seven weeks, and the entries grew shorter. He counted the candles that were "
    "left, and the tins, and the days. When the boat came at last, the men found the lamp lit and the log open. "
)


@functools.cache
def loaded():
    model, tokenizer, _ = load_model("smollm2-135m", device="cpu")
    return model, tokenizer(TEXT * 3, return_tensors="pt").input_ids[:, :288]


def token_losses(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="none")


@torch.inference_mode()
def streamed(chunk: int, first_position: int = 0) -> torch.Tensor:
    """Returns each token's loss when the text comes in chunks, its first token standing at `first_position`."""
    model, ids = loaded()
    cache, logits = build_cache(STRATEGY, model.config), []
    for first in range(0, ids.shape[1], chunk):
        last = min(first + chunk, ids.shape[1])
        options = {
            "attention_mask": torch.ones(1, last, dtype=torch.long),
            "position_ids": torch.arange(first, last)[None] + first_position,
            cache_keyword(model): cache,
        }
        logits.append(model(input_ids=ids[:, first:last], **options).logits)
    return token_losses(torch.cat(logits, dim=1), ids)


@pytest.mark.parametrize("chunk", [7, 64, 288])
def test_losses_are_those_of_the_oracle(chunk):
    model, ids = loaded()
    with torch.inference_mode():
        expected = token_losses(shifted_logits(model, ids, torch.ones_like(ids), 92, 4), ids)
        whole = token_losses(model(input_ids=ids, use_cache=False).logits, ids)
    found = streamed(chunk)
    assert (found - expected).abs().max() < 2e-4
    assert (found - whole)[96:].abs().max() > 0.1  # the window hides something


def test_far_beyond_the_trained_length_losses_stay_what_they_are_at_the_beginning():
    """Only distances count; what is left is the rounding of the model's own angles in float32."""
    near, far = streamed(32), streamed(32, first_position=100_000)
    assert (far - near).abs().max() < 2e-2
    assert (far - near).mean().abs() < 1e-3
