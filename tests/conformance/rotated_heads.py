"""Head projections that lose nothing, for any model: random rotations over all heads, all channels kept.

What is stored has another shape and other content than the model's states, so whatever a cache does with it must take
the projection into account; what is read must be the states again.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch
import zoo

from hf_kvplus.gqa.projection import GQAProjection
from hf_kvplus.probe import profile_model
from hf_kvplus.projections import HeadProjection


@functools.cache
def folder() -> tempfile.TemporaryDirectory:
    """Returns a folder that this process owns."""
    return tempfile.TemporaryDirectory()


@functools.cache
def projection_file(architecture: str) -> Path:
    """Returns the file of an architecture's projection."""
    generator = torch.Generator().manual_seed(0)
    layers = []
    for states in profile_model(zoo.model(architecture).config).layers:
        layer = {}
        for name in ("keys", "values"):
            if getattr(states, name) is None:  # a recurrence, or states of another layer
                continue
            heads, channels = getattr(states, name).shape
            width = heads * channels
            rotation = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))[0]
            mean = torch.randn(width, generator=generator)
            layer[name] = HeadProjection(rotation, rotation.T, mean, heads)
        layers.append(layer)
    path = Path(folder().name) / f"{zoo.ZOO[architecture].name.replace(' ', '_')}.safetensors"
    return GQAProjection(tuple(layers), 1).save(path).path
