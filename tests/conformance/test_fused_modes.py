"""Every mode again with packed states read directly, on a cheap selection of architectures and strategies.

Architectures: a plain one, one with windows and soft-capping, and one with sink logits. That fused
attention answers what decoding answers is shown layer by layer in tests/attention; this is about what modes do with a
cache in between.
"""

from __future__ import annotations

import pytest
import zoo
from case import Case
from modes import MODES
from suite import CELLS, STRATEGIES

from hf_kvplus import use_fused_attention
from hf_kvplus.attention.cpu import CPUKernel

FP, INT8, INT4 = "fp", "int8,recent=16", "int4,recent=16"
CHOSEN = {"Llama": (FP, INT4), "Gemma 2": (INT8,), "gpt-oss": (INT8,)}
BY_TEXT = {strategy.text: strategy for strategy in STRATEGIES}
FUSED_CELLS = [cell for cell, reason in CELLS.items() if reason is None and cell[1] in CHOSEN.get(cell[0], ())]


@pytest.mark.parametrize("cell", FUSED_CELLS, ids=["-".join(cell).replace(" ", "_") for cell in FUSED_CELLS])
def test_mode_with_fused_attention(cell):
    architecture, strategy, mode = cell
    case = Case(zoo.ZOO[architecture], BY_TEXT[strategy])
    with use_fused_attention(case.model):
        MODES[mode].run(case)


@pytest.mark.parametrize("architecture", CHOSEN)
def test_the_kernel_is_what_answers(architecture, monkeypatch):
    calls, attend = [], CPUKernel.attend
    monkeypatch.setattr(CPUKernel, "attend", lambda *given: calls.append(given) or attend(*given))
    case = Case(zoo.ZOO[architecture], BY_TEXT[INT8])
    with use_fused_attention(case.model):
        case.generate(case.tokens(), case.cache(), max_new_tokens=4)
    assert calls
