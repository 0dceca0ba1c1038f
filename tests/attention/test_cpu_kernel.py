"""The CPU kernel against the reference: error at most twice PyTorch's own, whatever the shape."""

from __future__ import annotations

import pytest
import torch
from layers import make_layer, make_turns, padding_mask
from torch.nn.functional import scaled_dot_product_attention

from hf_kvplus import threads
from hf_kvplus.attention import cpu_kernel
from hf_kvplus.attention.base import Scoring
from hf_kvplus.attention.cpu import CPUKernel
from hf_kvplus.attention.reference import ReferenceKernel
from hf_kvplus.policies import NativeWindowPolicy

LENGTHS = (1, 63, 111, 1000, 8192)
# Rounding of the inputs of a float32 product, relative to the largest value.
FLOOR = 1e-6


@pytest.fixture(scope="module")
def kernel() -> CPUKernel:
    return CPUKernel()


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
    assert error <= 2 * own_error + FLOOR * values.double().abs().max().item()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("recipe", ["affine", "dual_scale"])
def test_any_head_size(kernel, recipe, head_dim):
    for length in LENGTHS:
        layer = make_layer(length, head_dim=head_dim, recipe=recipe)
        check(kernel, layer, torch.randn(1, 8, 1, head_dim))


@pytest.mark.parametrize("queries_per_head", [1, 3, 4, 8, 12])
def test_any_number_of_query_heads(kernel, queries_per_head):
    for length in LENGTHS:
        check(kernel, make_layer(length), torch.randn(1, 2 * queries_per_head, 1, 64))


@pytest.mark.parametrize("nbits", [2, 3, 4, 5, 6, 8, 16])
@pytest.mark.parametrize("recipe", ["affine", "dual_scale"])
def test_any_width(kernel, recipe, nbits):
    for length in (111, 1000):
        layer = make_layer(length, recipe=recipe, key_nbits=nbits, value_nbits=3 if nbits == 16 else nbits)
        check(kernel, layer, torch.randn(1, 4, 1, 64))


@pytest.mark.parametrize("group_size", [16, 32, 128])
def test_any_group(kernel, group_size):
    check(kernel, make_layer(1000, recipe="affine", group_size=group_size, head_dim=128), torch.randn(1, 4, 1, 128))


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"key_nbits": 2, "value_nbits": 2},
        {"key_nbits": 8, "value_nbits": 8},
        {"rotary_means": 3},
        {"recipe": "affine"},
        {"recipe": "affine", "rotary_means": 1},
    ],
    ids=str,
)
def test_turning_means(kernel, options, head_dim):
    for interleaved, length in ((False, 111), (True, 111), (False, 1000)):
        turns = make_turns(head_dim, interleaved=interleaved)
        layer = make_layer(length, head_dim=head_dim, padding=(0, 40), key_turns=turns, **options)
        check(kernel, layer, torch.randn(2, 6, 2, head_dim), mask=padding_mask(layer, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packs", [True, False], ids=["packed", "unpacked"])
def test_half_precision(kernel, dtype, packs):
    for length in LENGTHS:
        check(kernel, make_layer(length, dtype=dtype, packs=packs), torch.randn(1, 4, 1, 64).to(dtype))


def test_unpacked_states(kernel):
    for length in LENGTHS:
        check(kernel, make_layer(length, packs=False), torch.randn(1, 4, 1, 64))


@pytest.mark.parametrize("queries", [2, 5, 16])
def test_several_queries(kernel, queries):
    for length in (16, 111, 1000):
        check(kernel, make_layer(length), torch.randn(1, 6, queries, 64))


@pytest.mark.parametrize("queries", [1, 5])
def test_rows_padded_on_the_left(kernel, queries):
    layer = make_layer(400, padding=(0, 3, 64, 190, 390))
    check(kernel, layer, torch.randn(5, 4, queries, 64), mask=padding_mask(layer, queries))
    check(kernel, layer, torch.randn(5, 4, queries, 64))


def test_any_mask(kernel):
    layer = make_layer(500, padding=(0, 40))
    mask = torch.rand(2, 1, 5, 500) < 0.3
    mask[..., 0] = True
    check(kernel, layer, torch.randn(2, 4, 5, 64), mask=mask)
    check(kernel, layer, torch.randn(2, 4, 5, 64), mask=mask[:1].expand(2, -1, -1, -1))


def test_a_window(kernel):
    layer = make_layer(700, policy=NativeWindowPolicy(300), num_sink_tokens=0)
    for queries in (1, 4):
        visible = layer.policy.first_visible(700 - queries)
        check(kernel, layer, torch.randn(1, 4, queries, 64), visible=visible)


@pytest.mark.parametrize("length", [5, 300])
def test_soft_capping_and_sink_logits(kernel, length):
    layer, query = make_layer(length), torch.randn(1, 4, 1, 64)
    check(kernel, layer, query, scoring=Scoring(0.3, softcap=3.0))
    check(kernel, layer, query, scoring=Scoring(0.3, sink_logits=torch.randn(4)))
    check(kernel, layer, query, scoring=Scoring(0.3, 20.0, torch.randn(4).bfloat16()))


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
    layer, query = make_layer(300), torch.randn(1, 1, 4, 64)
    check(kernel, layer, query.transpose(1, 2))
    check(kernel, layer, torch.randn(1, 4, 64, 1).transpose(2, 3))


def test_results_dont_depend_on_threads(kernel, monkeypatch):
    layer, query, scoring = make_layer(3000), torch.randn(1, 4, 1, 64), Scoring(0.125)
    expected = kernel.attend(layer, query, scoring, None, 0)
    for count in (1, 2, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        for runner in (threads.find_runner(), threads.run_on_python_threads):
            monkeypatch.setattr(kernel, "run", runner)
            torch.testing.assert_close(kernel.attend(layer, query, scoring, None, 0), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (make_layer(70, head_dim=20), "head sizes"),
        (make_layer(70, dtype=torch.float64), "float64"),
        (make_layer(130, recipe="affine", group_size=8), "keys in 4 bits"),
    ],
    ids=["head-size", "dtype", "group"],
)
def test_what_isnt_read_is_refused_with_the_reason(kernel, layer, reason):
    assert reason in kernel.refuses(layer)


def test_kernels_of_different_forms_are_stored_in_different_files():
    """In one file processes that compile at the same time would load each other's kernels."""
    kernels = [cpu_kernel._build(kernel_form(rows), 1) for rows in (1, 2, 2)]
    names = [kernel._pyfunc.__qualname__ for kernel in kernels]
    assert names[1] == names[2] != names[0]
    assert cpu_kernel._build(kernel_form(1), 2)._pyfunc.__qualname__ not in names


def kernel_form(rows):
    states = cpu_kernel.PackedForm()
    return cpu_kernel.KernelForm(rows, 16, 16, 16, "float32", states, states)
