"""Each way in which models tell positions: works behind a window to an oracle, or is refused by its name."""

import pytest
import torch
import transformers
from packaging.version import Version
from test_rope import COMMON
from transformers import AutoModelForCausalLM, DynamicCache, FalconConfig, GPT2Config, MptConfig, OPTConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from window_oracle import cached_logits, left_padding, oracle_logits

from hf_kvplus import SlidingWindowCache, build_cache
from hf_kvplus.compat import cache_keyword
from hf_kvplus.positions import sink_rotations
from hf_kvplus.window_layer import SinkWindowLayer

TOLERANCE = 1e-4
# This transformers has all model types that are named here; older ones may lack some.
SINCE = "5.24"
GREEDY = {"do_sample": False, "pad_token_id": 0}
TINY = {**COMMON, "vocab_size": 61, "initializer_range": 0.2}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 12}
# Models that have layers with full attention and no positions in them, beside others.
POSITIONLESS = {
    "cohere2": MIXED,
    "exaone4": MIXED,
    "exaone_moe": {**MIXED, "mlp_layer_types": ["dense"] * 4},
    "flint": MIXED,
    "kolibri1": MIXED,
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_dt_rank": 8,
    },
    "nemotron_h": {
        "layer_types": ["linear_attention", "full_attention"] * 2, "mamba_num_heads": 4,
        "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 8, "chunk_size": 16, "mamba_n_groups": 1,
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2, "position_embedding_type": None,
        "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16,
        "num_local_experts": 0, "shared_intermediate_size": 64,
    },
}  # fmt: skip


def tiny(model_type, **options):
    older = Version(transformers.__version__) < Version(SINCE)
    if older and model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    return CONFIG_MAPPING[model_type](**{**TINY, **options})


def batch(total, padding):
    ids = torch.randint(1, 61, (len(padding), total))
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        mask[row, :count] = 0
    return ids, mask


@torch.inference_mode()
def windowed_keys(model, position, layers):
    """Returns the keys of one token that stands alone at `position`, in the layers that a window is for."""
    cache = DynamicCache(config=model.config)
    model(
        input_ids=torch.tensor([[5]]), position_ids=torch.tensor([[position]]),
        attention_mask=torch.ones(1, 1, dtype=torch.long), **{cache_keyword(model): cache},
    )  # fmt: skip
    return [cache.layers[layer].keys for layer in layers]


@pytest.mark.parametrize("model_type", POSITIONLESS)
def test_layers_without_positions_have_nothing_to_shift(model_type):
    """Their keys are the same wherever a token stands, so both meanings of a window give the same logits."""
    config = tiny(model_type, **POSITIONLESS[model_type])
    model = AutoModelForCausalLM.from_config(config).eval()
    cache = build_cache("window:9,sinks=3,positions=shifted", config)
    windowed = [index for index, layer in enumerate(cache.layers) if isinstance(layer, SinkWindowLayer)]
    assert windowed
    assert all(cache.layers[index].rotation is None for index in windowed)
    near, far = (windowed_keys(model, position, windowed) for position in (3, 1203))
    torch.testing.assert_close(near, far, atol=1e-5, rtol=0)
    ids, mask = batch(40, (0,))
    with torch.inference_mode():
        found = [
            cached_logits(
                model, ids, mask, build_cache(f"window:9,sinks=3,positions={positions}", config), [12] + [1] * 28
            )
            for positions in ("original", "shifted")
        ]
        whole = cached_logits(model, ids, mask, build_cache("dynamic", config), [12] + [1] * 28)
    assert (found[0] - found[1]).abs().max() < TOLERANCE
    assert (found[0] - whole)[:, 20:].abs().max() > 10 * TOLERANCE  # the window hides something


def test_models_without_windows_of_their_own_have_rope_in_the_same_layers():
    config = tiny("exaone4", sliding_window=None, layer_types=["full_attention"] * 4)
    with pytest.raises(ValueError, match="wasn't verified"):
        sink_rotations(config)


# Absolute positions


def absolute(kind, **options):
    shape = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    if kind == "gpt2":
        config = GPT2Config(**shape, n_embd=32, n_layer=2, n_head=4, n_positions=48, initializer_range=0.3)
    else:
        config = OPTConfig(
            **shape, hidden_size=32, word_embed_proj_dim=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48,
            max_position_embeddings=48, init_std=0.3,
        )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, **options).eval()


@pytest.mark.parametrize("chunks", [[48], [1] * 48, [7, 30, 1, 10]], ids=str)
@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_learned_positions_equal_the_oracle_to_the_end_of_their_table(kind, chunks):
    model = absolute(kind)
    ids, mask = batch(48, (0, 27, 5))
    with torch.inference_mode():
        expected = oracle_logits(model, ids, mask, 9, 3)
        got = cached_logits(model, ids, mask, build_cache("window:9,sinks=3", model.config), chunks)
    assert ((got - expected) * mask[..., None]).abs().max() < TOLERANCE


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_behind_their_table_generation_ends_in_an_error(kind):
    model = absolute(kind)
    cache = build_cache("window:9,sinks=3", model.config)
    ids = torch.randint(1, 61, (1, 40))
    assert model.generate(ids, past_key_values=cache, max_new_tokens=8, **GREEDY).shape[1] == 48
    cache.reset()
    with pytest.raises(IndexError):
        model.generate(ids, past_key_values=cache, max_new_tokens=20, **GREEDY)


# ALiBi by slots


def mpt():
    config = MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=61, max_seq_len=48, initializer_range=0.3)
    return AutoModelForCausalLM.from_config(config).eval()


def mpt_oracle(model, ids, mask, chunks, window, sinks, monkeypatch):
    """One pass in which each query's sinks stand directly before the window that its chunk begins with."""
    begins = torch.cat([torch.full((count,), sum(chunks[:index])) for index, count in enumerate(chunks)])[:, None]
    tokens = torch.arange(ids.shape[1])
    query, key = tokens[:, None], tokens[None]
    sink = key[None] - left_padding(mask)[:, None, None]  # (batch, 1, tokens): which of the row's tokens
    seen = (key <= query) & ((key > begins - window) | (sink < sinks)) & mask[:, None].bool()
    before = (key <= begins - window)[None]
    distance = torch.where(before, (query - begins + window - 1 + sinks - sink).minimum(query - key), query - key)

    def attention(self, hidden_states, position_bias, *args, **kwargs):
        states = self.Wqkv(hidden_states).unflatten(-1, (3, self.n_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        slope = -position_bias[:, 0, -2]  # of the key one place before the last
        scores = states[0] @ states[1].transpose(-1, -2) * self.softmax_scale
        scores = scores - slope[:, None, None] * distance[:, None]
        weights = scores.masked_fill(~seen[:, None], torch.finfo(scores.dtype).min).softmax(-1)
        return self.out_proj((weights @ states[2]).transpose(1, 2).flatten(2)), weights

    with monkeypatch.context() as patch:
        patch.setattr(type(model.transformer.blocks[0].attn), "forward", attention)
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits


@pytest.mark.parametrize("chunks", [[20] + [1] * 50, [1] * 70, [14, 1, 1, 9, 1, 20, 3] + [1] * 21], ids=len)
@pytest.mark.parametrize("padding", [(0,), (0, 33, 5)], ids=str)
def test_bias_by_slots_equals_the_oracle_beyond_the_longest_bias(monkeypatch, padding, chunks):
    model = mpt()
    ids, mask = batch(70, padding)
    with torch.inference_mode():
        expected = mpt_oracle(model, ids, mask, chunks, 9, 3, monkeypatch)
        cache = build_cache("window:9,sinks=3,positions=shifted,prefill=dense", model.config)
        got = cached_logits(model, ids, mask, cache, chunks)
        near = mpt_oracle(model, ids, mask, chunks, 9, 2, monkeypatch)
    assert ((got - expected) * mask[..., None]).abs().max() < TOLERANCE
    assert ((near - expected) * mask[..., None]).abs().max() > 10 * TOLERANCE


def test_bias_by_slots_generates_endlessly_in_padded_batches_and_beams():
    model, strategy = mpt(), "window:9,sinks=3,positions=shifted,prefill=dense"
    ids, mask = batch(30, (0, 21))

    def generate(ids, mask, **options):
        cache = build_cache(strategy, model.config)
        return model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=60, use_cache=True, **GREEDY, **options
        )

    for options in ({}, {"num_beams": 3}):
        both, alone = generate(ids, mask, **options), generate(ids[1:, 21:], mask[1:, 21:], **options)
        assert torch.equal(both[1, 30:], alone[0, 9:])


def test_bias_by_slots_refuses_drafts_that_it_would_judge_wrongly():
    model = mpt()
    cache = build_cache("window:9,sinks=3,positions=shifted,prefill=dense", model.config)
    ids = torch.randint(1, 61, (1, 10)).repeat(1, 3)
    with pytest.raises(RuntimeError, match="distances from slots"):
        model.generate(
            ids, past_key_values=cache, max_new_tokens=30, prompt_lookup_num_tokens=4, use_cache=True, **GREEDY
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"needs positions=\"shifted\" and prefill=\"dense\""),
        ({"positions": "shifted"}, "window:40,sinks=4,positions=shifted,prefill=dense"),
        ({"positions": "shifted", "prefill": "dense", "num_sink_tokens": 9}, "must be at most 48"),
    ],
    ids=["original", "windowed", "long"],
)
def test_bias_by_slots_says_which_window_it_takes(options, message):
    with pytest.raises(ValueError, match=message):
        SlidingWindowCache(MptConfig(max_seq_len=48), 40, **options)


# What can't be right


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        ("gpt2", {"n_positions": 512}, "learned positions were added to embeddings.*up to 512 tokens"),
        ("opt", {"max_position_embeddings": 512}, "learned positions were added to embeddings.*up to 512 tokens"),
        ("gpt_bigcode", {"n_positions": 512}, "learned positions.*up to 512 tokens"),
        ("biogpt", {}, "learned positions.*up to 1024 tokens"),
        ("xglm", {}, "sinusoidal positions.*up to 2048 tokens"),
        ("ctrl", {}, "sinusoidal positions.*up to 256 tokens"),
        ("gptj", {}, "rotary positions from a table end with it.*up to 2048 tokens"),
        ("codegen", {}, "rotary positions from a table end with it.*up to 2048 tokens"),
        ("ministral3", {}, "scales queries"),
        ("llama4_text", {}, "scales queries"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." not in value else "",
)
def test_positions_that_cannot_be_shifted_are_refused_by_kind_and_work_unshifted(model_type, options, reason):
    config = CONFIG_MAPPING[model_type](**options)
    with pytest.raises(ValueError, match=reason) as error:
        SlidingWindowCache(config, 64, positions="shifted")
    assert repr(model_type) in str(error.value)
    assert 'use positions="original"' in str(error.value)
    assert SlidingWindowCache(config, 64).window.positions == "original"


def test_queries_that_are_not_scaled_leave_sinks_movable():
    parameters = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.0}
    config = CONFIG_MAPPING["ministral3"](**COMMON, rope_parameters=parameters)
    assert all(sink_rotations(config))


@pytest.mark.parametrize("positions", ["original", "shifted"])
@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("t5", "relative positions are distances from the first slot"),
        ("umt5", "relative positions are distances from the first slot"),
        ("switch_transformers", "relative positions are distances from the first slot"),
        ("bloom", r"padding mask \(ALiBi\)"),
        ("falcon", r"padding mask \(ALiBi\)"),
    ],
)
def test_positions_that_a_window_would_make_wrong_are_refused_by_kind(model_type, reason, positions):
    config = FalconConfig(alibi=True) if model_type == "falcon" else CONFIG_MAPPING[model_type]()
    with pytest.raises(ValueError, match=reason) as error:
        SlidingWindowCache(config, 64, positions=positions)
    assert repr(model_type) in str(error.value)


def test_local_layers_that_count_slots_need_a_window_as_long_as_theirs():
    config = CONFIG_MAPPING["gpt_neo"](window_size=64)
    with pytest.raises(ValueError, match="must be at least 64"):
        SlidingWindowCache(config, 63)
    assert SlidingWindowCache(config, 64).window.sliding_window == 64


def test_local_layers_equal_the_oracle_behind_a_window_as_long_as_theirs():
    config = CONFIG_MAPPING["gpt_neo"](
        vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, window_size=9,
        attention_types=[[["global", "local"], 1]], max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    ids, mask = batch(60, (0, 31))
    for chunks in ([60], [1] * 60, [20, 1, 19, 20]):
        with torch.inference_mode():
            expected = oracle_logits(model, ids, mask, 9, 3)
            got = cached_logits(model, ids, mask, build_cache("window:9,sinks=3", config), chunks)
        assert ((got - expected) * mask[..., None]).abs().max() < TOLERANCE
