"""The command `plan`: which widths each layer should have under a budget, measured on the model itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from hf_kvplus.caches import text_config
from hf_kvplus.gqa_commands import cut_end, require_text
from hf_kvplus.layer_plan import LayerPlan
from hf_kvplus.loading import ALIASES, load_model
from hf_kvplus.origin import describe_weights
from hf_kvplus.plans.budget import Budget, parse_budget

if TYPE_CHECKING:
    from hf_kvplus.plans.make import Made

Model = Annotated[str, typer.Option(help=f"Alias ({', '.join(ALIASES)}), hub id, checkpoint folder or .gguf file.")]


def plan(
    budget: Annotated[
        str, typer.Option(help="3.0bits (stored, scales counted), or 2.5GiB@32k; several, comma-separated.")
    ],
    text: Annotated[
        Path, typer.Option(help="UTF-8 text to measure on; its end is taken, so evaluate on its beginning.")
    ],
    model: Model = "smollm2-135m",
    max_kl: Annotated[float | None, typer.Option(help="Largest mean KL in nats that the plan may cost.")] = None,
    calibrate: Annotated[
        bool, typer.Option(help="Also measure the queries, and encode keys with that; written beside the plan.")
    ] = False,
    windows: Annotated[int, typer.Option(min=2, help="Windows of text; one of them checks the plan.")] = 3,
    window_tokens: Annotated[
        int, typer.Option(min=256, help="Tokens in a window; as long as contexts will be.")
    ] = 2048,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens fed at a time.")] = 64,
    groups: Annotated[str, typer.Option(help="Tokens of a block that are tried, multiples of 8.")] = "48,96,128",
    out: Annotated[
        Path,
        typer.Option(help="File to write; of several budgets each one's name is put in, as in plan-3.5bits.json."),
    ] = Path("plan.json"),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
) -> None:
    """Find the widths of each layer that lose least under a budget, and write them as a layer plan."""
    from hf_kvplus.plans.make import make_plans
    from hf_kvplus.plans.onepass import OnePass

    names = budget.split(",")
    limits, tried = [parse_budget(name) for name in names], _groups(groups)
    require_text(text)
    console = Console(stderr=True)
    loaded, tokenizer, _ = load_model(model, device, dtype)
    cut, facts = cut_end(tokenizer, text, windows, window_tokens)
    facts["chunk_tokens"] = chunk_tokens
    layers = text_config(loaded.config).num_hidden_layers
    with OnePass(loaded, chunk_tokens) as run, _progress(console) as progress:
        calibration = _calibrate(run, cut, out.with_suffix(".safetensors"), progress) if calibrate else None
        task = progress.add_task("layers", total=layers * (windows - 1))
        found = make_plans(
            run,
            cut,
            limits,
            calibration=str(calibration) if calibration else None,
            groups=tried,
            advance=lambda: progress.advance(task),
        )
    missed = []
    for name, limit, made in zip(names, limits, found, strict=True):
        path = out if len(names) == 1 else out.with_name(f"{out.stem}-{name.strip()}{out.suffix}")
        _write_and_tell(console, path, name.strip(), limit, made, facts, calibration)
        if max_kl is not None and made.measured_kl > max_kl:
            missed.append(
                f"`budget` of {limit} can't be met with `max_kl` {max_kl:g}: the best plan costs "
                f"{made.measured_kl:.2g} nats (it is in {path})"
            )
    if missed:
        raise ValueError(f"{'; '.join(missed)}; give a larger budget")


def _write_and_tell(
    console: Console,
    path: Path,
    name: str,
    limit: Budget,
    made: Made,
    facts: dict[str, Any],
    calibration: Path | None,
) -> None:
    """Writes one plan and prints what it costs."""
    facts = {
        **facts,
        "budget": name,
        "stored_bits": made.stored_bits,
        "predicted_kl": made.predicted_kl,
        "measured_kl": made.measured_kl,
        "uniform": made.uniform,
        "uniform_kl": made.uniform_kl,
    }
    _relative(LayerPlan(made.plan.layers, made.plan.model, facts), calibration).save(path)
    console.print(_table(made.plan))
    console.print(_verdict(limit, facts), soft_wrap=True, markup=False)
    typer.echo(json.dumps({"plan": str(path), **facts}))


def tell_key_biases(console: Console, model: str, text: Path) -> None:
    """Prints which layers' keys have channels far above the rest, measured on the end of a text.

    Raises:
        FileNotFoundError: If there is no such text or model.
        ValueError: If the text is too short.
    """
    from hf_kvplus.plans.keys import BIAS_TOKENS, FAR, key_biases
    from hf_kvplus.plans.onepass import OnePass

    require_text(text)
    loaded, tokenizer, _ = load_model(model)
    cut, _ = cut_end(tokenizer, text, 1, BIAS_TOKENS)
    with OnePass(loaded) as run:
        found = key_biases(run, cut)
    for bias in found:
        if bias.is_far:
            console.print(f"  {bias.describe()}", soft_wrap=True, markup=False)
    far = sum(bias.is_far for bias in found)
    console.print(
        f"key biases: {far} of {len(found)} layers have a channel at least {FAR} times above the typical one"
    )


def _groups(text: str) -> tuple[int, ...]:
    """Reads comma-separated block lengths."""
    try:
        return tuple(int(piece) for piece in text.split(","))
    except ValueError:
        raise ValueError(f"`groups` must be integers separated by commas, got {text!r}") from None


def _calibrate(run: Any, windows: list[torch.Tensor], path: Path, progress: Progress) -> Path:
    """Measures the model's queries and writes their metrics."""
    from hf_kvplus.codecs.metric import save_metrics
    from hf_kvplus.plans.calibrate import query_moments

    task = progress.add_task("queries", total=len(windows) - 1)
    # The last window checks the plan, so nothing is learnt from it.
    moments = query_moments(run, windows[:-1], lambda: progress.advance(task))
    save_metrics(path, moments, describe_weights(run.model))
    return path


def _relative(plan: LayerPlan, calibration: Path | None) -> LayerPlan:
    """Names the calibration by its file name alone, since it lies beside the plan."""
    if calibration is None:
        return plan
    layers = tuple(layer and replace(layer, calibration=calibration.name) for layer in plan.layers)
    return LayerPlan(layers, plan.model, plan.facts)


def _table(plan: LayerPlan) -> Table:
    table = Table(title="Layer plan", title_justify="left")
    for column in ("layer", "key bits", "value bits", "block tokens"):
        table.add_column(column, justify="right")
    for index, layer in enumerate(plan.layers):
        cells = (layer.key_nbits, layer.value_nbits, layer.block_tokens) if layer else ("–", "–", "–")
        table.add_row(str(index), *map(str, cells))
    return table


def _verdict(budget: Budget, facts: dict[str, Any]) -> str:
    """Tells what the plan costs against giving every layer the same."""
    line = f"{facts['stored_bits']:.3f} stored bits for a budget of {budget}: KL {facts['measured_kl']:.3g} nats"
    if facts["uniform_kl"] is None:
        return f"{line}; no candidate meets it with every layer alike"
    share = 100 * (facts["measured_kl"] / facts["uniform_kl"] - 1)
    return f"{line}, {share:+.0f} % against {facts['uniform_kl']:.3g} of {facts['uniform']} in every layer"


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console)
