"""Every mode, on every architecture, with every strategy that makes sense; see `modes.py`, `zoo.py` and `suite.py`."""

from __future__ import annotations

import pytest
import zoo
from case import Case
from modes import MODES
from suite import CELLS, STRATEGIES

BY_TEXT = {strategy.text: strategy for strategy in STRATEGIES}


@pytest.mark.parametrize(
    ("architecture", "strategy", "mode"),
    [pytest.param(*cell, id="-".join(cell).replace(" ", "_")) for cell, reason in CELLS.items() if reason is None],
)
def test_mode(architecture, strategy, mode, record_property):
    record_property("conformance", [architecture, strategy, mode])
    MODES[mode].run(Case(zoo.ZOO[architecture], BY_TEXT[strategy]))
