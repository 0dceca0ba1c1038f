"""Time of one decode step's attention alone: packed layers against PyTorch's attention over dense states.

Layers hold random states of one shape. Each is read by the kernel that `use_fused_attention` would choose, and takes
turns with SDPA over dense keys and values in float32 and bfloat16 (grouped heads aren't repeated), if asked also with
SDPA in bfloat16 on a CPU without units for it (`sdpa-bfloat16-avx512`, see `kvplus_eval.held_sdpa`). A kernel is timed
only after its output was compared with the reference kernel's.

The `kernel` part of a row:

    batch, kv_heads, queries, head_dim, tokens   the shape; `queries` query heads share a KV head
    dtype, name                       of queries and unpacked states; the kernel's class, or `sdpa`
    ms, ms_fastest, ms_slowest        median and extremes over all rounds
    held_bytes, bytes_per_s           all bytes that the layer holds, and how many of them were read per second
    bandwidth_bytes_per_s, share      what the machine reads (CPU) or copies (GPU) per second, and the share of it
    error                             largest difference from the reference, relative to its largest value
    times_sdpa_float32, times_sdpa_bfloat16   how many times faster than SDPA over dense states of that dtype
    times_sdpa_bfloat16_avx512        the same, SDPA held to plain AVX-512; only where that was asked for
    instructions                      CPU: what dense products may use, see `kvplus_eval.held_sdpa`
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from functools import partial
from statistics import median

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

from hf_kvplus import build_cache
from hf_kvplus.attention.base import Kernel, Scoring
from hf_kvplus.attention.integration import make_kernel
from hf_kvplus.attention.reference import ReferenceKernel
from hf_kvplus.attention.triton import Launch, TritonKernel
from hf_kvplus.checks import require_at_least
from hf_kvplus.layer import KVLayer
from kvplus_eval import held_sdpa
from kvplus_eval.guards import RefusedError
from kvplus_eval.held_sdpa import HeldAttention, cpu_instructions
from kvplus_eval.outcome import Outcome
from kvplus_eval.results import SCHEMA, Row, device_facts, git_commit, library_versions
from kvplus_eval.timing import clock_ms, rotated

WARMUP_STEPS = 3
DENSE = {"sdpa-float32": torch.float32, "sdpa-bfloat16": torch.bfloat16}
# Largest error of a right kernel, relative to the largest output.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
BANDWIDTH_BYTES = 1 << 29


@dataclass(frozen=True)
class Shape:
    """What is attended to.

    Args:
        batch: Rows.
        kv_heads: KV heads.
        queries: Query heads that share a KV head.
        head_dim: Channels of a head.
        tokens: Length of the context.
    """

    batch: int = 1
    kv_heads: int = 8
    queries: int = 4
    head_dim: int = 128
    tokens: int = 32768

    def __post_init__(self) -> None:
        """Checks the numbers."""
        for name, value in asdict(self).items():
            require_at_least(name, value, 1)


def read_shape(text: str) -> Shape:
    """Reads a shape such as `"batch=8,tokens=4096"`; what isn't named has its default.

    Raises:
        ValueError: If a name is unknown or a value isn't a whole number.
    """
    known, given = [one.name for one in fields(Shape)], {}
    for piece in filter(None, text.split(",")):
        name, _, value = piece.partition("=")
        if name not in known or not value.isdigit():
            raise ValueError(f"`shape` must name numbers for {', '.join(known)}, as in tokens=4096, got {piece!r}")
        given[name] = int(value)
    return Shape(**given)


@dataclass
class Contestant:
    """One way to attend, and what was measured of it."""

    outcome: Outcome
    act: Callable[[], torch.Tensor] | None = None
    name: str = ""
    held_bytes: int = 0
    error: float = 0.0
    held: HeldAttention | None = None
    ms: list[float] = field(default_factory=list)


def run_kernel_bench(
    strategies: Sequence[str],
    shape: Shape,
    *,
    device: torch.device,
    dtype: torch.dtype,
    rounds: int = 30,
    launch: Launch | None = None,
    held: bool = False,
) -> list[Row]:
    """Times the attention of all strategies, and SDPA's, in turns.

    Args:
        strategies: Strategies of this package.
        shape: What is attended to.
        device: Where.
        dtype: Of queries and unpacked states.
        rounds: How often each is timed.
        launch: How the Triton kernels are launched, instead of their defaults.
        held: Whether SDPA in bfloat16 also takes part held to plain AVX-512, in a process of its own.

    Returns:
        A row for each strategy and for SDPA in both dtypes.

    Raises:
        ValueError: If `held` is asked for on another device than a CPU.
    """
    if held and device.type != "cpu":
        raise ValueError(f"`held` is about a CPU's instructions, this is {device}; leave it out")
    torch.manual_seed(0)
    names = (*strategies, *DENSE, *([held_sdpa.NAME] if held else ()))
    contestants = {name: Contestant(Outcome(name)) for name in names}
    kernel = make_kernel("auto", device) if launch is None else TritonKernel(launch)
    with torch.inference_mode():
        for name, one in contestants.items():
            if name == held_sdpa.NAME:
                one.outcome.attempt(partial(_prepare_held, one, shape))
                continue
            prepare = partial(_prepare_dense, one) if name in DENSE else partial(_prepare_layer, one, kernel=kernel)
            one.outcome.attempt(partial(prepare, shape=shape, device=device, dtype=DENSE.get(name, dtype)))
        bandwidth = measure_bandwidth(device)
        for number in range(WARMUP_STEPS + rounds):
            for name in rotated(list(contestants), number):
                one = contestants[name]
                one.outcome.attempt(partial(_time, one, device, counted=number >= WARMUP_STEPS))
    for one in contestants.values():
        if one.held is not None:
            one.held.close()
    facts = {**kernel_facts(device), "launch": asdict(launch) if launch else None}
    return [_row(facts, one, contestants, shape, dtype, bandwidth) for one in contestants.values()]


def kernel_facts(device: torch.device) -> Row:
    """Collects what all rows of a run share."""
    return {
        "schema": SCHEMA,
        "kind": "kernel-bench",
        "run": uuid.uuid4().hex[:12],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": library_versions(),
        "device": {**device_facts(device), "processes": 1},
        "git_commit": git_commit(),
    }


def make_layer(strategy: str, shape: Shape, *, device: torch.device, dtype: torch.dtype) -> KVLayer:
    """Returns a layer that holds random states.

    Raises:
        RefusedError: If the strategy's cache has no layer of this package.
    """
    config = LlamaConfig(
        num_hidden_layers=1,
        num_attention_heads=shape.kv_heads * shape.queries,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        hidden_size=shape.kv_heads * shape.queries * shape.head_dim,
    )
    layer = build_cache(strategy, config, max_length=shape.tokens).layers[0]
    if not isinstance(layer, KVLayer):
        raise RefusedError(f"{strategy} has no layers that can be read packed; take one of fp, int8, int4, ...")
    size = (shape.batch, shape.kv_heads, shape.tokens, shape.head_dim)
    layer.update(*(torch.randn(size, device=device, dtype=dtype) for _ in range(2)))
    return layer


def _query(shape: Shape, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Returns one random query a head."""
    return torch.randn(shape.batch, shape.kv_heads * shape.queries, 1, shape.head_dim, device=device, dtype=dtype)


def _prepare_layer(one: Contestant, *, kernel: Kernel, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
    """Fills a layer and checks its kernel."""
    layer = make_layer(one.outcome.strategy, shape, device=device, dtype=dtype)
    reason = kernel.refuses(layer)
    if reason:
        raise RefusedError(reason)
    query, scoring = _query(shape, device, dtype), Scoring(shape.head_dim**-0.5)
    one.act = partial(kernel.attend, layer, query, scoring, None, 0)
    one.name = type(kernel).__name__
    one.held_bytes = sum(store.used_bytes for store in (*layer.packed.values(), layer.sinks, layer.recent))
    truth = ReferenceKernel().attend(layer, query.float(), scoring, None, 0)
    one.error = ((one.act().float() - truth).abs().max() / truth.abs().max()).item()
    if not one.error <= TOLERANCES[dtype]:
        raise RefusedError(f"the kernel is off by {one.error:.2g} of the largest output; its time means nothing")


def _prepare_dense(one: Contestant, *, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
    """Makes dense states for SDPA."""
    size = (shape.batch, shape.kv_heads, shape.tokens, shape.head_dim)
    keys, values = (torch.randn(size, device=device, dtype=dtype) for _ in range(2))
    one.act = partial(scaled_dot_product_attention, _query(shape, device, dtype), keys, values, enable_gqa=True)
    one.name, one.held_bytes = "sdpa", keys.nbytes + values.nbytes


def _prepare_held(one: Contestant, shape: Shape) -> None:
    """Begins the process that is held to plain AVX-512."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        raise RefusedError(f"{held_sdpa.NAME} needs a CPU with AVX-512; leave it out here")
    one.held = HeldAttention(asdict(shape))
    one.name = "sdpa"
    one.held_bytes = 2 * 2 * shape.batch * shape.kv_heads * shape.tokens * shape.head_dim


def _time(one: Contestant, device: torch.device, *, counted: bool) -> None:
    """Attends once."""
    if one.held is not None:
        took_ms = one.held.step_ms()
    else:
        began = clock_ms(device)
        one.act()
        took_ms = clock_ms(device) - began
    if counted:
        one.ms.append(took_ms)


def measure_bandwidth(device: torch.device) -> float:
    """Returns bytes per second: of reading on a CPU, as fast as all threads sum numbers, of copying on a GPU."""
    source = torch.ones(BANDWIDTH_BYTES // 8, dtype=torch.int64, device=device)
    target = torch.empty_like(source) if device.type == "cuda" else source
    actions = (
        [partial(target.copy_, source)] if device.type == "cuda" else [source.sum, source.view(torch.float32).sum]
    )
    best = 0.0
    for action in actions:
        times = []
        for _ in range(6):
            began = clock_ms(device)
            action()
            times.append(clock_ms(device) - began)
        moved = source.nbytes * (2 if device.type == "cuda" else 1)
        best = max(best, moved / median(times[1:]) * 1000)
    return best


def _row(
    facts: Row,
    one: Contestant,
    contestants: dict[str, Contestant],
    shape: Shape,
    dtype: torch.dtype,
    bandwidth: float,
) -> Row:
    """Makes the row of one way to attend."""
    held = one.outcome.strategy == held_sdpa.NAME
    chosen = torch.bfloat16 if held else DENSE.get(one.outcome.strategy, dtype)
    kernel: Row = {**asdict(shape), "dtype": str(chosen).removeprefix("torch."), "name": one.name}
    if facts["device"]["type"] == "cpu":
        kernel["instructions"] = one.held.instructions if one.held is not None else cpu_instructions()
    if one.outcome.status == "ok":
        typical_ms = median(one.ms)
        rate = one.held_bytes / typical_ms * 1000
        kernel.update(
            {
                "ms": typical_ms,
                "ms_fastest": min(one.ms),
                "ms_slowest": max(one.ms),
                "held_bytes": one.held_bytes,
                "bytes_per_s": rate,
                "bandwidth_bytes_per_s": bandwidth,
                "share": rate / bandwidth,
                "error": one.error,
            }
        )
        for name in (*DENSE, held_sdpa.NAME):
            if name in contestants:
                other = contestants[name]
                known = other.outcome.status == "ok"
                kernel[f"times_{name.replace('-', '_')}"] = median(other.ms) / typical_ms if known else None
    return {**facts, **one.outcome.facts(), "kernel": kernel}


def kernel_table(rows: Sequence[Row]) -> Table:
    """Makes the comparison, one line for each way to attend."""
    shape = rows[0]["kernel"]
    title = (
        f"Attention of one token: batch {shape['batch']}, {shape['kv_heads']} x {shape['queries']} heads of "
        f"{shape['head_dim']}, {shape['tokens']} tokens"
    )
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("strategy", no_wrap=True)
    held = any(row["strategy"] == held_sdpa.NAME for row in rows)
    heads = [
        "ms",
        "GB/s",
        "of bandwidth",
        "x SDPA fp32",
        "x SDPA bf16",
        *(["x bf16 AVX-512"] if held else []),
        "error",
    ]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        kernel = row["kernel"]
        if row["status"] != "ok":
            table.add_row(row["strategy"], row["status"], *["-"] * (len(heads) - 1), style="dim")
            continue
        ratios = [kernel["times_sdpa_float32"], kernel["times_sdpa_bfloat16"]]
        ratios += [kernel["times_sdpa_bfloat16_avx512"]] if held else []
        table.add_row(
            row["strategy"],
            f"{kernel['ms']:.3f}",
            f"{kernel['bytes_per_s'] / 1e9:.1f}",
            f"{kernel['share']:.0%}",
            *("-" if ratio is None else f"{ratio:.1f}" for ratio in ratios),
            f"{kernel['error']:.1e}",
        )
    return table


def kernel_summary(rows: Sequence[Row]) -> str:
    """Returns the last line of `kvplus bench --kernels`: one JSON object with every figure."""
    return json.dumps(
        {
            "schema": SCHEMA,
            "kind": "kernel-bench-summary",
            "run": rows[0]["run"],
            "strategies": [
                {name: row[name] for name in ("strategy", "status", "reason")} | row["kernel"] for row in rows
            ],
        }
    )
