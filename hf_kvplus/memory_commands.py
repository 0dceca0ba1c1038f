"""The commands `memory` (estimate, recommend) and `report` (results into documents)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import PretrainedConfig

from hf_kvplus.compute import decode_cost, generation_cost
from hf_kvplus.devices import DATA_SHEETS, HERE, Device, find_device
from hf_kvplus.estimate import MemoryEstimate, estimate_memory
from hf_kvplus.loading import ALIASES, load_config
from hf_kvplus.model_card import FORMATS, MemoryReport, update_card
from hf_kvplus.probe import profile_model
from hf_kvplus.recommend import HEADROOM, Recommendation, recommend
from hf_kvplus.strategies.grammar import split_list
from hf_kvplus.units import MISSING, format_bytes, format_count, format_number, parse_bytes, parse_tokens

DEFAULT_STRATEGIES = "dynamic,int8,k8v4,int4,int2"
COUNTED_TOKENS = 1024
ESTIMATED_CONTEXTS = "8k,32k"
DEVICES = ", ".join((HERE, *DATA_SHEETS))

ModelName = Annotated[
    str, typer.Argument(help=f"Alias ({', '.join(ALIASES)}), hub id, folder, .gguf file, or a config as a JSON file.")
]


def memory(
    model: ModelName = "smollm2-135m",
    context: Annotated[str, typer.Option(help="Tokens, comma-separated: 8k,32k,128k.")] = "8k,32k,128k",
    batch: Annotated[str, typer.Option(help="Rows, comma-separated.")] = "1",
    strategies: Annotated[str, typer.Option(help="Comma-separated strategies.")] = DEFAULT_STRATEGIES,
    dtype: Annotated[str, typer.Option(help="auto (the config's), float32, float16 or bfloat16.")] = "auto",
    beams: Annotated[int, typer.Option(min=1, help="Beams of each row.")] = 1,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Devices that share each layer's heads.")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="Devices that share the layers, as device_map does.")] = 1,
    devices: Annotated[str, typer.Option(help=f"Devices to fit on, comma-separated: {DEVICES}.")] = "",
    layers: Annotated[bool, typer.Option(help="Also tell the bytes of each kind of layer.")] = False,
    compute: Annotated[bool, typer.Option(help="Also tell operations, bytes read and the least time.")] = False,
    recommended: Annotated[bool, typer.Option("--recommend", help="Recommend a strategy.")] = False,
    budget: Annotated[str, typer.Option(help="What the cache may take, for --recommend: 64MiB.")] = "",
    max_kl: Annotated[float | None, typer.Option(help="Largest KL in nats, for --recommend.")] = None,
    recent: Annotated[str, typer.Option(help="Only so many recent tokens matter, for --recommend.")] = "",
    results: Annotated[Path | None, typer.Option(help="results.jsonl with measured losses.")] = None,
) -> None:
    """Tell what caches of a model take, from its config alone, and which one to use."""
    for_tables = {
        "strategies": strategies != DEFAULT_STRATEGIES,
        "tensor-parallel": tensor_parallel > 1,
        "pipeline": pipeline > 1,
        "layers": layers,
        "compute": compute,
    }
    for_advice = {"budget": budget, "max-kl": max_kl is not None, "recent": recent, "results": results}
    _require_fitting(for_tables if recommended else for_advice, recommended=recommended)
    config = load_config(model)
    kind = None if dtype == "auto" else dtype
    lengths = [parse_tokens(text) for text in context.split(",")]
    found = [find_device(name.strip()) for name in devices.split(",") if name.strip()]
    if recommended and len(found) > 1:
        raise ValueError(f"`devices` must name one device with --recommend, got {devices!r}; ask once for each")
    console = Console()
    if recommended:
        options = {
            "budget_bytes": parse_bytes(budget) if budget else None,
            "max_kl": max_kl,
            "device": found[0] if found else None,
            "dtype": kind,
            "results": read_results(results) if results else (),
            "recent_tokens": parse_tokens(recent) if recent else None,
        }
        for length in lengths:
            for rows in _integers("batch", batch):
                _tell_recommendation(console, recommend(config, length, batch_size=rows * beams, **options))
        return
    facts = []
    for rows in _integers("batch", batch):
        grid = [
            [
                estimate_memory(config, length, rows, name, kind, num_beams=beams, tensor_parallel=tensor_parallel)
                for length in lengths
            ]
            for name in split_list(strategies)
        ]
        console.print(_title(model, grid, pipeline), soft_wrap=True, markup=False, highlight=False)
        console.print(_bytes_table(grid, pipeline))
        _tell_fits(console, grid, found, pipeline)
        if layers:
            console.print(_layers_table([line[-1] for line in grid]))
        facts += [_facts(estimate) for line in grid for estimate in line]
        if compute:
            console.print(_compute_table(config, grid, found or [find_device("here")]))
    if compute:
        cost = generation_cost(config, COUNTED_TOKENS)
        console.print(
            f"generating {COUNTED_TOKENS} tokens: {cost.cached_flops:.2e} operations with a cache, "
            f"{cost.uncached_flops:.2e} without ({cost.speedup:.0f} times)"
        )
    typer.echo(json.dumps({"model": model, "parameters": profile_model(config).parameters, "estimates": facts}))


def _require_fitting(options: dict[str, Any], *, recommended: bool) -> None:
    """Checks that no option was given that would do nothing.

    Raises:
        ValueError: If one was.
    """
    for name in (name for name, given in options.items() if given):
        if recommended:
            raise ValueError(f"`{name}` does nothing with --recommend; leave out one of the two")
        raise ValueError(f"`{name}` is a wish for --recommend; add that, or leave it out")


def report(
    results: Annotated[list[Path], typer.Option(help="results.jsonl; repeat it for more.")],
    model_card: Annotated[Path | None, typer.Option(help="Model card to write a section into.")] = None,
    output_format: Annotated[str, typer.Option("--format", help=f"Print as {', '.join(FORMATS)}.")] = "markdown",
    model: Annotated[str, typer.Option(help="Model whose estimates are added, marked as such.")] = "",
    context: Annotated[str, typer.Option(help="Context lengths of these estimates.")] = ESTIMATED_CONTEXTS,
    push: Annotated[str, typer.Option(help="Hub repository that the card is uploaded to.")] = "",
) -> None:
    """Turn measured rows into a section of a model card, or print them."""
    if model_card is not None and output_format != "markdown":
        raise ValueError(f"`format` is for printing, and a card is Markdown, got {output_format!r}; leave it out")
    if context != ESTIMATED_CONTEXTS and not model:
        raise ValueError(f"`context` is for the estimates of a model, got {context!r}; name it with --model")
    if model and output_format in ("csv", "latex"):
        raise ValueError(f"`model` adds estimates, which {output_format} has no place for; print markdown or json")
    if push and model_card is None:
        raise ValueError("`push` uploads a card; name it with --model-card")
    rows = [row for path in results for row in read_results(path)]
    made = MemoryReport.from_rows(rows)
    if model:
        lengths = [parse_tokens(text) for text in context.split(",")]
        made = made.with_estimates(load_config(model), lengths)
    if model_card is None:
        typer.echo(made.render(output_format), nl=False)
        return
    changed = update_card(model_card, made)
    typer.echo(f"{model_card}: {'updated' if changed else 'up to date'}", err=True)
    if push:
        typer.echo(made.push(model_card, push))


def read_results(path: Path) -> list[dict[str, Any]]:
    """Reads rows of an evaluation.

    Raises:
        ValueError: If a line isn't a row.
        FileNotFoundError: If there is no such file.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"`{path}`, line {number} isn't JSON: {error}") from None
        if not isinstance(row, dict) or not str(row.get("schema", "")).startswith("kvplus-eval/"):
            raise ValueError(f"`{path}`, line {number} isn't a row of `kvplus eval`")
        rows.append(row)
    return [row for row in rows if row["kind"] == "eval"]


def _integers(name: str, text: str) -> list[int]:
    """Reads comma-separated integers."""
    try:
        return [int(piece) for piece in text.split(",")]
    except ValueError:
        raise ValueError(f"`{name}` must be integers separated by commas, got {text!r}") from None


def _largest_share(estimate: MemoryEstimate, pipeline: int) -> int:
    """Returns the bytes on the fullest of `pipeline` devices that share the layers in equal runs.

    Raises:
        ValueError: If blocks are elsewhere.
    """
    if pipeline == 1:
        return estimate.device_bytes
    if estimate.tier is not None:
        raise ValueError(f"`pipeline` isn't told for `{estimate.strategy}`, whose blocks leave the devices")
    count = estimate.decoder_layers
    device_map = {layer: str(layer * pipeline // count) for layer in range(count)}
    return max(estimate.by_device(device_map).values())


def _title(model: str, grid: list[list[MemoryEstimate]], pipeline: int) -> str:
    """Says what the figures of a table are."""
    first = grid[0][0]
    shares = "" if pipeline == 1 else f", fullest of {pipeline} devices"
    shares += ", of offloaded ones what stays on the device" if any(line[0].tier for line in grid) else ""
    dtype = str(first.dtype).removeprefix("torch.")
    weights = f"weights {format_bytes(first.weight_bytes)}"
    return f"{model}: cache of {format_count(first.batch_size, 'row')}, {dtype}{shares}; {weights}"


def _bytes_table(grid: list[list[MemoryEstimate]], pipeline: int) -> Table:
    """Shows the bytes of each strategy at each length."""
    table = Table()
    table.add_column("strategy", no_wrap=True)
    for estimate in grid[0]:
        table.add_column(f"{estimate.seq_len} tokens", justify="right")
    table.add_column("a token", justify="right")
    for line in grid:
        sizes = [format_bytes(_largest_share(estimate, pipeline)) for estimate in line]
        table.add_row(line[0].strategy, *sizes, format_bytes(line[-1].bytes_per_token))
    return table


def _tell_fits(console: Console, grid: list[list[MemoryEstimate]], devices: Sequence[Device], pipeline: int) -> None:
    """Tells for each device which strategies fit beside the weights."""
    for device in devices:
        usable = device.memory_bytes * (1 - HEADROOM)
        words = []
        for column, first in enumerate(grid[0]):
            weights = first.weight_bytes // pipeline
            fitting = [
                line[column].strategy for line in grid if weights + _largest_share(line[column], pipeline) <= usable
            ]
            words.append(f"{first.seq_len} tokens: {', '.join(fitting) or 'none'}")
        console.print(f"{device.name} ({format_bytes(device.memory_bytes)}) holds {'; '.join(words)}", soft_wrap=True)


def _layers_table(estimates: Sequence[MemoryEstimate]) -> Table:
    """Shows how many layers of each kind there are and what one of them holds."""
    table = Table(title=f"Layers at {estimates[0].seq_len} tokens", title_justify="left")
    table.add_column("strategy", no_wrap=True)
    table.add_column("layers", justify="right")
    table.add_column("each stores", overflow="fold")
    for name in ("tokens seen", "bytes of one"):
        table.add_column(name, justify="right")
    for estimate in estimates:
        name = estimate.strategy
        for layer, count in Counter(estimate.layers).items():
            seen = str(layer.visible_tokens or MISSING)
            table.add_row(name, str(count), escape(layer.kind), seen, format_bytes(layer.total_bytes))
            name = ""
    return table


def _compute_table(config: PretrainedConfig, grid: list[list[MemoryEstimate]], devices: Sequence[Device]) -> Table:
    """Shows what one decoded token costs at the longest context."""
    table = Table(title=f"One decoded token at {grid[0][-1].seq_len} tokens, at best", title_justify="left")
    for name in ("strategy", "device", "operations", "read", "operations a byte", "ms", "bound by"):
        table.add_column(name, justify="left" if name in ("strategy", "device", "bound by") else "right")
    for line in grid:
        for device in devices:
            cost = decode_cost(config, line[-1], device)
            bound = "memory" if cost.memory_bound else "compute"
            name = f"{device.name} (measured)" if device.measured else device.name
            figures = f"{cost.flops:.2e}", format_bytes(cost.bytes_read), format_number(cost.intensity)
            table.add_row(line[0].strategy, name, *figures, format_number(cost.floor_ms), bound)
    return table


def _facts(estimate: MemoryEstimate) -> dict[str, Any]:
    """Returns an estimate as plain values."""
    return {
        "strategy": estimate.strategy,
        "seq_len": estimate.seq_len,
        "batch_size": estimate.batch_size,
        "dtype": str(estimate.dtype).removeprefix("torch."),
        "cache_bytes": estimate.cache_bytes,
        "device_bytes": estimate.device_bytes,
        "host_bytes": estimate.host_bytes,
        "disk_bytes": estimate.disk_bytes,
        "weight_bytes": estimate.weight_bytes,
    }


def _tell_recommendation(console: Console, found: Recommendation) -> None:
    """Prints what to use, why, and the lines to paste."""
    for reason in found.reasons:
        console.print(reason, soft_wrap=True, markup=False, highlight=False)
    if found.code:
        console.print()
        console.print(found.code, soft_wrap=True, markup=False, highlight=False)
