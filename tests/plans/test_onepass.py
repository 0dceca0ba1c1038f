import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from conftest import tiny_llama
from hf_kvplus import build_cache
from hf_kvplus.compat import cache_keyword
from hf_kvplus.plans.onepass import NAME, OnePass

CHUNK, TOKENS = 32, 250


def tiny_gemma():
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        initializer_range=0.3,
    )
    return Gemma3ForCausalLM(config).eval()


def chunked_log_probs(model, token_ids, strategy):
    cache = build_cache(strategy, model.config)
    rows = []
    with torch.no_grad():
        for piece in token_ids.split(CHUNK):
            output = model(input_ids=piece[None], use_cache=True, **{cache_keyword(model): cache})
            rows.append(output.logits[0])
    return torch.log_softmax(torch.cat(rows), dim=-1)


@pytest.fixture(params=["llama", "gemma"])
def model(request):
    return tiny_llama(initializer_range=0.3) if request.param == "llama" else tiny_gemma()


@pytest.mark.parametrize("strategy", ["int4,recent=16", "k3v2,group=24,recent=40,sinks=2", "fp"])
def test_one_pass_equals_chunks_through_the_real_cache(model, strategy):
    token_ids = torch.randint(128, (TOKENS,))
    expected = chunked_log_probs(model, token_ids, strategy)
    with torch.no_grad(), OnePass(model, CHUNK) as run:
        reference = run.reference(token_ids, torch.arange(TOKENS))
        found = run.log_probs(reference, build_cache(strategy, model.config))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-3)
    if strategy != "fp":
        # What quantization does to the predictions is far more than what the comparison lets pass.
        assert (expected - reference.log_probs).abs().max() > 0.05


def test_a_pass_that_begins_at_a_layer_equals_a_whole_one():
    model = tiny_llama(initializer_range=0.3, num_hidden_layers=4)
    token_ids = torch.randint(128, (TOKENS,))
    cache = build_cache("int2", model.config)
    for layer in cache.layers[:2]:
        layer.codecs = {}
    with torch.no_grad(), OnePass(model, CHUNK) as run:
        reference = run.reference(token_ids, torch.arange(64, TOKENS), keep_inputs=True)
        whole = run.divergences(reference, cache)
        late = run.divergences(reference, cache, first_layer=2)
        assert torch.equal(run.reference(token_ids, torch.arange(64, TOKENS)).log_probs, reference.log_probs)
    assert len(reference.inputs) == 4
    assert whole.mean() > 1e-4
    torch.testing.assert_close(late, whole, rtol=1e-4, atol=1e-6)


def test_the_model_is_as_before_afterwards(llama):
    before = llama.config._attn_implementation
    with OnePass(llama):
        assert llama.config._attn_implementation == NAME
    assert llama.config._attn_implementation == before
