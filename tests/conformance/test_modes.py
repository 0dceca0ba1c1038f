"""Every mode, on every architecture, with every strategy that makes sense; see `modes.py`, `zoo.py` and `suite.py`."""

from __future__ import annotations

from collections import Counter

import pytest
import transformers
import zoo
from case import Case
from modes import MODES
from packaging.version import Version
from suite import CELLS, NOT_OURS, OLDER_CAN_NOT, SINCE, STRATEGIES

from hf_kvplus.layer import KVLayer
from hf_kvplus.strategies import available_strategies, parse
from hf_kvplus.strategies.build import find_strategy

BY_TEXT = {strategy.text: strategy for strategy in STRATEGIES}


def count_blocks(monkeypatch) -> Counter[KVLayer]:
    """Counts from now on the blocks that each layer packs."""
    blocks, pack = Counter(), KVLayer._pack

    def counted(layer, due, begin):
        blocks[layer] += due["keys"].shape[2] // layer.block_tokens
        pack(layer, due, begin)

    monkeypatch.setattr(KVLayer, "_pack", counted)
    return blocks


@pytest.mark.parametrize(
    ("architecture", "strategy", "mode"),
    [pytest.param(*cell, id="-".join(cell).replace(" ", "_")) for cell, reason in CELLS.items() if reason is None],
)
def test_mode(architecture, strategy, mode, record_property, monkeypatch):
    record_property("conformance", " | ".join((architecture, strategy, mode)))
    if Version(transformers.__version__) < Version(SINCE) and mode in OLDER_CAN_NOT.get(architecture, ()):
        pytest.skip(f"before transformers {SINCE} the model itself can't, whichever cache")
    case, blocks = Case(zoo.ZOO[architecture], BY_TEXT[strategy]), count_blocks(monkeypatch)
    MODES[mode].run(case)
    if case.strategy.packs and case.architecture.packs:
        assert max(blocks.values(), default=0) >= (1 if case.strategy.window else 2), "too little was packed to tell"


def test_every_registered_strategy_of_ours_is_in_the_suite():
    run = {find_strategy(part.name).info.name for strategy in STRATEGIES for part in parse(strategy.text)}
    ours = {info.name for info in available_strategies() if not info.name.startswith(NOT_OURS)}
    assert run == ours


def test_at_least_twenty_architectures_are_covered_and_listen_to_far_tokens():
    """Without the second, no mode would notice what is lost."""
    import torch

    assert len(zoo.ZOO) >= 20
    for architecture in zoo.ZOO.values():
        case = Case(architecture, BY_TEXT["fp"])
        tokens, other = case.tokens(), case.tokens()
        other[:, 100:120] = case.tokens(seed=5)[:, 100:120]
        with torch.no_grad():
            last, changed = case.forward(tokens)[0, -1], case.forward(other)[0, -1]
        distance = (last - changed).pow(2).mean().sqrt() / last.std()
        assert distance > 0.01 or not architecture.packs, architecture.name


@pytest.mark.parametrize("name", [name for name, kind in zoo.ZOO.items() if kind.recurrent or kind.convolves])
def test_recurrent_states_matter(name):
    """Without this, no mode would notice a wrong one: with its states zeroed the model says something else."""
    import torch

    case = Case(zoo.ZOO[name], BY_TEXT["fp"])
    tokens, cache = case.tokens(), case.cache()
    with torch.no_grad():
        case.forward(tokens[:, :-1], cache)
        for layer in cache.layers:
            held = vars(layer).get("recurrent_states" if zoo.ZOO[name].recurrent else "conv_states", {})
            for state in (state for state in held.values() if state is not None):
                state.zero_()
        expected, changed = case.reference(tokens[0])[-1], case.forward(tokens[:, -1:], cache)[0, -1]
    assert (expected - changed).pow(2).mean().sqrt() / expected.std() > 0.05
