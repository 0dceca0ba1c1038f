"""Latent heads on a CPU: one run of the compiled kernel over packed latents, one over sinks and recent tokens.

The first run reads one wide head with all query heads at once. What it finds goes through the projection and into the
second run, which adds it up with the rest (see `latents`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from hf_kvplus.attention import slots
from hf_kvplus.attention.base import Scoring, heads_per_group
from hf_kvplus.attention.cpu_run import Run, rows_per_pass
from hf_kvplus.attention.latents import (
    absorb,
    bends_mean,
    expand,
    inner_codec,
    say,
    score_offsets,
    shared_heads,
    stored_shape,
)
from hf_kvplus.attention.reference import ReferenceKernel
from hf_kvplus.codecs.latent import LatentCodec
from hf_kvplus.layer import KVLayer

if TYPE_CHECKING:
    from hf_kvplus.attention.cpu import CPUKernel

# Query vectors that share a pass over latents, with 32 registers and with 16: each has an accumulator.
MOST_ROWS = {16: 24, 8: 12}
STATE_TILES = (slots.RECENT_TILES, slots.SINK_TILES, slots.LEAD_TILES)


class LatentReader:
    """Reads layers with latents for the CPU kernel.

    Args:
        kernel: The kernel.
    """

    def __init__(self, kernel: CPUKernel) -> None:
        self.kernel = kernel
        self.reference = ReferenceKernel()
        # For each layer what its kernels were compiled from, by dtype and number of rows.
        self.known: WeakKeyDictionary[KVLayer, dict[Any, Any]] = WeakKeyDictionary()

    def refuses(self, layer: KVLayer) -> str | None:
        """Reads any layer; says where the compiled kernel doesn't."""
        reason = self._reason(layer)
        if reason:
            say(reason)
        return None

    def _reason(self, layer: KVLayer) -> str | None:
        """Returns why the compiled kernel can't read a layer, or `None` if it can."""
        lanes = self.kernel.module.LANES
        for name, codec in layer.codecs.items():
            for channels in (layer.shapes[name][1], stored_shape(layer, name)[1]):
                if channels % lanes:
                    return f"the CPU kernel needs sizes that are a multiple of {lanes}, got {channels} channels"
            if self._form(layer, name) is None:
                channels = stored_shape(layer, name)[1]
                return f"the CPU kernel doesn't read {name} in {codec.describe()} ({channels} channels)"
        return None

    def _form(self, layer: KVLayer, name: str) -> Any:
        """Returns how packed keys or values are read, or `None` if they can't be."""
        codec = layer.codecs[name]
        form = self.kernel.form(inner_codec(codec), name, stored_shape(layer, name)[1])
        return replace(form, rotated=False) if form and isinstance(codec, LatentCodec) else form

    def attend(
        self, layer: KVLayer, query: torch.Tensor, scoring: Scoring, mask: torch.Tensor | None, visible: int
    ) -> torch.Tensor:
        """Attends; see `Kernel.attend`."""
        batch, heads, queries, _ = query.shape
        kernels = None if bends_mean(layer.codecs["keys"], scoring) else self._kernels(layer, query)
        if kernels is None:
            return self.reference.attend(layer, query, scoring, mask, visible)
        kernel, a = self.kernel, self.kernel.workspace.arguments
        kernel.set_layer(layer, visible)
        earlier = None
        if a[slots.PACKED_TILES]:
            tiles = {slot: a[slot] for slot in STATE_TILES}
            for slot in STATE_TILES:
                a[slot] = 0
            earlier = self._attend_packed(layer, query, scoring, mask, kernels[0])
            for slot, count in tiles.items():
                a[slot] = count
            a[slots.PACKED_TILES] = 0
        kv_heads, channels = layer.shapes["values"]
        output = query.new_empty(batch, queries, heads, channels)
        compiled, rows = kernels[1]
        run = Run(query, output.transpose(1, 2), kv_heads, scoring, mask, rows, earlier=earlier)
        kernel.launch(compiled, layer, run)
        return output

    def _kernels(self, layer: KVLayer, query: torch.Tensor) -> Any:
        """Returns the kernels for packed latents and for states, with their rows per pass; `None` if it has none."""
        known = self.known.setdefault(layer, {})
        key = layer.dtype, query.shape[1], query.shape[2], *layer.shapes.values()
        if key not in known:
            known[key] = None if self._reason(layer) else self._compile(layer, query)
        return known[key]

    def _compile(self, layer: KVLayer, query: torch.Tensor) -> Any:
        """Compiles both kernels, or reads them from Numba's cache."""
        module, queries = self.kernel.module, query.shape[2]
        plain = module.PackedForm()
        form = module.KernelForm(
            rows=rows_per_pass(queries * heads_per_group(layer, query), queries),
            key_channels=layer.shapes["keys"][1],
            value_channels=layer.shapes["values"][1],
            tokens=layer.block_tokens,
            dtype=str(layer.dtype).removeprefix("torch."),
            keys=plain,
            values=plain,
        )
        packed = replace(
            form,
            rows=rows_per_pass(queries * query.shape[1] // shared_heads(layer), queries, MOST_ROWS[module.LANES]),
            key_channels=stored_shape(layer, "keys")[1],
            value_channels=stored_shape(layer, "values")[1],
            keys=self._form(layer, "keys"),
            values=self._form(layer, "values"),
            single=True,
        )
        return tuple((module.compile_kernel(each), each.rows) for each in (packed, form))

    def _attend_packed(
        self, layer: KVLayer, query: torch.Tensor, scoring: Scoring, mask: torch.Tensor | None, compiled: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attends to packed latents; returns outputs and logarithms of sums, `(batch, heads, queries, ...)`."""
        keys, values = layer.codecs["keys"], layer.codecs["values"]
        batch, heads, queries, _ = query.shape
        found = torch.empty(batch, heads, queries, stored_shape(layer, "values")[1])
        log_sums = torch.empty(batch, heads, queries)
        scoring, wide = replace(scoring, sink_logits=None), absorb(keys, query)
        run = Run(wide, found, shared_heads(layer), scoring, mask, compiled[1], log_sums=log_sums)
        self.kernel.launch(compiled[0], layer, run)
        offsets = score_offsets(keys, query)
        if offsets is not None:
            log_sums.add_(offsets, alpha=scoring.scaling)
        return expand(values, found), log_sums
