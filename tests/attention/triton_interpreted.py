"""The Triton kernels in Triton's interpreter, against the reference; run by `test_triton.py` in a process of its own.

The interpreter has to be chosen before Triton is imported. It multiplies bfloat16 as float32, and cuts it off where a
GPU rounds it, which is twice the error.
"""

from __future__ import annotations

import types
from functools import partial

import pytest
import torch
from layers import make_layer, make_turns, padding_mask, plant_bias
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from hf_kvplus import build_cache, use_fused_attention
from hf_kvplus.attention import integration, triton_encode
from hf_kvplus.attention.base import Scoring
from hf_kvplus.attention.reference import ReferenceKernel
from hf_kvplus.attention.triton import Launch, TritonKernel
from hf_kvplus.codecs.dual_scale import CLIPS, DualScaleCodec
from hf_kvplus.compat import cache_keyword
from hf_kvplus.handover import handover
from hf_kvplus.policies import NativeWindowPolicy
from hf_kvplus.recipes import Quantization
from hf_kvplus.stores import GrowingStore, PackedStore

# Rounding of the inputs of a float32 product, relative to the largest value.
FLOOR = 1e-6


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1234)


@pytest.fixture(scope="module")
def kernel() -> TritonKernel:
    return TritonKernel()


def check(kernel, layer, query, *, scoring=None, mask=None, visible=0):
    """Compares with the reference in double precision, and with what PyTorch makes of the decoded states."""
    assert kernel.refuses(layer) is None
    scoring = scoring or Scoring(query.shape[3] ** -0.5)
    output = kernel.attend(layer, query, scoring, mask, visible)
    truth = ReferenceKernel(torch.float64).attend(layer, query.double(), scoring, mask, visible)
    assert output.dtype == query.dtype
    assert output.shape == truth.shape
    keys, values = layer.dense(visible)
    if scoring.softcap is None and scoring.sink_logits is None:
        shown = padding_mask(layer, query.shape[2], visible) if mask is None else mask
        theirs = scaled_dot_product_attention(query, keys, values, shown, scale=scoring.scaling, enable_gqa=True)
        own = theirs.transpose(1, 2)
    else:
        own = ReferenceKernel().attend(layer, query, scoring, mask, visible)
    error, own_error = ((result.double() - truth).abs().max().item() for result in (output, own))
    times = 4 if query.dtype == torch.bfloat16 else 2
    assert error <= times * own_error + FLOOR * values.double().abs().max().item()


@pytest.mark.parametrize("length", [1, 63, 111])
@pytest.mark.parametrize("queries_per_head", [1, 3, 4, 8])
def test_any_length_and_number_of_query_heads(kernel, queries_per_head, length):
    layer = make_layer(length)
    check(kernel, layer, torch.randn(1, queries_per_head * layer.shapes["keys"][0], 1, 64))


@pytest.mark.parametrize("length", [1000, 8192])
def test_long_contexts(kernel, length):
    check(kernel, make_layer(length, kv_heads=1), torch.randn(1, 4, 1, 64))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("recipe", ["affine", "dual_scale"])
def test_any_head_size(kernel, recipe, head_dim):
    check(kernel, make_layer(170, kv_heads=1, head_dim=head_dim, recipe=recipe), torch.randn(1, 4, 1, head_dim))


@pytest.mark.parametrize("nbits", [2, 3, 4, 5, 6, 8, 16])
@pytest.mark.parametrize("recipe", ["affine", "dual_scale"])
def test_any_width(kernel, recipe, nbits):
    layer = make_layer(180, kv_heads=1, recipe=recipe, key_nbits=nbits, value_nbits=3 if nbits == 16 else nbits)
    check(kernel, layer, torch.randn(1, 4, 1, 64))


@pytest.mark.parametrize("group_size", [16, 32, 128])
@pytest.mark.parametrize("recipe", ["affine", "dual_scale"])
def test_any_group(kernel, recipe, group_size):
    layer = make_layer(330, kv_heads=1, recipe=recipe, group_size=group_size, head_dim=128)
    check(kernel, layer, torch.randn(1, 4, 1, 128))


@pytest.mark.parametrize(
    ("head_dim", "options"),
    [
        (64, {}),
        (96, {}),
        (128, {"key_nbits": 2, "value_nbits": 2}),
        (64, {"key_nbits": 8, "value_nbits": 8, "rotary_means": 3}),
        (64, {"recipe": "affine"}),
    ],
    ids=str,
)
def test_turning_means(kernel, head_dim, options):
    turns = make_turns(head_dim)
    layer = make_layer(170, head_dim=head_dim, padding=(0, 40), key_turns=turns, bias={0: 4.0, 5: -9.0}, **options)
    check(kernel, layer, torch.randn(2, 6, 2, head_dim), mask=padding_mask(layer, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packs", [True, False], ids=["packed", "unpacked"])
def test_half_precision(kernel, dtype, packs):
    for length in (63, 400):
        check(kernel, make_layer(length, dtype=dtype, packs=packs), torch.randn(1, 4, 1, 64).to(dtype))


def test_small_and_large_states_fit_into_half_precision(kernel):
    layer = make_layer(200, kv_heads=1, dtype=torch.float16)
    for factor in (1e-3, 500.0):
        for store in (*layer.packed.values(),):
            scales = store.get("channel_scale")
            scales.copy_((scales.int() + (60 if factor > 1 else -60)).clamp(1, 255).to(torch.uint8))
        check(kernel, layer, torch.randn(1, 4, 1, 64).half() / factor)


def test_unpacked_states(kernel):
    for length in (1, 63, 300):
        check(kernel, make_layer(length, packs=False), torch.randn(1, 4, 1, 64))


@pytest.mark.parametrize("queries", [2, 5, 32])
def test_several_queries(kernel, queries):
    for length in (32, 200):
        check(kernel, make_layer(length), torch.randn(1, 6, queries, 64))


@pytest.mark.parametrize("queries", [1, 5])
def test_rows_padded_on_the_left(kernel, queries):
    layer = make_layer(200, kv_heads=1, padding=(0, 3, 64, 190))
    check(kernel, layer, torch.randn(4, 4, queries, 64), mask=padding_mask(layer, queries))
    check(kernel, layer, torch.randn(4, 4, queries, 64))


def test_any_mask(kernel):
    layer = make_layer(200, kv_heads=1, padding=(0, 40))
    mask = torch.rand(2, 1, 5, 200) < 0.3
    mask[..., 0] = True
    check(kernel, layer, torch.randn(2, 4, 5, 64), mask=mask)
    check(kernel, layer, torch.randn(2, 4, 5, 64), mask=mask[:1].expand(2, -1, -1, -1))
    check(kernel, layer, torch.randn(2, 4, 5, 64), mask=mask[:1])


def test_a_window(kernel):
    for packs in (True, False):
        layer = make_layer(500, kv_heads=1, policy=NativeWindowPolicy(300), num_sink_tokens=0, packs=packs)
        for queries in (1, 4):
            # Unpacked tokens that the next query won't see have left.
            visible = max(layer.policy.first_visible(500 - queries), layer.first_stored)
            check(kernel, layer, torch.randn(1, 4, queries, 64), visible=visible)


@pytest.mark.parametrize("length", [5, 200])
def test_soft_capping_and_sink_logits(kernel, length):
    layer, query = make_layer(length), torch.randn(1, 4, 1, 64)
    check(kernel, layer, query, scoring=Scoring(0.3, softcap=3.0))
    check(kernel, layer, query, scoring=Scoring(0.3, sink_logits=torch.randn(4)))
    check(kernel, layer, query, scoring=Scoring(0.3, 20.0, torch.randn(4)))


def test_a_query_that_sees_nothing_gets_zeros(kernel):
    mask = torch.zeros(1, 1, 2, 200, dtype=torch.bool)
    mask[:, :, 1] = True
    output = kernel.attend(make_layer(200), torch.randn(1, 4, 2, 64), Scoring(0.125), mask, 0)
    assert torch.equal(output[:, 0], torch.zeros_like(output[:, 0]))
    assert output[:, 1].isfinite().all()
    assert output[:, 1].abs().sum() > 0


def test_large_scores_stay_finite(kernel):
    check(kernel, make_layer(300), 40 * torch.randn(1, 4, 1, 64), scoring=Scoring(1.0))


def test_queries_may_be_views(kernel):
    layer, query = make_layer(200), torch.randn(1, 1, 4, 64)
    check(kernel, layer, query.transpose(1, 2))
    check(kernel, layer, torch.randn(1, 4, 64, 1).transpose(2, 3))


def test_results_dont_depend_on_the_division():
    layer, query, scoring = make_layer(600, kv_heads=1), torch.randn(1, 4, 1, 64), Scoring(0.125)
    outputs = [TritonKernel(Launch(processors=count)).attend(layer, query, scoring, None, 0) for count in (1, 2, 1000)]
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (make_layer(70, dtype=torch.float64), "float64"),
        (make_layer(70, head_dim=264), "up to 256"),
        (make_layer(400, group_size=136), "up to 128 tokens"),
    ],
    ids=["dtype", "head-size", "block"],
)
def test_what_isnt_read_is_refused_with_the_reason(kernel, layer, reason):
    assert reason in kernel.refuses(layer)


def check_encoding(kernel, codec, states, valid=None):
    """Compares the payload with the codec's: rounding may go the other way on an edge, the error may not grow."""
    assert kernel.encoder.refuses(codec, states.shape[-1], states.device) is None
    found, expected = kernel.encoder.encode(codec, states, valid), codec.encode(states, valid)
    assert found.keys() == expected.keys()
    weight = torch.ones(states.shape[:-1]) if valid is None else valid[:, None].expand(states.shape[:-1]).float()
    errors = []
    for packed in (found, expected):
        out = torch.empty(states.shape)
        codec.decode(packed, states.shape[-1], out)
        errors.append(((out - states) * weight[..., None]).square().mean().sqrt().item())
    assert errors[0] <= 1.005 * errors[1] + 1e-9
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape
        assert found[name].dtype == tensor.dtype
        differ = (found[name] != tensor).float().mean()
        # A scale on the edge between two bytes moves the codes of its channel.
        assert differ <= 0.02
        if name != "codes":
            assert (found[name].int() - tensor.int()).abs().max() <= 1


@pytest.mark.parametrize("nbits", [2, 3, 4, 5, 6, 8])
def test_blocks_are_encoded_as_by_the_codec(kernel, nbits):
    for codec in Quantization(key_nbits=nbits, value_nbits=nbits).codecs():
        head_dim = 80 if nbits in (3, 4) else 64
        states = torch.randn(1, 2, 2, codec.block_tokens, head_dim) * torch.linspace(0.3, 2.0, head_dim) + 0.5
        check_encoding(kernel, codec, states.transpose(0, 1))


def test_padding_and_sinks_have_no_influence_on_encoding(kernel):
    states = torch.randn(2, 1, 2, 48, 64)
    valid = torch.arange(96).view(1, 2, 48) >= torch.tensor([5, 70]).view(2, 1, 1)
    states[~valid[:, None].expand(states.shape[:-1])] = float("nan")
    for codec in Quantization().codecs():
        found = kernel.encoder.encode(codec, states, valid)
        expected = codec.encode(states.nan_to_num(7.0), valid)
        for name in ("channel_scale", "mean", "mean_scale", "token_scale"):
            assert torch.equal(found[name], expected[name])


def test_keys_without_their_turning_means_are_encoded_as_by_the_codec(kernel):
    codec, _ = Quantization().codecs(0, 64, make_turns())
    states = plant_bias(torch.randn(2, 1, 2, 48, 64), make_turns().turns, {3: 50.0})
    reader = types.SimpleNamespace(kernel=kernel)
    encode = integration.KernelReader.encoder(reader, codec, 64, torch.device("cpu"))
    found, expected = encode(states), codec.encode(states)
    assert encode.keywords["encode_rest"].codec is codec.inner
    assert expected["rotary_mean"].any()
    for name in expected:
        assert (found[name] != expected[name]).float().mean() <= 0.02


@pytest.mark.parametrize("states", [torch.zeros(1, 1, 1, 48, 64), torch.full((1, 1, 1, 48, 64), 3.0)], ids=["0", "3"])
def test_constant_states_are_encoded(kernel, states):
    for codec in Quantization().codecs():
        check_encoding(kernel, codec, states)


def test_without_a_rotation_and_with_a_table_of_16_levels(kernel):
    codec = DualScaleCodec(block_tokens=32, nbits=4, rotate=False, levels="lloyd_max", clips=3)
    check_encoding(kernel, codec, torch.randn(1, 2, 2, 32, 96))
    assert CLIPS == (1.0, 0.85, 0.7)  # as the kernel counts them


def test_codecs_that_arent_written_are_refused(kernel):
    affine, _ = Quantization(recipe="affine").codecs()
    assert "doesn't write" in kernel.encoder.refuses(affine, 64, torch.device("cpu"))
    wide = DualScaleCodec(block_tokens=128)
    assert "128 tokens with 256 channels" in kernel.encoder.refuses(wide, 256, torch.device("cpu"))


def test_blocks_are_encoded_to_where_they_belong(kernel):
    for codec in Quantization().codecs():
        states = torch.randn(1, 2, 4, codec.block_tokens, 32)
        valid = torch.rand(1, 2, codec.block_tokens) < 0.7
        stores = [PackedStore(codec) for _ in range(2)]
        bound = kernel.encoder.bind(codec)
        for store, encode in zip(stores, (bound, partial(bound.__call__)), strict=True):
            store.append_states(states[:, :, :2].flatten(2, 3), valid.flatten(1), encode)
            poison_reserve(store)
            store.append_states(states[:, :, 2:].flatten(2, 3), None, encode)
        assert len(stores[0]) == len(stores[1]) == 4
        for name, tensor in stores[1].fields().items():
            assert torch.equal(stores[0].get(name), tensor)


def poison_reserve(store):
    """Gives a store room for two more blocks, full of nonsense."""
    store._reallocate(store.fields(), 2)
    for buffer in store._buffers.values():
        buffer[:, :, store.length :].fill_(77)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [(64, 64), (80, 40)], ids=str)
def test_new_states_are_appended_in_one_launch(kernel, dtype, channels):
    stores = [GrowingStore(minimum=16, ceiling=112) for _ in range(2)]
    for added in (1, 7, 8, 30, 1, 60):
        # Keys as models leave them: heads and tokens swapped.
        fields = {
            "keys": torch.randn(2, added, 3, channels[0]).to(dtype).transpose(1, 2),
            "values": torch.randn(2, 3, added, channels[1]).to(dtype),
        }
        for store, mover in zip(stores, (None, kernel.mover), strict=True):
            store.append(fields, mover=mover)
    for name in ("keys", "values"):
        assert torch.equal(stores[0].get(name), stores[1].get(name))


@pytest.mark.parametrize(("held", "count"), [(112, 48), (100, 8), (96, 96), (113, 104)])
def test_what_remains_is_moved_to_the_front_in_place(kernel, held, count):
    stores = [GrowingStore(minimum=16, ceiling=120) for _ in range(2)]
    fields = {"keys": torch.randn(2, 3, held, 80), "values": torch.randn(2, 3, held, 64)}
    for store in stores:
        store.append(fields)
    before = stores[1]._buffers["keys"].data_ptr()
    stores[0].shift(count)
    stores[1].shift(count, kernel.mover)
    assert len(stores[0]) == len(stores[1]) == held - count
    assert stores[1]._buffers["keys"].data_ptr() == before
    for name in ("keys", "values"):
        assert torch.equal(stores[0].get(name), stores[1].get(name))


def test_a_move_shorter_than_a_piece_is_refused(kernel):
    buffers = {name: torch.zeros(1, 1, 20, 64) for name in ("keys", "values")}
    with pytest.raises(ValueError, match="8 tokens or more"):
        kernel.mover.move(buffers, 4, 0, 10)


def test_a_step_stores_its_states_without_a_copy_by_pytorch(kernel, monkeypatch):
    """Across a flush: two launches encode, one appends and one moves the rest; PyTorch copies nothing."""
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, hidden_size=64)
    layers = [build_cache("int4", config).layers[0] for _ in range(2)]
    states = torch.randn(2, 1, 1, 200, 32)
    reader = types.SimpleNamespace(
        accepts=lambda *_: True, encoder=lambda codec, *_: kernel.encoder.bind(codec), mover=kernel.mover
    )
    launched = []
    for name in ("append_states", "move_to_front"):
        run = getattr(kernel.mover.module, name)
        monkeypatch.setattr(kernel.mover.module, name, Noting(run, name, launched))
    monkeypatch.setattr(kernel.encoder.module, "encode_block", Noting(triton_encode.encode_block, "encode", launched))
    with torch.no_grad():
        for layer in layers:
            layer.update(*states[..., :150, :])
        for token in range(150, 200):
            new = states[..., token : token + 1, :]
            layers[0].recent.append({"keys": new[0], "values": new[1]})
            layers[0].cumulative_length += 1
            layers[0].finish_update()
            handover.begin(reader)
            with monkeypatch.context() as patch:
                # What Triton's interpreter does with tensors aside, which has its own ways to read and write them.
                patch.setattr(GrowingStore, "replace", None)
                patch.setattr(PackedStore, "append", None)
                keys, _ = layers[1].update(new[0], new[1])
                handover.take(keys).finish_update()
            handover.end()
    assert launched.count("append_states") == 50
    assert launched.count("move_to_front") == 1
    assert launched.count("encode") == 2
    assert layers[1].packed_blocks == layers[0].packed_blocks
    for name in ("keys", "values"):
        assert torch.equal(layers[0].recent.get(name), layers[1].recent.get(name))
        for found, expected in zip(*(layer.packed[name].fields().values() for layer in layers[::-1]), strict=True):
            assert (found != expected).float().mean() < 0.02


class Noting:
    """A kernel whose launches are noted."""

    def __init__(self, kernel, name, launched):
        self.kernel, self.name, self.launched = kernel, name, launched

    def __getitem__(self, grid):
        self.launched.append(self.name)
        return self.kernel[grid]


def test_a_model_decodes_as_with_the_reference(kernel, monkeypatch):
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, initializer_range=0.2,
    )  # fmt: skip
    model, ids, logits = LlamaForCausalLM(config).eval(), torch.randint(64, (2, 185)), []
    encoded = []
    encode = kernel.encoder.encode_into
    monkeypatch.setattr(kernel.encoder, "encode_into", lambda *given: encoded.append(given) or encode(*given))
    for chosen in (kernel, ReferenceKernel()):
        monkeypatch.setattr(integration, "make_kernel", lambda *_, chosen=chosen: chosen)
        cache = build_cache("int4", config)
        with use_fused_attention(model), torch.no_grad():
            for piece in (ids[:, :180], ids[:, 180:183], ids[:, 183:184], ids[:, 184:]):
                logits.append(model(piece, **{cache_keyword(model): cache}).logits)
    assert encoded
    for one, other in zip(logits[:4], logits[4:], strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=0)
