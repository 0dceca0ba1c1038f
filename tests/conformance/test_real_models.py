"""Models with trained weights, where attention is as peaked as it really is."""

from __future__ import annotations

import functools

import pytest
import torch
from case import attention_layers

from hf_kvplus import build_cache, measure_memory
from hf_kvplus.loading import load_model

pytestmark = pytest.mark.model

TEXT = (
    "The lighthouse stood at the end of a narrow spit of land that the tide covered twice a day. Its keeper wrote "
    "down the weather every morning, the ships that passed, and what he had for breakfast. In the winter of that year "
    "the supply boat did not come for seven weeks, and the entries grew shorter. He counted the candles that were "
    "left, and the tins, and the days. When the boat came at last, the men found the lamp lit and the log open. "
)


@functools.cache
def loaded(name: str):
    return load_model(name, device="cpu")[:2]


def prompt(tokenizer, length: int) -> torch.Tensor:
    ids = tokenizer(TEXT * 8, return_tensors="pt").input_ids
    return ids[:, :length]


def antibody(tokenizer, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    acids = torch.tensor(tokenizer.convert_tokens_to_ids(list("ACDEFGHIKLMNPQRSTVWY")))
    return acids[torch.randint(0, 20, (1, length), generator=generator)]


def generate(model, ids: torch.Tensor, strategy: str, tokens: int):
    cache = build_cache(strategy, model.config)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return output.sequences[0, ids.shape[1] :], torch.stack(output.logits, 1)[0], cache


MODELS = {"smollm2-135m": (prompt, 64), "gemma3-270m": (prompt, 12), "iglm": (antibody, 100)}


@pytest.mark.parametrize("name", MODELS)
def test_full_precision_says_what_dynamic_cache_says_and_four_bits_nearly(name):
    make_prompt, tokens = MODELS[name]
    model, tokenizer = loaded(name)
    ids = make_prompt(tokenizer, 250)
    expected, logits, _ = generate(model, ids, "dynamic", tokens)
    said, ours, _ = generate(model, ids, "fp", tokens)
    assert torch.equal(said, expected)
    torch.testing.assert_close(ours, logits, rtol=1e-3, atol=1e-3)

    _, lossy, cache = generate(model, ids, "int4", 2)
    assert all(layer.packed_blocks for layer in attention_layers(cache) if layer.codecs)
    divergence = torch.nn.functional.kl_div(
        lossy[1].log_softmax(-1), logits[1].log_softmax(-1), log_target=True, reduction="sum"
    )
    assert 0 < divergence < 0.5
    assert measure_memory(cache).packed_bits_per_element < 5.5
