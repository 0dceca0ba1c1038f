"""Windows with sinks are read by the kernels from their blocks and rings, to the logits of the dense path."""

from __future__ import annotations

import pytest
import torch
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from conftest import tiny_llama
from hf_kvplus import KVPlusCache, build_cache, use_fused_attention
from hf_kvplus.compat import cache_keyword
from hf_kvplus.policies import SinkWindowPolicy
from hf_kvplus.recipes import Quantization
from hf_kvplus.stores import offloaded
from hf_kvplus.stores.space import MEMORY, Offload
from hf_kvplus.window_layer import SinkWindowLayer

STRATEGIES = (
    "window:90,sinks=4",
    "window:90,sinks=4,positions=shifted",
    "window:90,sinks=0",
    "window:90,sinks=70,positions=shifted",
    "window:90,sinks=3,prefill=dense",
    "window:90,sinks=4,positions=shifted,rollback=20",
    "int4+window:180,sinks=2",
    "int4,recent=16+window:150,sinks=6,positions=shifted",
    "int8,recipe=affine,recent=8+window:170,sinks=4,positions=shifted,rollback=9",
)
TOTAL = 330
GREEDY = {"do_sample": False, "max_new_tokens": 30, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model():
    pytest.importorskip("numba")
    return tiny_llama(initializer_range=0.15)


def tolerance(strategy: str) -> float:
    """Returns how far logits may differ; states that differ in their last bits may be packed to other codes."""
    return 5e-3 if "int" in strategy else 2e-4


def padded(padding: tuple[int, ...], total: int = TOTAL):
    """Returns token ids and mask of rows that begin later and later."""
    ids = torch.randint(1, 128, (len(padding), total))
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        mask[row, :count] = 0
    return ids, mask


@torch.no_grad()
def logits(model, cache, ids, mask, prompt_length, chunk):
    """Feeds a prompt, then chunks; returns the logits of the chunks."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = []
    for start in [0, *range(prompt_length, ids.shape[1], chunk)]:
        stop = prompt_length if start == 0 else min(start + chunk, ids.shape[1])
        given = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        found.append(model(ids[:, start:stop], **given, **{cache_keyword(model): cache}).logits)
    return torch.cat(found[1:], dim=1)


def counted(kernel, monkeypatch):
    """Returns a list that grows with each call of a kernel."""
    calls, attend = [], kernel.attend
    monkeypatch.setattr(kernel, "attend", lambda *given: calls.append(given) or attend(*given))
    return calls


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("chunk", [1, 23], ids=["token-by-token", "in-chunks"])
def test_logits_are_those_of_the_dense_path(model, monkeypatch, strategy, chunk):
    """From before the first eviction on, with rows that differ in padding by more than the window."""
    ids, mask = padded((0, 3, 250))
    expected = logits(model, build_cache(strategy, model.config), ids, mask, 60, chunk)
    with use_fused_attention(model) as fused:
        calls = counted(fused.reader.kernel, monkeypatch)
        found = logits(model, build_cache(strategy, model.config), ids, mask, 60, chunk)
    assert len(calls) == 2 * -(-(TOTAL - 60) // chunk)
    shown = mask[:, 60:, None]
    torch.testing.assert_close(found * shown, expected * shown, atol=tolerance(strategy), rtol=0)


@pytest.mark.parametrize("strategy", [STRATEGIES[1], STRATEGIES[7]])
def test_the_reference_reads_them_too(model, strategy):
    ids, mask = padded((0, 140), total=260)
    expected = logits(model, build_cache(strategy, model.config), ids, mask, 200, 9)
    with use_fused_attention(model, kernel="reference"):
        found = logits(model, build_cache(strategy, model.config), ids, mask, 200, 9)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if "dense" not in s])
def test_each_row_of_a_padded_batch_equals_that_row_alone(model, strategy):
    # Packed blocks begin at column 0; padding of whole blocks leaves them the same.
    padding = (0, 192, 48) if "int4" in strategy else (0, 192, 64) if "int8" in strategy else (0, 171, 13)
    ids, mask = padded(padding)
    with use_fused_attention(model):
        together = logits(model, build_cache(strategy, model.config), ids, mask, 210, 1)
        for row, count in enumerate(padding):
            own = ids[row : row + 1, count:], mask[row : row + 1, count:]
            alone = logits(model, build_cache(strategy, model.config), *own, 210 - count, 1)
            torch.testing.assert_close(together[row], alone[0], atol=tolerance(strategy), rtol=0)


@pytest.mark.parametrize("strategy", [STRATEGIES[0], STRATEGIES[1], STRATEGIES[7]])
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 6}], ids=["greedy", "beams", "prompt-lookup"]
)
def test_generation_is_the_same(model, strategy, options):
    ids, mask = padded((0,) if "prompt_lookup_num_tokens" in options else (0, 110), total=180)
    ids[:, -30:] = ids[:, -60:-30]

    def generate():
        cache = build_cache(strategy, model.config)
        given = {"attention_mask": mask, cache_keyword(model): cache}
        return model.generate(ids, **given, **options, **GREEDY)

    expected = generate()
    with use_fused_attention(model):
        assert torch.equal(generate(), expected)


def test_layers_without_rope_share_the_mask_of_those_with_it():
    pytest.importorskip("numba")
    torch.manual_seed(0)
    config = SmolLM3Config(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.15, no_rope_layers=[1, 0, 1], pad_token_id=0,
    )  # fmt: skip
    smollm3 = SmolLM3ForCausalLM(config).eval()
    ids, mask = padded((0, 40), total=120)
    found = []
    for fused, chunk in ((False, 1), (False, 11), (True, 1), (True, 11)):
        use_fused_attention(smollm3, enabled=fused)
        cache = build_cache("window:20,sinks=4,positions=shifted", config)
        found.append(logits(smollm3, cache, ids, mask, 64, chunk))
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], atol=2e-4, rtol=0)


def test_nothing_dense_is_built(model, monkeypatch):
    ids, mask = padded((0,))
    cache = build_cache("int4+window:180,sinks=4,positions=shifted", model.config)
    with use_fused_attention(model), torch.no_grad():
        model(ids[:, :300], **{cache_keyword(model): cache})
        monkeypatch.setattr(SinkWindowLayer, "_dense", None)
        for first in (300, 301, 302):
            model(ids[:, first : first + 1], **{cache_keyword(model): cache})
    assert cache.get_seq_length() == 303
    assert all(layer.lead is None for layer in cache.layers)


@pytest.mark.parametrize("chunk", [1, 5])
def test_what_no_kernel_answers_gets_the_same_sinks(model, chunk):
    """Attention weights are asked for, so that each call is decoded after it was handed over."""
    ids, mask = padded((0, 120), total=200)
    results = []
    for fused in (False, True):
        use_fused_attention(model, enabled=fused)
        cache, attentions = build_cache("window:50,sinks=4,positions=shifted", model.config), []
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            model(
                ids[:, :180],
                attention_mask=mask[:, :180],
                position_ids=positions[:, :180],
                **{cache_keyword(model): cache},
            )
            for first in range(180, 200, chunk):
                last = first + chunk
                out = model(
                    ids[:, first:last], attention_mask=mask[:, :last], position_ids=positions[:, first:last],
                    output_attentions=fused, **{cache_keyword(model): cache},
                )  # fmt: skip
                attentions.append(out.logits)
        results.append(torch.cat(attentions, dim=1))
    use_fused_attention(model, enabled=False)
    torch.testing.assert_close(results[1], results[0], atol=2e-4, rtol=0)


@pytest.mark.parametrize("quantization", [None, Quantization(4, 4)], ids=["fp", "int4"])
@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_an_offloaded_window_is_read_in_pieces_to_the_same_bits(model, monkeypatch, quantization, tier):
    monkeypatch.setattr(offloaded.OffloadedStore, "run_blocks", lambda self, batch: 2)
    ids, mask = padded((0, 170), total=420)
    found = []
    for place in (MEMORY, tier):
        window = SinkWindowPolicy(260, positions="shifted")
        cache = KVPlusCache(model.config, quantization=quantization, window=window, offload=Offload(place))
        with use_fused_attention(model):
            found.append(logits(model, cache, ids, mask, 340, 4))
        assert cache.layers[0].packed_blocks >= 3
        cache.close()
    assert torch.equal(*found)
