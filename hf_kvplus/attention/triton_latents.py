"""Latent heads on a GPU: kernels over packed latents, then over sinks and recent tokens (see `latents`).

Six launches: queries times decoder, packed latents, the sum of what their programs found, that times decoder, unpacked
states, and the sum of everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch

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
from hf_kvplus.attention.triton import (
    LEAST_BLOCKS,
    MOST_BLOCK_TOKENS,
    MOST_CHANNELS,
    Call,
    packed_form,
    packed_tensors,
    padding_counts,
    parts_of,
    power_of_two,
    rotation_of,
)
from hf_kvplus.layer import KVLayer

MOST_LATENTS = 1024
# Columns of an output that one program adds up.
COLUMNS = 128
LOG2_E = 1.4426950408889634


def import_kernels() -> ModuleType:
    """Returns the module with the kernels; Triton is there."""
    from hf_kvplus.attention import triton_latent_kernels

    return triton_latent_kernels


class LatentReader:
    """Reads layers with latents for the Triton kernel."""

    def __init__(self) -> None:
        self.module = import_kernels()
        self.reference = ReferenceKernel()
        self.known: WeakKeyDictionary[KVLayer, bool] = WeakKeyDictionary()

    def refuses(self, layer: KVLayer) -> str | None:
        """Reads any layer; says where the Triton kernels don't."""
        reason = unread(layer)
        if reason:
            say(reason)
        return None

    def attend(self, call: Call, mask: torch.Tensor | None) -> torch.Tensor:
        """Attends to the layer of a call; `mask` is as it was given, see `Kernel.attend`."""
        layer, scoring = call.layer, call.scoring
        if layer not in self.known:
            self.known[layer] = unread(layer) is None
        if bends_mean(layer.codecs["keys"], scoring) or not self.known[layer]:
            return self.reference.attend(layer, call.query, scoring, mask, call.visible)
        call.padding = padding_counts(tuple(layer.padding.counts), layer.device)
        earlier = self._attend_packed(call) if call.packed_shares else None
        call.parts = call.state_shares
        rows = call.batch * call.kv_heads * call.chunks * call.parts * call.row_tile
        call.found = make_room(call.query, rows, call.value_channels)
        call.attend_states()
        output = call.query.new_empty(call.batch, call.queries, call.heads, call.value_channels)
        self._gather(
            call, call.found, output.transpose(1, 2), call.kv_heads, call.parts, call.row_tile, earlier=earlier
        )
        return output

    def _attend_packed(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Attends to packed latents; returns outputs and log2 of their sums, `(batch, heads, queries, ...)`."""
        layer, codecs = call.layer, call.layer.codecs
        query = absorb(codecs["keys"], call.query)
        rotation = rotation_of(codecs["keys"], call.key_channels, layer.device)
        query = query if rotation is None else query @ rotation
        kv_heads, rows = shared_heads(layer), call.queries * call.heads // shared_heads(layer)
        shape = Shape.of(layer, rows)
        chunks = -(-rows // shape.rows)
        blocks = call.blocks - call.first_block
        lines = call.batch * kv_heads * chunks
        per_share, shares = call.divide(blocks, LEAST_BLOCKS, lines * shape.options["VALUE_PIECES"])
        channels = stored_shape(layer, "values")[1]
        found = call.found = make_room(query, lines * shares * shape.rows, channels)
        self.module.attend_latents[(shares, call.batch * kv_heads * shape.options["VALUE_PIECES"], chunks)](
            query, *query.stride()[:3],
            *packed_tensors(layer, "keys", call.padding), *packed_tensors(layer, "values", call.padding),
            *call.mask_arguments(), call.padding, *found,
            call.scoring.scaling, call.scoring.softcap or 0.0,
            kv_heads, call.heads // kv_heads, call.queries, call.sinks,
            call.blocks, call.first_block, call.visible, layer.first_stored, layer.packed_tokens,
            layer.cumulative_length, per_share, shares,
            **{
                **call.common(layer.dtype == torch.float32), **shape.options, "ROWS": shape.rows,
                "KEY_OPERAND": call.operand(shape.options["KEY_KIND"] == "states"),
                "VALUE_OPERAND": call.operand(shape.options["VALUE_KIND"] == "states"),
                "ASSEMBLY": call.assembly, "num_warps": call.launch.warps or shape.warps,
                "num_stages": min(shape.stages, call.launch.stages),
            },
        )  # fmt: skip
        output = query.new_empty(call.batch, call.heads, call.queries, channels)
        log_sums = query.new_empty(call.batch, call.heads, call.queries)
        self._gather(call, found, output, kv_heads, shares, shape.rows, log_sums=log_sums)
        offsets = score_offsets(codecs["keys"], call.query)
        if offsets is not None:
            log_sums.add_(offsets, alpha=call.scoring.scaling * LOG2_E)
        rotation = rotation_of(codecs["values"], call.value_channels, layer.device)
        return expand(codecs["values"], output if rotation is None else output @ rotation), log_sums

    def _gather(
        self,
        call: Call,
        found: tuple[torch.Tensor, ...],
        output: torch.Tensor,
        kv_heads: int,
        parts: int,
        row_tile: int,
        *,
        log_sums: torch.Tensor | None = None,
        earlier: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Adds up what programs found; sink logits join where nothing else follows."""
        logits = call.scoring.sink_logits if log_sums is None else None
        group, channels = call.heads // kv_heads, output.shape[3]
        absent = call.padding
        self.module.gather[(call.queries * group, call.batch * kv_heads, -(-channels // COLUMNS))](
            *found, output, *output.stride()[:3], absent if log_sums is None else log_sums,
            *(earlier or (absent, absent)), absent if logits is None else logits.contiguous(),
            kv_heads, group, call.queries, parts,
            HAS_LOG_SUMS=log_sums is not None, HAS_EARLIER=earlier is not None, HAS_SINK_LOGITS=logits is not None,
            CHANNELS=channels, COLUMNS=min(COLUMNS, power_of_two(channels)), ROWS=row_tile, STEP=16, num_warps=4,
        )  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """What a program over packed latents holds.

    Args:
        options: Constants of `attend_latents` that follow from what is stored.
        rows: Query vectors.
        warps: Warps with which nothing is spilled, as compiled for compute capability 8.0 and 9.0.
        stages: Blocks that are on their way at a time and fit into shared memory.
    """

    options: dict[str, Any]
    rows: int
    warps: int
    stages: int

    @classmethod
    def of(cls, layer: KVLayer, rows: int) -> Shape:
        """Returns the shape for a layer and `rows` query vectors of a head."""
        forms = {name: stored_form(layer, name) for name in ("keys", "values")}
        channels = {name: stored_shape(layer, name)[1] for name in forms}
        wide = 128 if layer.dtype == torch.float32 else 256
        pad, pieces = key_pieces(channels["keys"], wide)
        part, part_pad, value_pieces = value_parts(channels["values"], forms["values"]["nbits"], wide)
        tokens = parts_of(layer.block_tokens, forms["keys"]["nbits"])
        options = {
            f"{side}_{field.upper()}": value
            for side, name in (("KEY", "keys"), ("VALUE", "values"))
            for field, value in (*forms[name].items(), ("shared", stored_shape(layer, name)[0] == 1))
        }
        options |= {
            "TOKENS": layer.block_tokens, "KEY_CHANNELS": channels["keys"], "KEY_PAD": pad, "KEY_PIECES": pieces,
            "VALUE_CHANNELS": channels["values"], "VALUE_PART": part, "VALUE_PART_PAD": part_pad,
            "VALUE_PAD": channels["values"] // part * part_pad, "VALUE_PIECES": value_pieces,
        }  # fmt: skip
        options |= dict(zip(("TOKEN_PART", "TOKEN_PART_PAD", "TOKENS_PAD"), tokens, strict=True))
        half = layer.dtype != torch.float32
        small = half and max(channels.values()) <= 128
        row_tile = 32 if small and rows > 16 else 16
        stages = 3 if half and pieces == 1 and forms["keys"]["kind"] != "affine" else 2
        return cls(options, row_tile, 8, stages)


def stored_form(layer: KVLayer, name: str) -> dict[str, Any] | None:
    """Returns how the kernels read packed keys or values, or `None` if they can't."""
    return packed_form(inner_codec(layer.codecs[name]), name, stored_shape(layer, name)[1])


def key_pieces(channels: int, most: int) -> tuple[int, int]:
    """Returns how many channels of keys a program reads at a time, at most `most`, and how often."""
    if channels <= most:
        return max(16, power_of_two(channels)), 1
    # Channels that don't exist cost as much as others.
    size = 64 if -(-channels // 64) % 2 else 128
    return size, -(-channels // size)


def value_parts(channels: int, nbits: int, most: int) -> tuple[int, int, int]:
    """Returns how a line of values is divided among programs.

    Args:
        channels: Of a token.
        nbits: Bits per code.
        most: Channels that a program holds.

    Returns:
        Bytes of the first plane of a line (channels that a byte starts), how many of them a program takes, and how
        many programs that makes.
    """
    size, padded, whole = parts_of(channels, nbits)
    if whole <= most:
        return size, padded, 1
    padded = most * padded // whole
    return size, padded, -(-size // padded)


def unread(layer: KVLayer) -> str | None:
    """Returns why the Triton kernels can't read a layer with latents, or `None` if they can."""
    for name, codec in layer.codecs.items():
        channels = stored_shape(layer, name)[1]
        if layer.shapes[name][1] > MOST_CHANNELS or channels > MOST_LATENTS:
            return (
                f"the Triton kernel takes head sizes up to {MOST_CHANNELS} and {MOST_LATENTS} latents, got "
                f"{layer.shapes[name][1]} and {channels}"
            )
        if stored_form(layer, name) is None:
            return f"the Triton kernel doesn't read {name} in {codec.describe()}"
    if layer.block_tokens > MOST_BLOCK_TOKENS:
        return f"the Triton kernel takes blocks of up to {MOST_BLOCK_TOKENS} tokens, got {layer.block_tokens}"
    return None


def make_room(like: torch.Tensor, parts: int, channels: int) -> tuple[torch.Tensor, ...]:
    """Returns room for outputs, largest scores and sums of `parts` rows."""
    room = like.new_empty(parts * (channels + 2), dtype=torch.float32)
    return room[2 * parts :], room[:parts], room[parts : 2 * parts]
