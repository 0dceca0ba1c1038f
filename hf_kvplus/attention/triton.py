"""Attention on a GPU: hands a layer's buffers to the Triton kernels.

Three launches: packed blocks, unpacked states, and the sum of what their programs found. Triton comes with PyTorch for
CUDA and ROCm, so there is no extra to install; it is imported when a kernel is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from types import ModuleType
from typing import Any

import torch

from hf_kvplus.attention.base import Scoring, heads_per_group
from hf_kvplus.attention.latents import has_latents, inner_codec, stored_shape
from hf_kvplus.codecs import Codec
from hf_kvplus.codecs.affine import PER_CHANNEL, PER_TOKEN, AffineCodec
from hf_kvplus.codecs.dual_scale import DualScaleCodec
from hf_kvplus.codecs.identity import IdentityCodec
from hf_kvplus.codecs.levels import UNIFORM
from hf_kvplus.codecs.rotary_mean import RotaryMeanCodec, without_means
from hf_kvplus.codecs.turns import kernel_tables
from hf_kvplus.layer import KVLayer

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_CHANNELS = 256
MOST_BLOCK_TOKENS = 128
# Levels of a table that lie on a polynomial with four coefficients.
MOST_CURVED_BITS = 3
STATE_TOKENS = 64
# Blocks that a program reads at least, tiles of unpacked states likewise.
LEAST_BLOCKS, LEAST_TILES = 4, 4
FIELDS = {
    "dual": ("codes", "channel_scale", "token_scale", "mean", "mean_scale"),
    "affine": ("codes", "scale", "zero_point"),
    "states": ("states",),
}


def import_kernels() -> ModuleType:
    """Returns the module with the kernels.

    Raises:
        ImportError: If Triton is missing.
    """
    try:
        from hf_kvplus.attention import triton_kernels
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        raise ImportError(
            "fused attention on a GPU needs Triton, which PyTorch for Linux brings along; install it with "
            "`pip install triton`, or leave out `use_fused_attention`"
        ) from error
    return triton_kernels


@dataclass(frozen=True)
class Launch:
    """How the kernels are launched; results don't depend on it.

    Args:
        warps: Warps of a program; by default as many as hold everything in registers.
        stages: Blocks that are on their way at a time.
        programs_per_processor: Programs that a batch is at most divided into, for each multiprocessor.
        assembly: Whether codes are converted by PTX instructions where the device has them.
        processors: Multiprocessors; `None` asks the device.
    """

    warps: int | None = None
    stages: int = 3
    programs_per_processor: int = 4
    assembly: bool = True
    processors: int | None = None


class TritonKernel:
    """Attends on a GPU.

    Args:
        launch: How the kernels are launched.
    """

    def __init__(self, launch: Launch | None = None) -> None:
        self.module = import_kernels()
        self.launch = launch or Launch()
        from hf_kvplus.attention.triton_encoder import TritonEncoder
        from hf_kvplus.attention.triton_latents import LatentReader
        from hf_kvplus.attention.triton_mover import TritonMover

        self.encoder, self.mover = TritonEncoder(), TritonMover()
        self.latents = LatentReader()

    def refuses(self, layer: KVLayer) -> str | None:
        """Returns why this kernel can't read `layer`, or `None` if it can."""
        if layer.device.type != "cuda" and not interprets(self.module.combine):
            return f"the Triton kernel can't read a cache on {layer.device}"
        if layer.dtype not in DTYPES:
            return f"the Triton kernel doesn't read {layer.dtype}"
        if has_latents(layer):
            return self.latents.refuses(layer)
        for name, (_, channels) in layer.shapes.items():
            if channels > MOST_CHANNELS:
                return f"the Triton kernel takes head sizes up to {MOST_CHANNELS}, got {channels}"
            codec = layer.codecs.get(name)
            if codec is not None and packed_form(codec, name, channels) is None:
                return f"the Triton kernel doesn't read {name} in {codec.describe()} with a head size of {channels}"
        if layer.block_tokens > MOST_BLOCK_TOKENS:
            return f"the Triton kernel takes blocks of up to {MOST_BLOCK_TOKENS} tokens, got {layer.block_tokens}"
        return None

    def attend(
        self, layer: KVLayer, query: torch.Tensor, scoring: Scoring, mask: torch.Tensor | None, visible: int
    ) -> torch.Tensor:
        """Attends; see `Kernel.attend`."""
        # Triton launches on the current device, which needn't be this layer's.
        with torch.cuda.device_of(query):
            call = Call(self.module, self.launch, layer, query, scoring, mask, visible)
            return self.latents.attend(call, mask) if has_latents(layer) else call.run()


class Call:
    """One call of the kernels; arguments as of `Kernel.attend`."""

    def __init__(
        self,
        module: ModuleType,
        launch: Launch,
        layer: KVLayer,
        query: torch.Tensor,
        scoring: Scoring,
        mask: torch.Tensor | None,
        visible: int,
    ) -> None:
        self.module, self.launch, self.layer = module, launch, layer
        self.query = query if query.stride(3) == 1 else query.contiguous()
        self.batch, self.heads, self.queries, _ = query.shape
        self.group = heads_per_group(layer, query)
        self.scoring, self.visible = scoring, visible
        self.kv_heads, self.key_channels = layer.shapes["keys"]
        self.value_channels = layer.shapes["values"][1]
        self.rows = self.queries * self.group
        channels = max(self.key_channels, self.value_channels)
        self.row_tile = 16 if channels > 128 else min(32, max(16, power_of_two(self.rows)))
        curved = any(level_curve(inner_codec(codec))[1] for codec in layer.codecs.values())
        more = curved or isinstance(layer.codecs.get("keys"), RotaryMeanCodec)
        self.warps = warps_for(layer.dtype, self.row_tile, channels, more)
        self.chunks = -(-self.rows // self.row_tile)
        self.sinks = layer.num_sink_tokens if len(layer.sinks) else 0
        self.first_block = max(0, visible - layer.first_stored) // layer.block_tokens if layer.packed_blocks else 0
        self.blocks = layer.packed_blocks
        self.mask = None if mask is None else mask.view(torch.uint8) if mask.stride(3) == 1 else mask.to(torch.uint8)
        tiles = -(-len(layer.recent) // STATE_TOKENS) - max(0, visible - layer.packed_tokens) // STATE_TOKENS
        tiles += -(-self.sinks // STATE_TOKENS) - (-layer.lead_tokens // STATE_TOKENS)
        lines, blocks = self.batch * self.kv_heads * self.chunks, max(0, self.blocks - self.first_block)
        self.blocks_per_share, self.packed_shares = self.divide(blocks, LEAST_BLOCKS, lines)
        self.tiles_per_share, self.state_shares = self.divide(tiles, LEAST_TILES, lines)
        self.parts = self.packed_shares + self.state_shares
        self.assembly = launch.assembly and layer.device.type == "cuda" and torch.version.hip is None

    def divide(self, count: int, least: int, lines: int) -> tuple[int, int]:
        """Returns how many blocks or tiles a program takes, and how many programs that makes, for each of `lines`."""
        programs = self.launch.programs_per_processor * processors(self.launch, self.layer.device)
        wanted = max(1, programs // lines)
        per_share = max(least, -(-count // wanted))
        return per_share, -(-count // per_share)

    def run(self) -> torch.Tensor:
        """Launches the kernels and returns the output."""
        query, layer = self.query, self.layer
        parts = self.batch * self.kv_heads * self.chunks * self.parts * self.row_tile
        room = query.new_empty(parts * (self.value_channels + 2), dtype=torch.float32)
        output = query.new_empty(self.batch, self.queries, self.heads, self.value_channels)
        self.found = room[2 * parts :], room[:parts], room[parts : 2 * parts]
        self.padding = padding_counts(tuple(layer.padding.counts), layer.device)
        if self.packed_shares:
            self._attend_packed()
        self.attend_states()
        codec = layer.codecs.get("values")
        rotation = rotation_of(codec, self.value_channels, layer.device) if self.packed_shares else None
        logits = self.scoring.sink_logits
        self.module.combine[(self.rows, self.batch * self.kv_heads)](
            *self.found, output, self.padding if rotation is None else rotation,
            self.padding if logits is None else logits.contiguous(),
            self.kv_heads, self.group, self.queries, self.parts, self.state_shares,
            HAS_ROTATION=rotation is not None, HAS_SINK_LOGITS=logits is not None,
            CHANNELS=self.value_channels, CHANNELS_PAD=power_of_two(self.value_channels),
            ROWS=self.row_tile, STEP=16, COLUMNS=32, num_warps=4,
        )  # fmt: skip
        return output

    def _attend_packed(self) -> None:
        """Launches the kernel for packed blocks."""
        layer, query = self.layer, self.query
        rotation = rotation_of(layer.codecs["keys"], self.key_channels, layer.device)
        if rotation is not None:
            query = query.float() @ rotation
        forms = {name: packed_form(layer.codecs[name], name, layer.shapes[name][1]) for name in ("keys", "values")}
        single = layer.dtype == torch.float32
        options = {
            f"{side}_{field.upper()}": value
            for side, name in (("KEY", "keys"), ("VALUE", "values"))
            for field, value in forms[name].items()
        }
        operands = {
            f"{side}_OPERAND": self.operand(forms[name]["kind"] == "states")
            for side, name in (("KEY", "keys"), ("VALUE", "values"))
        }
        self.module.attend_packed[(self.packed_shares, self.batch * self.kv_heads, self.chunks)](
            query, *query.stride()[:3],
            *packed_tensors(layer, "keys", self.padding), *packed_tensors(layer, "values", self.padding),
            self.query, *self.query.stride()[:3], *mean_tensors(layer, self.padding),
            *self.mask_arguments(), self.padding, *self.found,
            self.scoring.scaling, self.scoring.softcap or 0.0,
            self.kv_heads, self.group, self.queries, self.sinks,
            self.blocks, self.first_block, self.visible, layer.first_stored, layer.packed_tokens,
            layer.cumulative_length, self.blocks_per_share, self.parts,
            **options, **operands, **self.common(single), **self._parts(forms),
            KEY_MEANS=getattr(layer.codecs["keys"], "means", 0), ASSEMBLY=self.assembly,
        )  # fmt: skip

    def _parts(self, forms: dict[str, Any]) -> dict[str, int]:
        """Returns in which order tokens and the values' channels are unpacked."""
        tokens = parts_of(self.layer.block_tokens, forms["keys"]["nbits"])
        channels = parts_of(self.value_channels, forms["values"]["nbits"])
        return {
            "TOKENS": self.layer.block_tokens,
            **dict(zip(("TOKEN_PART", "TOKEN_PART_PAD", "TOKENS_PAD"), tokens, strict=True)),
            **dict(zip(("VALUE_PART", "VALUE_PART_PAD", "VALUE_PAD"), channels, strict=True)),
        }

    def attend_states(self) -> None:
        """Launches the kernel for recent tokens, sinks, and what stands before a window."""
        layer, query = self.layer, self.query
        recent, sinks = (
            (store.get("keys"), store.get("values"), store.capacity) if len(store) else (query, query, 0)
            for store in (layer.recent, layer.sinks)
        )
        lead = [layer.lead[name].contiguous() for name in ("keys", "values")] if layer.lead else [query, query]
        self.module.attend_states[(self.state_shares, self.batch * self.kv_heads, self.chunks)](
            query, *query.stride()[:3], *recent, *sinks, *lead, layer.lead_tokens,
            *self.mask_arguments(leading=True), self.padding, *self.found,
            self.scoring.scaling, self.scoring.softcap or 0.0,
            self.kv_heads, self.group, self.queries, self.sinks,
            self.visible, layer.packed_tokens, layer.cumulative_length,
            self.tiles_per_share, self.parts, self.state_shares,
            **self.common(layer.dtype == torch.float32), OPERAND=self.operand(states=True), TOKENS_PAD=STATE_TOKENS,
            VALUE_PAD=max(16, power_of_two(self.value_channels)),
        )  # fmt: skip

    def common(self, single: bool) -> dict[str, Any]:
        """Returns the options that both kernels take."""
        return {
            "HAS_MASK": self.mask is not None,
            "HAS_SOFTCAP": bool(self.scoring.softcap),
            "PRECISION": "tf32" if not single else "ieee" if torch.version.hip else "tf32x3",
            "KEY_CHANNELS": self.key_channels,
            "KEY_PAD": max(16, power_of_two(self.key_channels)),
            "VALUE_CHANNELS": self.value_channels,
            "ROWS": self.row_tile,
            "num_warps": self.launch.warps or self.warps,
            "num_stages": self.launch.stages,
        }

    def operand(self, states: bool) -> Any:
        """Returns the dtype of what tensor cores multiply."""
        # Triton's interpreter multiplies the bits of bfloat16 numbers as integers.
        bits = torch.float32 if states and interprets(self.module.combine) else self.layer.dtype
        return operand(bits, states)

    def mask_arguments(self, leading: bool = False) -> tuple[Any, int, int]:
        """Returns the mask and its strides over batch rows and queries; `leading`: with the slots before a window."""
        if self.mask is None:
            return self.found[0], 0, 0
        mask = self.mask if leading else self.mask[..., self.layer.lead_tokens :]
        return mask, mask.stride(0) if len(mask) > 1 else 0, mask.stride(2)


def warps_for(dtype: torch.dtype, row_tile: int, channels: int, more: bool = False) -> int:
    """Returns the warps with which nothing is spilled, as compiled for compute capability 8.0 and 9.0.

    Float32 states of more than 128 channels spill a few registers with any number.

    Args:
        dtype: Of states.
        row_tile: Query vectors of a program.
        channels: The most channels of keys and values.
        more: Whether levels of packed states come from a table, or keys have turning means.
    """
    small = row_tile == 16 and channels <= 128 and dtype != torch.float32 and not more
    return 4 if small else 8


def operand(dtype: torch.dtype, states: bool) -> Any:
    """Returns the Triton dtype of what tensor cores multiply: that of states, or half precision for codes."""
    import triton.language as tl

    if dtype == torch.float32:
        return tl.float32
    return tl.bfloat16 if states and dtype == torch.bfloat16 else tl.float16


def packed_form(codec: Codec, name: str, channels: int) -> dict[str, Any] | None:
    """Returns how the kernels read blocks of `codec`, or `None` if they can't.

    Args:
        codec: The codec.
        name: `"keys"` or `"values"`.
        channels: Channels per head.
    """
    form = {"kind": "states", "nbits": 16, "token_scale": False, "curved": False, "group": 1}
    codec = without_means(codec) if name == "keys" else codec
    if isinstance(codec, IdentityCodec):
        return form
    axis = PER_CHANNEL if name == "keys" else PER_TOKEN
    line = codec.block_tokens if name == "keys" else channels
    if not isinstance(codec, (AffineCodec, DualScaleCodec)) or codec.axis != axis or line % 8:
        return None
    if isinstance(codec, AffineCodec):
        return {**form, "kind": "affine", "nbits": codec.nbits, "group": codec.group_length(channels)}
    if codec.levels != UNIFORM and codec.nbits > MOST_CURVED_BITS:
        return None
    dual = {"kind": "dual", "nbits": codec.nbits, "token_scale": codec.iterations > 0}
    return {**form, **dual, "curved": codec.levels != UNIFORM}


def parts_of(length: int, nbits: int) -> tuple[int, int, int]:
    """Returns how a line of codes is unpacked: codes of a part, their padded number, and that of the whole line."""
    parts = {"8": 1, "16": 1}.get(str(nbits), 2 if nbits >= 4 else 4)
    size = length // parts
    padded = max(16 // parts, power_of_two(size))
    return size, padded, parts * padded


@cache
def level_curve(codec: Codec) -> tuple[float, float, float, float]:
    """Returns the odd polynomial, from the first power on, that maps centred codes to a symmetric table of levels."""
    if not isinstance(codec, DualScaleCodec) or codec.levels == UNIFORM:
        return 1.0, 0.0, 0.0, 0.0
    levels = codec.level_table().double()
    numbers = torch.arange(len(levels), dtype=torch.float64) - (len(levels) - 1) / 2
    upper = slice(len(levels) // 2, None)
    powers = numbers[upper, None] ** (2 * torch.arange(len(levels) // 2) + 1)
    found = torch.linalg.solve(powers, levels[upper]).tolist()
    return tuple(found + [0.0] * (4 - len(found)))


def packed_tensors(layer: KVLayer, name: str, absent: torch.Tensor) -> tuple[Any, ...]:
    """Returns a payload's tensors in the order of the kernel's arguments, and how many blocks a head has room for."""
    store = layer.packed[name]
    codec = inner_codec(store.codec)
    kind = packed_form(codec, name, stored_shape(layer, name)[1])["kind"]
    found = [store.get(field) if field in store.names else absent for field in FIELDS[kind]]
    found += [absent] * (5 - len(found))
    return *found, *level_curve(codec), store.capacity


def mean_tensors(layer: KVLayer, absent: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the turning means of packed keys: pairs, means, their cosines and sines, their channels."""
    codec, store = layer.codecs["keys"], layer.packed["keys"]
    if not isinstance(codec, RotaryMeanCodec):
        return (absent,) * 4
    channels, turns = kernel_tables(codec.turns, codec.block_tokens, layer.shapes["keys"][1], str(layer.device))
    return store.get("rotary_pair"), store.get("rotary_mean"), turns, channels


def rotation_of(codec: Codec | None, channels: int, device: torch.device) -> torch.Tensor | None:
    """Returns the rotation of packed states, if there is one."""
    codec = without_means(codec)
    return codec.rotation(channels, device) if isinstance(codec, DualScaleCodec) else None


@lru_cache(maxsize=64)
def padding_counts(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Returns the padding of each row on the device; kept, so that a step doesn't wait for a copy."""
    return torch.tensor(counts, dtype=torch.int32, device=device)


@lru_cache(maxsize=16)
def device_processors(device: torch.device) -> int:
    """Returns the multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def processors(launch: Launch, device: torch.device) -> int:
    """Returns the multiprocessors to fill."""
    if launch.processors is not None:
        return launch.processors
    return device_processors(device) if device.type == "cuda" else 4


def interprets(kernel: Any) -> bool:
    """Whether Triton runs a kernel in its interpreter, on CPU tensors (for tests)."""
    return type(kernel).__name__ == "InterpretedFunction"


def power_of_two(number: int) -> int:
    """Returns the smallest power of two that isn't below `number`."""
    return 1 << max(0, number - 1).bit_length()
