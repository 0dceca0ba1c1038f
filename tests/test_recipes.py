"""What the default recipe loses on a real model, width by width: less than the next width, and than its line."""

from __future__ import annotations

import pytest
import torch

from checkpoints import one_thread
from hf_kvplus import build_cache
from hf_kvplus.loading import load_model
from hf_kvplus.plans.onepass import OnePass

TOKENS = 640
# Mean divergence in nats, the most that each width may lose. Measured here: two fifths to two thirds of it.
LINES = {"int8": 0.00003, "k5v4": 0.0007, "int4": 0.0018, "int3": 0.009, "int2": 0.035}
PLAIN = {"int4": "int4,recipe=affine", "int2": "int2,recipe=affine"}


@pytest.mark.model
def test_each_width_keeps_its_line_and_loses_less_than_the_next_and_far_less_than_plain_steps():
    """On Python's help topics, as chunks of 64 tokens would find them; one test, so that the model is loaded once."""
    from pydoc_data.topics import topics

    with one_thread():
        model, tokenizer, _ = load_model("smollm2-135m", "cpu", "float32")
        ids = tokenizer("\n\n".join(topics[name] for name in sorted(topics)), verbose=False)["input_ids"][:TOKENS]
        with OnePass(model) as run, torch.inference_mode():
            # Before them little is packed.
            reference = run.reference(torch.tensor(ids), torch.arange(256, TOKENS - 1, 2))
            losses = {
                name: run.divergences(reference, build_cache(name, model.config)).mean().item()
                for name in (*LINES, *PLAIN.values())
            }
    for name, line in LINES.items():
        assert 0 < losses[name] < line, name
    found = [losses[name] for name in LINES]
    assert all(1.5 * more < fewer for more, fewer in zip(found, found[1:], strict=False))
    assert 2 * losses["int4"] < losses[PLAIN["int4"]]
    assert 3 * losses["int2"] < losses[PLAIN["int2"]]
