"""The strategies that the suite runs: adding one is adding one line.

Losses are measured: the largest of any architecture and mode, and half as much again. An unrelated context gives 1 and
more, so that even 4 bits are told from a mix-up; what 8 bits and full precision allow is far less.
"""

from __future__ import annotations

import zoo
from case import Case, Strategy
from modes import MODES

STRATEGIES = [
    Strategy("fp", loss=2e-5, everywhere=True),
    Strategy("int8,recent=16", loss=0.1, everywhere=True),
    Strategy("int4,recent=16", loss=0.7, everywhere=True),
    Strategy("k8v4,recent=16", loss=0.7),
    Strategy("int3,recent=16", loss=0.9),
    Strategy("int2,recent=16,sinks=0", loss=1.2),
]

# (architecture, strategy, mode) -> why the cell doesn't apply, or None
CELLS: dict[tuple[str, str, str], str | None] = {
    (architecture.name, strategy.text, mode.name): mode.unless(Case(architecture, strategy))
    for architecture in zoo.ZOO.values()
    for strategy in STRATEGIES
    if strategy.everywhere or architecture.name in zoo.REPRESENTATIVE
    for mode in MODES.values()
}
