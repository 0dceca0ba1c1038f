"""What the default recipe loses on a real model, width by width: far less than the next width, and than its line."""

from __future__ import annotations

import pytest
import torch

from checkpoints import one_thread
from hf_kvplus import build_cache
from hf_kvplus.loading import load_model
from hf_kvplus.plans.onepass import OnePass

pytestmark = pytest.mark.model
TOKENS = 1024
# Mean divergence in nats, the most that each width may lose. Measured here: a third to five sixths of it.
LINES = {"int8": 0.00003, "k6v6": 0.0002, "k5v4": 0.0007, "int4": 0.0018, "int3": 0.009, "int2": 0.035}


@pytest.fixture(scope="module")
def losses():
    """Divergences of SmolLM2-135M on Python's help topics, as chunks of 64 tokens would find them, by strategy."""
    from pydoc_data.topics import topics

    with one_thread():
        model, tokenizer, _ = load_model("smollm2-135m", "cpu", "float32")
        ids = tokenizer("\n\n".join(topics[name] for name in sorted(topics)), verbose=False)["input_ids"][:TOKENS]
        with OnePass(model) as run, torch.inference_mode():
            # Before them little is packed.
            reference = run.reference(torch.tensor(ids), torch.arange(256, TOKENS - 1, 2))
            return {
                name: run.divergences(reference, build_cache(name, model.config)).mean().item()
                for name in (*LINES, "int4,recipe=affine", "int2,recipe=affine")
            }


@pytest.mark.parametrize("strategy", LINES)
def test_a_width_loses_no_more_than_its_line(losses, strategy):
    assert 0 < losses[strategy] < LINES[strategy]


def test_each_width_loses_far_less_than_the_next_and_than_plain_steps(losses):
    found = [losses[name] for name in LINES]
    assert all(2 * more < fewer for more, fewer in zip(found, found[1:], strict=False))
    assert 2 * losses["int4"] < losses["int4,recipe=affine"]
    assert 3 * losses["int2"] < losses["int2,recipe=affine"]
