"""Windows with sinks in Triton's interpreter, to the logits of the dense path; run by `test_triton.py`."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_kvplus import build_cache, use_fused_attention
from hf_kvplus.attention import integration
from hf_kvplus.attention.triton import TritonKernel
from hf_kvplus.compat import cache_keyword

STRATEGIES = {
    "window:90,sinks=4": 2e-4,
    "window:90,sinks=4,positions=shifted": 2e-4,
    "window:90,sinks=0": 2e-4,
    "window:90,sinks=70,positions=shifted": 2e-4,
    "window:90,sinks=3,prefill=dense": 2e-4,
    "window:90,sinks=4,positions=shifted,rollback=20": 2e-4,
    # States that differ in their last bits may be packed to other codes.
    "int4,recent=16+window:110,sinks=6,positions=shifted": 5e-3,
    "int8,recipe=affine,recent=8+window:120,sinks=4,positions=shifted,rollback=9": 5e-3,
}
# Past the window with one token after another, then with several at once, each with a window of its own.
PIECES = (140, 1, 5, 1)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def logits(model, strategy, ids, mask):
    """Feeds the pieces; returns the logits behind the first one."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache, found, first = build_cache(strategy, model.config), [], 0
    for count in PIECES:
        last = first + count
        given = {"attention_mask": mask[:, :last], "position_ids": positions[:, first:last]}
        found.append(model(ids[:, first:last], **given, **{cache_keyword(model): cache}).logits)
        first = last
    return torch.cat(found[1:], dim=1)


@pytest.mark.parametrize(
    ("strategy", "padding"), [*((strategy, (0, 132)) for strategy in STRATEGIES), ("window:90,sinks=4", (0,))]
)
def test_logits_are_those_of_the_dense_path(model, monkeypatch, strategy, padding):
    torch.manual_seed(3)
    ids = torch.randint(1, 64, (len(padding), sum(PIECES)))
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        mask[row, :count] = 0
    expected = logits(model, strategy, ids, mask)
    kernel, calls = TritonKernel(), []
    attend = kernel.attend
    monkeypatch.setattr(
        kernel, "attend", lambda layer, *given: calls.append(layer.lead_tokens) or attend(layer, *given)
    )
    monkeypatch.setattr(integration, "make_kernel", lambda *_: kernel)
    with use_fused_attention(model):
        found = logits(model, strategy, ids, mask)
    assert len(calls) == len(PIECES) - 1
    assert (max(calls) > 0) == ("sinks=0" not in strategy)
    shown = mask[:, PIECES[0] :, None]
    torch.testing.assert_close(found * shown, expected * shown, atol=STRATEGIES[strategy], rtol=0)
