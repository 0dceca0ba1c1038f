"""The reference kernel: PyTorch's attention over the decoded states."""

from __future__ import annotations

import pytest
import torch
from layers import make_layer, padding_mask

from hf_kvplus.attention.base import Scoring
from hf_kvplus.attention.reference import ReferenceKernel
from hf_kvplus.policies import NativeWindowPolicy
from hf_kvplus.recipes import recipes


def attend_densely(layer, query, scoring, mask, visible=0):
    keys, values = (states.double() for states in layer.dense(visible))
    groups = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = query.double() @ keys.transpose(-1, -2) * scoring.scaling
    if scoring.softcap:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if scoring.sink_logits is None:
        weights = scores.softmax(-1)
    else:
        logits = scoring.sink_logits.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, logits], -1).softmax(-1)[..., :-1]
    return (weights @ values).transpose(1, 2)


@pytest.mark.parametrize(
    ("recipe", "nbits"),
    [
        (recipe, nbits)
        for recipe in sorted(recipes.names())
        for nbits in ((8, 16) if recipe == "float8" else (2, 3, 4, 5, 6, 8, 16))
    ],
)
def test_every_codec_is_read(recipe, nbits):
    layer = make_layer(
        700, padding=(0, 90), recipe=recipe, key_nbits=nbits, value_nbits=8 if recipe == "float8" else 4
    )
    query, scoring = torch.randn(2, 6, 1, 64), Scoring(0.125)
    mask = padding_mask(layer)
    output = ReferenceKernel(torch.float64).attend(layer, query.double(), scoring, mask, 0)
    torch.testing.assert_close(output, attend_densely(layer, query, scoring, mask), atol=1e-6, rtol=0)


@pytest.mark.parametrize("length", [1, 63, 111, 1000])
@pytest.mark.parametrize(
    "scoring",
    [Scoring(0.125), Scoring(0.3, softcap=4.0), Scoring(0.125, sink_logits=torch.linspace(-3, 3, 4))],
    ids=["plain", "softcap", "sink-logits"],
)
def test_scores_are_made_as_asked(length, scoring):
    layer = make_layer(length)
    query = torch.randn(1, 4, 1, 64)
    output = ReferenceKernel().attend(layer, query, scoring, None, 0)
    torch.testing.assert_close(output.double(), attend_densely(layer, query, scoring, None), atol=1e-5, rtol=0)


def test_without_a_mask_queries_see_what_came_before_them():
    layer = make_layer(300)
    query, scoring = torch.randn(1, 4, 7, 64), Scoring(0.125)
    output = ReferenceKernel().attend(layer, query, scoring, None, 0)
    expected = attend_densely(layer, query, scoring, padding_mask(layer, 7))
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=0)


def test_columns_before_the_first_visible_one_are_hidden():
    layer = make_layer(500, policy=NativeWindowPolicy(200), num_sink_tokens=0)
    visible = layer.policy.first_visible(499)
    query, scoring = torch.randn(1, 4, 1, 64), Scoring(0.125)
    output = ReferenceKernel().attend(layer, query, scoring, None, visible)
    torch.testing.assert_close(
        output.double(), attend_densely(layer, query, scoring, None, visible), atol=1e-5, rtol=0
    )


def test_a_query_that_sees_nothing_gets_zeros():
    layer = make_layer(200)
    mask = torch.zeros(1, 1, 1, 200, dtype=torch.bool)
    output = ReferenceKernel().attend(layer, torch.randn(1, 4, 1, 64), Scoring(0.125), mask, 0)
    assert torch.equal(output, torch.zeros_like(output))
