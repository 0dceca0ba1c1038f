"""Models with fused attention answer as they do without it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel

import hf_kvplus.attention
from hf_kvplus import QuantizedCache, build_cache, use_fused_attention
from hf_kvplus.compat import cache_keyword
from hf_kvplus.handover import handover
from hf_kvplus.layer import KVLayer

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
WINDOW = {"sliding_window": 150, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "Llama": {},
    "Gemma2": {**WINDOW, "attn_logit_softcapping": 4.0, "query_pre_attn_scalar": 32},
    "Gemma3": {**WINDOW, "query_pre_attn_scalar": 32},
    "GptOss": {**WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 2048},
}
# Older transformers' Gemma 4 doesn't ask for the name of its attention.
GEMMA4 = ["Gemma4"] if hasattr(Gemma4TextModel, "_maybe_slice_kv_shared_inputs") else []
GREEDY = {"do_sample": False, "max_new_tokens": 24}


def build(name: str):
    torch.manual_seed(0)
    prefix = {"Gemma3": "Gemma3Text"}.get(name, name)
    config = getattr(transformers, f"{prefix}Config")(**({} if name == "GPT2" else SIZES), **MODELS[name])
    if name == "GPT2":
        config.vocab_size, config.initializer_range = 128, 0.2
        config.pad_token_id, config.eos_token_id = 0, None
    architecture = {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM")
    model = getattr(transformers, architecture)(config).eval()
    if name == "Gemma2":
        # The SDPA function of older transformers leaves out soft-capping without a word; eager has always had it.
        model.set_attn_implementation("eager")
    return model


_built: dict[str, torch.nn.Module] = {}


@pytest.fixture(params=list(MODELS))
def model(request):
    if request.param not in _built:
        _built[request.param] = build(request.param)
    return _built[request.param]


@pytest.fixture
def llama():
    return build("Llama")


def prompt(rows: int = 1, length: int = 260, padding: int = 0):
    """Returns token ids and mask, later rows padded more."""
    ids = torch.randint(1, 128, (rows, length))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : row * padding] = 0
        ids[row, : row * padding] = 0
    return ids, mask


@torch.no_grad()
def logits(model, cache, ids, mask, prompt_length=200, chunk=1):
    """Feeds a prompt, then chunks; returns the logits of the chunks."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = []
    for start in [0, *range(prompt_length, ids.shape[1], chunk)]:
        stop = prompt_length if start == 0 else min(start + chunk, ids.shape[1])
        given = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        found.append(model(ids[:, start:stop], **given, **{cache_keyword(model): cache}).logits)
    return torch.cat(found[1:], dim=1)


@pytest.mark.parametrize("strategy", ["int4", "k8v3", "fp"])
@pytest.mark.parametrize("chunk", [1, 7], ids=["token-by-token", "in-chunks"])
def test_logits_are_those_of_decoded_states(model, strategy, chunk):
    ids, mask = prompt(rows=2, padding=70)
    expected = logits(model, build_cache(strategy, model.config), ids, mask, chunk=chunk)
    with use_fused_attention(model):
        found = logits(model, build_cache(strategy, model.config), ids, mask, chunk=chunk)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 5}, {"num_beams": 2, "num_return_sequences": 2}],
    ids=["greedy", "beams", "prompt-lookup", "several-sequences"],
)
def test_generation_is_the_same(model, options):
    rows = 1 if "prompt_lookup_num_tokens" in options else 2
    ids, mask = prompt(rows=rows, length=150, padding=30)
    ids[:, -12:] = ids[:, -24:-12]
    outputs = []
    for fused in (False, True):
        cache = QuantizedCache(model.config, residual_length=16)
        with use_fused_attention(model) if fused else nullcontext():
            outputs.append(
                model.generate(ids, attention_mask=mask, **{cache_keyword(model): cache}, **options, **GREEDY)
            )
    assert torch.equal(*outputs)


def test_rows_of_a_padded_batch_are_those_of_each_row_alone(llama):
    ids, mask = prompt(rows=3, padding=75)
    with use_fused_attention(llama):
        together = logits(llama, build_cache("fp", llama.config), ids, mask)
        for row in range(3):
            chosen = slice(row * 75, None)
            alone = logits(
                llama, build_cache("fp", llama.config), ids[row : row + 1, chosen], mask[row : row + 1, chosen],
                prompt_length=200 - row * 75,
            )  # fmt: skip
            torch.testing.assert_close(together[row], alone[0], atol=2e-4, rtol=0)


def test_the_reference_serves_every_layer(llama):
    ids, mask = prompt(rows=2, padding=70)
    expected = logits(llama, build_cache("int4", llama.config), ids, mask)
    with use_fused_attention(llama, kernel="reference"):
        found = logits(llama, build_cache("int4", llama.config), ids, mask)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_nothing_dense_is_built(llama, monkeypatch):
    ids, mask = prompt()
    cache = build_cache("int4", llama.config)
    with use_fused_attention(llama):
        logits(llama, cache, ids[:, :201], mask[:, :201])
        monkeypatch.setattr(KVLayer, "_dense", None)
        given = {"attention_mask": mask[:, :202], cache_keyword(llama): cache}
        with torch.no_grad():
            llama(ids[:, 201:202], **given)
    assert cache.get_seq_length() == 202


def test_both_ways_can_alternate(llama):
    ids, mask = prompt()
    expected = logits(llama, build_cache("int4", llama.config), ids, mask)
    cache, found = build_cache("int4", llama.config), []
    with torch.no_grad():
        llama(ids[:, :200], **{cache_keyword(llama): cache})
        for position in range(200, 260):
            use_fused_attention(llama, enabled=position % 3 > 0)
            found.append(llama(ids[:, position : position + 1], **{cache_keyword(llama): cache}).logits)
    use_fused_attention(llama, enabled=False)
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=2e-4, rtol=0)


def test_other_caches_are_served_as_before(model):
    ids, mask = prompt()
    expected = logits(model, DynamicCache(config=model.config), ids, mask)
    with use_fused_attention(model):
        found = logits(model, DynamicCache(config=model.config), ids, mask)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_a_four_dimensional_mask_is_obeyed(llama):
    ids, _ = prompt()
    custom = torch.rand(1, 1, 1, 201) < 0.5
    custom[..., 0] = True
    results = []
    for fused in (False, True):
        cache = build_cache("int4", llama.config)
        with use_fused_attention(llama) if fused else nullcontext(), torch.no_grad():
            llama(ids[:, :200], **{cache_keyword(llama): cache})
            for mask in (custom, torch.zeros(1, 1, 1, 202).masked_fill(torch.rand(1, 1, 1, 202) < 0, -1e9)):
                torch.manual_seed(1)
                position = cache.get_seq_length()
                token = ids[:, position : position + 1]
                results.append(llama(token, attention_mask=mask, **{cache_keyword(llama): cache}).logits)
    torch.testing.assert_close(results[2], results[0], atol=2e-4, rtol=0)
    torch.testing.assert_close(results[3], results[1], atol=2e-4, rtol=0)


def test_gradients_flow(llama):
    ids, _ = prompt(length=201)
    with use_fused_attention(llama):
        cache = build_cache("int4", llama.config)
        with torch.no_grad():
            llama(ids[:, :200], **{cache_keyword(llama): cache})
        llama(ids[:, 200:], **{cache_keyword(llama): cache}).logits.sum().backward()
    assert llama.model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0
    llama.zero_grad()


def test_switching_back_restores_the_model(model):
    before = model.config._attn_implementation
    handle = use_fused_attention(model)
    assert model.config._attn_implementation == "kvplus"
    use_fused_attention(model)  # twice is as good as once
    assert use_fused_attention(model, enabled=False) is None
    with use_fused_attention(model):
        pass
    assert handle is not None
    assert model.config._attn_implementation == before
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert handover.reader is None


def test_a_copy_is_fused_and_switched_back_on_its_own(llama):
    ids, mask = prompt()
    expected = logits(llama, build_cache("int4", llama.config), ids, mask)
    with use_fused_attention(llama):
        copy = deepcopy(llama)
    assert copy.config._attn_implementation == "kvplus"
    for enabled in (True, False):
        use_fused_attention(copy, enabled=enabled)
        found = logits(copy, build_cache("int4", copy.config), ids, mask)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
    assert copy.config._attn_implementation == llama.config._attn_implementation == "sdpa"


def test_states_taken_twice_are_noticed(llama):
    ids, _ = prompt(length=201)
    cache = build_cache("int4", llama.config)
    with use_fused_attention(llama), torch.no_grad():
        llama(ids[:, :200], **{cache_keyword(llama): cache})
        handover.begin(vars(llama)["_kvplus_fused_attention"].reader)
        keys, _ = cache.update(*[torch.zeros(1, 2, 1, 32)] * 2, 0)
        handover.take(keys).finish_update()
        handover.end()
        with pytest.raises(RuntimeError, match="more than once"):
            handover.take(keys)


def test_a_model_that_fails_leaves_nothing_behind(llama):
    ids, _ = prompt(length=201)
    cache = build_cache("int4", llama.config)
    with use_fused_attention(llama), torch.no_grad():
        llama(ids[:, :200], **{cache_keyword(llama): cache})
        hook = llama.model.layers[1].mlp.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("mlp")))
        with pytest.raises(KeyError, match="mlp"):
            llama(ids[:, 200:], **{cache_keyword(llama): cache})
        hook.remove()
        assert handover.reader is None
        assert handover.layer is None


def test_a_model_that_attends_by_itself_is_told(llama):
    ids, _ = prompt(length=201)
    cache = build_cache("int4", llama.config)
    with use_fused_attention(llama), torch.no_grad():
        llama(ids[:, :200], **{cache_keyword(llama): cache})
        attention = llama.model.layers[0].self_attn
        attention.forward = lambda hidden_states, **options: (
            cache.update(*[torch.zeros(1, 2, 1, 32)] * 2, 0)[0].sum() + hidden_states,
            None,
        )
        with pytest.raises(RuntimeError, match="doesn't hand the keys"):
            llama(ids[:, 200:], **{cache_keyword(llama): cache})


def test_what_isnt_a_model_is_refused():
    with pytest.raises(TypeError, match="PreTrainedModel, got Linear"):
        use_fused_attention(torch.nn.Linear(2, 2))


def test_an_unknown_kernel_is_refused(llama):
    with pytest.raises(ValueError, match="`kernel` must be one of auto, reference, got 'fast'"):
        use_fused_attention(llama, kernel="fast")


def test_a_missing_extra_is_named(llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    for name in ("cpu_kernel", "intrinsics", "vectors"):
        monkeypatch.delitem(sys.modules, f"hf_kvplus.attention.{name}", raising=False)
        monkeypatch.delattr(hf_kvplus.attention, name, raising=False)
    with pytest.raises(ImportError, match=r"hf_kvplus\[cpu\]"):
        use_fused_attention(llama)
    assert llama.config._attn_implementation != "kvplus"


def test_importing_registers_nothing():
    code = (
        "import sys, hf_kvplus\n"
        "assert 'numba' not in sys.modules\n"
        "from transformers import AttentionInterface, AttentionMaskInterface\n"
        "assert 'kvplus' not in AttentionInterface() and 'kvplus' not in AttentionMaskInterface()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kind", [*GEMMA4, "Falcon"])
def test_a_model_that_asks_for_the_attentions_name_is_refused_and_left_alone(kind):
    tiny = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "Gemma4":
        config = transformers.Gemma4TextConfig(
            **tiny,
            intermediate_size=96,
            num_key_value_heads=2,
            head_dim=16,
            global_head_dim=16,
            num_kv_shared_layers=0,
            vocab_size_per_layer_input=128,
            hidden_size_per_layer_input=8,
        )
        model = transformers.Gemma4ForCausalLM(config)
    else:
        model = transformers.FalconForCausalLM(transformers.FalconConfig(**tiny))
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="decides by the name of its attention"):
        use_fused_attention(model)
    assert model.config._attn_implementation == before
    assert not model._forward_pre_hooks
