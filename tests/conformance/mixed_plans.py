"""Layer plans with other widths and blocks in every layer, for any model."""

from __future__ import annotations

import functools
from pathlib import Path

import zoo
from rotated_heads import folder

from hf_kvplus.caches import text_config
from hf_kvplus.fingerprint import config_fields
from hf_kvplus.layer_plan import LayerPlan
from hf_kvplus.recipes import Quantization

KINDS = (
    Quantization(8, 6, residual_length=16),
    Quantization(6, 8, group_size=32, residual_length=24),
    None,
)


@functools.cache
def plan_file(architecture: str) -> Path:
    """Returns the file of an architecture's plan."""
    config = text_config(zoo.model(architecture).config)
    layers = tuple(KINDS[index % len(KINDS)] for index in range(config.num_hidden_layers))
    path = Path(folder().name) / f"{architecture}-plan.json".replace(" ", "-").replace("+", "-")
    LayerPlan(layers, {"config": config_fields(config)}).save(path)
    return path
