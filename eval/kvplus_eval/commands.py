"""The commands `kvplus eval` and `kvplus bench`, which hf_kvplus finds through its entry points."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import Progress

from hf_kvplus.loading import load_model
from hf_kvplus.report import write_report
from kvplus_eval.bench import BenchPlan, run_bench
from kvplus_eval.data import cut_windows, load_text
from kvplus_eval.evaluation import Job, run_evaluation
from kvplus_eval.protocol import Protocol, choose_strategies, require_positions
from kvplus_eval.results import append_rows, run_facts
from kvplus_eval.tables import bench_summary, bench_table, complaints, eval_summary, eval_tables, make_console

DEFAULT_STRATEGIES = "dynamic,fp,int8,k8v4,int4,int2,hf-quanto4,hf-hqq4,hf-hqq2"
RANDOM_PROMPT_SEED = 0

Model = Annotated[str, typer.Option(help="Alias, hub id, checkpoint folder or .gguf file.")]
Strategies = Annotated[str, typer.Option(help="Comma-separated strategies; see `kvplus strategies`.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")]
Out = Annotated[Path, typer.Option(help="Folder for results; rows are appended to what is there.")]
Prefill = Annotated[int, typer.Option(help="Tokens in one forward pass of a timed prefill.")]


def evaluate(
    model: Model = "smollm2-135m",
    strategies: Strategies = DEFAULT_STRATEGIES,
    text: Annotated[
        str | None,
        typer.Option(help="Text or .jsonl file, data set NAME:CONFIG:SPLIT, or pydoc-topics.", show_default="auto"),
    ] = None,
    windows: Annotated[int, typer.Option(help="Windows of text.")] = 4,
    window_tokens: Annotated[int, typer.Option(help="Tokens in a window.")] = 2048,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens fed at once; later chunks read stored ones.")] = 64,
    prefill_chunk_tokens: Prefill = 512,
    decode_tokens: Annotated[int, typer.Option(help="Greedy tokens timed after a window.")] = 16,
    greedy_tokens: Annotated[int, typer.Option(help="Length of greedy text compared with the full cache's.")] = 64,
    timing_rounds: Annotated[int, typer.Option(help="Rounds of timing; 0 leaves out times and greedy text.")] = 3,
    device: Device = "auto",
    dtype: Dtype = "auto",
    out: Out = Path("kvplus-eval"),
) -> None:
    """Measure what each cache costs in quality and saves in memory and time."""
    protocol = Protocol(
        windows, window_tokens, chunk_tokens, prefill_chunk_tokens, decode_tokens, greedy_tokens, timing_rounds
    )
    names = choose_strategies(strategies)
    chosen_text = load_text(text)
    console = make_console()
    console.print(f"text: {chosen_text.name}, SHA-256 {chosen_text.sha256}", soft_wrap=True)
    loaded, tokenizer, source = load_model(model, device, dtype)
    console.print(f"model: {source.name} from {source.how}, {source.revision}", soft_wrap=True)
    require_positions(loaded.config, protocol.longest_tokens if timing_rounds else window_tokens)
    cut = cut_windows(chosen_text, tokenizer, windows=windows, window_tokens=window_tokens)
    rows = run_evaluation(Job(loaded, source, chosen_text, cut, names, protocol, out), console)
    append_rows(out / "results.jsonl", rows)
    report = write_report(rows, out)
    for table in eval_tables(rows, console.width):
        console.print(table)
    for line in complaints(rows):
        console.print(line, soft_wrap=True, markup=False)
    console.print(f"rows: {out / 'results.jsonl'}   report: {report}", soft_wrap=True)
    typer.echo(eval_summary(rows, out))
    _leave(rows)


def bench(
    model: Model = "smollm2-135m",
    strategies: Strategies = "dynamic,fp,int4",
    context: Annotated[str, typer.Option(help="Context lengths in tokens, comma-separated, ascending.")] = "1024,4096",
    tokens: Annotated[int, typer.Option(help="Decoded tokens in a round.")] = 16,
    rounds: Annotated[int, typer.Option(help="Rounds at each context length.")] = 3,
    prefill_chunk_tokens: Prefill = 512,
    text: Annotated[
        str | None, typer.Option(help="Text to feed, as for `kvplus eval`.", show_default="random tokens")
    ] = None,
    fused: Annotated[bool, typer.Option(help="Read packed states directly, as `use_fused_attention` does.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    out: Out = Path("kvplus-bench"),
) -> None:
    """Time one decoded token at given context lengths, strategies taking turns in one run."""
    plan = BenchPlan(_lengths(context), tokens, rounds, prefill_chunk_tokens, fused)
    names = choose_strategies(strategies)
    chosen_text = None if text is None else load_text(text)
    loaded, tokenizer, source = load_model(model, device, dtype)
    require_positions(loaded.config, plan.longest_tokens)
    if chosen_text is None:
        token_ids = _random_prompt(len(tokenizer), plan.longest_tokens)
    else:
        token_ids = cut_windows(chosen_text, tokenizer, windows=1, window_tokens=plan.longest_tokens)[0]
    console = make_console()
    facts = {
        **run_facts(loaded, source),
        "kind": "bench",
        "text": None if chosen_text is None else {"name": chosen_text.name, "sha256": chosen_text.sha256},
    }
    with Progress(console=console) as progress:
        task = progress.add_task("bench", total=len(plan.contexts) * (len(names) + rounds))
        found = run_bench(loaded, token_ids, names, plan, lambda: progress.advance(task))
    rows = [{**facts, **row} for row in found]
    append_rows(out / "bench.jsonl", rows)
    console.print(bench_table(rows))
    for line in complaints(rows):
        console.print(line, soft_wrap=True, markup=False)
    typer.echo(bench_summary(rows))
    _leave(rows)


def _lengths(text: str) -> tuple[int, ...]:
    """Reads comma-separated lengths."""
    try:
        return tuple(int(piece) for piece in text.split(","))
    except ValueError:
        raise ValueError(f"`context` must be integers separated by commas, got {text!r}") from None


def _random_prompt(vocab: int, tokens: int) -> torch.Tensor:
    """Returns seeded random token ids, shape (tokens,); the time of a step doesn't depend on what is said."""
    return torch.tensor(random.Random(RANDOM_PROMPT_SEED).choices(range(vocab), k=tokens))


def _leave(rows: list[dict[str, object]]) -> None:
    """Ends with exit status 1 unless every strategy has figures."""
    if any(row["status"] != "ok" for row in rows):
        raise typer.Exit(1)
