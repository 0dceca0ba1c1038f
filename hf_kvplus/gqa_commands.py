"""The commands `calibrate-gqa` (projections for a cache) and `convert-gqa` (a checkpoint with fewer heads)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hf_kvplus.gqa.projection import default_name
from hf_kvplus.loading import ALIASES, load_model
from hf_kvplus.units import format_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HEALING_FOLDER = "healing"
HEALING_OPTIONS = ("heal_window_tokens", "heal_windows", "heal_batch", "heal_rate", "heal_weights", "stop_after")
FACTS_FILE = "kvplus-gqa.json"

Model = Annotated[str, typer.Option(help=f"Alias ({', '.join(ALIASES)}), hub id, checkpoint folder or .gguf file.")]
Text = Annotated[
    Path, typer.Option(help="UTF-8 text to calibrate on; its end is taken, so evaluate on its beginning.")
]
Heads = Annotated[int, typer.Option(min=1, help="Key-value heads to keep.")]
Windows = Annotated[int, typer.Option(min=1, help="Windows of text to calibrate on.")]
WindowTokens = Annotated[int, typer.Option(min=16, help="Tokens in a window.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")]


def calibrate_gqa(
    num_key_value_heads: Heads,
    text: Text,
    model: Model = "smollm2-135m",
    method: Annotated[str, typer.Option(help="svd, or mean (to compare with).")] = "svd",
    ranks: Annotated[str, typer.Option(help="solved (per layer and part) or equal.")] = "solved",
    share: Annotated[
        float | None,
        typer.Option(help="Channels to keep, in parts of the model's.", show_default="as many as those heads have"),
    ] = None,
    sinks: Annotated[
        int, typer.Option(min=0, help="First tokens that caches will keep whole, as in gqa:N,sinks=.")
    ] = 4,
    windows: Windows = 8,
    window_tokens: WindowTokens = 1024,
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default="kvplus-gqa-N.safetensors")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Make the projection that the strategy gqa:N needs, from a few thousand tokens of text."""
    from hf_kvplus.gqa import calibrate

    require_text(text)
    console = Console(stderr=True)
    loaded, tokenizer, _ = load_model(model, device, dtype)
    cut, facts = cut_end(tokenizer, text, windows, window_tokens)
    path = out or Path(default_name(num_key_value_heads))
    with _progress(console) as progress:
        task = progress.add_task("calibration", total=len(cut))
        projection = calibrate.calibrate_gqa(
            loaded,
            cut,
            num_key_value_heads,
            method=method,
            ranks=ranks,
            latent_share=share,
            num_sink_tokens=sinks,
            text=json.dumps(facts),
            advance=lambda: progress.advance(task),
        ).save(path)
    share = projection.latent_share()
    console.print(
        f"{path}: {100 * share:.1f} % of the channels kept, matrices of {format_bytes(projection.nbytes)}; use it as "
        f"gqa:{num_key_value_heads},projection={path}",
        soft_wrap=True,
    )
    typer.echo(json.dumps({"projection": str(path), "latent_share": share, **facts}))


def convert_gqa(
    context: typer.Context,
    num_key_value_heads: Heads,
    out: Annotated[Path, typer.Option(help="Folder for the converted checkpoint.")],
    model: Model = "smollm2-135m",
    text: Annotated[Path | None, typer.Option(help="UTF-8 text to calibrate and heal on; its end is taken.")] = None,
    method: Annotated[str, typer.Option(help="svd, aligned or mean.")] = "svd",
    windows: Windows = 8,
    window_tokens: WindowTokens = 1024,
    heal_steps: Annotated[int, typer.Option(min=0, help="Steps of distillation from the original model.")] = 0,
    heal_window_tokens: Annotated[int, typer.Option(min=16, help="Tokens in a window of a step.")] = 512,
    heal_windows: Annotated[int, typer.Option(min=1, help="Windows of text to heal on.")] = 128,
    heal_batch: Annotated[int, typer.Option(min=1, help="Windows in a step, on each process.")] = 1,
    heal_rate: Annotated[float, typer.Option(help="Largest learning rate.")] = 3e-4,
    heal_weights: Annotated[str, typer.Option(help="attention or all.")] = "attention",
    stop_after: Annotated[
        int | None, typer.Option(help="Stop healing after so many steps; run again to go on.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Write a checkpoint with fewer key-value heads, which plain transformers loads; heal it by distillation."""
    from hf_kvplus.gqa.heal import Healing, heal, join_processes, plot_curve, steps_done

    if text is None and (method != "mean" or heal_steps):
        raise ValueError(
            "`text` must be given: the conversion is calibrated, and healed, on it; only mean does without"
        )
    if text is not None:
        require_text(text)
    healing, first = None, True
    idle = [name for name in HEALING_OPTIONS if context.get_parameter_source(name).name == "COMMANDLINE"]
    if idle and not heal_steps:
        raise ValueError(
            f"`{idle[0].replace('_', '-')}` is for healing; say how long with --heal-steps, or leave it out"
        )
    if heal_steps:
        healing = Healing(heal_steps, heal_batch, heal_rate, min(10, heal_steps), heal_weights)
        first, device = join_processes(device)
    console = Console(stderr=True, quiet=not first)
    original, tokenizer, _ = load_model(model, device, dtype)
    cut, where = cut_end(tokenizer, text, windows, window_tokens) if text else (None, {})
    facts: dict[str, Any] = {"model": model, "method": method, "num_key_value_heads": num_key_value_heads}
    facts["calibration"] = where
    if healing and _holds(out, facts):
        converted, _, _ = load_model(out, device, dtype)
        console.print(f"{out}: converted already, going on with its healing", soft_wrap=True)
    else:
        _require_unhealed(out)
        converted = _convert(console, original, num_key_value_heads, method, cut)
        if first:
            _save(converted, tokenizer, out, facts)
    if healing and text is not None:
        cut, where = cut_end(tokenizer, text, heal_windows, heal_window_tokens)
        folder = out / HEALING_FOLDER
        with _progress(console) as progress:
            task = progress.add_task("healing", total=heal_steps)

            def advance(step: int, loss: float) -> None:
                progress.update(task, completed=step, description=f"healing, KL {loss:.3f}")

            heal(converted, original, cut, healing, folder, stop_after=stop_after, advance=advance)
        if first:
            healed = {"steps": steps_done(folder), "of_steps": heal_steps, **where}
            _save(converted, tokenizer, out, facts | {"healing": healed})
            console.print(f"loss curve: {plot_curve(folder)}", soft_wrap=True)
    heads = f"{converted.config.num_attention_heads} query heads"
    console.print(f"{out}: {converted.config.num_key_value_heads} key-value heads, {heads}", soft_wrap=True)
    if first:
        typer.echo(json.dumps({"checkpoint": str(out), **facts}))


def require_text(path: Path) -> None:
    """Checks that a text is there before a model is loaded for it.

    Raises:
        FileNotFoundError: If it isn't.
    """
    if not path.is_file():
        raise FileNotFoundError(f"text `{path}`: no such file")


def cut_end(
    tokenizer: PreTrainedTokenizerBase, path: Path, windows: int, window_tokens: int
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Cuts windows from the end of a text, so that its beginning is left for evaluation.

    Args:
        tokenizer: The model's tokenizer.
        path: UTF-8 text.
        windows: How many.
        window_tokens: Tokens in each.

    Returns:
        Token ids, the last window first, and which part of which text they are.

    Raises:
        ValueError: If the text is too short, or isn't UTF-8.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"text `{path}` isn't UTF-8 text: {error.reason} at byte {error.start}") from error
    ids = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < windows * window_tokens:
        raise ValueError(
            f"text `{path}` has {len(ids)} tokens, fewer than the {windows * window_tokens} of {windows} windows; use "
            "a longer text or fewer windows"
        )
    ends = range(len(ids), len(ids) - windows * window_tokens, -window_tokens)
    facts = {
        "text": path.name,
        "text_sha256": hashlib.sha256(content.encode()).hexdigest(),
        "text_tokens": len(ids),
        "first_token": len(ids) - windows * window_tokens,
        "windows": windows,
        "window_tokens": window_tokens,
    }
    return [torch.tensor(ids[end - window_tokens : end]) for end in ends], facts


def _convert(
    console: Console,
    original: PreTrainedModel,
    num_key_value_heads: int,
    method: str,
    cut: list[torch.Tensor] | None,
) -> PreTrainedModel:
    """Converts a model, with a progress bar where it is calibrated."""
    from hf_kvplus.gqa.convert import convert_to_gqa, require_convertible

    require_convertible(original, num_key_value_heads, method)
    if cut is None:
        return convert_to_gqa(original, num_key_value_heads, method)
    with _progress(console) as progress:
        task = progress.add_task("calibration", total=len(cut))
        return convert_to_gqa(original, num_key_value_heads, method, cut, advance=lambda: progress.advance(task))


def _holds(out: Path, facts: dict[str, Any]) -> bool:
    """Tells whether a folder holds this very conversion, unhealed or with the healing that it is to go on from."""
    path = out / FACTS_FILE
    if not path.is_file():
        return False
    found = json.loads(path.read_text())
    if "healing" in found and not (out / HEALING_FOLDER).exists():
        return False  # its weights are healed, and another healing begins from those that aren't
    return all(found.get(name) == value for name, value in facts.items())


def _require_unhealed(out: Path) -> None:
    """Checks that no healing of another conversion lies where a new one would go on from it.

    Raises:
        ValueError: If one does.
    """
    if (out / HEALING_FOLDER).exists():
        raise ValueError(
            f"`out` {out} holds the healing of another conversion in {HEALING_FOLDER}/; give another folder, or "
            "delete that one"
        )


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path, facts: dict[str, Any]) -> None:
    """Writes a checkpoint, its tokenizer, and how it was made."""
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / FACTS_FILE).write_text(json.dumps(facts, indent=2) + "\n")


def _progress(console: Console) -> Progress:
    """Makes progress bars."""
    columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console)
