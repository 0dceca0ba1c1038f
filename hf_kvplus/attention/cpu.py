"""Attention on a CPU: hands a layer's buffers to the compiled kernel.

Which kernel is compiled depends on the codecs, the head sizes and the number of queries per KV head; a layer that no
kernel can read is refused with the reason. Latent heads (GQA) take two runs, see `cpu_latents`. Numba is needed (the
extra `cpu`) and imported on first use.
"""

from __future__ import annotations

import ctypes
import math
import threading
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from hf_kvplus.attention import slots
from hf_kvplus.attention.base import Scoring, heads_per_group
from hf_kvplus.attention.cpu_latents import LatentReader
from hf_kvplus.attention.cpu_run import Run, rows_per_pass
from hf_kvplus.attention.latents import has_latents, inner_codec
from hf_kvplus.codecs import Codec
from hf_kvplus.codecs.affine import PER_CHANNEL, PER_TOKEN, AffineCodec
from hf_kvplus.codecs.base import Packed
from hf_kvplus.codecs.dual_scale import DualScaleCodec
from hf_kvplus.codecs.identity import IdentityCodec
from hf_kvplus.codecs.latent import LatentCodec
from hf_kvplus.codecs.levels import UNIFORM
from hf_kvplus.codecs.rotary_mean import RotaryMeanCodec
from hf_kvplus.codecs.turns import kernel_tables
from hf_kvplus.layer import KVLayer
from hf_kvplus.threads import find_runner

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
PACKED_SLOTS = {"keys": slots.KEY_CODES, "values": slots.VALUE_CODES}
FOUND_SLOTS = (slots.LOG_SUMS, slots.EARLIER, slots.EARLIER_LOG_SUMS)
SHARES_PER_THREAD = 4
MEAN_SLOTS = {"rotary_pair": slots.KEY_PAIR, "rotary_mean": slots.KEY_PAIR_MEAN}
# Fields of a payload in the order of the kernel's slots; a codec has at most one of each line.
FIELDS = (("codes", "states"), ("scale", "channel_scale"), ("zero_point", "token_scale"), ("mean",), ("mean_scale",))


def import_kernel() -> Any:
    """Returns the module with the kernel.

    Raises:
        ImportError: If Numba is missing.
    """
    try:
        from hf_kvplus.attention import cpu_kernel
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("numba", "llvmlite"):
            raise
        raise ImportError(
            "fused attention on a CPU needs Numba; install it with `pip install hf_kvplus[cpu]`, or leave out "
            "`use_fused_attention`"
        ) from error
    return cpu_kernel


class Workspace(threading.local):
    """The kernel's arguments and room for partial results, for each thread that calls it."""

    def __init__(self) -> None:
        self.arguments = (ctypes.c_int64 * slots.COUNT)()
        self.arguments[slots.SELF] = ctypes.addressof(self.arguments)
        self.counters = torch.zeros(1, dtype=torch.int64)
        self.partial = torch.empty(0)
        self.states = torch.empty(0)
        self.padding = torch.zeros(1, dtype=torch.int64)
        self.turns: tuple[torch.Tensor, ...] = ()


class CPUKernel:
    """Attends on the CPU, on as many threads as PyTorch uses."""

    reads_pieces = True

    def __init__(self) -> None:
        self.module = import_kernel()
        self.run = find_runner()
        self.workspace = Workspace()
        self.latents = LatentReader(self)

    def refuses(self, layer: KVLayer) -> str | None:
        """Returns why this kernel can't read `layer`, or `None` if it can."""
        if layer.device.type != "cpu":
            return f"the CPU kernel can't read a cache on {layer.device}"
        if layer.dtype not in DTYPES:
            return f"the CPU kernel doesn't read {layer.dtype}"
        if has_latents(layer):
            return self.latents.refuses(layer)
        lanes = self.module.LANES
        for _, channels in layer.shapes.values():
            if channels % lanes:
                return f"the CPU kernel needs head sizes that are a multiple of {lanes}, got {channels}"
        for name, codec in layer.codecs.items():
            channels = layer.shapes[name][1]
            if self.form(codec, name, channels) is None:
                return f"the CPU kernel doesn't read {name} in {codec.describe()} with a head size of {channels}"
        return None

    def form(self, codec: Codec | None, name: str, channels: int) -> Any:
        """Returns how the kernel reads blocks of `codec`, or `None` if it can't."""
        form, lanes = self.module.PackedForm, self.module.LANES
        if codec is None:
            return form()
        if isinstance(codec, RotaryMeanCodec):
            inner = self.form(codec.inner, name, channels)
            return replace(inner, means=codec.means) if inner and name == "keys" else None
        if codec.block_tokens % lanes:
            return None
        if isinstance(codec, IdentityCodec):
            return form()
        axis = PER_CHANNEL if name == "keys" else PER_TOKEN
        if isinstance(codec, DualScaleCodec) and codec.axis == axis:
            uniform, small = codec.levels == UNIFORM, codec.nbits <= 4
            return (
                form(
                    kind="dual",
                    nbits=codec.nbits,
                    token_scale=codec.iterations > 0,
                    # Looking up 16 numbers takes AVX-512 one instruction, less than converting and shifting a code.
                    table=small and (not uniform or self.module.LOOKUP == "wide"),
                    rotated=codec.rotation(channels) is not None,
                )
                if uniform or small
                else None
            )
        if isinstance(codec, AffineCodec) and codec.axis == axis:
            group = codec.group_length(channels)
            line = codec.block_tokens if name == "keys" else channels
            # Groups of tokens are whole vectors; those of channels needn't be.
            fits = group % lanes == 0 or name == "values"
            return form(kind="affine", nbits=codec.nbits, groups=line // group) if fits else None
        return None

    def attend(
        self, layer: KVLayer, query: torch.Tensor, scoring: Scoring, mask: torch.Tensor | None, visible: int
    ) -> torch.Tensor:
        """Attends; see `Kernel.attend`."""
        if has_latents(layer):
            return self.latents.attend(layer, query, scoring, mask, visible)
        batch, heads, queries, _ = query.shape
        output = query.new_empty(batch, queries, heads, layer.shapes["values"][1])
        rows = queries * heads_per_group(layer, query)
        pass_rows = rows_per_pass(rows, queries)
        kernel = self._compile(layer, pass_rows)
        self.set_layer(layer, visible)
        run = Run(query, output.transpose(1, 2), layer.shapes["keys"][0], scoring, mask, pass_rows)
        self.launch(kernel, layer, run)
        return output

    def launch(self, kernel: Any, layer: KVLayer, run: Run) -> None:
        """Runs a compiled kernel over the tiles that the arguments name after `set_layer`."""
        query, output, kv_heads, scoring = run.query, run.output, run.kv_heads, run.scoring
        query = query if query.stride(3) == 1 else query.contiguous()
        batch, heads, queries, _ = query.shape
        value_channels, pass_rows = output.shape[3], run.pass_rows
        rows = queries * heads // kv_heads
        a = self.workspace.arguments
        chunks = -(-rows // pass_rows)
        pairs = batch * kv_heads
        threads = torch.get_num_threads()
        tiles = a[slots.PACKED_TILES] + a[slots.RECENT_TILES] + a[slots.SINK_TILES] + a[slots.LEAD_TILES]
        a[slots.PIECE_FIRST], a[slots.PIECE_LAST] = 0, tiles
        shares = max(1, min(math.ceil(SHARES_PER_THREAD * threads / pairs), tiles // 4)) if threads > 1 else 1
        partial = pairs * shares * chunks * pass_rows
        if len(self.workspace.counters) < pairs:
            self.workspace.counters = torch.zeros(pairs, dtype=torch.int64)
        if self.workspace.partial.numel() < partial * (value_channels + 2):
            self.workspace.partial = torch.empty(partial * (value_channels + 2))
        a[slots.NEXT_TASK], a[slots.SHARES_DONE] = 0, self.workspace.counters.data_ptr()
        a[slots.TASKS], a[slots.SHARES], a[slots.KV_HEADS] = pairs * shares, shares, kv_heads
        a[slots.QUERIES_PER_HEAD], a[slots.QUERIES], a[slots.ROW_CHUNKS] = rows // queries, queries, chunks
        a[slots.SCALING], a[slots.SOFTCAP] = _float_bits(scoring.scaling), _float_bits(scoring.softcap or 0.0)
        for slot, tensor in ((slots.QUERY, query), (slots.OUTPUT, output)):
            self._set_tensor(slot, tensor)
            a[slot + 3] = tensor.element_size() * tensor.stride(2)
        for slot, found in zip(FOUND_SLOTS, (run.log_sums, *(run.earlier or (None, None))), strict=True):
            a[slot] = 0 if found is None else found.data_ptr()
        mask = run.mask
        a[slots.MASK] = 0
        if mask is not None:
            mask = mask if mask.stride(3) == 1 else mask.contiguous()
            a[slots.MASK], a[slots.MASK_Q] = mask.data_ptr(), mask.stride(2)
            a[slots.MASK_B] = mask.stride(0) if len(mask) > 1 else 0
        logits = scoring.sink_logits
        logits = logits.to(torch.float32).contiguous() if logits is not None else None
        a[slots.SINK_LOGITS] = logits.data_ptr() if logits is not None else 0
        a[slots.PARTIAL_OUTPUT] = self.workspace.partial.data_ptr()
        a[slots.PARTIAL_SUMS] = a[slots.PARTIAL_OUTPUT] + 4 * partial * value_channels
        ranges = self._pieces(layer)
        if ranges:
            # Outputs, sums and largest scores of each pass, see `kept` in the kernel.
            kept = pairs * shares * chunks * pass_rows * (2 * value_channels + 2 * self.module.LANES)
            if self.workspace.states.numel() < kept:
                self.workspace.states = torch.empty(kept)
            a[slots.STATES] = self.workspace.states.data_ptr()
            readers = {name: layer.packed[name].pieces(ranges) for name in ("keys", "values")}
            for first, last in ranges:
                for name, first_slot in PACKED_SLOTS.items():
                    self._set_payload(next(readers[name]), first_slot, first)
                a[slots.NEXT_TASK], a[slots.PIECE_LAST] = 0, last - a[slots.FIRST_TILE]
                if last == layer.packed_blocks:
                    a[slots.PIECE_LAST] = tiles
                self.run(kernel.address, a[slots.SELF], threads)
                a[slots.PIECE_FIRST] = a[slots.PIECE_LAST]
            return
        self.run(kernel.address, a[slots.SELF], threads)

    def _pieces(self, layer: KVLayer) -> list[tuple[int, int]]:
        """Returns the ranges of packed blocks that are read one after the other, if a layer's blocks aren't here."""
        a = self.workspace.arguments
        if layer.shelf is None or not a[slots.PACKED_TILES]:
            return []
        first = a[slots.FIRST_TILE]
        return layer.packed["keys"].boundaries(first, layer.packed_blocks)

    def _compile(self, layer: KVLayer, rows: int) -> Any:
        """Returns the kernel for a layer."""
        (_, key_channels), (_, value_channels) = layer.shapes["keys"], layer.shapes["values"]
        form = self.module.KernelForm(
            rows=rows,
            key_channels=key_channels,
            value_channels=value_channels,
            tokens=layer.block_tokens or 64,
            dtype=DTYPES[layer.dtype],
            keys=self.form(layer.codecs.get("keys"), "keys", key_channels),
            values=self.form(layer.codecs.get("values"), "values", value_channels),
        )
        return self.module.compile_kernel(form)

    def set_layer(self, layer: KVLayer, visible: int) -> None:
        """Writes the arguments that describe what the layer holds."""
        a = self.workspace.arguments
        tokens = layer.block_tokens or 64
        recent, sinks = len(layer.recent), layer.num_sink_tokens if len(layer.sinks) else 0
        a[slots.VISIBLE], a[slots.TOTAL] = visible, layer.cumulative_length
        a[slots.FIRST_STORED], a[slots.PACKED_TOKENS] = layer.first_stored, layer.packed_tokens
        a[slots.FIRST_TILE] = max(0, visible - layer.first_stored) // tokens if layer.packed_blocks else 0
        a[slots.PACKED_TILES] = max(0, layer.packed_blocks - a[slots.FIRST_TILE])
        a[slots.RECENT_TOKENS], a[slots.RECENT_TILES] = recent, -(-recent // tokens)
        a[slots.SINK_TOKENS], a[slots.SINK_TILES] = sinks, -(-sinks // tokens)
        a[slots.LEAD_TOKENS], a[slots.LEAD_TILES] = layer.lead_tokens, -(-layer.lead_tokens // tokens)
        a[slots.FIRST_SLOT] = visible - layer.lead_tokens
        self.workspace.padding = torch.tensor(layer.padding.counts, dtype=torch.int64)
        a[slots.PADDING] = self.workspace.padding.data_ptr()
        self._set_tensor(slots.RECENT_KEYS, layer.recent.get("keys"))
        self._set_tensor(slots.RECENT_VALUES, layer.recent.get("values"))
        if sinks:
            self._set_tensor(slots.SINK_KEYS, layer.sinks.get("keys"))
            self._set_tensor(slots.SINK_VALUES, layer.sinks.get("values"))
        if layer.lead:
            self._set_tensor(slots.LEAD_KEYS, layer.lead["keys"])
            self._set_tensor(slots.LEAD_VALUES, layer.lead["values"])
        if layer.packed_blocks:
            self._set_packed(layer, "keys", slots.KEY_CODES, slots.KEY_ROTATION)
            self._set_packed(layer, "values", slots.VALUE_CODES, slots.VALUE_ROTATION)

    def _set_packed(self, layer: KVLayer, name: str, first: int, rotation: int) -> None:
        """Writes the arguments of packed keys or values from slot `first` on; offloaded payload follows in pieces."""
        store, a = layer.packed[name], self.workspace.arguments
        if layer.shelf is None:
            self._set_payload({field: store.get(field) for field in store.names}, first)
        codec = inner_codec(store.codec)
        if isinstance(codec, DualScaleCodec):
            a[first + 3 * len(FIELDS)] = _padded_levels(codec).data_ptr()
            a[slots.OCTAVES] = _octaves().data_ptr()
            # Where latents were rotated, their queries and outputs already are.
            matrix = None if isinstance(store.codec, LatentCodec) else codec.rotation(layer.shapes[name][1])
            a[rotation] = 0 if matrix is None else matrix.data_ptr()
        if isinstance(store.codec, RotaryMeanCodec):
            tables = kernel_tables(store.codec.turns, store.codec.block_tokens, layer.shapes[name][1], "cpu")
            self.workspace.turns = tables
            a[slots.KEY_TURN_CHANNELS], a[slots.KEY_TURNS] = (table.data_ptr() for table in tables)

    def _set_payload(self, fields: Packed, first: int, first_block: int = 0) -> None:
        """Writes where the blocks of a payload are, of which the first in memory is `first_block` of the layer."""
        places = {field: first + 3 * index for index, choices in enumerate(FIELDS) for field in choices}
        for field, tensor in fields.items():
            slot = MEAN_SLOTS[field] if field in MEAN_SLOTS else places[field]
            self._set_tensor(slot, tensor)
            self.workspace.arguments[slot] -= first_block * tensor.stride(2) * tensor.element_size()

    def _set_tensor(self, slot: int, tensor: torch.Tensor) -> None:
        """Writes a tensor's address and its strides over batch rows and heads."""
        item = tensor.element_size()
        a = self.workspace.arguments
        a[slot], a[slot + 1] = tensor.data_ptr(), item * tensor.stride(0)
        # A head that all share is found under any number.
        a[slot + 2] = item * tensor.stride(1) if tensor.shape[1] > 1 else 0


def _float_bits(number: float) -> int:
    """Returns a float32 as the lower half of a 64-bit integer."""
    return ctypes.c_int32.from_buffer(ctypes.c_float(number)).value & 0xFFFFFFFF


@cache
def _padded_levels(codec: DualScaleCodec) -> torch.Tensor:
    """Returns 16 float32 numbers, what codes of up to 4 bits stand for; zeros behind, or for wider codes."""
    levels = torch.zeros(16)
    if codec.nbits <= 4:
        levels[: 2**codec.nbits] = codec.level_table()
    return levels


@cache
def _octaves() -> torch.Tensor:
    """Returns the powers of two from 0 to 7 eighths, twice, then from 0 to 15 sixteenths, as float32 numbers."""
    eighths = torch.arange(16, dtype=torch.float64).remainder(8) / 8
    return torch.exp2(torch.cat([eighths, torch.arange(16, dtype=torch.float64) / 16])).float()
